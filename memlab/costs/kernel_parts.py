"""What the kernels of one operator do, in numbers that need no card: products and bytes moved.

An operator may run more than one kernel, and a kernel may read a tensor twice. Batch normalization
reads its input once for the mean and the variance and once more to normalize, so its forward moves
three times its input where an ideal one moves two. `kernel_times.py` turns parts into seconds.

The backward of a convolution has two parts, the gradient of the input and that of the weight:

    convolution_backward -> KernelPart("convolution", ...), KernelPart("convolution", ...)

Left out: the algorithm that cuDNN takes, and values that decide how much work there is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from memlab.operators.signatures import TRUE, TensorSpec

Product = tuple[int, int, int, int]
"""Batch, rows, columns and inner size of a matrix product."""

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
COMPRESSED_PRODUCTS = {"gemm_4bit", "int8_linear_matmul"}  # of bitsandbytes
FUSED_ROWS = 4  # up to these no 4-bit weight is widened; its _GEMM_4BIT_CUSTOM_FLOOR_M
CONVOLUTIONS = {"convolution", "_convolution", "convolution_overrideable"}
NORMS = ("layer_norm", "softmax", "group_norm", "rms_norm")
REDUCTIONS = {"sum", "mean", "var", "var_mean", "linalg_vector_norm", "amax", "norm"}
COPIES = {"clone", "copy_", "_to_copy"}
# Passes over the tensors of a batch normalization beyond one each: the forward reads x twice and
# writes y (3 for 2), the backward reads x and dy twice and writes dx (5 for 3). PyTorch's
# Normalization.cuh, batch_norm_collect_statistics and batch_norm_backward_reduce.
BATCH_NORM_PASSES = {"forward": 3 / 2, "backward": 5 / 3}
# Channels are padded to what a tile of the tensor cores holds: 8 fp16 numbers are 16 bytes, the
# least that is read at once (cuDNN developer guide), and kernels have tiles of 32 columns or more.
INNER_PADDING, OUTER_PADDING, GROUP_PADDING = 8, 32, 16


class KernelPart(NamedTuple):
    """What one kernel of an operator does.

    Attributes:
        group: the kind of kernel, as `kernel_times.json` names it without its number format.
        flops: multiplied and added, with padded channels; 0 if it only waits for memory.
        read_bytes: of all its reads, and of its writes too where these are not told apart.
        written_bytes: of a product's result.
        layout_bytes: of tensors that a convolution copies to channels-last and back.
        product: None if it is no plain matrix product.
    """

    group: str
    flops: int
    read_bytes: int
    written_bytes: int = 0
    layout_bytes: int = 0
    product: Product | None = None


def parts_of(
    name: str, args: Sequence[Any], outputs: Sequence[TensorSpec], num_bytes: int, flops: int
) -> tuple[KernelPart, ...]:
    """Return the parts of an operator.

    Args:
        name: without namespace and overload.
        args: by position, as a signature has them.
        outputs: its tensors.
        num_bytes: that it reads and writes, each tensor once.
        flops: of its products.
    """
    if name in CONVOLUTIONS:
        groups = args[8]
        return (_convolution("forward", args[0], args[1], outputs[0], groups),)
    if name == "convolution_backward":
        return _convolution_backward(args)
    if name in PRODUCTS:
        return (_product(args, outputs, num_bytes, flops),)
    if name in COMPRESSED_PRODUCTS:
        return _compressed_product(name, args, outputs, num_bytes, flops)
    if "attention" in name and flops:
        way = "_backward" if "backward" in name else ""
        return (KernelPart(f"attention{way}", flops, num_bytes),)
    if flops:
        return (KernelPart("other_product", flops, num_bytes),)
    return (KernelPart(*_streamed(name, args, outputs, num_bytes)),)


def _streamed(
    name: str, args: Sequence[Any], outputs: Sequence[TensorSpec], num_bytes: int
) -> tuple[str, int, int]:
    """Return the group, no flops, and the bytes of a kernel that only waits for memory."""
    way = "backward" if "backward" in name else "forward"
    if "batch_norm" in name:
        return "batch_norm", 0, round(num_bytes * BATCH_NORM_PASSES[way])
    if any(norm in name for norm in NORMS):
        return f"normalize_{way}", 0, num_bytes
    if name in REDUCTIONS:
        return "reduce", 0, num_bytes
    if "pool" in name or "upsample" in name:
        return "pool", 0, num_bytes
    if name in COPIES and outputs:
        source = args[-1] if name == "copy_" and len(args) == 2 else args[0]
        if isinstance(source, TensorSpec) and source.stride != outputs[0].stride:
            return "transpose", 0, num_bytes
    return "stream", 0, num_bytes


def _product(
    args: Sequence[Any], outputs: Sequence[TensorSpec], num_bytes: int, flops: int
) -> KernelPart:
    left, right = [x for x in args if isinstance(x, TensorSpec)][-2:]
    batch = left.shape[0] if len(left.shape) == 3 else 1
    written = math.prod(outputs[0].shape) * outputs[0].dtype.itemsize if outputs else 0
    written = min(written, num_bytes)
    shape = (batch, left.shape[-2], right.shape[-1], left.shape[-1])
    return KernelPart("product", flops, num_bytes - written, written, product=shape)


def _compressed_product(
    name: str, args: Sequence[Any], outputs: Sequence[TensorSpec], num_bytes: int, flops: int
) -> tuple[KernelPart, ...]:
    """Return the product with a weight in 8 bits, or in 4, which one kernel widens before.

    Source: `gemm_4bit` in bitsandbytes/backends/cuda/ops.py.
    """
    left, made = args[0], outputs[0]
    columns = left.shape[-1]
    shape = (1, math.prod(left.shape) // columns, made.shape[-1], columns)
    written = math.prod(made.shape) * made.dtype.itemsize
    if name == "int8_linear_matmul" or shape[1] <= FUSED_ROWS:
        return (KernelPart("product", flops, num_bytes - written, written, product=shape),)

    size = left.dtype.itemsize
    factor, weight = size * math.prod(left.shape), size * shape[2] * columns
    compressed = num_bytes - written - factor
    return (
        KernelPart("stream", 0, compressed + weight),
        KernelPart("product", flops, factor + weight, written, product=shape),
    )


def _convolution_backward(args: Sequence[Any]) -> tuple[KernelPart, ...]:
    gradient, x, weight, groups, mask = args[0], args[1], args[2], args[9], args[10]
    ways = [way for way, wanted in zip(("data", "weight"), mask[:2], strict=True) if wanted == TRUE]
    parts = [_convolution(way, x, weight, gradient, groups) for way in ways]
    if not parts:  # the bias alone: a sum
        return (KernelPart("reduce", 0, math.prod(gradient.shape) * gradient.dtype.itemsize),)
    return tuple(parts)


def _convolution(
    way: str, x: TensorSpec, weight: TensorSpec, y: TensorSpec, groups: int
) -> KernelPart:
    """Return one of the three kernels: forward, gradient of the data, gradient of the weight.

    x is (N, C, ...), weight (K, C / groups, ...) and y (N, K, ...); transposed, C and K change
    places, which no number here depends on.
    """
    samples, inputs = x.shape[:2]
    outputs = y.shape[1]
    taps = math.prod(weight.shape[2:])
    positions = min(math.prod(x.shape[2:]), math.prod(y.shape[2:]))
    size = x.dtype.itemsize
    tensors = size * (math.prod(x.shape) + math.prod(y.shape))
    moved = tensors + size * math.prod(weight.shape)
    once = 2 * samples * positions * taps

    if groups > 1 and inputs == groups:
        return KernelPart(f"depthwise_{way}", once * outputs, moved)

    inner, outer = inputs // groups, outputs // groups
    # as PyTorch decides (cudnn_conv_suggest_memory_format): by the tensor or by the weight
    is_last = any(map(_is_channels_last, (x, y) if taps == 1 else (x, y, weight)))
    if groups > 1:
        padded = groups * _padded(inner, GROUP_PADDING) * _padded(outer, GROUP_PADDING)
        return KernelPart(f"grouped_{'last' if is_last else 'first'}", once * padded, moved)

    padded = _padded(inner, INNER_PADDING) * _padded(outer, OUTER_PADDING)
    # tensor cores want channels last: other tensors are copied, read and written once each
    layout = 0 if is_last or size > 2 else 2 * tensors
    return KernelPart("convolution", once * padded, moved, layout_bytes=layout)


def _is_channels_last(tensor: TensorSpec) -> bool:
    return len(tensor.stride) > 2 and tensor.shape[1] > 1 and tensor.stride[1] == 1


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
