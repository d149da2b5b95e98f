"""Ranks of a simulated step: which hold the same, and what each class holds."""

import dataclasses

import pytest

import memlab
from benchmarks.ranks import Ranks
from memlab import StepConfig
from memlab._util.units import format_bytes
from memlab.prediction.predict import spread_notes
from memlab.runtime.measure import MOST_UNSEEN_BYTES
from memlab.techniques.sharding.ranks import MOST_SIMULATED_PARTS
from memlab.tracing import simulated_ranks
from tests.figure_parts import MIB, make_result
from tests.models import blocks
from tests.predictions import simulated
from tests.tensor_parts import HIDDEN, IN, OUT, mlp

ADAM = 2  # numbers for each weight


def held(result, category):
    return result.peak_by_category[category]


def numbers(result):
    return [rank for each in result.ranks for rank in each.rank_numbers]


def test_replicas_are_one_class():
    result = simulated(batch_size=4096, sharding="ddp", world_size=4096)
    (only,) = result.ranks
    assert only.rank_numbers == tuple(range(4096))
    assert only.peak_allocated_bytes == result.peak_allocated_bytes
    assert result.rank_numbers == ()


def test_parts_by_hand():
    """Of 32 rows, 5 ranks have 7, 7, 7, 7 and 4; of 3 rows three have one."""
    result = simulated(batch_size=5, sharding="zero3", world_size=5)
    assert [each.rank_numbers for each in result.ranks] == [(0, 1, 2), (3,), (4,)]
    padded = 4 * 2 * 7 * (32 + 1) + (32 + 1)  # the parts of parameters have one size
    for each, (rows, head) in zip(result.ranks, [(7, 1), (7, 0), (4, 0)], strict=True):
        weights = 4 * 2 * rows * (32 + 1) + head * (32 + 1)
        assert held(each, "parameters") == 4 * padded
        # a counter of steps of 4 bytes for each of 18 parameters
        assert held(each, "optimizer_state") == 4 * ADAM * weights + 4 * 18
    peaks = [each.peak_allocated_bytes for each in result.ranks]
    assert result.peak_allocated_bytes == max(peaks)
    highest = result.ranks[peaks.index(max(peaks))].rank_numbers[0]
    assert result.notes[0] == (
        f"These are the numbers of rank {highest}, which has the highest peak of 5 ranks; the "
        f"lowest is {format_bytes(min(peaks))}."
    )


def test_whose_numbers_these_are():
    def rank(peak, *numbers):
        config = StepConfig(batch_size=8, sharding="zero1", world_size=8)
        return make_result(config=config, peak_allocated_bytes=peak, rank_numbers=numbers)

    worst = rank(3 * MIB, 2, 3)
    others = [rank(3 * MIB, 0, 1), rank(3 * MIB, 4, 5, 6, 7)]
    assert spread_notes(worst, [worst, *others]) == (
        "These are the numbers of rank 2; 8 ranks have the same peak.",
    )
    assert spread_notes(worst, [worst, rank(2 * MIB, 0, 1, 4, 5)]) == (
        "These are the numbers of rank 2, which has the highest peak of 6 of 8 ranks; the lowest "
        "is 2.00 MiB.",
    )
    assert spread_notes(worst, [worst]) == ()


def test_groups_of_a_hybrid_step_are_copies():
    result = simulated(batch_size=10, sharding="hybrid", world_size=10, shard_group_size=5)
    assert [each.rank_numbers for each in result.ranks] == [(0, 1, 2, 5, 6, 7), (3, 8), (4, 9)]


def test_ranks_that_divide_layers_hold_the_same():
    """Of 6 ranks 2 divide layers: 32 hidden features have 16 rows each, 3 ranks have 6, 6, 4.

    The 6 outputs have 2 rows each, of which a rank multiplies the half of the hidden features.
    """
    result = simulated(mlp(), batch_size=6, sharding="zero2", world_size=6, tensor_parallel_size=2)
    assert [each.rank_numbers for each in result.ranks] == [(0, 1, 2, 3), (4, 5)]
    for each, rows in zip(result.ranks, (6, 4), strict=True):
        weights = rows * (IN + 1) + OUT // 3 * (HIDDEN // 2 + 1)
        assert held(each, "optimizer_state") == 4 * ADAM * weights + 4 * 4

    alone = simulated(mlp(), batch_size=4, sharding="tensor", world_size=4)
    assert [each.rank_numbers for each in alone.ranks] == [(0, 1, 2, 3)]


