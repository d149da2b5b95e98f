"""What a batch normalization moves on a card, and how fast: it is not bound by memory alone.

An example: the forward reads its input for the mean and the variance and once more to normalize,
and writes as much, which is three passes where an ideal one has two. An A100 has 1,555 GB/s; its
108 multiprocessors at 1.41 GHz move 6 bytes a clock each, 914 GB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memlab._util.units import MHZ
from memlab.devices.cards import Card
from memlab.devices.operators import Scalar, TensorSpec

# Passes over the tensors beyond one each: the forward reads x twice and writes y (3 for 2), the
# backward reads x and dy twice and writes dx (5 for 3). PyTorch's Normalization.cuh,
# batch_norm_collect_statistics and batch_norm_backward_reduce.
PASSES = {"forward": 3 / 2, "backward": 5 / 3}
# Each multiprocessor moves no more than this in a clock, though the memory of a data-centre card
# could: what batch norm adds to VGG 11 to 19 on an A100 (5.5; benchmarks/host_pace.py), and what
# steps on an RTX 3090 reached (6.0). Held against ResNet-50 on nine cards (benchmarks/one_card.py).
BYTES_A_CLOCK = 6.0
# Of bf16, or with a weight of 16 bits, PyTorch runs its own kernels (Normalization.cpp), which take
# as long for an element of 16 bits as of 32: the same VGGs in fp16, on three cards.
NARROW = 2


def passes(way: str, args: Sequence[Any]) -> float | None:
    """Return how often all tensors are moved; None if it only scales, by means that it has kept.

    Args:
        way: "forward" or "backward".
        args: by position, as a signature has them.
    """
    switches = [x.text for x in args if isinstance(x, Scalar) and x.text in ("True", "False")]
    if switches[:1] == ["False"]:  # the first of them: whether it trains
        return None
    tensors = [x for x in args if isinstance(x, TensorSpec)]
    weights = [x for x in tensors if len(x.shape) == 1]
    is_native = tensors[0].dtype is torch.bfloat16 or not weights or weights[0].dtype.itemsize == 2
    return PASSES[way] * (NARROW if is_native and tensors[0].dtype.itemsize == 2 else 1)


def most_bytes_per_second(card: Card) -> float | None:
    """Return what the multiprocessors of a card move; None if they are not known."""
    if not card.num_multiprocessors or not card.boost_mhz:
        return None
    return BYTES_A_CLOCK * card.num_multiprocessors * card.boost_mhz * MHZ
