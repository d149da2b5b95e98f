"""What the tests of workers share: workloads that do something while they are built or run."""

import torch
from torch import nn

from memlab import StepConfig, Workload, measure
from tests.models import linear

BATCH = (torch.randn(4, 3), torch.randn(4, 3))


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
