"""A model is trained in the formats that it was built in, unless a precision says otherwise."""

import dataclasses

import pytest
import torch
from torch import nn

from memlab import StepConfig, Workload, measure
from memlab.script import script
from memlab.step import build_step

FEATURES, RANK, BATCH = 512, 4, 8


class Lora(nn.Module):
    """A frozen bf16 matrix, and two trainable fp32 ones of a low rank beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(FEATURES, FEATURES, bias=False, dtype=torch.bfloat16)
        self.base.requires_grad_(False)
        self.down = nn.Linear(FEATURES, RANK, bias=False)
        self.up = nn.Linear(RANK, FEATURES, bias=False)

    def forward(self, x):
        return self.base(x.to(torch.bfloat16)).to(x.dtype) + self.up(self.down(x))


class Float64(nn.Linear):
    """All parameters in fp64, as scientific models have them."""

    def __init__(self):
        super().__init__(FEATURES, 1, dtype=torch.float64)


class NormInBf16(nn.Module):
    """fp32 but for one layer, and an fp64 buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.LayerNorm(FEATURES, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x):
        return self.norm(self.first(x).to(torch.bfloat16)).to(x.dtype) * self.scale


def workload(kind, dtype=torch.float32):
    return Workload(
        name=kind.__name__,
        build_model=kind,
        make_batch=lambda n: torch.randn(n, FEATURES, dtype=dtype),
        compute_loss=lambda model, x: model(x).square().mean(),
    )


EVERY = [(Lora, torch.float32), (Float64, torch.float64), (NormInBf16, torch.float32)]


@pytest.mark.parametrize(("kind", "dtype"), EVERY)
def test_by_default_nothing_is_cast(kind, dtype):
    assert StepConfig().precision == "as-built"
    expected = {name: t.dtype for name, t in kind().state_dict().items()}
    step = build_step(workload(kind, dtype), StepConfig(batch_size=2), "cpu")
    assert {name: t.dtype for name, t in step.model.state_dict().items()} == expected
    assert step.micro_batches[0].dtype == dtype
    step()


def test_as_built_is_what_a_person_would_write_bit_by_bit():
    step = build_step(workload(Lora), StepConfig(batch_size=BATCH, optimizer="sgd"), "cpu")
    torch.manual_seed(0)
    model = Lora()
    torch.manual_seed(0)
    batch = torch.randn(BATCH, FEATURES)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(3):
        loss = model(batch).square().mean()
        assert step() == loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(step.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_bytes_of_a_bf16_base_and_fp32_adapters_are_those_of_their_formats():
    result = measure(workload(Lora), StepConfig(batch_size=BATCH), "cpu", repeats=1, isolate=False)
    adapters = 4 * 2 * FEATURES * RANK
    assert result.peak_by_category["parameters"] == 2 * FEATURES**2 + adapters
    assert result.peak_by_category["optimizer_state"] == 2 * adapters + 2 * 4  # two steps
    cast = measure(
        workload(Lora),
        StepConfig(batch_size=BATCH, precision="bf16"),
        "cpu",
        repeats=1,
        isolate=False,
    )
    assert cast.peak_by_category["parameters"] == 2 * FEATURES**2 + adapters // 2


def test_a_script_casts_nothing_unless_it_is_asked_to():
    config = StepConfig(batch_size=BATCH)
    text = script(config, "cpu")
    assert ".float()" not in text
    assert "is_floating_point" not in text
    assert "model.float()" in script(dataclasses.replace(config, precision="fp32"), "cpu")
