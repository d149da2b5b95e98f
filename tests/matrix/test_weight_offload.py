"""Weights in the host's memory against the plain step: the same bits, and bytes counted by hand.

On a CPU nothing is offloaded; here the check is off, and weights go to other memory of the CPU.
"""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import memlab
from memlab import MemlabError, Outcome, StepConfig
from memlab.devices.cards import resolve
from memlab.prediction.predict import predict_in_process
from memlab.runtime.measure import measure_in_process
from memlab.runtime.verify import verify_in_process
from memlab.techniques import registry
from memlab.techniques.offload import offloading
from memlab.techniques.offload.offloading import OffloadedWeights, Offloader
from memlab.techniques.script import script
from memlab.techniques.step import build_step
from memlab.tracing import fake_cuda
from memlab.workloads.language import Gpt
from tests.models import blocks, made_of
from tests.offload_parts import DEPTH, SAMPLES, WIDTH, Queue, chain, predicted
from tests.weight_offload_parts import (
    CPU,
    OFFLOADED,
    WORKLOADS,
    after_updates,
    gpt,
    mute,
    odd,
    plan_of,
)

WEIGHT = WIDTH * WIDTH * 4


def in_place():
    return made_of(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1)), (1, 6, 6)
    )


TOGETHER = [
    {},
    {"checkpointing": "blocks"},
    {"checkpointing": "blocks", "checkpoint_policy": "keep-matmuls"},
    {"checkpointing": "blocks", "checkpoint_policy": "recompute-pointwise"},
    {"memory_budget": 0.5},
    {"memory_budget": 0.0, "offload_activations": True},
    {"optimizer_in_backward": True},
    {"optimizer_in_backward": True, "offload_optimizer": True, "offload_activations": True},
    {"accumulation_steps": 2, "offload_activations": True, "offload_fraction": 0.5},
    {"offload_optimizer": True, "optimizer": "sgd-momentum"},
    {"optimizer": "adafactor"},
    {"precision": "bf16-mixed", "memory_budget": 0.3},
    {"precision": "bf16-master", "offload_optimizer": True},
    {"precision": "bf16-stochastic", "optimizer_in_backward": True},
    {"init_on_meta": True},
]


@pytest.mark.parametrize("fields", TOGETHER, ids=str)
@pytest.mark.parametrize("name", WORKLOADS)
def test_updates_are_those_of_the_plain_step(possible, name, fields):
    config = StepConfig(batch_size=4, **fields)
    on_the_device = StepConfig(batch_size=4, **without_offload(fields))
    assert_same_updates(WORKLOADS[name](), on_the_device, config)


def assert_same_updates(workload, plain, config=None):
    """Hold the updates of a step against those with its weights in the host's memory."""
    losses, weights = after_updates(workload, dataclasses.replace(config or plain, **OFFLOADED))
    expected_losses, expected = after_updates(workload, plain)
    assert losses == expected_losses
    for path, weight in weights.items():
        assert torch.equal(weight, expected[path]), path


@pytest.mark.parametrize("fields", [{}, {"optimizer_in_backward": True}], ids=str)
def test_a_recompute_fetches_no_more_weights_than_it_uses(possible, monkeypatch, fields):
    come, here, most = offloading._Weight.come, [], [0]

    def counted(weight):
        come(weight)
        here[:] = {id(w): w for w in (*here, weight) if w.copy is not None}.values()
        most[-1] = max(most[-1], len(here))

    monkeypatch.setattr(offloading._Weight, "come", counted)
    for depth in (4, 8):
        workload = memlab.workloads.get("vit-digits", num_layers=depth, hidden_size=32, num_heads=2)
        config = StepConfig(batch_size=2, checkpointing="blocks", **fields, **OFFLOADED)
        step = build_step(workload, config, CPU)
        most.append(0)
        for _ in range(2):  # the first recompute looks at all that its module can reach
            step()
    assert most[1] == most[2] > 0


