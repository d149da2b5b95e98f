"""Parameters of classes that quantize themselves when they are moved, compared with `measure`."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parameter import Parameter

from memlab import StepConfig, Workload, measure, predict
from tests.models import LIBRARY_BYTES, made_of

WIDTH = 64
CONFIG = StepConfig(batch_size=4)
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs memlab[optimizers]"
)


class Scales:
    """Held by a parameter and by its module."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


class Bytes(Parameter):
    """Numbers of one byte, once it is moved; the scale of each row is an attribute."""

    scales = None

    def to(self, *args, **kwargs):
        """Quantize at the first call."""
        if self.scales is not None:
            return super().to(*args, **kwargs)
        self.scales = Scales(self.data.abs().amax(1, keepdim=True) / 127)
        self.data = (self.data / self.scales.values).round().to(torch.int8)
        return self


class OwnFormat(nn.Module):
    """A frozen linear layer whose weight is a `Bytes`."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        weight = torch.randn(outer, inner)
        self.weight = torch.Tensor._make_subclass(Bytes, weight, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.to(x.dtype) * self.weight.scales.values)


class Adapted(nn.Module):
    """A frozen layer, and two trained ones of low rank beside it."""

    def __init__(self, base: nn.Module, inner: int, outer: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(inner, 4, bias=False), nn.Linear(4, outer, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def workload(make) -> Workload:
    """Return blocks of two adapted layers each, over frozen ones that `make` makes."""

    def block() -> nn.Module:
        wide = Adapted(make(WIDTH, 2 * WIDTH), WIDTH, 2 * WIDTH)
        narrow = Adapted(make(2 * WIDTH, WIDTH), 2 * WIDTH, WIDTH)
        return nn.Sequential(wide, nn.GELU(), narrow)

    return made_of(lambda: nn.Sequential(*(block() for _ in range(3))), (16, WIDTH))


def four_bit(kind: str, is_double: bool, dtype: torch.dtype):
    """Return what makes layers of bitsandbytes."""

    def make(inner: int, outer: int) -> nn.Module:
        from bitsandbytes.nn import Linear4bit

        how = {"quant_type": kind, "compress_statistics": is_double, "compute_dtype": dtype}
        return Linear4bit(inner, outer, **how)

    return make


def assert_predicted(made: Workload, config: StepConfig = CONFIG, *, within: int = 0) -> None:
    predicted = predict(made, config, "cpu")
    measured = measure(made, config, "cpu", repeats=1, warmup=0)
    assert (predicted.outcome, measured.outcome) == ("ok", "ok"), predicted.message
    assert 0 <= measured.peak_allocated_bytes - predicted.peak_allocated_bytes <= within
    assert predicted.uncertainty["peak_allocated_bytes"] < 0.02


@pytest.mark.parametrize("precision", ["as-built", "bf16-mixed"])
def test_a_class_of_parameters_that_quantizes_itself_is_predicted(precision):
    assert_predicted(workload(OwnFormat), replace(CONFIG, precision=precision))


@needs_bitsandbytes
@pytest.mark.parametrize(
    "change",
    [{"checkpointing": "blocks"}, {"memory_budget": 0.5}, {"accumulation_steps": 2}],
    ids=lambda change: next(iter(change)),
)
def test_four_bit_layers_go_with_techniques(change):
    layers = workload(four_bit("nf4", True, torch.float32))
    assert_predicted(layers, replace(CONFIG, **change), within=LIBRARY_BYTES)
