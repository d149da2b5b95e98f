"""The parts of `benchmarks/recompute.py` and its checks that are not timing."""

import dataclasses

import pytest

from benchmarks import recompute, recompute_checks
from benchmarks.recompute_points import BY_HAND, OURS, Point, area, dominating, judge
from memlab import StepConfig, predict
from memlab.config import PRESET_POLICIES
from tests.models import linear


def point(rule, peak, time):
    return Point(rule=rule, setting=str(peak), peak_bytes=peak, time=time, predicted_bytes=peak)


def test_the_area_is_below_the_steps_of_the_points():
    points = [point(OURS, 50, 1.5), point(OURS, 100, 1.0), point(OURS, 80, 1.6)]
    # at 1 until half of the way, then at a half; what is slower and higher changes nothing
    assert area(points, 100, 2.0) == pytest.approx(0.5 * 1.0 + 0.5 * 0.5)
    assert area([point(OURS, 60, 0.9)], 100, 2.0) == pytest.approx(0.6)  # faster than plain


def test_a_peer_dominates_where_both_are_better_by_more_than_the_margin():
    ours = [point(OURS, 100, 1.0)]
    assert dominating(ours, [point(BY_HAND, 97, 0.97)])
    assert not dominating(ours, [point(BY_HAND, 50, 0.99), point(BY_HAND, 99, 0.5)])


def test_a_model_is_judged_by_area_and_dominance():
    ours = [point(OURS, 100, 1.0), point(OURS, 40, 1.2)]
    peers = [point(BY_HAND, 60, 1.3)]
    row = judge("m", [*ours, *peers])
    assert (row["area goal"], row["dominance goal"], row["least, budget"]) == ("met", "met", 0.4)
    row = judge("m", [ours[0], point(OURS, 95, 1.3), point(BY_HAND, 60, 1.2)])
    assert (row["area goal"], row["dominance goal"], row["dominated"]) == ("MISSED", "MISSED", 1)


def test_combinations_are_random_and_the_same_for_a_seed_and_cover_what_is_claimed():
    pairs = recompute_checks.combinations(500, False)
    assert pairs == recompute_checks.combinations(500, False)
    assert pairs[:50] != recompute_checks.combinations(50, False, seed=1)
    configs = [config for _, config in pairs]
    assert {name.endswith("+") for name, _ in pairs} == {True, False}  # with dropout, without
    assert set(PRESET_POLICIES) <= {config.checkpoint_policy for config in configs}
    assert {0.0, 1.0} < {config.memory_budget for config in configs}
    assert {config.accumulation_steps for config in configs} == {1, 2}
    assert {str(config.precision) for config in configs} == {"as-built", "bf16-mixed"}


def test_checks_are_counted_by_precision_and_verdict():
    plain = StepConfig(batch_size=2)
    every = dataclasses.replace(plain, checkpointing="blocks", checkpoint_modules="Linear")
    rows = recompute_checks.verified([("tied", plain), ("tied", every), ("tied", every)])
    assert {row["verdict"]: row["combinations"] for row in rows} == {
        "within tolerance": 1, "same bits as without recomputing": 2,
    }  # fmt: skip


@pytest.mark.slow
def test_saved_bytes_of_a_linear_are_its_loss_alone():
    """Its input is the batch; of the squares autograd keeps what they were made of."""
    on_cpu, on_card = (
        recompute.saved_bytes(predict(linear(), StepConfig(batch_size=8), device))
        for device in ("cpu", "h200")
    )
    assert 0 < on_cpu <= on_card


def test_a_step_timed_against_itself_takes_its_own_time():
    ways = [recompute.Way(OURS, "1", StepConfig(batch_size=4)) for _ in range(2)]
    shares = recompute.times_in_turns(linear(), ways, 3)
    assert shares[0] == 1.0
    assert shares[1] > 0


def test_a_chain_is_solved_and_picked_from():
    row = recompute.solving(2)
    assert row["plans"] > 1
    assert row["chain s"] > 0
