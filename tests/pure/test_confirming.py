"""Which settings of a recommendation are measured, with made-up runs in place of real ones."""

import pytest

from memlab.config import StepConfig
from memlab.recommending import confirming
from memlab.recommending.confirming import confirmed, why_dropped
from memlab.recommending.recommendations import Recommendation
from memlab.result import Outcome
from memlab.running import Ended
from tests.figure_parts import MIB, make_result, out_of_memory

LIMIT = 100 * MIB


def candidate(seconds, mib=50, **config):
    result = make_result(
        seconds=(seconds,), config=StepConfig(**config), peak_allocated_bytes=mib * MIB,
        source="predicted", uncertainty={"peak_allocated_bytes": 0.01},
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

    monkeypatch.setattr(confirming, "measure", measure)
    return measured


def confirm(candidates, most, headroom=0.0):
    return confirmed(
        candidates, most, limit_bytes=LIMIT, headroom=headroom, options={"candidates": candidates}
    )


FAST = candidate(0.10, precision="bf16-mixed")
ALMOST = candidate(0.11, precision="bf16-mixed", optimizer_implementation="fused")
PLAIN = candidate(0.15)
PLAIN_AGAIN = candidate(0.16, accumulation_steps=2)


def test_the_best_of_each_number_format_is_measured_first_and_what_that_says_decides(runs):
    found = confirm([FAST, ALMOST, PLAIN, PLAIN_AGAIN], 3)
    assert runs == [FAST.config, PLAIN.config, PLAIN_AGAIN.config]
    assert [one.config for one in found.kept] == [PLAIN.config, PLAIN_AGAIN.config, FAST.config]
    assert found.count == 3


def test_no_more_are_measured_than_asked_for_or_found(runs):
    assert confirm([FAST, PLAIN], 0).count == 0
    assert confirm([FAST, PLAIN], 1).kept[0].config == FAST.config
    assert confirm([FAST, PLAIN], 9).count == 2


def test_the_reason_of_the_limit_is_that_of_the_run(runs):
    (kept,) = confirm([candidate(0.1, mib=100)], 1, headroom=0.1).kept
    assert kept.predicted.fit == "too close"
    assert kept.reasons[0] == "a reason"
    assert kept.reasons[1].startswith("fits with 50 % of 100 MiB free (allocated, measured)")


def test_a_format_whose_first_run_has_no_room_gets_another(monkeypatch, runs):
    made = confirming.measure
    monkeypatch.setattr(
        confirming,
        "measure",
        lambda *, config, **options: (
            out_of_memory(config=config)
            if config == FAST.config
            else made(config=config, **options)
        ),
    )
    found = confirm([FAST, ALMOST, PLAIN], 2)
    assert runs == [ALMOST.config]
    (dropped,) = found.dropped
    assert why_dropped(dropped).startswith(f"{FAST.config} was predicted to fit, and did not fit")


def test_what_is_stopped_ends_it(monkeypatch):
    stopped = make_result(outcome=Outcome.CANCELLED)
    monkeypatch.setattr(confirming, "measure", lambda **options: stopped)
    with pytest.raises(Ended):
        confirm([FAST], 1)
