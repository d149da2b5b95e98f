"""The time of an operator on a card: its bound by the datasheet, and the time to expect.

The lower bound of an operator is the longer of two times: its arithmetic at the datasheet peak of
its number format, and its bytes at the datasheet bandwidth, with each tensor read and written once.
It is a bound for *this* algorithm on *this* memory: by FFT, or by Winograd on tensor cores, less is
multiplied, and tensors in the L2 cache are read faster, so for small ones it is not strict. People
are shown the estimate: what kernels of that kind reach, and launches.

An example: multiplying two 4096 x 4096 matrices in bf16 takes 2 * 4096**3 = 137 GFLOP and moves
3 * 32 MiB. On a card with 300 TFLOP/s and 1.5 TB/s the arithmetic takes 0.46 ms and the memory
0.07 ms. The bound is 0.46 ms.

Left out: clocks that are lowered under load, and work that depends on data. `overlap.py` has the
overlap of operators on several streams, and time on the host that the card waits for.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import torch

from memlab._util.torch_private.tensors import OpOverload, schema_of
from memlab._util.units import round_up
from memlab.cost_model import batch_norm, power
from memlab.devices.cards import Card
from memlab.devices.operators import TRUE, Scalar, Signature, TensorSpec, call_of

# What the kernels of one operator do, in numbers that need no card: products and bytes moved.
#
# An operator may run more than one kernel, and a kernel may read a tensor twice. Batch
# normalization reads its input once for the mean and the variance and once more to
# normalize, so its forward moves three times its input where an ideal one moves two.
# The backward of a convolution has two parts, the gradient of the input and that of the weight.
# What follows turns parts into seconds.
#
# Left out: values that decide how much work there is.

Product = tuple[int, int, int, int]
"""Batch, rows, columns and inner size of a matrix product."""

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
COMPRESSED_PRODUCTS = {"gemm_4bit", "int8_linear_matmul"}  # of bitsandbytes
FUSED_ROWS = 4  # up to these no 4-bit weight is widened; its _GEMM_4BIT_CUSTOM_FLOOR_M
CONVOLUTIONS = {"convolution", "_convolution", "convolution_overrideable"}
NORMS = ("layer_norm", "softmax", "group_norm", "rms_norm")
REDUCTIONS = {"sum", "mean", "var", "var_mean", "linalg_vector_norm", "amax", "norm"}
COPIES = {"clone", "copy_", "_to_copy"}
# Channels are padded to what a tile of the tensor cores holds: 8 fp16 numbers are 16 bytes, the
# least that is read at once (cuDNN developer guide), and kernels have tiles of 32 columns or more.
INNER_PADDING, OUTER_PADDING, GROUP_PADDING = 8, 32, 16
# The window of cuDNN's Winograd convolutions, and how many times less they multiply at most: a tile
# of 4 x 4 outputs takes 36 products for 144 (Lavin and Gray, 2016, "Fast Algorithms ...").
WINOGRAD, WINOGRAD_SAVES = (3, 3), 4


class KernelPart(NamedTuple):
    """What one kernel of an operator does.

    Attributes:
        group: the kind of kernel, as `kernel_times.json` names it without its number format.
        flops: multiplied and added, with padded channels; 0 if it only waits for memory.
        read_bytes: of all its reads, and of its writes too where these are not told apart.
        written_bytes: of a product's result.
        layout_bytes: of tensors that a convolution copies to channels-last and back.
        product: None if it is no plain matrix product.
        can_be_winograd: of a convolution whose window of 3 x 3 moves by one.
    """

    group: str
    flops: int
    read_bytes: int
    written_bytes: int = 0
    layout_bytes: int = 0
    product: Product | None = None
    can_be_winograd: bool = False


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
        moves = (*args[3], *args[5])
        return (_convolution("forward", args[0], args[1], outputs[0], moves, args[8]),)
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
        passes = batch_norm.passes(way, args)
        if passes is None:
            return "stream", 0, num_bytes
        return "batch_norm", 0, round(num_bytes * passes)
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
    gradient, x, weight, mask = *args[:3], args[10]
    moves, groups = (*args[4], *args[6]), args[9]
    ways = [way for way, wanted in zip(("data", "weight"), mask[:2], strict=True) if wanted == TRUE]
    parts = [_convolution(way, x, weight, gradient, moves, groups) for way in ways]
    if not parts:  # the bias alone: a sum
        return (KernelPart("reduce", 0, math.prod(gradient.shape) * gradient.dtype.itemsize),)
    return tuple(parts)


def _convolution(
    way: str, x: TensorSpec, weight: TensorSpec, y: TensorSpec, moves: tuple[int, ...], groups: int
) -> KernelPart:
    """Return one of the three kernels: forward, gradient of the data, gradient of the weight.

    x is (N, C, ...), weight (K, C / groups, ...) and y (N, K, ...); transposed, C and K change
    places, which no number here depends on. `moves` are its stride and dilation.
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
        padded = groups * round_up(inner, GROUP_PADDING) * round_up(outer, GROUP_PADDING)
        return KernelPart(f"grouped_{'last' if is_last else 'first'}", once * padded, moved)

    padded = round_up(inner, INNER_PADDING) * round_up(outer, OUTER_PADDING)
    # tensor cores want channels last: other tensors are copied, read and written once each
    layout = 0 if is_last or size > 2 else 2 * tensors
    winograd = weight.shape[2:] == WINOGRAD and {*moves} == {1}
    return KernelPart("convolution", once * padded, moved, 0, layout, None, winograd)


