"""Which peak counts against a memory limit, and whether it fits: one answer everywhere."""

from dataclasses import replace

import pytest

import memlab
from memlab import Outcome, StepConfig, StepResult, api, plots
from memlab._panel import forecasts, questions, verdicts
from memlab.comparing import pairs
from memlab.errors import ConfigError
from memlab.predicting.interpolation import interpolated
from memlab.result import CountedPeak, Source
from tests.figure_parts import texts_of
from tests.models import blocks
from tests.panel_parts import PATIENCE_SECONDS, find, make_result, until

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


# the same everywhere


@pytest.fixture(scope="module")
def base():
    return api.predict_with_forecast(WORKLOAD, CONFIG, "h200")


def test_predictions_badges_and_pairs_say_the_same(base):
    for limit in ("258MiB", "250MiB", "231MiB"):
        said = VERDICTS[limit]
        result = memlab.predict(WORKLOAD, CONFIG, "h200", memory_limit=limit)
        assert (result.fits, result.close_to_limit) == said, limit
        assert base.forecast.fits([3000], result.memory_limit_bytes) == result.fits
        badge = verdicts.fit_verdict(result, result.memory_limit_bytes)
        assert badge.kind == kind_of(result), limit
    assert 244 * MIB < base.result.peak_reserved_bytes == 266 * MIB


def kind_of(result):
    if result.close_to_limit:
        return verdicts.WARN
    return verdicts.GOOD if result.fits else verdicts.BAD


def test_a_panel_says_of_each_limit_what_predict_says(base):
    panel = memlab.panel(WORKLOAD, device="h200", config=CONFIG)
    try:
        until(lambda: panel.prediction is not None, PATIENCE_SECONDS)
        for limit, said in VERDICTS.items():
            panel.set(memory_limit=limit)
            assert panel._page._draw.wait(PATIENCE_SECONDS)
            found = panel.prediction
            assert (found.fits, found.close_to_limit) == said, limit
            assert f"memlab-{kind_of(found)}" in find(panel, "memlab-fit").value, limit
        panel.set(memory_limit="258MiB")
        assert panel._page._draw.wait(PATIENCE_SECONDS)
        assert "fits with less cache: 266 of 258 MiB" in find(panel, "memlab-fit").value
    finally:
        panel.close()


def test_a_limit_is_replayed_once(base, monkeypatch):
    found = forecasts.Forecasts({"blocks": WORKLOAD}, lambda estimate: None, lambda text: None)
    here = questions.Question("blocks", CONFIG, "h200")
    found._answers.add(here, base)
    calls = []
    replay = type(base.forecast).runs_within
    monkeypatch.setattr(
        type(base.forecast), "runs_within", lambda *args: calls.append(args) or replay(*args)
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
    limited = base.forecast.against_limit(base.result, 200 * MIB)
    assert limited.fits is False
    estimate = interpolated(replace(base, result=limited), StepConfig(batch_size=500))
    assert (estimate.memory_limit_bytes, estimate.fits, estimate.close_to_limit) == (
        None,
        None,
        None,
    )
    assert base.forecast.against_limit(estimate, 200 * MIB).fits


def test_the_largest_batch_is_one_that_predict_says_fits_for_sure():
    limit = 250 * MIB
    found = pairs._Search(WORKLOAD, limit, "h200", 4096).largest(StepConfig(batch_size=1), 2)
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
