"""Sharded steps, predicted in one process: against real ranks, and for many ranks."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import Ranks
from benchmarks.sharding import compared, in_ranks, simulated
from memlab import StepConfig, StepResult
from memlab.devices.cards import Target
from memlab.prediction.predict import predict_in_process
from memlab.runtime.measure import MOST_UNSEEN_BYTES
from tests.models import blocks, half_used
from tests.tensor_parts import HIDDEN, IN, OUT, TOKENS, WIDTH, decoder, gated, looked_up, mlp

CPU = Target(kind="cpu", card=None, name="cpu")


def predicted(config: StepConfig, report: Any = lambda progress: None) -> StepResult:
    made = predict_in_process(
        blocks(norm=True), config, CPU, seed=0, memory_limit=None, report=report
    )
    return made.result


@pytest.fixture(scope="module")
def ranks():
    started = Ranks()
    yield started
    started.end()


@pytest.mark.slow
def test_a_prediction_has_the_bytes_of_real_ranks(ranks):
    rows = compared(ranks, 2, "^plain-mlp, (ddp|zero1|zero3), (plain|2, averaged once), ")
    assert len(rows) == 6
    for row in rows:
        # real meshes hold 4 bytes for each rank; and a thread may free something unseen
        assert abs(row["measured"] - row["predicted"]) < MOST_UNSEEN_BYTES, row
        assert row.get("gradient error", 0.0) < 1e-5


@pytest.mark.slow
def test_a_loss_in_chunks_and_updates_in_backward_have_the_bytes_of_real_ranks(ranks):
    for fields in (
        {"sharding": "zero3", "loss_chunks": 4},
        {"sharding": "zero2", "optimizer_in_backward": True},
        {"sharding": "tensor", "optimizer_in_backward": True},
    ):
        asked = {"world_size": 2, "batch_size": 32, **fields}
        measured = in_ranks(ranks, "plain-mlp", asked).peak_allocated_bytes
        foreseen = simulated("plain-mlp", asked).peak_allocated_bytes
        assert abs(measured - foreseen) < MOST_UNSEEN_BYTES, fields


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "hybrid"])
def test_many_ranks_are_as_one(sharding):
    group = {"shard_group_size": 64} if sharding == "hybrid" else {}
    few, many = (
        predicted(
            StepConfig(sharding=sharding, world_size=size, batch_size=4 * size, **group),
        )
        for size in (64, 1024)
    )
    assert few.outcome == many.outcome == "ok", many.message
    # the peak may be higher: parameters with fewer rows than ranks are gathered with padding
    state = [result.peak_by_category["optimizer_state"] for result in (few, many)]
    assert state[1] <= state[0]
    assert many.step_seconds is None
    assert any("communication" in note for note in many.notes)
    assert not dist.is_initialized()


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero3"])
def test_a_parameter_that_the_loss_does_not_use(sharding):
    config = StepConfig(batch_size=4, sharding=sharding, world_size=2)
    made = predict_in_process(half_used(), config, CPU, seed=0, memory_limit=None, report=print)
    if sharding == "zero3":
        assert made.result.outcome == "ok"
    else:  # in real ranks the second forward raises a RuntimeError
        assert made.result.outcome == "unsupported"
        assert "does not use the parameters 'idle.weight', 'idle.bias'" in made.result.message


def test_what_a_collective_returns_is_held_as_long_as_it_is_used():
    config = StepConfig(batch_size=8, sharding="tensor", world_size=2, optimizer="sgd")
    made = predict_in_process(looked_up(), config, CPU, seed=0, memory_limit=None, report=print)
    sums = [each for each in made.result.peak_holdings if "all_reduce" in each.operator]
    assert sum(each.nbytes for each in sums) == 8 * TOKENS * WIDTH * 4  # of the embedding


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero3"])
def test_one_rank_sends_nothing_and_has_the_time_of_its_operators(sharding):
    # with few samples the collectives of ddp would be a third of the work, if they did any
    alone, two = (
        predicted(StepConfig(sharding=sharding, world_size=size, batch_size=4)) for size in (1, 2)
    )
    assert alone.step_seconds > 0
    assert not any("no known time" in said or "between ranks" in said for said in alone.notes)
    assert two.step_seconds is None
    assert any("between ranks is not known" in said for said in two.notes)


def test_a_rank_has_its_share_of_the_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(4)  # kernels take more workspace with more of them
    try:
        few, many = (
            predicted(StepConfig(sharding="ddp", world_size=size, batch_size=size))
            for size in (2, 64)
        )
        assert (few.versions["threads"], many.versions["threads"]) == ("2", "1")
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)


def test_a_model_keeps_the_name_of_its_class_when_it_is_sharded():
    config = StepConfig(batch_size=4096, sharding="zero3", world_size=2, optimizer="sgd")
    made = predict_in_process(half_used(), config, CPU, seed=0, memory_limit=None, report=print)
    modules = {each.module for each in made.result.peak_holdings}
    assert "Linear" in modules
    assert not any("FSDP" in module for module in modules)


def test_each_rank_holds_its_part_of_the_optimizer_state():
    whole, half, eighth = (
        predicted(StepConfig(batch_size=16, sharding="zero3", world_size=size)).peak_by_category
        for size in (1, 2, 8)
    )
    assert half["optimizer_state"] < 0.55 * whole["optimizer_state"]
    assert eighth["optimizer_state"] < 0.2 * whole["optimizer_state"]


def test_only_some_of_many_micro_batches_are_recorded():
    made = {
        count: predicted(
            StepConfig(
                sharding="zero2", world_size=2, batch_size=2 * 4 * count, accumulation_steps=count
            )
        )
        for count in (3, 9)
    }
    assert made[9].outcome == "ok", made[9].message
    more_inputs = made[9].peak_by_category["inputs"] - made[3].peak_by_category["inputs"]
    assert made[9].peak_allocated_bytes == made[3].peak_allocated_bytes + more_inputs


def test_what_is_replaced_is_put_back_after_an_error():
    own = dist.Reducer, dist.Logger, torch.UntypedStorage.resize_

    def stop(progress):
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        predicted(StepConfig(sharding="ddp", world_size=2, batch_size=4), stop)
    failed = predict_in_process(
        blocks(), StepConfig(sharding="ddp", world_size=2, batch_size=4, optimizer="adamw"), CPU,
        seed=0, memory_limit=None, report=lambda progress: None,
    )  # fmt: skip
    assert failed.result.outcome == "ok"
    assert (dist.Reducer, dist.Logger, torch.UntypedStorage.resize_) == own
    assert not dist.is_initialized()


def test_adafactor_is_refused_for_sharded_parameters():
    made = predicted(
        StepConfig(sharding="zero3", world_size=2, batch_size=4, optimizer="adafactor")
    )
    assert made.outcome == "unsupported"
    assert "adamw" in made.message


@pytest.mark.parametrize("count", [2, 4])
def test_each_rank_holds_its_part_of_layers_that_are_divided(count):
    config = StepConfig(batch_size=8, sharding="tensor", world_size=count)
    made = predict_in_process(
        mlp(), config, CPU, seed=0, memory_limit=None, report=lambda progress: None
    ).result
    part = HIDDEN // count
    # the bias of the second layer is whole: it is added to the sum of all ranks
    own = 4 * ((part * IN + part) + (OUT * part + OUT))
    assert made.peak_by_category["parameters"] == own
    assert made.timeline.bytes_of("optimizer_state").max() == 2 * own + 4 * 4
    assert f"{count} ranks divide layers" in made.notes[0]


@pytest.mark.slow
def test_many_ranks_that_divide_layers_and_batches_are_as_few():
    few, many = (
        predict_in_process(
            decoder(),
            StepConfig(
                sharding="zero3", world_size=size, batch_size=size, tensor_parallel_size=2
            ),
            CPU, seed=0, memory_limit=None, report=lambda progress: None,
        ).result
        for size in (16, 1024)
    )  # fmt: skip
    assert few.outcome == many.outcome == "ok", many.message
    assert many.peak_by_category["optimizer_state"] < few.peak_by_category["optimizer_state"]
    assert not dist.is_initialized()


def test_layers_that_share_their_input_sum_its_gradient_once():
    config = StepConfig(batch_size=8, sharding="tensor", world_size=2)
    made = predict_in_process(
        gated(), config, CPU, seed=0, memory_limit=None, report=lambda progress: None
    ).result
    # forward adds the outputs of `down`, backward the gradients of the input
    sent = [(line.num_calls, line.payload_bytes) for line in made.communication]
    assert sent == [(2, 8 * OUT * 4 + 8 * IN * 4)]