def _is_channels_last(tensor: TensorSpec) -> bool:
    return len(tensor.stride) > 2 and tensor.shape[1] > 1 and tensor.stride[1] == 1


# Seconds of a kernel on a card: the roofline with what kinds of kernels reach of it.
#
# The idea. A kernel takes the longer of two times, since arithmetic and memory traffic
# overlap:
#
#     seconds = max(compute_factor * compute, memory_factor * read + written_factor * written)
#               + layout_factor * layout
#
# `compute` is its arithmetic at the sustained peak of the card, in whole tiles and waves:
# 80 multiprocessors take as long for 81 tiles as for 160. `read`, `written` and `layout`
# are bytes at the bandwidth that the card's kind of memory reaches. The factors depend on
# the kind of kernel and not on the card. `python -m benchmarks.fit_times` fits them, with
# few parameters, to what others measured and writes `kernel_times.json`, which also says
# how far off steps of models and cards were that the fit had not seen. Where a kind of
# kernel has no data the factor is one of the priors there.
#
# On data-centre cards the factor of compute is no less than what the fastest products and
# attention kernels took when others timed them on the tensor cores of such a card
# (`devices/cards.toml`).
#
# An example: 128 x 128 outputs make 2 tiles of 128 x 64, and a card with 40 multiprocessors
# uses 2 of them, so such a product takes 20 times as long as its flops at the peak.
#
# Left out: heat. Overlap of operators, and the host that a card waits for: `overlap.py`.

FILE = "kernel_times.json"
# Tiles of cuBLAS kernels, as their names give them, rows and columns of the result.
TILES = ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (32, 32), (16, 64),
         (64, 16), (16, 16))  # fmt: skip
# A tile loads rows + columns numbers for rows * columns multiply-adds, so small ones reach less:
# 1 / (1 + TILE_LOADS * (1 / rows + 1 / columns)); and it fills and empties its pipeline, as long
# as TILE_START steps of the inner size take. Values from 1 to 6 and from 10 to 35 fit the cards of
# operator_ms.csv equally well.
TILE_LOADS, TILE_START = 2.0, 24.0
SPLITS = (1, 2, 4, 8, 16, 32)  # of the inner size over tiles, where there are few tiles
LEAST_SPLIT = 256  # of the inner size that is left to each

LEAST_SHARE = 0.05  # of a step's time; less is not mentioned
VOLTA = (7, 0)  # delivers 1.22 times as large a share of its bandwidth as Pascal (white paper)


@dataclass(frozen=True, slots=True)
class Factors:
    """How many times its ideal a kind of kernel takes."""

    compute: float = 1.0
    memory: float = 1.0
    written: float = 1.0
    layout: float = 1.0


