"""bf16 weights alone, updated in fp32 and rounded up or down at random: small updates count.

An update of a tenth of the distance to the next bf16 number moves a weight there once in ten times,
so that its mean is exact (Gupta et al. 2015, "Deep Learning with Limited Numerical Precision").
One parameter at a time has an fp32 copy, with its gradient and the random bits: 13 bytes for each
of its values. The optimizer state is fp32. Left out: fp32 accumulation of gradients over
micro-batches.

An exported script holds this file as it stands, so it imports nothing of memlab.
"""

from types import MethodType
from typing import Any

import torch


def given_stochastic_rounding(optimizer: Any) -> Any:
    """Let an optimizer of one group of bf16 weights update fp32 copies, one after another."""
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

    optimizer.step = MethodType(step, optimizer)  # a schedule asks for a method
    return optimizer


def round_at_random(exact: torch.Tensor, out: torch.Tensor) -> None:
    """Write fp32 values as bf16, up or down with the chance of how near each lies."""
    if out.is_complex():  # kept as it is, in full
        out.detach().copy_(exact)
        return
    bits = torch.randint_like(exact, 1 << 16, dtype=torch.int32)
    bits.mul_(exact == exact)  # CUDA's NaN, 0x7fffffff, would go on to be a zero
    bits.add_(exact.view(torch.int32)).bitwise_and_(-1 << 16)  # bf16 is the upper half of fp32
    out.detach().copy_(bits.view(torch.float32))
