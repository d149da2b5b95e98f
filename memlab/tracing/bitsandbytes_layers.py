"""Kernels of bitsandbytes in 8 bits, as a card runs them, and what is not quantized.

To the dispatcher a product in 8 bits is one operator. On CUDA it is a few lines of Python around
kernels in C, and these lines allocate. Here they run over fake tensors, so that what they allocate
is seen. For x of (rows, columns) in bf16 and a weight of (outputs, columns) in int8:

    int8_vectorwise_quant   int8 (rows, columns), and for a moment fp16 and bool of this shape
    int8_linear_matmul      int32 (rows, outputs)
    int8_mm_dequant         fp16 (rows, outputs), then bf16 of this shape

A column of x with a value of 6 or more is multiplied in 16 bits. Which columns these are depends on
values; none is assumed. The paper of LLM.int8() (arXiv:2208.07339) counts about 0.1 % of columns.

Source: `backends/cuda/ops.py` and `backends/default/ops.py` of bitsandbytes 0.50. Left out: 8-bit
weights that are trained themselves, and 4-bit ones (see `memlab.cost_model.cuda_kernels`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memlab._util.units import format_bytes
from memlab.tracing.fakify import kind_of

CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
NAMESPACE = "bitsandbytes"
NO_OUTLIERS = (
    "bitsandbytes multiplies columns of activations with outliers in 16 bits; assumed that there "
    "are none."
)


LEAST_SHARE = 0.01  # of a model's bytes, to be worth a note


def unquantized_notes(model: torch.nn.Module) -> tuple[str, ...]:
    """Return a note on the weights of a quantized model that stay as they are, if they are many.

    Only linear layers are quantized. The experts of a mixture are one parameter of three dimensions
    in transformers, and no layer.
    """
    every = list(model.parameters())
    if all(kind_of(parameter) is torch.nn.Parameter for parameter in every):
        return ()
    found = {
        id(parameter): (name, parameter)
        for module in model.modules()
        if not isinstance(module, CONVOLUTIONS)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and parameter.is_floating_point()
    }
    kept = [parameter for _, parameter in found.values()]
    nbytes = sum(parameter.nbytes for parameter in kept)
    if nbytes <= LEAST_SHARE * sum(parameter.nbytes for parameter in every):
        return ()
    names = " and ".join(sorted({name for name, _ in found.values()}))
    formats = " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in kept}))
    return (
        f"Only linear layers are quantized. Parameters of three dimensions ({names}), such as the "
        f"experts of a mixture, stay in {formats} and take {format_bytes(nbytes)}.",
    )


Kernel = tuple[Callable[..., Any], str | None]


def kernel_of(func: Any) -> Kernel | None:
    """Return what runs on a card in place of an operator, and what is assumed for it.

    None: the operator itself is all that runs.
    """
    return KERNELS.get(func.overloadpacket.__name__) if func.namespace == NAMESPACE else None


def _quantized_rows(
    x: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the rows in int8, the scale of each, and the columns with outliers."""
    scales = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    rows = x.new_empty(x.shape, dtype=torch.int8)
    if threshold == 0.0:
        return rows, scales, None
    outliers = x.abs() >= threshold
    outliers.any()
    return rows, scales, x.new_empty(0, dtype=torch.int64)


def _product_beside_outliers(
    x: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    weight_scales: torch.Tensor,
    outlier_columns: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product, and the part of x that is multiplied in 16 bits."""
    product = torch.ops.bitsandbytes.int8_scaled_mm.default
    beside = x.new_empty(0)
    return product(rows, weight, scales, weight_scales, bias=bias, dtype=x.dtype), beside


def _product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the product in a format of 16 bits."""
    operators = torch.ops.bitsandbytes
    summed = operators.int8_linear_matmul.default(rows, weight)
    made: torch.Tensor = operators.int8_mm_dequant.default(
        summed, scales, weight_scales, dtype=dtype, bias=bias
    )
    return made


def _scaled(
    summed: torch.Tensor,
    scales: torch.Tensor,
    weight_scales: torch.Tensor,
    dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return sums of int32 in fp16, and from there in the format that was asked for."""
    made = torch.empty_like(summed, dtype=torch.float16)
    if bias is not None and bias.dtype is not torch.float16:
        made.add_(bias)
    return made.to(dtype or torch.float16)


KERNELS: dict[str, Kernel] = {
    "int8_vectorwise_quant": (_quantized_rows, None),
    "int8_mixed_scaled_mm": (_product_beside_outliers, NO_OUTLIERS),
    "int8_scaled_mm": (_product, None),
    "int8_mm_dequant": (_scaled, None),
}
