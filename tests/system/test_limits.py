"""Which peak counts against a memory limit, and whether it fits: one answer everywhere."""

import json
from dataclasses import replace

import pytest

import memlab
from memlab import Outcome, StepConfig, StepResult, api, plots
from memlab._panel import questions, state
from memlab.errors import ConfigError
from memlab.prediction.interpolation import interpolated
from memlab.result import CountedPeak, Source
from memlab.search.largest_batch import LargestSearch
from tests.figure_parts import texts_of
from tests.models import blocks
from tests.panel_parts import PATIENCE_SECONDS, badge, make_result, rested, until

MIB = 2**20
ON_A_CARD = {"device": "h200", "source": Source.PREDICTED}
# 218 MiB are live at most, 266 MiB are reserved, and a replay of the allocator runs from 244 MiB on
WORKLOAD = blocks(width=512, depth=6)
CONFIG = StepConfig(batch_size=3000)
VERDICTS = {  # by limit
    "300MiB": (True, False), "274MiB": (True, False), "258MiB": (True, False),
    "250MiB": (True, True), "240MiB": (False, True), "231MiB": (False, False),
    "100MiB": (False, False),
}  # fmt: skip


def on_a_card(**changes):
    """Return a result of a card: 100 MiB allocated, 150 MiB reserved."""
    changes = {"peak_reserved_bytes": 150 * MIB, **ON_A_CARD, **changes}
    return make_result(peak=100 * MIB, peak_by_category={"parameters": 100 * MIB}, **changes)


def out_of_memory(limit, **changes):
    return make_result(Outcome.OUT_OF_MEMORY, memory_limit_bytes=limit, **changes)


# which peak


def test_reserved_bytes_count_on_a_card_and_allocated_ones_on_a_cpu():
    widths = {"peak_allocated_bytes": 0.02, "peak_reserved_bytes": 0.05}
    card = on_a_card(uncertainty=widths).counted_peak
    assert card == CountedPeak(kind="reserved", nbytes=150 * MIB, uncertainty=0.05)
    assert card.upper_bytes == pytest.approx(157.5 * MIB, abs=1)
    cpu = make_result(peak=100, uncertainty=widths).counted_peak
    assert (cpu.kind, cpu.nbytes, cpu.upper_bytes) == ("allocated", 100, 102)
    assert make_result(peak=None).counted_peak is None


# whether it fits


def test_a_peak_above_the_limit_fits_where_the_allocator_runs_within_it():
    peak = CountedPeak(kind="reserved", nbytes=1000, uncertainty=0.1)
    asked = []

    def from_800(limit):
        asked.append(limit)
        return limit >= 800

    assert peak.fits(1000, from_800)
    assert asked == [], "the peak alone decides"
    said = {
        limit: (peak.fits(limit, from_800), peak.is_close_to(limit, from_800))
        for limit in (900, 850, 800, 750, 700)
    }
    assert said == {
        900: (True, False), 850: (True, True), 800: (True, True), 750: (False, True),
        700: (False, False),
    }  # fmt: skip
    assert not peak.fits(900)


@pytest.mark.parametrize(
    ("width", "limit", "said"),
    [
        (0.0, 1000, (True, False)), (0.0, 999, (False, False)),
        (0.1, 1101, (True, False)), (0.1, 1099, (True, True)),
        (0.1, 900, (False, True)), (0.1, 899, (False, False)),
        (1.5, 1, (False, True)),
    ],
)  # fmt: skip
def test_near_the_limit_the_other_end_of_the_uncertainty_says_otherwise(width, limit, said):
    peak = CountedPeak(kind="allocated", nbytes=1000, uncertainty=width)
    assert (peak.fits(limit), peak.is_close_to(limit)) == said


def test_a_result_is_compared_with_any_limit():
    result = make_result(peak=MIB)
    found = {limit: result.against_limit(limit) for limit in (None, "1MiB", MIB - 1)}
    assert [r.fits for r in found.values()] == [None, True, False]
    assert [r.memory_limit_bytes for r in found.values()] == [None, MIB, MIB - 1]
    assert StepResult.from_dict(found["1MiB"].to_dict()).close_to_limit is False
    with pytest.raises(ConfigError, match="memory_limit='much'"):
        result.against_limit("much")
    ran = make_result(peak=MIB, memory_limit_bytes=10, fits=True)
    assert ran.against_limit(10).fits, "what was found under that very limit stays"


