"""Sharded steps, predicted for CUDA cards: by hand, by PyTorch's own tracker, and many ranks."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memlab import StepConfig, StepResult, Workload
from memlab._util.torch_private.ranks import group_of_none
from memlab._util.units import MIB
from memlab.cost_model.cuda_kernels import effects
from memlab.cost_model.overlap import scheduler_of
from memlab.cost_model.traced_step import Failure, TracedStep, from_traced_step
from memlab.devices import cards
from memlab.devices.cards import CUBLAS_WORKSPACE_BYTES
from memlab.devices.operators import TensorSpec
from memlab.memory.replay import replay
from memlab.prediction.predict import Prediction, predict_in_process
from memlab.techniques import registry
from memlab.techniques.technique import Setup
from memlab.trace import Category, Phase
from memlab.tracing.recording import Operator, OpTrace
from tests.models import blocks

WIDTH, SAMPLES = 1024, 16
MATRIX = WIDTH * WIDTH * 4  # bytes: 4 MiB
ROWS = SAMPLES * WIDTH * 4
CARD = "a100-80"
SHARDS = {"offload_parameters": True, "offload_optimizer": True}
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


class Decoding(nn.Sequential):
    """A block of another class."""


class TwoStacks(nn.Module):
    """Two blocks of one class, then two of another one, of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(map(pair, range(2)))
        self.decoder = nn.ModuleList(Decoding(*pair(0)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.encoder, *self.decoder):
            x = block(x)
        return x


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


def test_the_peak_of_two_stacks_counted_by_hand():
    # in backward, after the second of four blocks: the first is whole, the gradients of the second
    # are copied to be sent, and what was sent of the third is still there
    parameters = 8 * MATRIX // 2
    states = 2 * parameters
    whole, gradients = 2 * MATRIX, 2 * MATRIX
    reduced_from, reduced = 2 * (2 * MATRIX), 2 * MATRIX  # of the third block and the fourth one
    rows = 5 * ROWS  # the batch, two outputs of the first block, two gradients of the second
    scalars = 2 * 512

    workload = dataclasses.replace(pairs(0), build_model=TwoStacks)
    result = predicted(workload, sharding="zero3")
    by_hand = parameters + states + whole + gradients + reduced_from + reduced + rows + scalars
    assert result.peak_allocated_bytes == by_hand + CUBLAS


def test_replicas_counted_by_hand():
    # in the update, whose square roots are as large as the parameters that a rank updates
    parameters = gradients = buckets = 4 * MATRIX
    for sharding, share in (("ddp", 1), ("zero1", 2)):
        result = predicted(pairs(2), sharding=sharding)
        states, roots = 2 * parameters // share, parameters // share
        by_hand = parameters + gradients + buckets + states + roots + 512  # the loss
        assert result.peak_allocated_bytes == by_hand + CUBLAS
        assert result.peak_by_category["buffers"] == buckets + CUBLAS


def test_offloaded_shards_counted_by_hand():
    # in backward, when the second block is whole, the first is being gathered, and both gradients
    # of the second are there: no part of a rank is on the card
    whole = gathered = gradients = 2 * MATRIX
    # the batch, the outputs of the first block, the gradients of an output and of its input
    rows, scalars = 5 * ROWS, 2 * 512
    result = predicted(pairs(2), f"8x-{CARD}", sharding="zero3", **SHARDS)
    assert result.peak_allocated_bytes == whole + gathered + gradients + rows + scalars + CUBLAS
    for category in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE):
        assert result.timeline.bytes_of(category).max() < MATRIX // 1024
    # half of the parameters, of their gradients and of the two moments
    assert any(note.startswith(f"{4 * 4 * MATRIX // 2 // MIB}.0 MiB") for note in result.notes)
    assert result.step_seconds is None
    assert any("processor of the host updates" in note for note in result.notes)


