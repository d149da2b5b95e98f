"""`check_formats`: errors of operands whose number formats do not go together.

Fake kernels of these operators take any formats, where real ones raise: a step that cannot run has
no memory to predict. Source: what the kernels of a CPU in this torch raise; those of CUDA raise as
well, save that norms on CUDA take more mixtures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten
# the places of the arguments that must have one format
ALIKE: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.mv.default: (0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.addmv.default: (0, 1, 2),
    aten.index_put.default: (0, 2),
    aten.index_put_.default: (0, 2),
    aten.index_add.default: (0, 3),
    aten.index_add_.default: (0, 3),
    aten.binary_cross_entropy.default: (0, 1),
    aten.grid_sampler_2d.default: (0, 1),
    aten.grid_sampler_3d.default: (0, 1),
}
# input and weight: alike, or the input in 16 bits and the weight in fp32
NORMS: dict[Any, tuple[int, int]] = {
    aten.native_layer_norm.default: (0, 2),
    aten.native_group_norm.default: (0, 1),
    aten.native_batch_norm.default: (0, 1),
}
HALVES = (torch.bfloat16, torch.float16)


def check_formats(func: Any, args: Sequence[Any]) -> None:
    """Raise RuntimeError where a real kernel would for the formats of its operands."""
    places = ALIKE.get(func)
    if places is not None:
        dtypes = {args[place].dtype for place in places if place < len(args)}
        if len(dtypes) > 1:
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise RuntimeError(f"{func}: operands must have the same dtype, but got {names}")
    if func in NORMS:
        value, weight = (args[place] for place in NORMS[func])
        if weight is None or value.device.type != "cpu" or value.dtype == weight.dtype:
            return
        if value.dtype not in HALVES or weight.dtype != torch.float32:
            raise RuntimeError(
                f"{func}: input and weight must have the same dtype, but got {value.dtype} and "
                f"{weight.dtype}"
            )