class Complex(nn.Module):
    """Saves complex views of its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x):
        w = self.weight
        y = (x.to(w.dtype) @ w.mH @ w.conj()).abs() + x @ w.imag
        return y + torch.view_as_real(w).square().sum(-1)


def of_a_slice():
    """Return a layer whose weight is a slice with an offset."""
    model = nn.Linear(6, 6)
    model.weight = nn.Parameter(torch.randn(6, 12)[:, 6:])
    return model


ODD_USES = {
    "weights read in backward by a reentrant checkpoint": (lambda: odd(reentrant=True), {}),
    "activations in place": (in_place, {"inplace": True}),
    "a head that the loss in chunks reads": (gpt, {"loss_chunks": 3}),
    "complex views": (lambda: made_of(Complex, (4,)), {}),
    "a slice": (lambda: made_of(of_a_slice, (6,)), {}),
}


@pytest.mark.parametrize("use", ODD_USES)
def test_updates_of_odd_uses_are_those_of_the_plain_step(possible, use):
    make, fields = ODD_USES[use]
    assert_same_updates(make(), StepConfig(batch_size=4, **fields))


@pytest.mark.parametrize("name", WORKLOADS)
def test_verify_reads_gradients_and_frozen_weights_where_they_are(possible, name):
    config = StepConfig(batch_size=4, memory_budget=0.5, **OFFLOADED)
    workload = WORKLOADS[name]()
    plan = plan_of(workload, config)
    report = verify_in_process(workload, config, CPU, seed=0, plan=plan, report=mute)
    assert report.ok, str(report)
    assert report.bitwise, str(report)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"memory_budget": 0.3},
        {"optimizer_in_backward": True},
        {"precision": "bf16-mixed", "checkpointing": "blocks"},
    ],
    ids=str,
)
def test_measured_as_predicted(possible, fields):
    workload, config = gpt(), StepConfig(batch_size=4, optimizer="sgd", **fields, **OFFLOADED)
    plan = plan_of(workload, config)
    found = predict_in_process(
        workload, config, resolve("cpu"), seed=0, memory_limit=None, plan=plan, report=mute
    ).result
    measured = measure_in_process(
        workload,
        config,
        CPU,
        repeats=1,
        warmup=0,
        seed=0,
        memory_limit=None,
        plan=plan,
        report=mute,
    )
    assert measured.outcome is found.outcome is Outcome.OK, (measured.message, found.message)
    assert found.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=1e-3)
    assert not any("still held" in note for note in measured.notes)


def test_one_weight_and_the_next_are_on_the_device():
    fields = {"batch_size": 2, "optimizer": "sgd"}
    plain, moved = predicted(chain(), **fields), predicted(chain(), **fields, **OFFLOADED)
    assert plain.peak_by_category["parameters"] >= DEPTH * WEIGHT
    assert moved.peak_by_category["parameters"] < 0.1 * WEIGHT * DEPTH
    assert f"{DEPTH * WEIGHT / 2**20:.2f} MiB of parameters are held" in moved.notes[0]
    # the gradients of all weights, the last of which is there when its update comes
    saved = plain.peak_allocated_bytes - moved.peak_allocated_bytes
    assert saved >= (DEPTH - 3) * WEIGHT
    in_backward = predicted(chain(), **fields, **OFFLOADED, optimizer_in_backward=True)
    assert moved.peak_allocated_bytes - in_backward.peak_allocated_bytes >= (DEPTH - 3) * WEIGHT
    assert in_backward.peak_allocated_bytes < plain.peak_allocated_bytes


def test_each_weight_crosses_the_bus_four_times():
    plain = predicted(chain(), batch_size=2)
    moved = predicted(chain(), batch_size=2, **OFFLOADED)
    # to forward, to backward but for the first layer's, whose input needs no gradient, and to the
    # update and back, which nothing hides
    assert moved.step_seconds - plain.step_seconds >= 2 * DEPTH * WEIGHT / 63e9


def test_streams_copy_in_the_right_order(possible, monkeypatch):
    copy, like = torch.Tensor.copy_, torch.empty_like

    def copy_later(target, source, non_blocking=False):
        if Queue.active is None:
            return copy(target, source)
        Queue.active.waiting.append(lambda: copy(target, source))
        return target.fill_(torch.nan)

    streams = Queue(), Queue()
    monkeypatch.setattr(torch.Tensor, "copy_", copy_later)
    monkeypatch.setattr(torch, "empty_like", lambda t, pin_memory=False, **k: like(t, **k))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Queue())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(offloading, "streams_of", lambda _: streams)
    assert_same_updates(gpt(), StepConfig(batch_size=4, checkpointing="blocks"))


def test_offloading_a_share_of_the_activations():
    plain, half, none, all_of_it = (
        predicted(chain(), **fields)
        for fields in (
            {},
            {"offload_activations": True, "offload_fraction": 0.5},
            {"offload_activations": True, "offload_fraction": 0.0},
            {"offload_activations": True},
        )
    )
    one = SAMPLES * WIDTH * 4
    assert none.peak_allocated_bytes == plain.peak_allocated_bytes
    assert "0 B of activations" in none.notes[0]
    assert f"{(DEPTH + 2) // 2 * one / 2**20:.1f} MiB of activations are held" in half.notes[0]
    peaks = [r.peak_allocated_bytes for r in (all_of_it, half, plain)]
    assert peaks[1] - peaks[0] >= one
    assert peaks[2] - peaks[1] >= one
    times = [r.step_seconds for r in (plain, half, all_of_it)]
    assert times == sorted(times)


def test_a_tensor_that_stays_is_counted_once(possible):
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(3, 4)
    offloader = Offloader(model, fraction=0.5)
    with offloader:
        model(batch)
    # the batch, and what the tanh saves and the last layer once more
    assert offloader._seen_bytes == 2 * batch.nbytes


def test_it_is_refused_on_a_cpu_compiled_and_with_a_share_of_nothing():
    with pytest.raises(MemlabError, match="offload_parameters=True does nothing on a CPU"):
        build_step(blocks(), StepConfig(**OFFLOADED), "cpu")
    for fields in ({"compile": True}, {"memory_budget": 0.5, "budget_engine": "compile"}):
        with pytest.raises(MemlabError, match="offload_parameters=True with"):
            script(StepConfig(**fields, **OFFLOADED), fake_cuda.device())
    with pytest.raises(MemlabError, match="precision='bf16-mixed'"):
        registry.check(StepConfig(precision="fp8-mixed", **OFFLOADED), fake_cuda.device())
    with pytest.raises(MemlabError, match=r"offload_fraction=0\.5 does nothing"):
        StepConfig(offload_fraction=0.5)
    with pytest.raises(MemlabError, match="share of the activations that leave"):
        StepConfig(offload_activations=True, offload_fraction=1.5)


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16-master", "offload_optimizer": True},
        {"loss_chunks": 2, "optimizer_in_backward": True, "offload_optimizer": True},
        {"offload_activations": True, "offload_fraction": 0.5, "checkpointing": "blocks"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["blocks", "attention", "odd", "gpt"])
def test_the_source_is_what_the_step_runs(name, fields):
    if "loss_chunks" in fields and name in ("attention", "odd"):
        pytest.skip("its head does not go into a cross entropy as a module alone")
    results = []
    for more, device in ((OFFLOADED, fake_cuda.device()), ({}, CPU)):
        config = StepConfig(batch_size=8, **(fields if more else without_offload(fields)), **more)
        text = script(config, device).replace("SMALLEST_BYTES = 1 << 18", "SMALLEST_BYTES = 0")
        assert "memlab." not in text
        scope = {}
        exec(text, scope)
        workload = WORKLOADS[name]()
        torch.manual_seed(0)
        batches = [workload.make_batch(8) for _ in range(2)]
        torch.manual_seed(1)
        model, losses = scope["train"](workload.build_model, batches, workload.compute_loss, "cpu")
        with torch.no_grad():  # its weights stay where they are
            workload.compute_loss(copy.deepcopy(model).float(), batches[0])
            workload.compute_loss(model.float(), batches[0])
        results.append((losses, model.state_dict()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], value) for name, value in results[1][1].items())


def without_offload(fields):
    return {name: value for name, value in fields.items() if not name.startswith("offload")}


def test_a_weight_that_nobody_announced_is_nan_and_no_old_value(possible):
    model = nn.Linear(3, 3)
    values = model.weight.detach().clone()
    weights = OffloadedWeights(model, CPU)
    assert model.weight.shape == (3, 3)
    assert model.weight.isnan().all()
    assert torch.equal(weights.value_of(model.weight), values)
    weights.restore()
    assert torch.equal(model.weight, values)


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_weight_is_left_on_the_device(possible, name):
    step = build_step(WORKLOADS[name](), StepConfig(batch_size=4, **OFFLOADED), CPU)
    known = []
    for _ in range(3):
        step()
        known.append(sum(len(reads) for reads in step.offloader.weights._reads.values()))
        assert known[-1] == known[0]
        weights = step.offloader.weights._of.values()
        assert not any(weight.users for weight in weights)
        assert not any(weight.copy is not None for weight in weights)


def test_a_copy_of_the_model_has_no_weights_and_says_so(possible):
    workload = blocks()
    step = build_step(workload, StepConfig(batch_size=4, **OFFLOADED), CPU)
    copied = copy.deepcopy(step.model)
    with pytest.raises(RuntimeError, match="is a copy of a module whose weights are offloaded"):
        workload.compute_loss(copied, workload.make_batch(4))


def test_parts_that_are_compiled_by_themselves_keep_their_weights(possible):
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4))))
    assert sum(OffloadedWeights(model, CPU).sizes) == sum(p.nbytes for p in model[0].parameters())


def test_a_weight_changed_before_its_use_in_backward_is_an_error(possible):
    model = nn.Sequential(nn.Conv1d(1, 1, 1), nn.Conv1d(1, 1, 1))
    weights = OffloadedWeights(model, CPU)
    offloader = Offloader(model, 0.0, weights)
    with offloader:
        loss = model(torch.randn(2, 1, 3)).sum()
    with torch.no_grad(), weights.in_backward():
        model[1].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_casts_of_weights_do_not_stay_either():
    sizes = {"num_layers": 6, "hidden_size": 512, "num_heads": 4, "sequence_length": 8}
    fields = {"batch_size": 2, "optimizer": "sgd", "checkpointing": "blocks", **OFFLOADED}
    workload = Gpt(**sizes).workload("gpt")
    plain, mixed = (
        predicted(workload, precision=p, optimizer_in_backward=True, **fields)
        for p in ("fp32", "bf16-mixed")
    )
    assert mixed.peak_allocated_bytes < 1.5 * plain.peak_allocated_bytes


@pytest.mark.parametrize("precision", ["bf16-master", "bf16-stochastic"])
def test_an_update_that_fails_leaves_the_optimizer_whole(precision, monkeypatch):
    def convert_it(convert, *args, **kwargs):
        return convert(*args, **kwargs)

    def fail(*_, **__):
        raise torch.OutOfMemoryError("once")

    step = build_step(blocks(), StepConfig(batch_size=4, precision=precision), CPU)
    (group,) = step.optimizer.param_groups
    before = list(group["params"])
    step()
    step.accumulate()
    convert, calls = torch.Tensor.to, iter([convert_it, convert_it, fail])
    monkeypatch.setattr(
        torch.Tensor, "to", lambda *a, **k: next(calls, convert_it)(convert, *a, **k)
    )
    with pytest.raises(torch.OutOfMemoryError):
        step.update()
    assert all(a is b for a, b in zip(group["params"], before, strict=True))
    assert step.optimizer.state.keys() == set(before)
    assert step() != step()  # it trains


def test_what_shares_memory_and_small_weights_stay(possible):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data[:2].t()[:4])  # another view of its memory
    assert sum(OffloadedWeights(model, CPU).sizes) == 0
    offloading.SMALLEST_BYTES = 1 << 18  # the fixture puts it back
    assert sum(OffloadedWeights(nn.Linear(8, 8), CPU).sizes) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{}, {"memory_budget": 0.3, "optimizer_in_backward": True}])
def test_on_a_card_the_gradients_are_the_same_and_memory_falls(fields):
    config = StepConfig(batch_size=64, **fields)
    moved = dataclasses.replace(config, **OFFLOADED)
    assert memlab.verify(chain(), moved, device="cuda").ok
    plain = memlab.measure(chain(), config, device="cuda", repeats=2)
    found = memlab.measure(chain(), moved, device="cuda", repeats=2)
    assert found.outcome is Outcome.OK
    assert found.peak_allocated_bytes < plain.peak_allocated_bytes - (DEPTH - 3) * WEIGHT