@pytest.mark.parametrize(("sharding", "share"), [("ddp", 1), ("zero1", 2), ("zero3", 2)])
def test_optimizer_state_in_host_memory_counted_by_hand(sharding, share):
    result = predicted(pairs(2), sharding=sharding, offload_optimizer=True)
    parameters = gradients = buckets = 4 * MATRIX
    states = 2 * parameters // share
    if sharding == "zero3":
        there = predicted(pairs(2), sharding=sharding)
        assert result.peak_allocated_bytes == there.peak_allocated_bytes - states
    else:  # in the update of one matrix: its two moments and a square root
        held = parameters + gradients + buckets + 3 * MATRIX + 512  # the loss
        assert result.peak_allocated_bytes == held + CUBLAS
    assert any(note.startswith(f"{states // MIB}.0 MiB of optimizer") for note in result.notes)


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "hybrid"])
def test_ranks_offload_the_activations_that_one_process_does(sharding):
    group = {"shard_group_size": 2} if sharding == "hybrid" else {}
    samples = 1024
    ranks = {"sharding": sharding, "world_size": 4, "batch_size": 4 * samples, **group}
    result = predicted(pairs(2), offload_activations=True, **ranks)
    # the batch and the outputs of four matrices, whole; no parameter that a block has gathered
    saved = 5 * samples * WIDTH * 4
    assert any(note.startswith(f"{saved // MIB}.0 MiB of activations") for note in result.notes)
    # what is left of them is in other categories: it does not stay until backward
    alone = predicted(pairs(2), **ranks)
    most = [r.timeline.bytes_of(Category.ACTIVATIONS).max() for r in (result, alone)]
    assert most[0] < most[1]


def test_offloaded_shards_are_filled_on_the_card_and_clipped_on_the_host():
    # built on meta, each part goes to host memory as it is made
    result = predicted(
        pairs(2), sharding="zero2", init_on_meta=True, max_grad_norm=1.0, accumulation_steps=2,
        precision="bf16-mixed", **SHARDS, offload_activations=True,
    )  # fmt: skip
    assert result.timeline.bytes_of(Category.PARAMETERS).max() == 0
    assert any("parameters, gradients and optimizer state" in note for note in result.notes)


@pytest.mark.parametrize(("fields", "said"), [
    ({"sharding": "zero3", "offload_parameters": True}, "use offload_optimizer=True"),
    ({"sharding": "ddp", "offload_parameters": True}, "DistributedDataParallel needs all"),
    ({"sharding": "tensor", **SHARDS}, "all of it must be on the card"),
    ({"sharding": "zero3", "precision": "fp16-mixed", **SHARDS}, "the processor does not wait"),
    ({"sharding": "tensor", "offload_activations": True}, "do not see the memory of their parts"),
])  # fmt: skip
def test_what_ranks_do_not_offload_is_refused_by_name(fields, said):
    config = StepConfig(world_size=2, batch_size=4, **fields)
    (refusal,) = registry.refusals(Setup(config=config, device=torch.device("cuda")))
    assert said in str(refusal)
    for remedy in refusal.remedies:
        other = dataclasses.replace(config, **remedy)
        assert not registry.is_refused(other, "cuda"), remedy


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

    with group_of_none(0, 2):
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


def test_a_stream_keeps_its_freed_memory_to_itself():
    made = prediction(pairs(2), sharding="zero3")
    trace, reserved = made.size_model.trace((SAMPLES,))
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
    assert made.size_model.program.layout.stream is None


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
    assert few.size_model.program.ran.names == many.size_model.program.ran.names
    assert any("NCCL takes memory" in note for note in many.result.notes)


def one_group(sharding: str) -> dict[str, int]:
    return {"shard_group_size": 8} if sharding == "hybrid" else {}


def scheduled(sharding: str, seconds: dict[str, float]) -> dict[Phase, float]:
    """Return how long each phase of a step takes if these operators take so long, and no other."""

    def run(step: TracedStep) -> dict[Phase, float]:
        recording = step.program.recording
        each = np.array([seconds.get(operator.name, 0.0) for operator in recording.operators])
        taken = scheduler_of(recording)(each, np.zeros_like(each))
        return {
            interval.phase: float(taken[at])
            for at, interval in enumerate(recording.intervals)
            if interval.step == 1
        }

    made = from_traced_step(
        run, pairs(4), StepConfig(sharding=sharding, world_size=2, batch_size=32),
        cards.resolve(CARD), seed=0, report=lambda progress: None, purpose="for its streams",
    )  # fmt: skip
    assert not isinstance(made, Failure), made.message
    return made


