"""The time of an operator on a card: its bound by the datasheet, and the time to expect.

The lower bound of an operator is the longer of two times: its arithmetic at the datasheet peak of
its number format, and its bytes at the datasheet bandwidth, with each tensor read and written once.
It is a bound for *this* algorithm on *this* memory. Winograd convolutions multiply less than is
counted, and tensors in the L2 cache are read faster, so for small tensors it is not strict. People
are shown the estimate: what kernels of that kind reach (`kernel_times.py`), and launches.

An example: multiplying two 4096 x 4096 matrices in bf16 takes 2 * 4096**3 = 137 GFLOP and moves
3 * 32 MiB. On a card with 300 TFLOP/s and 1.5 TB/s the arithmetic takes 0.46 ms and the memory
0.07 ms. The bound is 0.46 ms.

Left out: overlap of operators on several streams, time on the host that the card waits for, clocks
that are lowered under load, and work that depends on data.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from memlab.costs.kernel_parts import COMPRESSED_PRODUCTS, CONVOLUTIONS, KernelPart, parts_of
from memlab.costs.kernel_times import half_width_of, seconds_of
from memlab.devices.cards import Card
from memlab.operators.signatures import Scalar, Signature, TensorSpec, call_of
from memlab.torch_private.operators import OpOverload, schema_of

Outputs = tuple[TensorSpec, ...]

# From one operator to the next in eager PyTorch, host bound: 4 us on CUDA (pytorch issue 82793),
# 5-7 us from Python (pytorch issue 41383); backward and foreach operators come from C++.
LAUNCH_SECONDS = 5e-6
# The same with all that a trainer does in Python between kernels: what 232 steps of GPT models
# under Megatron on A100 say, with each shape left out in turn (benchmarks/iteration_times.py).
SLOW_LAUNCH_SECONDS = 40e-6
# Copies between pinned memory and a card, as a share of the bus's raw rate. Our choice, for packet
# headers and waiting; not compared with a card yet. Copies from pageable memory reach less.
HOST_EFFICIENCY = 0.78

FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
RNNS = {"_cudnn_rnn", "_cudnn_rnn_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}

NO_KERNEL = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty"}
NO_KERNEL |= {"new_empty_strided", "resize_", "set_", "record_stream", "_local_scalar_dense"}
NO_KERNEL |= {"_unsafe_view"}  # a view whose schema does not say so
NO_KERNEL |= {"wait_tensor"}  # of a collective; streams wait, no kernel runs
COPIES_FIRST = {"all_gather_copy_in"}  # reads its first argument and writes as much, whatever else
# Arguments of which no element is read: they are overwritten, or only their shape is used.
UNREAD = dict.fromkeys(("copy_", "fill_", "zero_", "normal_", "uniform_", "random_"), 0)
UNREAD |= dict.fromkeys(("bernoulli_", "exponential_", "_foreach_copy_", "_foreach_zero_"), 0)
UNREAD |= dict.fromkeys(("zeros_like", "ones_like", "full_like", "rand_like", "randn_like"), 0)
UNREAD |= dict.fromkeys(("new_zeros", "new_ones", "new_full"), 0)
UNREAD |= dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), 1)
UNREAD |= dict.fromkeys(("max_pool2d_with_indices_backward",), 1)
# The kernel touches only as much of the first argument as the other arguments and results hold.
SPARSE = {"embedding", "index", "index_select", "gather", "nll_loss_forward"}
SPARSE |= {"nll_loss2d_forward", "index_put_", "_index_put_impl_", "index_add_", "scatter_"}
SPARSE |= {"scatter_add_", "index_copy_"}


class KernelCall(NamedTuple):
    """One dispatched operator: its signature, its outputs, and its number of kernels."""

    signature: Signature
    outputs: Outputs
    num_kernels: int = 1


class Work(NamedTuple):
    """The work of an operator, independent of the card.

    Attributes:
        flops: floating-point operations of matrix products, convolutions, attention and RNNs; a
            multiply-add counts as two. Other operators count as 0, since they wait for memory.
        num_bytes: bytes read from and written to the card's memory, each argument once. A view
            counts as 0; a lookup reads only the rows that it returns.
        dtype: format of the numbers that are multiplied.
        kind: "matmul", "cudnn" (convolutions, RNNs) or "attention"; "" if flops are not counted.
        parts: of its kernels, for the estimate.
    """

    flops: int
    num_bytes: int
    dtype: torch.dtype | None
    kind: str
    parts: tuple[KernelPart, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The predicted time of one or more operators on a card.

    Attributes:
        lower_bound_seconds: the sum of the operators' bounds.
        estimate_seconds: the time to expect, never below the bound.
        unsure_seconds: the half-widths of kinds of kernels and number formats of which the fit of
            the estimate has seen few or none, added up; 0 for the others.
    """

    lower_bound_seconds: float
    estimate_seconds: float
    unsure_seconds: float = 0.0


