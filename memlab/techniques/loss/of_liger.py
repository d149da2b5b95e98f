"""Liger's fused linear cross entropy: `LigerFusedLinearCrossEntropyLoss` of `liger_kernel`.

The forward multiplies the head with a chunk of tokens at a time. A Triton kernel replaces the
logits of a chunk with their gradient where they lie, and two products make of it the gradients of
hidden states and head. So backward has nothing left to compute but a factor, and what is held
between forward and backward are these gradients, not the logits:

    chunk of tokens        next_power_of_2(ceil(tokens / ceil(classes / features))), at most tokens
    logits                 chunk x classes, in the format of the hidden states; freed in forward
    gradient of hidden     tokens x features, in their format
    gradient of the head   classes x features, in its format; none if it is frozen

Source: `liger_kernel/ops/fused_linear_cross_entropy.py`, Liger-Kernel 0.8.5.

This file imports nothing from memlab but errors and files beside it, because an exported script
contains a copy of it.
"""

import torch
from torch import nn

from memlab.techniques.loss.fused_head import Options


def liger_loss(
    linear: nn.Linear, hidden: torch.Tensor, target: torch.Tensor, options: Options, reduction: str
) -> torch.Tensor:
    """Return the cross entropy of hidden states (tokens, features) and targets (tokens,)."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    _, ignore_index, smoothing = options
    compute = LigerFusedLinearCrossEntropyLoss(
        ignore_index=ignore_index, label_smoothing=smoothing, reduction=reduction
    )
    loss: torch.Tensor = compute(linear.weight, hidden, target, linear.bias)
    return loss
