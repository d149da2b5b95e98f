"""What the tests of the memory budget share: models to plan for, and their plans."""

import dataclasses

import torch
from torch import nn

import memlab
from memlab import Outcome, StepConfig, Workload
from memlab.devices.cards import resolve
from memlab.prediction import planning
from memlab.prediction.predict import predict_in_process
from tests.models import blocks

WORKLOADS = {
    "gelu": lambda: regression(lambda: nn.Sequential(*(Gelu(64) for _ in range(4))), 64, 64),
    "stages": lambda: regression(Stages, 3, 32, 32),
    "shared": lambda: regression(Shared, 64, 32),
    "gpt": lambda: memlab.workloads.get("gpt-small", num_layers=3, sequence_length=64),
    "dropout": lambda: blocks(depth=4, dropout=0.2),
}


class Gelu(nn.Module):
    """A block whose pointwise operators hold most: two matmuls around a written-out GELU."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.up(self.norm(x))
        h = 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * h**3)))
        return x + self.down(h)


class Stages(nn.Module):
    """Convolutions in stages, as attributes: no list of blocks."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Stage(3, 16), Stage(16, 16)
        self.three = Stage(16, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.three(self.two(self.one(x))).mean((2, 3)))


class Stage(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


class Shared(nn.Module):
    """One block, called four times."""

    def __init__(self):
        super().__init__()
        self.block = Gelu(32)

    def forward(self, x):
        for _ in range(4):
            x = self.block(x)
        return x


def regression(model, *shape):
    return Workload(
        name="regression",
        build_model=model,
        make_batch=lambda n: torch.randn(n, *shape),
        compute_loss=lambda model, x: model(x).square().mean(),
    )


def frontier_of(workload, config=None, device="cpu"):
    made = planning.plan_in_process(
        workload, config or StepConfig(), resolve(device), seed=0, report=lambda progress: None
    )
    assert made.frontier is not None, made.message
    return made.frontier


def predicted(workload, config, device, plan):
    if plan.regions:
        config = dataclasses.replace(config, memory_budget=min(plan.share, 0.999))
    found = predict_in_process(
        workload, config, resolve(device), seed=0, memory_limit=None,
        plan=plan if plan.regions else None, report=lambda progress: None,
    ).result  # fmt: skip
    assert found.outcome is Outcome.OK, found.message
    return found