class Ideal(NamedTuple):
    """The seconds of a part on a card, before factors."""

    compute: float
    read: float
    written: float
    layout: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorTable:
    """What `kernel_times.json` holds.

    Attributes:
        reach: share of the bandwidth that streaming kernels reach, "high" and "low" (see `reach`).
        joules_per_flop: of fp32 at 16 nm, that a board must have to work at its boost clock.
        groups: factors by kind of kernel.
        formats: number formats of the data of each kind; empty if there were none.
        cards: names of the cards whose whole steps are in the data.
        operator_cards: of those whose single operators are.
        doubt: half-widths that cover 90 %, and how many steps they come from.
    """

    reach: dict[str, float]
    joules_per_flop: float
    groups: dict[str, Factors]
    formats: dict[str, tuple[str, ...]]
    cards: tuple[str, ...]
    operator_cards: tuple[str, ...]
    doubt: dict[str, Any]


@functools.cache
def table() -> FactorTable:
    """Return what the fit has written."""
    found = json.loads(resources.files("memlab.cost_model").joinpath(FILE).read_text())
    return FactorTable(
        reach=found["reach"],
        joules_per_flop=found["joules_per_flop"],
        groups={name: Factors(**group["factors"]) for name, group in found["groups"].items()},
        formats={name: tuple(group["formats"]) for name, group in found["groups"].items()},
        cards=tuple(found["cards"]["steps"]),
        operator_cards=tuple(found["cards"]["operators"]),
        doubt=found["doubt"],
    )


def group_of(part: KernelPart, dtype: torch.dtype | None, card: Card) -> str:
    """Return the kind of kernel with its number format, where the data tell formats apart.

    Convolutions that CUDA cores do, for want of tensor cores for the format, are of their own.
    """
    rate = FORMATS.get(dtype or torch.float32, "tf32") + "_flops_per_second"
    if part.group == "convolution" and dtype != torch.float64 and getattr(card, rate) is None:
        return "convolution_winograd" if part.can_be_winograd else "convolution_fp32"
    is_half = dtype is not None and dtype.itemsize <= 2  # int8 is multiplied by the same cores
    if part.group in ("stream", "product"):
        return f"{part.group}_{'half' if is_half else 'fp32'}"
    return "attention" if part.group == "attention_backward" else part.group


def is_measured(group: str, dtype: torch.dtype | None) -> bool:
    """Return whether the fit has seen this kind of kernel in this number format."""
    return str(dtype).removeprefix("torch.") in table().formats[group]


def half_width_of(part: KernelPart, dtype: torch.dtype | None, card: Card) -> float:
    """Return the relative half-width that a part adds to that of a step: 0 for most.

    It is wide for what no data are of, and for kernels of which cuDNN has fast and slow ones.
    """
    doubt, group = table().doubt, group_of(part, dtype, card)
    widths = [0.0]
    if part.flops and not is_measured(group, dtype):
        widths.append(doubt["unmeasured"]["half_width"])
    if group in doubt["erratic"]["groups"]:
        widths.append(doubt["erratic"]["half_width"])
    return float(max(widths))


def time_and_draw(
    part: KernelPart, dtype: torch.dtype | None, card: Card, peak: float | None
) -> tuple[float, power.DrawnBy]:
    """Return the seconds of a part on a card whose peak for its format is given, and its draw."""
    found = table()
    ideal = ideal_of(part, card, peak, found.reach, found.joules_per_flop)
    factors = found.groups[group_of(part, dtype, card)]
    least = least_factor(part, card, peak)
    factors = replace(factors, compute=max(factors.compute, least))
    seconds, moved = (float(combined(ideal, f)) for f in (factors, replace(factors, compute=0.0)))
    if part.group == "other_product":
        return seconds, power.DrawnBy.RECURRENT
    return seconds, power.DrawnBy.COMPUTE if seconds > moved else power.DrawnBy.MEMORY


def least_factor(part: KernelPart, card: Card, peak: float | None) -> float:
    """Return the factor of compute with which a part takes no less than the fastest of its kind.

    0 where none was timed on such a card, and on its CUDA cores, which are known by their peak.
    """
    is_on_tensor_cores = peak is not None and peak > (card.fp32_flops_per_second or 0.0)
    if card.reached is None or not is_on_tensor_cores:
        return 0.0
    if part.group == "attention":
        return 1 / card.reached.attention_share
    if part.group == "attention_backward":
        return 1 / card.reached.attention_backward_share
    if part.product is not None:
        return least_of_products(card)
    return 1 / card.reached.product_share


