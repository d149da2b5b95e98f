"""Which settings of a recommendation are measured, with made-up runs in place of real ones."""

from dataclasses import replace

import pytest
import torch

from memlab.config import StepConfig
from memlab.result import Outcome
from memlab.running import Ended
from memlab.search import recommend
from memlab.search.answer import Recommendation
from memlab.search.recommend import confirmed, why_dropped
from memlab.workload import Workload
from tests.figure_parts import MIB, make_result, out_of_memory

LIMIT = 100 * MIB
LAYER, BATCH = torch.nn.Linear(1, 1), (torch.ones(1, 1), torch.ones(1, 1))
LOSS = torch.nn.functional.mse_loss


def candidate(seconds, mib=50, **config):
    result = make_result(
        seconds=(seconds,), config=StepConfig(**config), peak_allocated_bytes=mib * MIB,
        source="predicted",
        uncertainty={"peak_allocated_bytes": 0.01, "step_seconds": 0.3},
    ).against_limit(LIMIT)  # fmt: skip
    return Recommendation(result=result, reasons=("a reason", "fits"), predicted=result)


@pytest.fixture
def runs(monkeypatch):
    """Return the configs that are measured; one takes twice its time in bf16, and 50 MiB."""
    measured = []

    def measure(*, config, repeats, memory_limit, candidates):
        measured.append(config)
        one = next(one for one in candidates if one.config == config)
        factor = 2.0 if config.precision == "bf16-mixed" else 1.0
        return make_result(
            seconds=(factor * one.predicted.step_seconds,) * repeats, config=config,
            peak_allocated_bytes=50 * MIB,
        ).against_limit(memory_limit)  # fmt: skip

    monkeypatch.setattr(recommend, "measure", measure)
    return measured


def confirm(certain, most, *, likely=(), headroom=0.0):
    return confirmed(
        certain, likely, most, limit_bytes=LIMIT, headroom=headroom,
        options={"candidates": [*certain, *likely]},
    )  # fmt: skip


FAST = candidate(0.10, precision="bf16-mixed")
ALMOST = candidate(0.11, precision="bf16-mixed", optimizer_implementation="fused")
PLAIN = candidate(0.15)
PLAIN_AGAIN = candidate(0.16, accumulation_steps=2)
SLOW_FORMAT = candidate(1.0, precision="fp16-mixed")
CLOSE = candidate(0.09, mib=100, accumulation_steps=4)
CLOSER = candidate(0.085, mib=100, precision="bf16-mixed", accumulation_steps=4)


def test_the_best_of_each_number_format_is_measured_first_and_what_that_says_decides(runs):
    found = confirm([FAST, ALMOST, PLAIN, PLAIN_AGAIN], 3)
    assert runs == [FAST.config, PLAIN.config, PLAIN_AGAIN.config]
    assert [one.config for one in found.kept] == [PLAIN.config, PLAIN_AGAIN.config, FAST.config]
    assert found.seconds(ALMOST) == pytest.approx(0.22)


def test_a_format_that_cannot_be_the_fastest_is_not_measured(runs):
    confirm([FAST, ALMOST, PLAIN, SLOW_FORMAT], 4)
    assert runs == [FAST.config, PLAIN.config, ALMOST.config, SLOW_FORMAT.config]  # as the slowest
    runs.clear()
    confirm([FAST, PLAIN, PLAIN_AGAIN, SLOW_FORMAT], 3)
    assert SLOW_FORMAT.config not in runs


def test_the_last_run_is_for_the_fastest_even_where_formats_are_left(runs):
    third = candidate(0.12, precision="fp16-mixed")
    confirm([FAST, ALMOST, third, PLAIN], 2)
    assert runs == [FAST.config, third.config]
    runs.clear()
    more = candidate(0.125, precision="fp16-mixed", optimizer_implementation="fused")
    confirm([FAST, third, more, PLAIN], 3)
    assert runs == [FAST.config, third.config, more.config]


def test_no_more_are_measured_than_asked_for_or_found(runs):
    assert confirm([FAST, PLAIN], 0).keys == set()
    assert confirm([FAST, PLAIN], 1).kept[0].config == FAST.config
    assert len(confirm([FAST, PLAIN], 9).keys) == 2


