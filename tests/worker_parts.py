"""What the tests of workers share: workloads that do something while they are built or run."""

import time

import torch
from torch import nn

from memlab import StepConfig, Workload, measure
from tests.models import linear

WAIT_SECONDS = 20.0
BATCH = (torch.randn(4, 3), torch.randn(4, 3))


def wait_for(state):
    """Wait until a state of another process is true, or not for ever; return it."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := state()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def doing(action, **options):
    """Measure a model whose forward runs `action` first."""

    class Acts(nn.Linear):
        def forward(self, x):
            action()
            return super().forward(x)

    workload = Workload.from_module(Acts(3, 3), BATCH, nn.functional.mse_loss)
    return measure(workload, StepConfig(), "cpu", repeats=1, **options)


def assert_worker_is_back():
    result = measure(linear(), StepConfig(), "cpu", repeats=1)
    assert result.outcome == "ok", result.message


def parameters_of(build):
    workload = Workload(
        name="mine",
        build_model=build,
        make_batch=lambda n: torch.randn(n, 3),
        compute_loss=lambda model, x: model(x).mean(),
    )
    result = measure(workload, StepConfig(), "cpu", repeats=1)
    assert result.outcome == "ok", result.message
    return result.peak_by_category["parameters"]
