"""What ranks send one another: counted by hand, and the same predicted and measured."""

import pytest

import memlab
from benchmarks.ranks import Ranks
from memlab import StepConfig, StepResult
from memlab._util.collectives import Communication
from memlab._util.units import format_bytes
from tests.models import blocks
from tests.predictions import DEPTH, NARROW, simulated

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
