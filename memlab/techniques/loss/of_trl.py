"""The loss of trl's `SFTTrainer`: `loss_type="nll"`, which was named `"chunked_nll"` before trl 1.

The head multiplies tiles of 4096 tokens and 32768 classes. Of each tile the sums of a log-softmax
are kept, and backward computes it once more. Gradients are summed in fp32: that of the head takes
4 bytes a number while backward computes it (`trl/kernels/chunked_logprob.py` of trl 1.16).

On a card only tokens with a label are computed, and a Triton kernel turns a tile into its gradient
where it lies. On a CPU operators of PyTorch do that, in several tensors as large as a tile, so that
a small vocabulary takes more memory there than the plain loss.

This file imports nothing from memlab but errors and files beside it, because an exported script
contains a copy of it.
"""

import torch
from torch import nn

from memlab.errors import UnsupportedError
from memlab.techniques.loss.fused_head import Options
from memlab.techniques.loss.lazy_logits import reduced

CLASSES_OF_A_TILE = 32768  # `_CHUNKED_LOGPROB_CHUNK_SIZE` of trl.trainer.utils


def trl_loss(
    linear: nn.Linear, hidden: torch.Tensor, target: torch.Tensor, options: Options, reduction: str
) -> torch.Tensor:
    """Return the cross entropy of hidden states (tokens, features) and targets (tokens,)."""
    from trl.kernels import chunked_logprob

    _, ignore_index, smoothing = options
    if smoothing:
        raise UnsupportedError(
            "loss_kernel='chunked-nll': trl's loss has no label smoothing; use "
            "loss_kernel='as-built'"
        )
    counts = target != ignore_index
    on_card = chunked_logprob._use_triton(hidden.device)
    found, *_ = chunked_logprob.ChunkedLogProbFunction.apply(  # type: ignore[no-untyped-call]
        hidden[counts] if on_card else hidden,
        linear.weight,
        linear.bias,
        target[counts] if on_card else target.clamp(min=0),
        1.0,
        CLASSES_OF_A_TILE,
        None,
        1.0,
        ("log_probs",),
    )
    if on_card:
        found = found.new_zeros(counts.shape).masked_scatter(counts, found)
    else:
        found = found.masked_fill(~counts, 0)
    return reduced(-found, counts, reduction)