@functools.cache
def least_of_products(card: Card) -> float:
    """Return the same for products in whole tiles: with it the timed one takes what it took."""
    assert card.reached is not None
    rows, columns, inner = card.reached.product_shape
    flops = whole_tiles((1, rows, columns, inner), card.reached.num_multiprocessors)
    return 2 * rows * columns * inner / flops / card.reached.product_share


def combined(ideal: Ideal, factors: Factors) -> Any:
    """Return the seconds of an ideal, which may be of arrays, with these factors."""
    memory = factors.memory * ideal.read + factors.written * ideal.written
    return np.maximum(factors.compute * ideal.compute, memory) + factors.layout * ideal.layout


def ideal_of(
    part: KernelPart,
    card: Card,
    peak: float | None,
    reach: dict[str, float],
    joules_per_flop: float,
) -> Ideal:
    """Return the seconds of a part on a card before factors.

    Args:
        part: what a kernel does.
        card: with a known bandwidth.
        peak: operations per second of the part's number format; None if it is not known.
        reach: as in `FactorTable`.
        joules_per_flop: as in `FactorTable`.
    """
    assert card.memory_bytes_per_second is not None
    bandwidth = card.memory_bytes_per_second * reach[reach_of(card)]
    if part.group == "batch_norm":
        bandwidth = min(bandwidth, batch_norm.most_bytes_per_second(card) or bandwidth)
    compute = 0.0
    if peak and part.flops:
        flops = part.flops
        if part.product is not None:
            flops = whole_tiles(part.product, card.num_multiprocessors or 1)
        compute = flops / (peak * power.sustained(card, joules_per_flop))
    return Ideal(
        compute=compute,
        read=part.read_bytes / bandwidth,
        written=part.written_bytes / bandwidth,
        layout=part.layout_bytes / bandwidth,
    )


def reach_of(card: Card) -> str:
    """Return "low" for cards whose memory delivers a smaller share of its bandwidth, else "high".

    These are cards before Volta, and GDDR with error correction, which shares its bus.
    """
    is_old = card.compute_capability is not None and card.compute_capability < VOLTA
    return "low" if is_old or card.ecc_in_memory else "high"


