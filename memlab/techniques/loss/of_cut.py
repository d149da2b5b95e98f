"""Cut cross-entropy (`cut_cross_entropy`): the logits are never in the memory of the card at all.

A Triton kernel multiplies blocks of the head and the hidden states, and keeps of each token the
logarithm of its sum of exponentials. Another one does so again in backward, and adds each block to
the gradients. Beside these gradients only vectors are allocated:

    log-sum-exp, loss      tokens, in fp32
    mean logits, order     classes, in fp32 and as integers
    gradient of hidden     tokens x features, in their format
    gradient of the head   classes x features, in the format of the hidden states; then, if it has
                           another, in its own too; none if it is frozen

By default it leaves out of the gradients what is smaller than the number format resolves
(`filter_eps`), so they differ a little from those of the plain loss. Source: the package's version
25.1.1, and "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009.

This file imports nothing from memlab but errors and files beside it, because an exported script
contains a copy of it.
"""

import inspect

import torch
from torch import nn

from memlab.errors import UnsupportedError
from memlab.techniques.loss.fused_head import Options

HALF = (torch.bfloat16, torch.float16)


def cut_loss(
    linear: nn.Linear, hidden: torch.Tensor, target: torch.Tensor, options: Options, reduction: str
) -> torch.Tensor:
    """Return the cross entropy of hidden states (tokens, features) and targets (tokens,)."""
    from cut_cross_entropy import linear_cross_entropy

    dtype, ignore_index, smoothing = options
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # as it would be for the head
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    takes_bias = "bias" in inspect.signature(linear_cross_entropy).parameters
    why = ""
    if hidden.dtype not in HALF:
        why = f"takes hidden states in bf16 or fp16, not in {dtype}"
    elif smoothing:
        why = "has no label smoothing"
    elif linear.bias is not None and not takes_bias:
        why = "takes no bias in the version that is installed, and the head has one"
    if why:
        raise UnsupportedError(
            f"loss_kernel='cut': cut cross-entropy {why}; use loss_kernel='as-built'"
        )
    more = {} if linear.bias is None else {"bias": linear.bias}
    loss: torch.Tensor = linear_cross_entropy(
        hidden, linear.weight, target, ignore_index=ignore_index, reduction=reduction, **more
    )
    return loss