def test_shares_of_the_state_of_divided_layers():
    fields = {"batch_size": 4, "sharding": "zero1", "world_size": 4, "tensor_parallel_size": 2}
    result = simulated(mlp(), **fields)
    assert sorted(each.rank_numbers for each in result.ranks) == [(0, 1), (2, 3)]
    shares = sum(held(each, "optimizer_state") for each in result.ranks)
    half = HIDDEN // 2  # of a rank; the bias of the outputs is whole
    assert shares == 4 * ADAM * (half * (IN + 1) + OUT * (half + 1)) + 4 * 4


@pytest.mark.parametrize("world_size", [2, 4])
def test_shares_of_the_optimizer_state_sum_to_the_whole(world_size):
    result = simulated(batch_size=8, sharding="zero1", world_size=world_size)
    assert sorted(numbers(result)) == list(range(world_size))
    whole = simulated(batch_size=8)
    shares = sum(held(each, "optimizer_state") * len(each.rank_numbers) for each in result.ranks)
    assert shares == held(whole, "optimizer_state")


def test_only_some_of_many_shares_are_recorded_and_the_others_are_said(monkeypatch):
    monkeypatch.setattr(simulated_ranks, "MOST_RECORDED_RANKS", 2)
    result = simulated(batch_size=7, sharding="zero1", world_size=7)
    assert len(result.ranks) == 2
    left = 7 - len(numbers(result))
    assert any(f"{left} ranks were not recorded apart" in note for note in result.notes)


def test_a_large_model_is_recorded_once(monkeypatch):
    monkeypatch.setattr(simulated_ranks, "MOST_OPERATORS", 10)
    result = simulated(batch_size=5, sharding="zero3", world_size=5)
    assert [each.rank_numbers for each in result.ranks] == [(0, 1, 2)]
    assert any("2 ranks were not recorded apart" in note for note in result.notes)


def test_ranks_survive_a_round_trip():
    config = StepConfig(batch_size=5, sharding="zero3", world_size=5)
    result = memlab.predict(blocks(), config, "cpu")
    again = memlab.StepResult.from_dict(result.to_dict())
    assert [each.rank_numbers for each in again.ranks] == [(0, 1, 2), (3,), (4,)]


def test_the_batch_of_thousands_of_ranks_is_not_made():
    made = []
    workload = blocks()

    def make_batch(count):
        made.append(count)
        return workload.make_batch(count)

    config = {"batch_size": 2 * 4096, "sharding": "zero3", "world_size": 4096}
    result = simulated(dataclasses.replace(workload, make_batch=make_batch), **config)
    assert max(made) == 2 * MOST_SIMULATED_PARTS
    few = simulated(workload, batch_size=2 * 64, sharding="zero3", world_size=64)
    assert held(result, "inputs") == held(few, "inputs")


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero1", "zero3"])
def test_real_ranks_hold_what_their_class_is_predicted_to_hold(sharding):
    config = {"batch_size": 8, "sharding": sharding, "world_size": 4}
    foreseen = simulated(**config)
    group = Ranks()
    try:
        measured_ranks = group.measured(blocks(), StepConfig(**config)).ranks
    finally:
        group.end()
    assert len(foreseen.ranks) > 1
    for each in foreseen.ranks:
        for rank in each.rank_numbers:
            measured = measured_ranks[rank]
            assert measured.outcome == "ok", measured.message
            for category in ("parameters", "optimizer_state"):
                assert held(measured, category) == held(each, category), (rank, category)
            # as in test_sharded_prediction: meshes, and what threads free unseen
            away = abs(measured.peak_allocated_bytes - each.peak_allocated_bytes)
            assert away < MOST_UNSEEN_BYTES, rank
