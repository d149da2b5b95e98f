"""A step in which formats meet that no kernel takes together fails where it is predicted, too."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from memlab import StepConfig, Workload, measure, workloads
from memlab.devices.cards import resolve
from memlab.prediction.predict import predict_in_process
from tests.processor import has_bf16_kernels

HALF = torch.bfloat16


class Meets(nn.Module):
    def __init__(self, meet):
        super().__init__()
        self.weight, self.meet = nn.Parameter(torch.ones(4, 4)), meet

    def forward(self, x):
        return self.meet(x, self.weight).float()


MEET = {
    "linear": (lambda x, w: functional.linear(x.to(HALF), w), False),
    "linear with bias": (lambda x, w: functional.linear(x, w, w[0].to(HALF)), False),
    "product": (lambda x, w: x @ w.double(), False),
    "row": (lambda x, w: torch.mv(w, x[0].to(HALF)), False),
    "norm": (lambda x, w: functional.layer_norm(x, (4,), w[0].to(HALF), w[0].to(HALF)), False),
    "norm of halves": (lambda x, w: functional.layer_norm(x.to(HALF), (4,), w[0], w[0]), True),
    "loss": (lambda x, w: functional.binary_cross_entropy((x * w[0]).sigmoid(), x.to(HALF)), False),
    "sum": (lambda x, w: x.to(HALF) + w[0], True),
    "rows put": (lambda x, w: w.clone().index_put((torch.tensor([0]),), x[:1].double()), False),
}


@pytest.mark.matrix
@pytest.mark.parametrize(("meet", "runs"), MEET.values(), ids=MEET)
def test_a_prediction_fails_where_the_step_does(meet, runs):
    workload = Workload(
        name="formats",
        build_model=lambda: Meets(meet),
        make_batch=lambda n: torch.full((n, 4), 0.5),
        compute_loss=lambda model, batch: model(batch).sum(),
    )
    config = StepConfig(batch_size=4)
    outcome = "ok" if runs else "failed"
    assert measure(workload, config, "cpu", repeats=1, isolate=False).outcome == outcome
    found = predict_in_process(
        workload, config, resolve("cpu"), seed=0, memory_limit=None, report=lambda progress: None
    ).result
    assert found.outcome == outcome
    assert runs or "two number formats are mixed" in found.message


class NoKernel(nn.Module):
    """Calls an operator that PyTorch has for a CPU in fp32 and fp64 only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.linalg.qr(self.linear(x)).R


@pytest.mark.parametrize(("precision", "outcome"), [("fp32", "ok"), ("bf16", "unsupported")])
def test_a_kernel_that_a_format_does_not_have_is_told_before_the_step_runs(precision, outcome):
    workload = Workload(
        name="no kernel",
        build_model=NoKernel,
        make_batch=lambda n: torch.randn(n, 4),
        compute_loss=lambda model, batch: model(batch).sum(),
    )
    config = StepConfig(batch_size=4, precision=precision)
    found = [
        measure(workload, config, "cpu", repeats=1, isolate=False),
        predict_in_process(
            workload, config, resolve("cpu"), seed=0, memory_limit=None, report=lambda _: None
        ).result,
    ]
    assert [result.outcome for result in found] == [outcome, outcome]
    if outcome != "ok":
        for result in found:
            assert "in NoKernel" in result.message
            assert "geqrf_cpu" in result.message


def test_an_lstm_in_bf16_runs_or_is_told_not_to():
    """Which of the two depends on the processor; without AVX-512 there is no such kernel."""
    config = StepConfig(batch_size=2, precision="bf16-mixed")
    workload = workloads.get("lstm-text", hidden_size=32, chunk_length=8)
    measured = measure(workload, config, "cpu", repeats=1, isolate=False)
    predicted = predict_in_process(
        workload, config, resolve("cpu"), seed=0, memory_limit=None, report=lambda _: None
    ).result
    assert measured.outcome == ("ok" if has_bf16_kernels() else "unsupported")
    assert predicted.outcome == measured.outcome
