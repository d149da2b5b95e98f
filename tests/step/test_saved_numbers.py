"""The 8 bytes of each number that autograd keeps as a tensor are predicted too."""

import pytest
import torch
from torch import nn

from memlab import StepConfig, Workload, measure
from memlab.devices.cards import resolve
from memlab.prediction.predict import predict_in_process
from memlab.trace import PHASES, Phase

FORMULAS = {
    "product": lambda x: 2 * x * 0.9,
    "in place": lambda x: (x + 1).mul_(0.9).div_(3),
    "quotient": lambda x: torch.div(x / 3.0, 0.5, rounding_mode=None),
    "reciprocal": lambda x: 2.0 / (x + 10),
    "nothing kept": lambda x: (x + 1.0 - 0.5) ** 2,
    "no gradient": lambda x: x + (x.detach() * 2.0),
}


class Scaled(nn.Module):
    def __init__(self, formula):
        super().__init__()
        self.linear, self.formula = nn.Linear(32, 32), formula

    def forward(self, x):
        return x + self.formula(self.linear(x))


def forward_peak(result):
    """Return the most bytes that stand in the forward, where those of numbers are most."""
    timeline = result.timeline
    return int(
        timeline.bytes_by_category[timeline.phase == PHASES.index(Phase.FORWARD)].sum(axis=1).max()
    )


@pytest.mark.matrix
@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_numbers_are_counted(formula):
    workload = Workload(
        name="scaled",
        build_model=lambda: nn.Sequential(*[Scaled(formula) for _ in range(4)]),
        make_batch=lambda n: torch.ones(n, 32),
        compute_loss=lambda model, batch: model(batch).square().mean(),
    )
    config = StepConfig(batch_size=4, accumulation_steps=2)
    measured = measure(workload, config, "cpu", repeats=1, isolate=False)
    predicted = predict_in_process(
        workload, config, resolve("cpu"), seed=0, memory_limit=None, report=lambda progress: None
    ).result
    assert predicted.peak_allocated_bytes == measured.peak_allocated_bytes
    assert forward_peak(predicted) == forward_peak(measured)
