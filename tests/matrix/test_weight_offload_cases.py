"""Offloaded weights in odd uses: unseen reads, copies, updates that fail, memory that is shared."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from memlab import StepConfig, Workload
from memlab.techniques.offload import offloading
from memlab.techniques.offload.offloading import OffloadedWeights, Offloader
from memlab.techniques.step import build_step
from memlab.workloads.language import Gpt
from tests.models import blocks
from tests.offload_parts import predicted
from tests.weight_offload_parts import (
    CPU,
    OFFLOADED,
    WORKLOADS,
    after_updates,
)


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


def test_complex_views_of_a_weight_are_saved_as_they_are(possible):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

        def forward(self, x):
            w = self.weight
            y = (x.to(w.dtype) @ w.mH @ w.conj()).abs() + x @ w.imag
            return y + torch.view_as_real(w).square().sum(-1)

    workload = Workload(
        name="complex",
        build_model=Complex,
        make_batch=lambda n: torch.randn(4, 4),
        compute_loss=lambda model, x: model(x).square().mean(),
    )
    expected = after_updates(workload, StepConfig(batch_size=4))
    losses, weights = after_updates(workload, StepConfig(batch_size=4, **OFFLOADED))
    assert losses == expected[0]
    assert torch.equal(weights["weight"], expected[1]["weight"])


def test_a_slice_with_an_offset_is_a_weight_like_any_other(possible):
    def build():
        model = nn.Linear(6, 6)
        model.weight = nn.Parameter(torch.randn(6, 12)[:, 6:])
        return model

    workload = dataclasses.replace(blocks(), build_model=build, name="slice")
    workload = dataclasses.replace(
        workload,
        make_batch=lambda n: torch.randn(n, 6),
        compute_loss=lambda model, x: model(x).square().mean(),
    )
    expected = after_updates(workload, StepConfig(batch_size=4))
    losses, weights = after_updates(workload, StepConfig(batch_size=4, **OFFLOADED))
    assert losses == expected[0]
    assert torch.equal(weights["weight"], expected[1]["weight"])


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
