"""bf16 weights that are updated in fp32 and rounded up or down at random: small updates count.

If an update is a tenth of the distance to the next bf16 number, the weight moves to that number
once in ten updates, so its mean is exact (Gupta et al. 2015, "Deep Learning with Limited Numerical
Precision"). Only one parameter at a time has an fp32 copy. With its gradient and the random bits
that takes 13 bytes for each of its values. The optimizer state is fp32. Left out: accumulating the
gradients of micro-batches in fp32.

This file imports nothing from memlab, because an exported script contains a copy of it.
"""

from types import MethodType
from typing import Any

import torch


def given_stochastic_rounding(optimizer: Any) -> Any:
    """Make an optimizer (one group) update fp32 copies of its bf16 weights, one after another."""
    update = optimizer.step

    def step(self: Any, closure: Any = None) -> None:
        (group,) = self.param_groups
        weights = group["params"]
        try:
            for weight in weights:
                if weight.grad is not None:
                    exact = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
                    exact.grad, weight.grad = weight.grad.to(exact.dtype), None
                    self.state[exact] = self.state.pop(weight, {})
                    group["params"] = [exact]
                    try:
                        update()
                    finally:
                        self.state[weight] = self.state.pop(exact)
                    exact.grad = None
                    round_at_random(exact, weight)
        finally:
            group["params"] = weights

    optimizer.step = MethodType(step, optimizer)  # learning rate schedules need a method
    return optimizer


def round_at_random(exact: torch.Tensor, out: torch.Tensor) -> None:
    """Write fp32 values as bf16, rounded up or down; the nearer number is the likelier."""
    if out.is_complex():  # complex weights are not rounded
        out.detach().copy_(exact)
        return
    bits = torch.randint_like(exact, 1 << 16, dtype=torch.int32)
    bits.mul_(exact == exact)  # adding bits to CUDA's NaN, 0x7fffffff, would make it a zero
    bits.add_(exact.view(torch.int32)).bitwise_and_(-1 << 16)  # bf16 is the upper half of fp32
    out.detach().copy_(bits.view(torch.float32))
