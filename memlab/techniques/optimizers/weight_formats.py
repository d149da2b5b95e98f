"""bf16 weights in the model, fp32 master weights in the optimizer: small updates are not lost.

Megatron and DeepSpeed train in bf16 this way. The master weights start as copies of the bf16
weights and are part of the optimizer state: 4 bytes for each parameter. Gradients are bf16; an
update makes fp32 copies of them and frees these when it ends. Left out: accumulating the gradients
of micro-batches in fp32.

It is plain PyTorch, of which exported scripts contain what they call.
"""

from types import MethodType
from typing import Any

import torch


def given_master_weights(optimizer: Any) -> Any:
    """Make an optimizer update fp32 master weights and then copy them into the bf16 weights."""
    update = optimizer.step

    def step(self: Any, closure: Any = None) -> None:
        every = [(group, group["params"]) for group in self.param_groups]
        pairs = []
        try:
            for group, weights in every:
                group["params"] = []
                for weight in weights:
                    if weight.grad is not None:
                        master = self.state[weight].pop("master", None)
                        if master is None:
                            exact = torch.promote_types(weight.dtype, torch.float32)
                            master = weight.detach().to(exact)
                        pairs.append((weight, master))
                        self.state[master] = self.state.pop(weight)
                        master.grad, weight.grad = weight.grad.to(master.dtype), None
                        group["params"].append(master)
            update()
        finally:
            for weight, master in pairs:
                master.grad = None
                weight.detach().copy_(master)
                self.state[weight] = self.state.pop(master) | {"master": master}
            for group, weights in every:
                group["params"] = weights

    optimizer.step = MethodType(step, optimizer)  # learning rate schedules need a method
    return optimizer


# bf16 weights that are updated in fp32 and rounded up or down at random: small updates count.
#
# If an update is a tenth of the distance to the next bf16 number, the weight moves to that
# number once in ten updates, so its mean is exact (Gupta et al. 2015, "Deep Learning with
# Limited Numerical Precision"). Only one parameter at a time has an fp32 copy. With its
# gradient and the random bits that takes 13 bytes for each of its values. The optimizer
# state is fp32. Left out: accumulating the gradients of micro-batches in fp32.
#
# It is plain PyTorch, of which exported scripts contain what they call.


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
