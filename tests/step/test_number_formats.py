"""A step in which formats meet that no kernel takes together fails where it is predicted, too."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from memlab import StepConfig, Workload, measure
from memlab.devices.cards import resolve
from memlab.predicting.predict import predict_in_process

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
