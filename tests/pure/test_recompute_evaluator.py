"""The example that `recompute_evaluator.py` and `budget_frontier.py` work through by hand."""

import pytest
import torch
from torch import nn

from memlab import StepConfig, Workload
from memlab._util.units import KIB, MIB
from memlab.prediction.budget_frontier import RecomputeCandidates
from memlab.prediction.recompute_evaluator import RecomputeEvaluator
from memlab.tracing.assembly import sizes_of
from memlab.tracing.trace_step import trace_step
from memlab.tracing.tracker import Tracker

LOSS_BYTES = 4
SMALL_BYTES = 16 * KIB  # of the weight, its gradient and Adam's state
NOTHING: frozenset[int] = frozenset()


class Scaled(nn.Module):
    """Three blocks of two GELUs, after one product, over 1 MiB."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256))
        self.blocks = nn.ModuleList(nn.Sequential(nn.GELU(), nn.GELU()) for _ in range(3))

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def cut():
    workload = Workload(
        name="example",
        build_model=Scaled,
        make_batch=lambda n: torch.ones(n, 128, 256),
        compute_loss=lambda model, x: model(x).sum(),
    )
    cpu = torch.device("cpu")
    program = trace_step(workload, StepConfig(batch_size=8), cpu, 0, Tracker("cpu"))
    operators = program.recording.operators
    own = sizes_of(program.recording, program.layout, [None] * len(operators))
    plain = RecomputeEvaluator(program, own, None)
    return RecomputeCandidates(plain, [c for c in plain.candidates() if c.path.count(".") == 1])


@pytest.mark.parametrize(
    ("kept", "held", "peak"),
    [
        ((None, None, None), 6, 8),
        ((NOTHING, None, None), 5, 7),
        ((NOTHING, NOTHING, NOTHING), 3, 7),
    ],
    ids=["plain", "the first", "all"],
)
def test_the_example_holds_what_is_said(cut, kept, held, peak):
    found = cut.evaluate(kept)
    assert found.saved_bytes - LOSS_BYTES == held * MIB
    assert 0 <= found.peak_bytes - peak * MIB < SMALL_BYTES
