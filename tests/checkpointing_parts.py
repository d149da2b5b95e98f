"""What the tests of checkpointing share: blocks, and workloads of them."""

import dataclasses

import torch
from torch import nn
from torch.nn import functional

from memlab import StepConfig, Workload


class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.layers(x)


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor


class LateNoise(nn.Module):
    """Ends in an operator that saves its noise before it fills it."""

    def forward(self, x):
        return functional.rrelu(x, training=self.training)


class InADataclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = LateNoise()

    def forward(self, x):
        return Output(self.inner(x))


class OutOfADataclass(nn.Module):
    """Calls a module that returns a dataclass."""

    def __init__(self):
        super().__init__()
        self.linear, self.wrapped = nn.Linear(8, 8), InADataclass()

    def forward(self, x):
        return self.wrapped(self.linear(x)).hidden


class FilledAfterSaving(torch.autograd.Function):
    """Saves its noise first and fills it then; writes its input in place."""

    @staticmethod
    def forward(ctx, x):
        noise = torch.empty_like(x)
        ctx.save_for_backward(noise, x)
        ctx.mark_dirty(x)
        noise.uniform_(0.5, 1.5)
        return x.mul_(noise)

    @staticmethod
    def backward(ctx, gradient):
        noise, x = ctx.saved_tensors
        return gradient * noise + 0 * x


class OutputFilledAfterSaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        ctx.save_for_backward(out)
        torch.exp(x.clamp(max=1), out=out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x * 2)


class WritesUnseen(nn.Module):
    """Changes a tensor that was saved, without raising its version."""

    def forward(self, x):
        out = x.sigmoid()
        out.data.mul_(0.5)
        return out


LATE = {
    "rrelu": lambda: [nn.Linear(8, 8), nn.RReLU()],
    "rrelu-in-place": lambda: [nn.Linear(8, 8), nn.RReLU(inplace=True)],
    "functional-rrelu": lambda: [nn.Linear(8, 8), LateNoise()],
    "rrelu-in-the-middle": lambda: [nn.Linear(8, 8), LateNoise(), nn.Linear(8, 8), nn.Tanh()],
    "rrelu-then-views": lambda: [
        nn.Linear(8, 8), LateNoise(), nn.Unflatten(1, (2, 4)), nn.Flatten()
    ],
    "rrelu-in-a-dataclass": lambda: [OutOfADataclass()],
    "own-function": lambda: [nn.Linear(8, 8), Applied(FilledAfterSaving)],
    "own-function-output": lambda: [nn.Linear(8, 8), Applied(OutputFilledAfterSaving)],
}  # fmt: skip
"""Layers that save memory before they fill it, last in their block or not."""


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
