"""Decide which outputs a preset keeps, by the names of operators.

This file imports nothing from memlab, because an exported script contains a copy of it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

MATMULS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "convolution")
) | frozenset(("_convolution", "cudnn_convolution", "mkldnn_rnn_layer", "_cudnn_rnn"))
ATTENTION = "_scaled_dot_product"
NORMS = frozenset(
    ("native_layer_norm", "native_batch_norm", "native_group_norm", "_native_batch_norm_legit")
) | frozenset(("_batch_norm_with_update", "cudnn_batch_norm", "_fused_rms_norm"))
CHEAP = NORMS | frozenset(
    ("_softmax", "_log_softmax", "_to_copy", "clone", "copy", "mean", "var_mean", "sum", "cat")
)


def by_preset(
    preset: str, func: OpOverload, _: int, args: Sequence[Any], kwargs: dict[str, Any], __: Any
) -> bool:
    """Return whether a preset keeps the output of an operator."""
    name = func.overloadpacket.__name__
    if preset == "keep-attention":
        return bool(name.startswith(ATTENTION))
    if preset == "keep-matmuls":
        return name in MATMULS or bool(name.startswith(ATTENTION))
    is_pointwise: bool = torch.Tag.pointwise in func.tags
    return not is_pointwise and name not in CHEAP
