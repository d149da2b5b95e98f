"""What simulated ranks send one another and hold: counted by hand, and the same measured."""

import dataclasses

import pytest

import memlab
from benchmarks.ranks import Ranks
from memlab import StepConfig, StepResult
from memlab._util.collectives import Communication
from memlab._util.units import format_bytes
from memlab.prediction.predict import spread_notes
from memlab.runtime.measure import MOST_UNSEEN_BYTES
from memlab.techniques.sharding.ranks import MOST_SIMULATED_PARTS
from memlab.tracing import simulated_ranks
from tests.figure_parts import MIB, make_result
from tests.models import blocks
from tests.predictions import DEPTH, NARROW, simulated
from tests.tensor_parts import HIDDEN, IN, OUT, mlp

BLOCK = 4 * 2 * (NARROW * NARROW + NARROW)  # bytes of two linear layers with biases
HEAD = 4 * (NARROW * 3 + 3)
MODEL = DEPTH * BLOCK + HEAD
ONCE = {"accumulation_steps": 2, "sync_each_micro_batch": False}


def predicted(**fields) -> dict[tuple[str, int], Communication]:
    """What one rank does, by collective and number of ranks."""
    found = simulated(batch_size=64, **fields).communication
    return {(str(each.collective), each.num_ranks): each for each in found}


def padded(rows: int, columns: int, ranks: int) -> int:
    """Bytes of a parameter that is divided by rows into parts of one size."""
    return 4 * -(-rows // ranks) * ranks * columns


@pytest.mark.parametrize("fields", [{}, {"accumulation_steps": 4}, ONCE])
def test_fully_sharded_blocks_are_gathered_twice_and_reduced_once_in_each_micro_batch(fields):
    ranks = 4
    found = predicted(sharding="zero3", world_size=ranks, **fields)
    gathered, reduced = found["all-gather", ranks], found["reduce-scatter", ranks]
    batches = fields.get("accumulation_steps", 1)
    syncs = 1 if "sync_each_micro_batch" in fields else batches
    # the head belongs to the model as a whole, which keeps it from forward to backward
    head = padded(3, NARROW, ranks) + padded(3, 1, ranks)
    assert reduced.num_calls == syncs * (DEPTH + 1)
    assert reduced.payload_bytes == syncs * (DEPTH * BLOCK + head)
    assert gathered.num_calls == batches * (2 * DEPTH + 1)
    assert gathered.payload_bytes == batches * (2 * DEPTH * BLOCK + head)
    for each in (gathered, reduced):
        assert each.sent_bytes == each.payload_bytes * (ranks - 1) // ranks
    assert set(found) == {("all-gather", ranks), ("reduce-scatter", ranks)}


@pytest.mark.parametrize(("fields", "times"), [({}, 1), ({"accumulation_steps": 4}, 4), (ONCE, 1)])
def test_replicas_average_all_gradients(fields, times):
    found = predicted(sharding="ddp", world_size=8, **fields)
    assert set(found) == {("all-reduce", 8)}
    assert found["all-reduce", 8].payload_bytes == times * MODEL


def test_ranks_with_a_share_of_the_state_also_send_their_parameters():
    found = predicted(sharding="zero1", world_size=8)
    assert found["all-reduce", 8].payload_bytes == MODEL
    assert found["broadcast", 8].payload_bytes == MODEL
    assert found["broadcast", 8].num_calls == 4 * DEPTH + 2


def test_groups_gather_within_and_average_between():
    found = predicted(sharding="hybrid", world_size=64, shard_group_size=4)
    head = padded(3, NARROW, 4) + padded(3, 1, 4)
    assert found["all-gather", 4].payload_bytes == 2 * DEPTH * BLOCK + head
    assert found["reduce-scatter", 4].payload_bytes == DEPTH * BLOCK + head
    assert found["all-reduce", 16].payload_bytes == (DEPTH * BLOCK + head) // 4


def test_half_formats_send_half_of_the_parameters():
    whole, half = (
        predicted(sharding="zero3", world_size=4, precision=precision)
        for precision in ("fp32", "bf16-mixed")
    )
    assert 2 * half["all-gather", 4].payload_bytes == whole["all-gather", 4].payload_bytes
    assert half["reduce-scatter", 4] == whole["reduce-scatter", 4]  # gradients, in fp32


def test_one_process_sends_nothing():
    alone = simulated(batch_size=4)
    assert alone.communication == ()
    assert alone.sent_bytes is None


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero3"])
def test_a_single_rank_sends_no_bytes(sharding):
    assert simulated(batch_size=4, sharding=sharding, world_size=1).sent_bytes == 0


def test_what_is_sent_is_said_in_words_and_tables():
    result = simulated(batch_size=8, sharding="ddp", world_size=2)
    assert result.sent_bytes == MODEL
    said = f"all-reduce {format_bytes(MODEL)} in 1 call among 2 ranks"
    assert said in result._repr_html_()
    assert said in str(memlab.explain(result))
    frame = memlab.to_frame([result, simulated(batch_size=4)])
    assert frame["sent_bytes"][0] == MODEL
    assert frame["sent_bytes"].isna()[1]


@pytest.fixture(scope="module")
def ranks():
    found = Ranks()
    yield found
    found.end()


MEASURED = [
    (2, {"sharding": "ddp", "accumulation_steps": 2}),
    (2, {"sharding": "ddp", **ONCE}),
    (2, {"sharding": "zero1", "max_grad_norm": 1.0}),
    (2, {"sharding": "zero3", "max_grad_norm": 1.0}),
]
MORE = [
    (2, {"sharding": "zero2", "accumulation_steps": 2}),
    (2, {"sharding": "zero3", "accumulation_steps": 4, "precision": "bf16-mixed"}),
    (4, {"sharding": "ddp"}),
    (4, {"sharding": "zero1", **ONCE}),
    (4, {"sharding": "zero2", **ONCE}),
    (4, {"sharding": "zero3", **ONCE}),
    (4, {"sharding": "hybrid", "shard_group_size": 2, "accumulation_steps": 2}),
    (4, {"sharding": "hybrid", "shard_group_size": 2, **ONCE}),
]


@pytest.mark.parametrize(
    ("world_size", "fields"),
    [*MEASURED, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)],
)
def test_real_ranks_send_what_is_predicted(ranks, world_size, fields):
    workload = blocks(norm=True)  # replicas also send the statistics of rank 0
    asked = {"batch_size": 32, "world_size": world_size, **fields}
    foreseen = simulated(workload, **asked)
    measured = ranks.measured(workload, StepConfig(**asked))
    assert measured.outcome == "ok", measured.message
    assert measured.communication, "nothing was seen"
    for rank in measured.ranks:
        assert rank.communication == foreseen.communication
    assert StepResult.from_dict(measured.to_dict()).communication == measured.communication


# which ranks of a simulated step hold the same, and what each class holds


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
def test_real_ranks_hold_what_their_class_is_predicted_to_hold(ranks, sharding):
    config = {"batch_size": 8, "sharding": sharding, "world_size": 4}
    foreseen = simulated(**config)
    measured_ranks = ranks.measured(blocks(), StepConfig(**config)).ranks
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
