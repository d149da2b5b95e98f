"""Families of models that predict has to know by structure, each held against `measure`."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from memlab import StepConfig, Workload, measure, predict

CONFIG = StepConfig(batch_size=4)


def assert_predicted(workload: Workload, config: StepConfig = CONFIG, *, within: float = 1e-3):
    """Hold the prediction for this CPU against the meter, and ask for one for two cards."""
    predicted = predict(workload, config, "cpu")
    measured = measure(workload, config, "cpu", repeats=1, warmup=0)
    assert (predicted.outcome, measured.outcome) == ("ok", "ok"), predicted.message
    peak = measured.peak_allocated_bytes
    assert abs(predicted.peak_allocated_bytes - peak) <= within * peak
    for card in ("h200", "rtx-4060"):
        on_card = predict(workload, config, card)
        assert on_card.outcome == "ok", on_card.message
    return predicted


def on_features(name: str, build, width: int = 16) -> Workload:
    """Return a workload whose model makes its own loss of `width` features."""
    return Workload(
        name=name,
        build_model=build,
        make_batch=lambda n: torch.randn(n, 8, width),
        compute_loss=lambda model, x: model(x),
    )


class GroupedExperts(nn.Module):
    """Tokens sorted by the expert that they go to, and one product over all groups of them."""

    def __init__(self, outer: int) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.up = nn.Parameter(torch.randn(4, outer, 16) / 4)  # each expert's, (outer, 16)
        self.down = nn.Parameter(torch.randn(4, 16, outer) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(0, 1)
        weight, chosen = self.router(x).softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        counts = torch.histc(chosen.flatten().float(), 4, 0, 3)
        ends = counts.cumsum(0).to(torch.int32)
        inner = functional.grouped_mm(x[order // 2], self.up.transpose(1, 2), offs=ends).relu()
        out = functional.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
        return (out * weight.flatten()[order, None]).square().mean()


@pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="this torch has no grouped_mm")
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_products_of_groups_are_predicted_in_any_format(precision):
    workload = on_features("grouped", lambda: GroupedExperts(24))
    assert_predicted(workload, StepConfig(batch_size=4, precision=precision))
