"""What the tests of checkpointing share: blocks, and workloads of them."""

import torch
from torch import nn

from memlab import StepConfig, Workload


class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.layers(x)


def make_workload(block, depth=3):
    return Workload(
        name="blocks",
        build_model=lambda: nn.Sequential(
            nn.Linear(8, 8), *[Residual(*block()) for _ in range(depth)], nn.Linear(8, 1)
        ),
        make_batch=lambda n: (torch.randn(n, 8), torch.randn(n, 1)),
        compute_loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    )


def plain_config(**changes):
    return StepConfig(batch_size=12, accumulation_steps=2, **changes)


def draw(block, h, _):
    return h * torch.rand(h.shape, generator=block.generators[0])