def test_two_whose_repeats_overlap_are_run_again_and_the_faster_run_counts(monkeypatch):
    times = {
        FAST.config: [(0.3, 0.2, 0.11), (0.1, 0.1, 0.1)],  # other programs slow the first run
        PLAIN.config: [(0.15, 0.15, 0.15), (0.15, 0.15, 0.15)],
        ALMOST.config: [(0.12, 0.12, 0.12)],
    }
    asked = []

    def measure(*, config, memory_limit, **options):
        asked.append(config)
        result = make_result(seconds=times[config].pop(0), config=config)
        return result.against_limit(memory_limit)

    monkeypatch.setattr(recommend, "measure", measure)
    found = confirm([FAST, PLAIN], 2)
    assert asked == [FAST.config, PLAIN.config] * 2
    assert (found.kept[0].config, found.kept[0].result.step_seconds) == (FAST.config, 0.1)
    assert found.num_runs == 4
    assert found.factors["line", "bf16-mixed"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("second", "is_kept"),
    [
        (out_of_memory(config=FAST.config), False),
        (make_result(outcome=Outcome.CRASHED, config=FAST.config), True),  # it says nothing
    ],
    ids=["out of memory", "crashed"],
)
def test_a_setting_whose_second_run_does_not_fit_is_dropped(monkeypatch, second, is_kept):
    first = make_result(seconds=(0.1, 0.2), config=FAST.config).against_limit(LIMIT)
    plain = make_result(seconds=(0.15,), config=PLAIN.config).against_limit(LIMIT)
    results = [first, plain, second, plain]
    monkeypatch.setattr(recommend, "measure", lambda **options: results.pop(0))
    found = confirm([FAST, PLAIN], 2)
    assert {one.config for one in found.kept} == {PLAIN.config} | (
        {FAST.config} if is_kept else set()
    )
    assert [one.config for one in found.dropped] == ([] if is_kept else [FAST.config])
    assert found.num_runs == 4


def test_of_what_is_too_close_to_say_one_is_measured_after_one_that_is_certain(runs):
    found = confirm([PLAIN, PLAIN_AGAIN], 3, likely=[CLOSER, CLOSE])
    assert runs == [PLAIN.config, CLOSER.config, PLAIN_AGAIN.config]
    assert found.kept[-1].config == CLOSER.config  # 0.17 s: bf16 took twice its time
    runs.clear()
    confirm([], 3, likely=[CLOSE, CLOSER])
    assert runs == [CLOSER.config]


def test_the_reason_of_the_limit_is_that_of_the_run(runs):
    (kept,) = confirm([], 1, likely=[CLOSE], headroom=0.1).kept
    assert kept.predicted.fit == "too close"
    assert kept.reasons[0] == "a reason"
    assert kept.reasons[1].startswith("fits with 50 % of 100 MiB free (allocated, measured)")


def test_where_the_first_run_of_a_format_has_no_room_another_format_is_next(monkeypatch, runs):
    made = recommend.measure

    def measure(*, config, **options):
        if config == FAST.config:
            return out_of_memory(config=config)
        return made(config=config, **options)

    monkeypatch.setattr(recommend, "measure", measure)
    found = confirm([FAST, ALMOST, PLAIN], 2)
    assert runs == [PLAIN.config]
    (dropped,) = found.dropped
    said = why_dropped(dropped, was_close=False)
    assert said.startswith(f"{FAST.config} was predicted to fit, and did not fit")
    assert "was too close to say, and did not fit" in why_dropped(dropped, was_close=True)


def test_what_is_stopped_ends_it(monkeypatch):
    stopped = make_result(outcome=Outcome.CANCELLED)
    monkeypatch.setattr(recommend, "measure", lambda **options: stopped)
    with pytest.raises(Ended):
        confirm([FAST], 1)


def test_of_two_workloads_each_is_run_with_its_own_and_corrects_its_own_times(monkeypatch):
    """The same settings of two workloads are two settings: one takes twice its predicted time."""
    workloads = {name: Workload.from_module(LAYER, BATCH, LOSS, name=name) for name in "ab"}
    found = [
        replace(
            one, workload=workloads[name],
            result=replace(one.result, workload_name=name),
            predicted=replace(one.predicted, workload_name=name),
        )
        for name, one in (("a", PLAIN), ("b", PLAIN), ("a", PLAIN_AGAIN))
    ]  # fmt: skip
    asked = []

    def measure(*, workload, config, repeats, memory_limit, **options):
        asked.append((workload.name, config))
        seconds = {"a": 0.3, "b": 0.15}[workload.name]
        result = make_result(seconds=(seconds,) * repeats, config=config)
        return replace(result, workload_name=workload.name).against_limit(memory_limit)

    monkeypatch.setattr(recommend, "measure", measure)
    measured = confirm(found, 2)
    assert asked == [("a", PLAIN.config), ("b", PLAIN.config)]
    assert [one.workload.name for one in measured.kept] == ["b", "a"]
    assert measured.seconds(found[2]) == pytest.approx(2 * found[2].predicted.step_seconds)