def test_a_run_out_of_memory_fits_nothing_as_small_as_its_limit():
    over = out_of_memory(2 * MIB, peak=MIB)  # it went over while the model was built
    assert [over.against_limit(n * MIB).fits for n in (1, 2, 3)] == [False, False, True]
    cut_short = out_of_memory(2 * MIB, peak=MIB, peak_reserved_bytes=2 * MIB, device="cuda:0")
    assert cut_short.ended_before_its_peak
    assert [cut_short.against_limit(n * MIB).fits for n in (1, 2, 3)] == [False, False, None]
    machine = make_result(Outcome.OUT_OF_MEMORY, peak=2 * MIB)
    assert [machine.against_limit(n * MIB).fits for n in (1, 2)] == [False, None]
    assert make_result(Outcome.OUT_OF_MEMORY, peak=None).against_limit(MIB).fits is None
    of_the_prediction = out_of_memory(2 * MIB, peak=None, source=Source.PREDICTED)
    assert of_the_prediction.against_limit(2 * MIB).fits is None


# fit: both in one, and without a limit that of the card

GIB = 2**30
TEN_GIB = {"uncertainty": {"peak_allocated_bytes": 0.05, "peak_reserved_bytes": 0.05}}


def of_ten_gib(**changes):
    """Return a result of a card: 10 GiB +-5 % reserved, 8 GiB allocated."""
    changes = {"peak_reserved_bytes": 10 * GIB, **ON_A_CARD, **TEN_GIB, **changes}
    return make_result(peak=8 * GIB, **changes)


@pytest.mark.parametrize(
    ("limit", "fit", "kind"),
    [
        ("9GiB", "does not fit", state.BAD), ("9.8GiB", "too close", state.WARN),
        ("10.3GiB", "too close", state.WARN), ("11GiB", "fits", state.GOOD),
    ],
)  # fmt: skip
def test_fit_is_judged_with_its_uncertainty_and_the_badge_is_that_value(limit, fit, kind):
    found = of_ten_gib().against_limit(limit)
    assert found.fit == fit
    assert found.fits == (found.memory_limit_bytes >= 10 * GIB)
    assert state.fit_verdict(of_ten_gib(), found.memory_limit_bytes).kind == kind
    assert found.against_limit(limit) is found
    # the same without a limit, where the card holds so much
    of_card = of_ten_gib(usable_memory_bytes=found.memory_limit_bytes).against_limit(None)
    assert (of_card.fit, of_card.fits, of_card.close_to_limit) == (fit, None, None)
    assert state.fit_verdict(of_card, None).kind == kind
    assert found.against_limit(None).fit is None, "what the card holds is not known"


def test_fit_is_of_reserved_bytes_on_a_card_and_of_allocated_ones_on_a_cpu():
    assert of_ten_gib().against_limit("8.5GiB").fit == "does not fit"
    cpu = of_ten_gib(peak_reserved_bytes=None, device="cpu")
    assert [cpu.against_limit(f"{n}GiB").fit for n in ("7.5", "8.2", "8.5")] == [
        "does not fit", "too close", "fits",
    ]  # fmt: skip
    assert cpu.against_limit(None).fit is None
    assert make_result().against_limit(None).fit is None
    assert state.fit_verdict(make_result(), None).kind == state.OPEN


def test_a_step_that_runs_at_the_limit_fits_though_its_peak_is_above():
    result = of_ten_gib(usable_memory_bytes=9 * GIB)
    for limit in (9 * GIB, None):
        assert result.against_limit(limit, lambda asked: True).fit == "fits"
        assert result.against_limit(limit, lambda asked: asked >= 9 * GIB).fit == "too close"
        assert result.against_limit(limit, lambda asked: False).fit == "does not fit"


