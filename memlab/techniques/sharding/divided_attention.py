"""Attention over divided heads, where PyTorch has no rule of its own: its kernel for a CPU.

Heads do not look at one another, so each rank can compute its own. PyTorch says so of its kernels
for a card, and `register_sharding` is its way to say it of another one.
"""

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

DIM_OF_HEADS = 1  # (samples, heads, tokens, size)
aten = torch.ops.aten


def register_attention() -> None:
    """Tell DTensor how the attention of a CPU, and its backward, may be divided."""
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    register_sharding(forward)(_forward)
    register_sharding(backward)(_backward)


def _forward(
    query: Any, key: Any, value: Any, dropout: Any = 0.0, is_causal: Any = False, *,
    attn_mask: Any = None, scale: Any = None,
) -> list[Any]:  # fmt: skip
    return [
        ([divided] * 2, [divided] * 3 + [None] * 2 + _of_mask(attn_mask, divided))
        for divided in (Replicate(), Shard(DIM_OF_HEADS))
    ]


def _backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, dropout: Any,
    is_causal: Any, *, attn_mask: Any = None, scale: Any = None,
) -> list[Any]:  # fmt: skip
    return [
        ([divided] * 3, [divided] * 6 + [None] * 2 + _of_mask(attn_mask, divided))
        for divided in (Replicate(), Shard(DIM_OF_HEADS))
    ]


def _of_mask(mask: Any, divided: Any) -> list[Any]:
    """Return how a mask is divided: one for all heads is whole in every rank."""
    if mask is None:
        return []
    has_heads = len(mask.shape) == 4 and mask.shape[DIM_OF_HEADS] > 1
    return [divided if has_heads else Replicate()]
