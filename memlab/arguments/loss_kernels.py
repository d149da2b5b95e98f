"""What may compute the loss of a language model: the values of `loss_kernel`."""

from enum import StrEnum


class LossKernel(StrEnum):
    """What computes the cross entropy of the last linear layer, without all logits at once.

    - as-built is the loss as the workload computes it.
    - liger is the fused linear cross entropy of the package liger_kernel.
    - chunked-nll is the loss of trl's SFTTrainer, the default of trl 1.
    - cut is the cut cross-entropy of the package cut_cross_entropy.
    """

    AS_BUILT = "as-built"
    LIGER = "liger"
    CHUNKED_NLL = "chunked-nll"
    CUT = "cut"
