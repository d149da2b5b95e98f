"""Models that memlab has never seen and that refuse to be run: predict must not run them."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab import StepConfig, Workload, measure, predict
from memlab._util.units import GIB, MIB


def refuse_real(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, FakeTensor):
        raise TypeError(f"a real tensor of {tuple(tensor.shape)} came in")


class Guarded(nn.Module):
    """Runs its inner module on fake tensors only, and with fake parameters only."""

    def __init__(self, inner: nn.Module, is_strict: bool) -> None:
        super().__init__()
        self.inner, self.is_strict = inner, is_strict

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_strict:
            for tensor in (x, *self.parameters(), *self.buffers()):
                refuse_real(tensor)
        return self.inner(x)


class GatedMixer(nn.Module):
    """Gated mixing along the length and the width: no layer of any library."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.along = nn.Parameter(torch.randn(length, length) / length)
        self.gate, self.out = nn.Linear(width, 2 * width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (n, length, width) -> (n, 10)
        value, gate = self.gate(torch.einsum("lm,nmw->nlw", self.along, x)).chunk(2, dim=-1)
        return self.out((value * gate.sigmoid() + x).amax(dim=1))


class Pyramid(nn.Module):
    """Convolutions whose outputs are kept, scaled and summed, with a normalisation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.Conv2d(c, 8, 3, 2, 1) for c in (3, 8, 8))
        self.norm, self.out = nn.BatchNorm2d(8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (n, 3, 32, 32) -> (n, 10)
        kept = []
        for level in self.levels:
            x = self.norm(level(x)).relu()
            kept.append(nn.functional.adaptive_avg_pool2d(x, 4))
        return self.out(torch.stack(kept).sum(dim=0).mean(dim=(2, 3)))


FOREIGN = {
    "mixer": (lambda: GatedMixer(16, 48), (16, 48)),
    "pyramid": (Pyramid, (3, 32, 32)),
}


def foreign(name: str, *, is_strict: bool) -> Workload:
    build, shape = FOREIGN[name]

    def loss(model, batch):
        if is_strict:
            refuse_real(batch[0])
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Workload(
        name=name,
        build_model=lambda: Guarded(build(), is_strict),
        make_batch=lambda n: (torch.randn(n, *shape), torch.randint(10, (n,))),
        compute_loss=loss,
    )


CONFIGS = [
    StepConfig(batch_size=6),
    StepConfig(batch_size=7, accumulation_steps=3, precision="bf16-mixed"),
    StepConfig(batch_size=4, precision="bf16", optimizer="sgd-momentum"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", FOREIGN)
def test_a_model_that_refuses_real_tensors_is_predicted_as_if_it_did_not(name, config):
    strict = predict(foreign(name, is_strict=True), config, "cpu")
    assert strict.outcome == "ok", strict.message
    measured = measure(foreign(name, is_strict=False), config, "cpu", repeats=1, warmup=0)
    error = strict.peak_allocated_bytes / measured.peak_allocated_bytes - 1
    assert abs(error) < 0.005, (strict.peak_allocated_bytes, measured.peak_allocated_bytes)


@pytest.mark.parametrize("name", FOREIGN)
def test_for_a_card_nothing_is_run_either(name):
    results = [predict(foreign(name, is_strict=b), CONFIGS[0], "t4") for b in (True, False)]
    assert [result.outcome for result in results] == ["ok", "ok"], results[0].message
    strict, loose = results
    assert strict.peak_allocated_bytes == loose.peak_allocated_bytes
    assert strict.peak_reserved_bytes == loose.peak_reserved_bytes >= 2 * MIB


def test_the_guard_refuses_a_step_that_is_run():
    result = measure(foreign("mixer", is_strict=True), CONFIGS[0], "cpu", repeats=1, warmup=0)
    assert result.outcome == "failed"
    assert "a real tensor of" in result.message


def test_a_model_beyond_any_memory_is_predicted_by_hand_count():
    width = 400_000  # a weight of 596 GiB

    workload = Workload(
        name="huge",
        build_model=lambda: nn.Linear(width, width, bias=False),
        make_batch=lambda n: torch.randn(n, width),
        compute_loss=lambda model, x: model(x).square().mean(),
    )
    result = predict(workload, StepConfig(batch_size=2, optimizer="sgd-momentum"), "h200")
    assert result.outcome == "ok", result.message
    weight = 4 * width**2
    # weight, gradient and momentum, and on CUDA what the fused update of all of them makes anew
    assert 3 * weight <= result.peak_allocated_bytes <= 4.01 * weight
    # a block keeps what is left of its segment if that is less than 1 MiB
    assert 0 <= result.peak_by_category["parameters"] - weight < MIB
    assert weight > 500 * GIB
