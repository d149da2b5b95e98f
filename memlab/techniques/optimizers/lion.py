"""Lion: the sign of a momentum, with one state for each weight.

Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2. Its usual
learning rate is a tenth to a third of AdamW's. Left out: kernels for many parameters at once.

This file imports nothing from memlab, because an exported script contains a copy of it.
"""

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Updates one parameter after another; temporaries are as large as one parameter."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            now, later = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                update = momentum.mul(now).add_(parameter.grad, alpha=1 - now).sgn_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"])
                momentum.mul_(later).add_(parameter.grad, alpha=1 - later)
