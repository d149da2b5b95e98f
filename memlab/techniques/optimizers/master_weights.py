"""bf16 weights in the model, fp32 master weights in the optimizer: small updates are not lost.

Megatron and DeepSpeed train in bf16 this way. The master weights start as copies of the bf16
weights and are part of the optimizer state: 4 bytes for each parameter. Gradients are bf16; an
update makes fp32 copies of them and frees these when it ends. Left out: accumulating the gradients
of micro-batches in fp32.

This file imports nothing from memlab, because an exported script contains a copy of it.
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