def known_time(seconds: float) -> StepTime:
    """Return a time that was measured or that needs no estimate."""
    return StepTime(lower_bound_seconds=seconds, estimate_seconds=seconds)


def step_time(
    calls: Iterable[KernelCall], card: Card, *, tf32_matmul: bool = False
) -> StepTime | None:
    """Return the time of a sequence of operators, None if the card's speed is not known.

    Args:
        calls: in any order; equal calls are computed once.
        card: with or without datasheet figures.
        tf32_matmul: value of `torch.backends.cuda.matmul.allow_tf32`; off by PyTorch's default.
    """
    if card.memory_bytes_per_second is None:
        return None

    bound = estimate = unsure = 0.0
    for signature, outputs, num_kernels in calls:
        time = _time_of(work_of(signature, outputs), num_kernels, card, tf32_matmul)
        bound += time.lower_bound_seconds
        estimate += time.estimate_seconds
        unsure += time.unsure_seconds

    return StepTime(lower_bound_seconds=bound, estimate_seconds=estimate, unsure_seconds=unsure)


@functools.lru_cache(maxsize=2**14)
def _time_of(work: Work, num_kernels: int, card: Card, tf32_matmul: bool) -> StepTime:
    if work.num_bytes == 0:
        return StepTime(lower_bound_seconds=0.0, estimate_seconds=0.0)

    bound = max(_seconds_of(work, card, tf32_matmul))
    peak = peak_of(work, card, tf32_matmul)
    seconds = sum(seconds_of(part, work.dtype, card, peak) for part in work.parts)
    estimate = max(seconds, bound, LAUNCH_SECONDS * num_kernels)
    width = max((half_width_of(part, work.dtype) for part in work.parts), default=0.0)
    return StepTime(
        lower_bound_seconds=bound,
        estimate_seconds=estimate,
        unsure_seconds=width * estimate,
    )


@functools.lru_cache(maxsize=2**16)
def work_of(signature: Signature, outputs: Outputs) -> Work:
    """Return what an operator does; cached, since a step repeats its operators layer by layer."""
    try:
        func, args, kwargs = call_of(signature, _empty)
    except AttributeError:  # an operator registered in another process: only its tensors are known
        tensors = _flat((signature[1], signature[2]))
        num_bytes = sum(map(_size, (*tensors, *outputs)))
        return Work(0, num_bytes, None, "", (KernelPart("stream", 0, num_bytes),))

    num_bytes = _bytes(func, signature, outputs)
    flops, kind = _flops(func, args, kwargs, outputs) if num_bytes else (0, "")
    floats = [t.dtype for t in _flat(signature[1]) if t.dtype.is_floating_point]
    if any(isinstance(arg, torch.dtype) for arg in args):  # narrow factors, added to a wide matrix
        floats.reverse()
    name = func.overloadpacket.__name__
    parts = parts_of(name, signature[1], outputs, num_bytes, flops) if num_bytes else ()
    dtype = next(iter(floats), args[0].dtype if flops else None)  # a product may be one of int8
    return Work(flops, num_bytes, dtype, kind, parts)


def _empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


def _seconds_of(work: Work, card: Card, tf32_matmul: bool) -> tuple[float, float]:
    """Return the seconds of arithmetic and of memory traffic, each at the card's peak."""
    assert card.memory_bytes_per_second is not None
    peak = peak_of(work, card, tf32_matmul) if work.flops else None
    return work.flops / peak if peak else 0.0, work.num_bytes / card.memory_bytes_per_second


def peak_of(work: Work, card: Card, tf32_matmul: bool) -> float | None:
    """Return the operations per second of the fastest unit that the operator may use."""
    fp32, tf32 = card.fp32_flops_per_second, card.tf32_flops_per_second
    if work.dtype in FORMATS:
        return getattr(card, f"{FORMATS[work.dtype]}_flops_per_second") or fp32
    if work.dtype is torch.float64:
        return card.fp64_flops_per_second
    if work.dtype is torch.int8:
        return card.int8_flops_per_second
    if fp32 is None or tf32 is None or work.dtype is not torch.float32:
        return fp32
    # torch.backends.cudnn.allow_tf32 is on by default, unlike that of matmul
    if work.kind == "cudnn" or (work.kind == "matmul" and tf32_matmul):
        return max(fp32, tf32)

    # the memory-efficient kernel multiplies fp32 as three tf32 products (OpMultiplyAddFastF32)
    return max(fp32, tf32 / 3) if work.kind == "attention" else fp32


