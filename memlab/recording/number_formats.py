"""`check_formats`: raise the errors of real kernels for operands of different number formats.

Fake kernels of these operators accept any formats, but real kernels raise an error, and a step that
cannot run has no memory to predict. Source: the errors of CPU kernels in this torch. CUDA kernels
raise them as well, except that norms on CUDA accept more combinations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten
# the positions of the arguments that must have the same format
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
# positions of input and weight: the same format, or a 16-bit input and an fp32 weight
NORMS: dict[Any, tuple[int, int]] = {
    aten.native_layer_norm.default: (0, 2),
    aten.native_group_norm.default: (0, 1),
    aten.native_batch_norm.default: (0, 1),
}
HALVES = (torch.bfloat16, torch.float16)


def check_formats(func: Any, args: Sequence[Any]) -> None:
    """Raise RuntimeError if a real kernel would because of its operands' formats."""
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


def in_fp64(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor | None:
    """Return the result of an operator that a CPU has for other number formats, None if for none.

    For instance, `torch.histc` counts integers on a card alone, and models of experts do.
    """
    wide = [value.double() if isinstance(value, torch.Tensor) else value for value in args]
    try:
        result: torch.Tensor = func(*wide, **kwargs)
    except NotImplementedError:
        return None
    return result.to(dtype)
