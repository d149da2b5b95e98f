"""bf16 weights in the model, fp32 master weights in the optimizer: small updates are not lost.

Known from Megatron's and DeepSpeed's bf16 training. The masters begin as the bf16 weights and are
part of the optimizer state: 4 bytes a parameter. Gradients are bf16; fp32 copies of them live as
long as an update. Left out: fp32 accumulation of gradients over micro-batches.
"""

from typing import Any

import torch

from memlab.techniques.source import Source, text_of


def given_master_weights(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let an optimizer of bf16 weights update fp32 masters, of which the weights are copies."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before(*_: Any) -> None:
        for group in optimizer.param_groups if not pairs else ():
            masters = [
                weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
                for weight in group["params"]
            ]
            pairs.extend(zip(group["params"], masters, strict=True))
            group["params"] = masters
        for weight, master in pairs:
            if weight.grad is not None:
                master.grad, weight.grad = weight.grad.to(master.dtype), None

    def after(*_: Any) -> None:
        for weight, master in pairs:
            master.grad = None
            weight.detach().copy_(master)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


def source() -> Source:
    """Return the definition for a script, which must call it on each optimizer."""
    return Source(imports=("from typing import Any",), functions=(text_of(given_master_weights),))
