"""What the tests of checkpointed models share: a regression over any model, and its configs."""

import torch
from torch import nn

from memlab import StepConfig, Workload


def regression(build, loss=lambda model, x: model(x).square().mean(), shape=(8,)):
    return Workload(
        name="regression",
        build_model=build,
        make_batch=lambda n: torch.randn(n, *shape),
        compute_loss=loss,
    )


def config_of(policy="recompute-all", modules="auto", **fields):
    return StepConfig(
        batch_size=6,
        checkpointing="blocks",
        checkpoint_modules=modules,
        checkpoint_policy=policy,
        **fields,
    )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.up(x).tanh())