def test_what_ran_on_a_card_fits_it_and_what_ran_out_of_memory_does_not():
    facts = {"source": Source.MEASURED, "device": "cuda:0", "uncertainty": None}
    ran = of_ten_gib(**facts, usable_memory_bytes=9 * GIB)  # which is an estimate
    for limit in (None, 9 * GIB):
        found = ran.against_limit(limit)
        assert (found.fit, found.fits) == ("fits", limit and True)
    assert state.fit_verdict(ran, 9 * GIB).text == ("fits: 10.0 of 9.00 GiB (111 %), measured")
    assert ran.against_limit("8.9GiB").fit == "does not fit"
    assert replace(ran, source=Source.RECORDED).against_limit(None).fit == "fits"

    over = make_result(Outcome.OUT_OF_MEMORY, peak=None)
    assert over.against_limit(None).fit == "does not fit"
    assert state.fit_verdict(over, None).kind == state.BAD
    under = out_of_memory(MIB, peak=None)
    assert [under.against_limit(limit).fit for limit in (None, MIB, 2 * MIB)] == [
        None, "does not fit", None,
    ]  # fmt: skip
    of_the_prediction = make_result(Outcome.OUT_OF_MEMORY, peak=None, source=Source.PREDICTED)
    assert of_the_prediction.against_limit(None).fit is None
    assert state.fit_verdict(of_the_prediction, None).kind == state.OPEN


def test_fit_goes_through_json_and_is_a_column():
    for limit in (None, "9GiB", "9.8GiB", "11GiB"):
        result = of_ten_gib(usable_memory_bytes=11 * GIB).against_limit(limit)
        data = json.loads(json.dumps(result.to_dict()))
        assert StepResult.from_dict(data).fit is result.fit
        assert memlab.to_frame([result])["fit"][0] == result.fit
        assert memlab.to_frame([result])["usable_memory_bytes"][0] == 11 * GIB
    del data["fit"], data["usable_memory_bytes"]
    assert StepResult.from_dict(data).fit == "fits"
    assert StepResult.from_dict(data | {"close_to_limit": True}).fit == "too close"


def test_a_prediction_says_whether_it_fits_the_card():
    small = memlab.predict(blocks(), StepConfig(), "rtx-3060")
    assert (small.fit, small.fits) == ("fits", None)
    assert small.usable_memory_bytes == memlab.card("rtx-3060").usable_bytes
    assert "memory of the device" in small._repr_html_()
    huge = memlab.predict(blocks(width=16384, depth=8), StepConfig(), "rtx-3060")
    assert (huge.fit, huge.fits) == ("does not fit", None)
    assert memlab.predict(blocks(), StepConfig(), "rtx-3060", memory_limit="1MiB").fits is False
    assert memlab.predict(blocks(), StepConfig(), "cpu").fit is None
    assert memlab.predict(blocks(), StepConfig(), "cpu", memory_limit="1GiB").fit == "fits"


# the same everywhere


@pytest.fixture(scope="module")
def base():
    return api.predict_with_size_model(WORKLOAD, CONFIG, "h200")


def test_predictions_badges_and_pairs_say_the_same(base):
    for limit in ("258MiB", "250MiB", "231MiB"):
        said = VERDICTS[limit]
        result = memlab.predict(WORKLOAD, CONFIG, "h200", memory_limit=limit)
        assert (result.fits, result.close_to_limit) == said, limit
        assert base.size_model.fits([3000], result.memory_limit_bytes) == result.fits
        badge = state.fit_verdict(result, result.memory_limit_bytes)
        assert badge.kind == kind_of(result), limit
    assert 244 * MIB < base.result.peak_reserved_bytes == 266 * MIB


def kind_of(result):
    if result.close_to_limit:
        return state.WARN
    return state.GOOD if result.fits else state.BAD


