"""bf16 weights in the model, fp32 master weights in the optimizer: small updates are not lost.

Known from Megatron's and DeepSpeed's bf16 training. The masters begin as the bf16 weights and are
part of the optimizer state: 4 bytes a parameter. Gradients are bf16; fp32 copies of them live as
long as an update. Left out: fp32 accumulation of gradients over micro-batches.

An exported script holds this file as it stands, so it imports nothing of memlab.
"""

from types import MethodType
from typing import Any

import torch


def given_master_weights(optimizer: Any) -> Any:
    """Let an optimizer of bf16 weights update fp32 masters, of which the weights are copies."""
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

    optimizer.step = MethodType(step, optimizer)  # a schedule asks for a method
    return optimizer