def _flops(
    func: OpOverload, args: list[Any], kwargs: dict[str, Any], outputs: Outputs
) -> tuple[int, str]:
    from torch.utils.flop_counter import flop_registry

    name = func.overloadpacket.__name__
    if name == "convolution_backward":
        return _convolution_backward_flops(args), "cudnn"
    if name in RNNS:
        return _rnn_flops(name, args), "cudnn"
    if name.startswith("_scaled_dot_product"):
        return _attention_flops(func, args, kwargs), "attention"
    if func.namespace == "bitsandbytes" and name in COMPRESSED_PRODUCTS:
        columns = args[0].shape[-1]
        return 2 * math.prod(outputs[0].shape) * columns, "matmul"

    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return 0, ""

    results = tuple(_empty(spec) for spec in outputs)
    args = [arg for arg in args if not isinstance(arg, torch.dtype)]  # `out_dtype` of a product
    flops = count(*args, **kwargs, out_val=results[0] if len(results) == 1 else results)
    return int(flops), "cudnn" if name in CONVOLUTIONS else "matmul"


def _convolution_backward_flops(args: list[Any]) -> int:
    """Return the flops of the requested gradients; each takes as many as the forward.

    flop_registry counts the weight's gradient of a grouped convolution `groups` times.
    """
    grad_output, x, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    positions = (x if transposed else grad_output).shape[2:]
    once = 2 * x.shape[0] * math.prod(positions) * weight.numel()
    return int(once) * (bool(mask[0]) + bool(mask[1]))


def _rnn_flops(name: str, args: list[Any]) -> int:
    """Return the flops of the matrix products of a fused RNN: every weight once per token."""
    weights = args[1] if isinstance(args[1], list) else args[1:3]
    tokens = args[0].numel() // args[0].shape[-1]
    once = 2 * tokens * sum(w.numel() for w in weights if w.dim() == 2)
    with_weights = args[-1][3] if isinstance(args[-1], list) else True  # cuDNN's output_mask
    return int(once) * (1 + bool(with_weights) if name.endswith("backward") else 1)


def _attention_flops(func: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> int:
    """Return the flops of two products in forward and five in backward, which repeats the scores.

    Kernels skip query-key pairs that a causal mask hides, but flop_registry counts them. In torch
    2.11 it also refuses fewer key heads than query heads.
    """
    names = [argument.name for argument in schema_of(func).arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    batch, heads, queries, query_width = values["query"].shape
    keys, value_width = values["value"].shape[2:]
    pairs = queries * keys

    if values.get("is_causal"):
        seen = min(queries, keys)
        pairs = seen * (seen + 1) // 2 + max(0, queries - keys) * keys
    if "backward" in func.overloadpacket.__name__:
        return int(2 * batch * heads * pairs * (3 * query_width + 2 * value_width))

    return int(2 * batch * heads * pairs * (query_width + value_width))


def _bytes(func: OpOverload, signature: Signature, outputs: Outputs) -> int:
    name, schema = func.overloadpacket.__name__, schema_of(func)
    returned = [value.alias_info for value in schema.returns]
    no_kernel = name in NO_KERNEL or func.namespace in ("prim", "profiler")
    if no_kernel or (returned and all(a and not a.is_write for a in returned)):
        return 0

    passed = dict(zip((a.name for a in schema.arguments), signature[1], strict=False))
    passed |= dict(signature[2])
    sizes, traffic = [], []

    for position, argument in enumerate(schema.arguments):
        size = sum(map(_size, _flat(passed.get(argument.name))))
        written = argument.alias_info is not None and argument.alias_info.is_write
        written &= not (
            argument.name == "grads" and name.startswith("_fused_")
        )  # with a scaler only
        sizes.append(size)
        read = UNREAD.get(name) != position and not argument.is_out
        traffic.append(size * (read + written))

    if name in COPIES_FIRST:
        return 2 * sizes[0]
    fresh = 0 if any(returned) else sum(map(_size, outputs))
    if name in SPARSE:
        traffic[0] = min(traffic[0], 2 * (sum(sizes[1:]) + fresh))

    return sum(traffic) + fresh


def _flat(value: Any) -> list[TensorSpec]:
    """Return the tensors in nested arguments."""
    if isinstance(value, TensorSpec):
        return [value]
    if not isinstance(value, tuple) or isinstance(value, Scalar):
        return []
    return [spec for item in value for spec in _flat(item)]


def _size(spec: TensorSpec) -> int:
    """Return the bytes of the elements in memory; an expanded dimension has one."""
    if not spec.stride:
        return math.prod(spec.shape) * spec.dtype.itemsize
    shape = (
        min(size, 1) if step == 0 else size
        for size, step in zip(spec.shape, spec.stride, strict=True)
    )
    return math.prod(shape) * spec.dtype.itemsize