def test_a_panel_says_of_each_limit_what_predict_says(base):
    panel = memlab.panel(WORKLOAD, device="h200", config=CONFIG)
    try:
        until(lambda: panel.prediction is not None, PATIENCE_SECONDS)
        for limit, said in VERDICTS.items():
            panel.set(memory_limit=limit)
            rested(panel)
            found = panel.prediction
            assert (found.fits, found.close_to_limit) == said, limit
            assert badge(panel)["kind"] == kind_of(found), limit
        panel.set(memory_limit="258MiB")
        rested(panel)
        assert "fits with less cache: 266 of 258 MiB" in badge(panel)["text"]
    finally:
        panel.close()


def test_a_limit_is_replayed_once(base, monkeypatch):
    found = questions.Forecasts({"blocks": WORKLOAD}, lambda estimate: None, lambda text: None)
    here = questions.Question("blocks", CONFIG, "h200")
    found._answers.add(here, base)
    calls = []
    replay = type(base.size_model).runs_within
    monkeypatch.setattr(
        type(base.size_model), "runs_within", lambda *args: calls.append(args) or replay(*args)
    )
    for batch_size in (3000, 2800):
        asked = replace(here, config=StepConfig(batch_size=batch_size))
        calls.clear()
        first = found.look(asked, 250 * MIB)
        limits = [limit for *_, limit in calls]
        assert len(limits) == len(set(limits)) > 0
        assert found.look(asked, 250 * MIB).result is first.result
        assert len(calls) == len(limits)


def test_an_interpolated_result_forgets_the_limit_of_another_batch(base):
    limited = base.size_model.against_limit(base.result, 200 * MIB)
    assert limited.fits is False
    estimate = interpolated(replace(base, result=limited), StepConfig(batch_size=500))
    assert (estimate.memory_limit_bytes, estimate.fits, estimate.close_to_limit) == (
        None,
        None,
        None,
    )
    assert base.size_model.against_limit(estimate, 200 * MIB).fits


@pytest.mark.slow
def test_the_largest_batch_is_one_that_predict_says_fits_for_sure():
    limit = 250 * MIB
    found = LargestSearch(WORKLOAD, limit, "h200", 4096).largest(StepConfig(batch_size=1), 2)
    assert (found.fits, found.close_to_limit) == (True, False)
    config = replace(found.config, batch_size=found.config.batch_size + 1)
    more = memlab.predict(WORKLOAD, config, "h200", memory_limit=limit)
    assert more.close_to_limit or not more.fits


def test_explain_speaks_of_reserved_bytes_on_a_card():
    over = memlab.explain(on_a_card().against_limit(120 * MIB)).message
    assert over.endswith("; 150 MiB reserved, 30.0 MiB over the limit of 120 MiB; "
                         "which modules hold it was not traced")  # fmt: skip
    within = memlab.explain(on_a_card().against_limit(120 * MIB, lambda limit: True)).message
    assert "; 150 MiB reserved, which fits the limit of 120 MiB with less cache" in within
    assert "limit" not in memlab.explain(on_a_card().against_limit(150 * MIB)).message
    cpu = make_result(peak=100 * MIB, peak_by_category={"parameters": 100 * MIB})
    assert (
        "; 40.0 MiB over the limit of 60.0 MiB"
        in memlab.explain(cpu.against_limit("60MiB")).message
    )


def test_pictures_compare_reserved_bytes_with_a_limit():
    def said(figure):
        return " ".join(texts_of(figure))

    over = on_a_card().against_limit(120 * MIB)
    within = on_a_card().against_limit(120 * MIB, lambda limit: True)
    assert "150 MiB reserved, 30.0 MiB over the limit" in said(plots.peak_map(over))
    assert "which fits the limit of 120 MiB with less cache" in said(plots.peak_map(within))
    assert "30.0 MiB over" in said(plots.peak_bar(over, limit_bytes=120 * MIB))
    bar = said(plots.peak_bar(within, limit_bytes=120 * MIB))
    assert "fits the limit of 120 MiB with less cache" in bar
    spots = plots.memory_against_time([over], labels=["one"])
    assert "limit 120 MiB of reserved bytes" in said(spots)
    for result, hatched in ((over, True), (within, False)):
        title = said(plots.heat_map([result], limit_bytes=120 * MIB))
        assert ("over limit" in title) == hatched
