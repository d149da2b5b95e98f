"""Sharded steps, predicted for CUDA cards: by hand, by PyTorch's own tracker, and many ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memlab import StepConfig, StepResult, Workload
from memlab.allocator.replay import replay
from memlab.arguments.units import MIB
from memlab.costs.cuda_kernels import effects
from memlab.devices import cards
from memlab.devices.card import CUBLAS_WORKSPACE_BYTES
from memlab.operators.signatures import TensorSpec
from memlab.predicting.predict import Prediction, predict_in_process
from memlab.recording.recording import Operator, Recording
from memlab.torch_private.ranks import open_group_of_none
from memlab.trace import Category
from tests.models import blocks

WIDTH, SAMPLES = 1024, 16
MATRIX = WIDTH * WIDTH * 4  # bytes: 4 MiB
ROWS = SAMPLES * WIDTH * 4
CARD = "a100-80"
CUBLAS = 2 * CUBLAS_WORKSPACE_BYTES  # of forward and of backward


def pairs(count: int) -> Workload:
    """Blocks of two matrices each, without biases: everything can be counted by hand."""
    return Workload(
        name="pairs",
        build_model=lambda: nn.Sequential(*map(pair, range(count))),
        make_batch=lambda n: torch.randn(n, WIDTH),
        compute_loss=lambda model, x: model(x).square().mean(),
    )


def pair(_: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))


def prediction(workload: Workload, device: str = CARD, **settings: Any) -> Prediction:
    config = StepConfig(**{"world_size": 2, "batch_size": 2 * SAMPLES, **settings})
    made = predict_in_process(
        workload, config, cards.resolve(device), seed=0, memory_limit=None,
        report=lambda progress: None,
    )  # fmt: skip
    assert made.result.outcome == "ok", made.result.message
    return made


def predicted(workload: Workload, device: str = CARD, **settings: Any) -> StepResult:
    return prediction(workload, device, **settings).result


def test_the_peak_of_two_blocks_counted_by_hand():
    # in backward, when the first block is whole and the gradients of the second are on their way
    parameters = 4 * MATRIX // 2
    states = 2 * parameters
    buffer, whole = 2 * MATRIX, 2 * MATRIX  # gathered into one tensor, then copied into two
    reduced_from, reduced = 2 * MATRIX, MATRIX
    rows = 3 * ROWS  # the batch, the output of the first matrix, the gradient of the block's output
    scalars = 2 * 512  # the loss and its gradient

    result = predicted(pairs(2), sharding="zero3")
    by_hand = parameters + states + buffer + whole + reduced_from + reduced + rows + scalars
    assert result.peak_allocated_bytes == by_hand + CUBLAS
    assert result.peak_by_category["parameters"] == parameters
    assert result.peak_by_category["optimizer_state"] == states
    assert result.peak_by_category["gradients"] == reduced


def test_replicas_counted_by_hand():
    # in the update, whose square roots are as large as the parameters that a rank updates
    parameters = gradients = buckets = 4 * MATRIX
    for sharding, share in (("ddp", 1), ("zero1", 2)):
        result = predicted(pairs(2), sharding=sharding)
        states, roots = 2 * parameters // share, parameters // share
        by_hand = parameters + gradients + buckets + states + roots + 512  # the loss
        assert result.peak_allocated_bytes == by_hand + CUBLAS


@pytest.mark.parametrize("count", [2, 4])
def test_the_peak_is_that_of_pytorchs_tracker(count):
    result = predicted(pairs(count), sharding="zero3", optimizer="sgd")
    tracked = peak_by_pytorch(count)
    rounded = 2 * (512 - 4)  # each scalar takes 512 bytes on a card
    assert result.peak_allocated_bytes == tracked + rounded + CUBLAS


def peak_by_pytorch(count: int) -> int:
    """Return what PyTorch's tracker finds in forward and backward; it knows no update of shards."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    open_group_of_none(0, 2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        with FakeTensorMode():
            model = nn.Sequential(*map(pair, range(count)))
            for part in (*model, model):
                fully_shard(part, mesh=mesh)
            x = torch.randn(SAMPLES, WIDTH)
            tracker = FSDPMemTracker(model)
            tracker.track_inputs((x,))
            with tracker:
                model(x).square().mean().backward()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    finally:
        dist.destroy_process_group()


def test_a_stream_keeps_its_freed_memory_to_itself():
    made = prediction(pairs(2), sharding="zero3")
    trace, reserved = made.forecast.trace((SAMPLES,))
    born = trace.nbytes >= MATRIX
    # on one stream parameters are gathered and on another gradients are summed up
    assert len(set(trace.stream[born])) == 3
    gathered = trace.stream[born & (trace.nbytes == 2 * MATRIX)]
    assert len(gathered[gathered > 0]) == 2 * 4  # each block, forward and backward, two steps
    together = replay(trace.address, trace.nbytes).peak_reserved_bytes
    assert together < reserved == made.result.peak_reserved_bytes
    # what one stream has freed another cannot use: 20 MiB for the first request of 2 to 10 MiB
    assert reserved - together >= 20 * MIB


def test_one_process_uses_one_stream():
    made = prediction(pairs(2), world_size=1, sharding="none")
    assert made.forecast.program.layout.stream is None


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "hybrid"])
def test_a_card_holds_what_a_processor_holds(sharding):
    group = {"shard_group_size": 2} if sharding == "hybrid" else {}
    both = [
        predicted(pairs(2), device, sharding=sharding, world_size=4, batch_size=64, **group)
        for device in (CARD, "cpu")
    ]
    on_card, on_cpu = (
        {
            # numbers that a card holds in 512 bytes take 4 on a CPU
            category: result.timeline.bytes_of(category).max() // 4096
            for category in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
        }
        for result in both
    )
    assert on_card == on_cpu


@pytest.mark.parametrize("sharding", ["ddp", "zero3", "hybrid"])
def test_thousands_of_ranks_run_as_many_operators_as_few(sharding):
    few, many = (
        prediction(
            blocks(norm=True), sharding=sharding, world_size=ranks, batch_size=4 * ranks,
            **one_group(sharding),
        )
        for ranks in (64, 4096)
    )  # fmt: skip
    assert few.forecast.program.ran.names == many.forecast.program.ran.names
    assert any("NCCL takes memory" in note for note in many.result.notes)


def one_group(sharding: str) -> dict[str, int]:
    return {"shard_group_size": 8} if sharding == "hybrid" else {}


def test_lists_of_tensors_are_gathered_through_one_tensor():
    parts = tuple(TensorSpec(torch.float32, (256,), (1,)) for _ in range(4))
    odd = (*parts[:3], TensorSpec(torch.float32, (100,), (1,)))
    for given, taken in ((parts, 4 * 256 * 4), (odd, None)):
        signature = ("c10d.allgather_.default", ((given,), (parts[0],)), ())
        operator = Operator("c10d::allgather_", signature, (), -1, 0)
        (effect,) = effects(Recording(operators=[operator]), None)
        assert (effect and effect.workspace_bytes) == taken