def test_a_block_is_gathered_while_the_one_before_it_computes():
    gather, reduce = 0.5, 0.25
    taken = scheduled(
        "zero3",
        {"aten::mm": 1.0, "c10d::_allgather_base_": gather, "c10d::_reduce_scatter_base_": reduce},
    )
    # two products in each of four blocks; nothing computes while the first block is gathered
    assert taken[Phase.FORWARD] == gather + 8
    # two for each product of forward, but no gradient of the batch. The last block is gathered
    # again while its forward still computes; nothing does while those of the first are reduced
    assert taken[Phase.BACKWARD] == 15 + reduce


def test_gathering_that_takes_longer_than_computing_is_not_hidden():
    taken = scheduled("zero3", {"aten::mm": 1.0, "c10d::_allgather_base_": 5.0})
    # each of four blocks is gathered in turn; the products of the last one follow
    assert taken[Phase.FORWARD] == 4 * 5 + 2


def test_replicas_wait_for_their_gradients_at_the_end_of_backward():
    taken = scheduled("ddp", {"aten::mm": 1.0, "c10d::allreduce_": 4.0})
    # a bucket is full from 1 MiB on, the next one from 25: one matrix of 4 MiB, and seven of them,
    # which are there when backward is over
    assert taken[Phase.FORWARD] == 8
    assert taken[Phase.BACKWARD] == 15 + 4


def test_a_step_between_the_cards_of_a_cluster_has_a_time():
    by_itself = predicted(pairs(4), "h100", sharding="zero3")
    assert by_itself.step_seconds is None
    assert "8x-h100" in by_itself.notes[-1]
    fast, bus, slow = (
        predicted(pairs(4), name, sharding="zero3")
        for name in ("2x-h100", "2x-rtx-4090", "2x1-rtx-4090")
    )
    assert fast.step_seconds < bus.step_seconds < slow.step_seconds  # NVLink, PCIe, Ethernet
    alone = predicted(pairs(4), "h100", world_size=1, sharding="none")
    assert fast.uncertainty["step_seconds"] >= alone.uncertainty["step_seconds"]
    assert any(note.startswith("Collectives take") for note in fast.notes)
    assert any(note.startswith("The card waits for its host") for note in fast.notes)
    assert fast.uncertainty["step_seconds"] < 1
    assert by_itself.peak_allocated_bytes == fast.peak_allocated_bytes


@pytest.mark.parametrize("sharding", ["ddp", "zero3"])
@pytest.mark.parametrize("device", ["h100", "8x-h100"])
def test_one_rank_sends_nothing_and_has_the_time_of_its_kernels(sharding, device):
    result = predicted(pairs(2), device, sharding=sharding, world_size=1)
    assert result.step_seconds > 0
    assert not any("communication between ranks" in note for note in result.notes)
    assert not any("Collectives take" in note for note in result.notes)


def test_averaging_once_changes_nothing_for_one_micro_batch_and_a_note_says_so():
    late = {"sharding": "zero3", "world_size": 2, "sync_each_micro_batch": False}
    said = "sync_each_micro_batch=False changes nothing with accumulation_steps=1"
    once, every = (predicted(pairs(2), "h100", **late | more) for more in (
        {}, {"sync_each_micro_batch": True},
    ))  # fmt: skip
    assert any(note.startswith(said) for note in once.notes)
    assert not any(note.startswith(said) for note in every.notes)
    assert once.peak_by_category == every.peak_by_category
    assert once.communication == every.communication


def test_lists_of_tensors_are_gathered_through_one_tensor():
    parts = tuple(TensorSpec(torch.float32, (256,), (1,)) for _ in range(4))
    odd = (*parts[:3], TensorSpec(torch.float32, (100,), (1,)))
    for given, taken in ((parts, 4 * 256 * 4), (odd, None)):
        signature = ("c10d.allgather_.default", ((given,), (parts[0],)), ())
        operator = Operator("c10d::allgather_", signature, (), -1, 0)
        (effect,) = effects(OpTrace(operators=[operator]), None)
        assert (effect and effect.workspace_bytes) == taken


def test_sharded_weights_are_rounded_at_random_on_a_card():
    whole, half = (
        predicted(pairs(2), sharding="zero3", precision=precision)
        for precision in ("bf16", "bf16-stochastic")
    )
    states = [result.peak_by_category["optimizer_state"] for result in (whole, half)]
    assert states == [4 * MATRIX // 2, 2 * 4 * MATRIX // 2]  # two moments, of bf16 and of fp32
