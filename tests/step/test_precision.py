"""Number formats: what they refuse, what they switch and put back, and what small updates do."""

import copy
import dataclasses
import importlib.util

import pytest
import torch
from torch import nn

from memlab import StepConfig, Workload, measure
from memlab.config import Precision
from memlab.errors import UnsupportedError
from memlab.techniques import every, precision
from memlab.techniques.optimizers.weight_formats import round_at_random
from memlab.techniques.step import build_step, set_seed
from tests.models import linear
from tests.predictions import predicted


def test_tf32_is_refused_on_a_cpu_and_on_cards_before_ampere():
    with pytest.raises(UnsupportedError, match=r"precision='tf32' on a CPU.*use precision='fp32'"):
        build_step(linear(), StepConfig(precision="tf32"), "cpu")
    turing = predicted(StepConfig(precision="tf32"), "t4")
    assert turing.outcome == "unsupported"
    assert "Ampere" in turing.message


def test_tf32_changes_the_time_on_a_card_and_no_byte():
    def build():
        return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))

    workload = Workload(
        name="products", build_model=build, make_batch=lambda n: torch.randn(n, 4096),
        compute_loss=lambda model, x: model(x).square().mean(),
    )  # fmt: skip
    found = {
        name: predicted(StepConfig(batch_size=4096, precision=name), "h200", workload)
        for name in ("fp32", "tf32")
    }
    assert found["tf32"].peak_allocated_bytes == found["fp32"].peak_allocated_bytes
    assert found["tf32"].step_seconds < 0.5 * found["fp32"].step_seconds


def test_tf32_is_on_inside_of_the_step_alone():
    before = torch.get_float32_matmul_precision()
    with precision.matrix_products(Precision.TF32):
        assert torch.get_float32_matmul_precision() == "high"
    with pytest.raises(KeyError), precision.matrix_products(Precision.TF32):
        raise KeyError
    assert torch.get_float32_matmul_precision() == before
    with precision.matrix_products(Precision.FP32):
        assert torch.get_float32_matmul_precision() == before


def test_fp16_tells_its_risk_and_a_nan_is_told():
    result = measure(
        linear(), StepConfig(batch_size=4, precision="fp16"), "cpu", repeats=3, isolate=False
    )
    assert result.outcome == "ok"
    assert any("becomes NaN" in note for note in result.notes)
    dead = dataclasses.replace(
        linear(), compute_loss=lambda model, x: (model(x)[:, :1] * 1.0).square().mean()
    )  # all other rows of the weight have no gradient: 0 / (0 + eps), and eps is 0 in fp16
    result = measure(dead, StepConfig(batch_size=4, precision="fp16"), "cpu", isolate=False)
    assert result.outcome == "ok"
    step = build_step(dead, StepConfig(batch_size=4, precision="fp16"), "cpu")
    step()
    assert step.model.weight.isnan().any()


def one_weight():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return self.weight * x

    return Workload(
        name="one", build_model=One, make_batch=lambda n: torch.ones(n, 4),
        compute_loss=lambda model, x: model(x).mean(),
    )  # fmt: skip


@pytest.mark.parametrize("in_backward", [False, True])
def test_master_weights_keep_updates_that_bf16_loses(in_backward):
    """SGD takes 1e-3 * 0.25 off a weight of 1: less than half of bf16's step of 2**-8 below 1."""
    ends = {}
    for name in ("fp32", "bf16", "bf16-master", "bf16-stochastic"):
        config = StepConfig(
            batch_size=2, optimizer="sgd", precision=name, optimizer_in_backward=in_backward
        )
        step = build_step(one_weight(), config, "cpu")
        for _ in range(40):
            step()
        ends[name] = step.model.weight[0].item()
    assert ends["bf16"] == 1.0
    assert ends["fp32"] == pytest.approx(0.99, abs=1e-4)
    assert ends["bf16-master"] == pytest.approx(0.99, abs=2**-9)
    assert ends["bf16-stochastic"] < 1.0


def test_rounding_at_random_is_right_in_the_mean_and_to_a_neighbour_each_time():
    set_seed(0)
    exact = torch.linspace(-2.0, 2.0, 1001)
    out = torch.zeros(4000, 1001, dtype=torch.bfloat16)
    round_at_random(exact.repeat(4000, 1), out)
    step = torch.finfo(torch.bfloat16).eps * 2
    assert ((out.float() - exact).abs() < step).all()
    assert (out.double().mean(0) - exact).abs().max() < 5 * step / 2 / 4000**0.5
    as_bf16 = exact.bfloat16()
    round_at_random(as_bf16.float(), out[0])
    assert torch.equal(out[0], as_bf16)


def test_fp8_is_refused_where_there_is_none(monkeypatch):
    config = StepConfig(precision="fp8-mixed")
    with pytest.raises(UnsupportedError, match=r"'fp8-mixed' on a CPU.*use precision='bf16-mixed'"):
        build_step(linear(), config, "cpu")
    found = predicted(config, "h200")
    assert (found.outcome, "cannot be predicted" in found.message) == ("unsupported", True)
    monkeypatch.setattr(precision, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"needs torchao.*memlab\[fp8\]"):
        every.check(config, torch.device("cuda"))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs memlab[fp8]")
def test_fp8_replaces_the_linear_layers_that_it_can_and_keeps_the_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 3))
    plain, x = copy.deepcopy(model), torch.randn(32, 64)
    weights = list(map(id, model.parameters()))
    precision.multiply_in_fp8(model, emulate=True)
    assert [type(m).__name__ for m in model] == ["Float8Linear", "GELU", "Float8Linear", "Linear"]
    assert list(map(id, model.parameters())) == weights
    for each in (model, plain):
        each(x).square().mean().backward()
    found, expected = (
        torch.cat([p.grad.flatten() for p in each.parameters()]) for each in (model, plain)
    )
    assert 1e-3 < (found - expected).norm() / expected.norm() < 0.25
    with pytest.raises(UnsupportedError, match="multiples of 16"):
        precision.multiply_in_fp8(nn.Linear(64, 3))