@functools.lru_cache(maxsize=2**16)
def whole_tiles(product: Product, num_multiprocessors: int) -> int:
    """Return the flops of a product in whole tiles and waves, of the tile that takes least.

    The time of the slowest multiprocessor, as flops of all of them.
    """
    batch, rows, columns, inner = product
    least = math.inf
    for tile_rows, tile_columns in TILES:
        tiles = batch * -(-rows // tile_rows) * -(-columns // tile_columns)
        each = 2.0 * tile_rows * tile_columns
        each *= 1 + TILE_LOADS * (1 / tile_rows + 1 / tile_columns)
        for split in SPLITS:
            if split > 1 and (tiles * split > num_multiprocessors or inner < LEAST_SPLIT * split):
                break
            waves = -(-tiles * split // num_multiprocessors)
            least = min(least, waves * each * (inner / split + TILE_START))
    return round(least * num_multiprocessors)


def time_half_width(card: Card | None, unsure_share: float) -> float:
    """Return the relative half-width of a predicted step time.

    Three errors that do not depend on one another: of a model that the fit has not seen, of a card
    that it has not seen, and of kinds of kernels and number formats with few or no data.

    Args:
        card: that the step would run on.
        unsure_share: of the step's time, as `StepTime.unsure_seconds` has it.
    """
    doubt = table().doubt
    widths = [doubt["model"]["half_width"], unsure_share]
    if not _is_seen(card):
        widths.append(doubt["card"]["half_width"])
    return math.hypot(*widths)


def time_note(card: Card | None, unsure_share: float, of: str = "The time") -> str:
    """Return a sentence that says where the half-width of a predicted time comes from.

    Args:
        card: as for `time_half_width`.
        unsure_share: as for `time_half_width`.
        of: which time it is.
    """
    doubt = table().doubt
    steps = doubt["model"]["steps"] - doubt["erratic"]["steps"]
    text = (
        f"{of} is stated ± {time_half_width(card, unsure_share):.0%}, from "
        f"{steps} steps of other models in fp16 on an RTX 3090"
    )
    if not _is_seen(card):
        others = set(table().operator_cards) - {card.name if card else ""}
        text += f" and fp32 operators on {len(others)} other cards"
    if unsure_share > LEAST_SHARE:
        text += "; it is wide because there are few or no measurements of some of its kernels"
    return f"{text}."


def _is_seen(card: Card | None) -> bool:
    return card is not None and card.name in table().cards


Outputs = tuple[TensorSpec, ...]

# A kernel takes no less: C++ starts one each 4 us at best (pytorch issue 82793).
LAUNCH_SECONDS = 5e-6
# Copies between pinned memory and a card, as a share of the bus's raw rate. Our choice, for packet
# headers and waiting; not compared with a card yet. Copies from pageable memory reach less.
HOST_EFFICIENCY = 0.78

FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
RNNS = {"_cudnn_rnn", "_cudnn_rnn_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}

NO_KERNEL = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty"}
NO_KERNEL |= {"new_empty_strided", "resize_", "set_", "record_stream", "_local_scalar_dense"}
NO_KERNEL |= {"_unsafe_view"}  # a view whose schema does not say so
NO_KERNEL |= {"wait_tensor"}  # of a collective; streams wait, no kernel runs
NO_KERNEL |= {"record_grad_output_stream"}  # of fully_shard since torch 2.15: nothing on CUDA
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
        busy: seconds of the estimate in which kernels work, by what they draw.
    """

    lower_bound_seconds: float
    estimate_seconds: float
    unsure_seconds: float = 0.0
    busy: power.Busy = power.IDLE


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

    times = [
        _time_of(work_of(signature, outputs), num_kernels, card, tf32_matmul)
        for signature, outputs, num_kernels in calls
    ]
    return StepTime(
        lower_bound_seconds=sum(time.lower_bound_seconds for time in times),
        estimate_seconds=sum(time.estimate_seconds for time in times),
        unsure_seconds=sum(time.unsure_seconds for time in times),
        busy=power.added(time.busy for time in times),
    )


@functools.lru_cache(maxsize=2**14)
def _time_of(work: Work, num_kernels: int, card: Card, tf32_matmul: bool) -> StepTime:
    if work.num_bytes == 0:
        return StepTime(lower_bound_seconds=0.0, estimate_seconds=0.0)

    bound = max(_seconds_of(work, card, tf32_matmul))
    peak = peak_of(work, card, tf32_matmul)
    parts = [time_and_draw(part, work.dtype, card, peak) for part in work.parts]
    busy = max(sum(seconds for seconds, _ in parts), bound)
    estimate = max(busy, LAUNCH_SECONDS * num_kernels)
    width = max((half_width_of(part, work.dtype, card) for part in work.parts), default=0.0)
    return StepTime(
        lower_bound_seconds=bound,
        estimate_seconds=estimate,
        unsure_seconds=width * estimate,
        busy=power.Busy.of(parts).scaled_to(busy),
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
    formats = [tensor.dtype for tensor in _flat(signature[1])]
    floats = [dtype for dtype in formats if dtype.is_floating_point]
    if any(isinstance(arg, torch.dtype) for arg in args):  # narrow factors, added to a wide matrix
        floats.reverse()
    name = func.overloadpacket.__name__
    parts = parts_of(name, signature[1], outputs, num_bytes, flops) if num_bytes else ()
    known = floats or (formats if flops else [])  # a product may be one of int8
    return Work(flops, num_bytes, next(iter(known), None), kind, parts)


def _empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


def _seconds_of(work: Work, card: Card, tf32_matmul: bool) -> tuple[float, float]:
    """Return the seconds of arithmetic and of memory traffic, each at the card's peak."""
    assert card.memory_bytes_per_second is not None
    peak = peak_of(work, card, tf32_matmul) if work.flops else None
    groups = {group_of(part, work.dtype, card) for part in work.parts}
    flops = work.flops / (WINOGRAD_SAVES if "convolution_winograd" in groups else 1)
    return flops / peak if peak else 0.0, work.num_bytes / card.memory_bytes_per_second


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
