"""What CUDA kernels allocate in addition to their outputs, by rules read in PyTorch's sources.

Fake tensors show the outputs of an operator. The rules here give what its kernel requests from the
caching allocator in addition, in torch 2.11 to 2.15: workspaces of cuBLAS, buffers of cuDNN's RNN,
contiguous copies, partial sums, what NCCL's process group copies. Some operators are written in
terms of others (`CompositeExplicitAutograd`) and have no CUDA kernel of their own: the intermediate
tensors of the losses among them are counted here too.

To add a rule, write a function that takes an operator and returns its `KernelMemory`, and add it to
`RULES`.

Left out: what convolutions take if there is room (`take_workspace`), allocations below 1 MiB,
memory that libraries take without the allocator, and operators from outside of PyTorch, except the
product of bitsandbytes' 4-bit weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import torch

from memlab._util.units import round_up
from memlab.cost_model.roofline import FUSED_ROWS
from memlab.devices.cards import CUBLAS_WORKSPACE_BYTES, Card
from memlab.devices.operators import TensorSpec, tensors_of
from memlab.trace import Phase
from memlab.tracing.assembly import KernelMemory
from memlab.tracing.recording import Operator, OpTrace

CUBLAS = frozenset(
    "aten::" + name for name in ("addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv", "vdot")
)

# ATen/native/cuda/EmbeddingBackwardKernel.cu: NROWS_PER_THREAD, C10_WARP_SIZE, and the number of
# indices from which embedding_dense_backward_cuda sorts them (Embedding.cu).
ROWS_PER_THREAD = 10
WARP = 32
SORTED_FROM = 3073


def effects(recording: OpTrace, card: Card | None) -> list[KernelMemory | None]:
    """Return the memory of each operator's kernel; None if fake tensors show everything.

    Args:
        recording: of a run on the device that stands in for CUDA.
        card: None for a card of unknown architecture.
    """
    found = [_effect(operator, card) for operator in recording.operators]
    workspace = CUBLAS_WORKSPACE_BYTES if card is None else card.cublas_workspace_bytes
    for number in _first_uses(recording):
        found[number] = KernelMemory(kept_bytes=workspace)
    return found


def _first_uses(recording: OpTrace) -> list[int]:
    """Return the operators that create a cuBLAS handle, whose workspace is never freed.

    Each thread has its own handle (CublasHandlePool.cpp), and backward runs in its own thread.
    """
    first: dict[bool, int] = {}
    for number, operator in enumerate(recording.operators):
        if operator.name in CUBLAS and operator.signature is not None:
            is_backward = recording.intervals[operator.interval].phase is Phase.BACKWARD
            first.setdefault(is_backward, number)
    return list(first.values())


def _effect(operator: Operator, card: Card | None) -> KernelMemory | None:
    if operator.signature is None or operator.name not in RULES:
        return None
    return RULES[operator.name](operator, card)


def _layer_norm(operator: Operator, _: Card | None) -> KernelMemory | None:
    """Count copies of non-contiguous inputs (`expect_contiguous` in layer_norm_kernel.cu).

    The kernels of RMS norm are in the same file.
    """
    count = 2 if operator.name.endswith("backward") else 1  # gradient and input, or the input
    size = sum(_copied_bytes(spec) for spec in _arguments(operator)[:count])
    return KernelMemory(workspace_bytes=size) if size else None


def _bce_with_logits(operator: Operator, _: Card | None) -> KernelMemory | None:
    """Count log(sigmoid(x)), and the losses before they are summed.

    Weights of positives take as much, but are gone before the losses are there.
    Source: `binary_cross_entropy_with_logits` in ATen/native/Loss.cpp.
    """
    is_reduced = not operator.outputs[0].shape
    size = _numel(_arguments(operator)[0]) * operator.outputs[0].dtype.itemsize
    return KernelMemory(workspace_bytes=size * (1 + is_reduced))


def _logsumexp(operator: Operator, _: Card | None) -> KernelMemory | None:
    """Count the exponentials, and the maxima that are subtracted before.

    Source: `logsumexp_out_impl` in ATen/native/ReduceOps.cpp.
    """
    sizes = _numel(_arguments(operator)[0]), _numel(operator.outputs[0])
    return KernelMemory(workspace_bytes=sum(sizes) * operator.outputs[0].dtype.itemsize)


def _embedding_backward(operator: Operator, _: Card | None) -> KernelMemory | None:
    """Count sorted indices and sums of parts of segments (embedding_backward_cuda_kernel)."""
    gradient, indices = _arguments(operator)[:2]
    count, width = _numel(indices), gradient.shape[-1]
    if count < SORTED_FROM:
        return None
    num_weights = operator.outputs[0].shape[0]
    most_parts = count // ROWS_PER_THREAD + min(count, num_weights)
    sums = most_parts * (-(-width // WARP) * WARP) * 4  # in fp32, whatever the gradient
    return KernelMemory(workspace_bytes=sums + 4 * count * indices.dtype.itemsize)


def _flash_backward(operator: Operator, _: Card | None) -> KernelMemory | None:
    """Count gradients of queries in fp32, which blocks add to, and those of keys that heads share.

    Source: `mha_bwd` in ATen/native/transformers/cuda/flash_attn/flash_api.cpp, which is that of
    flash_attn (csrc/flash_attn/flash_api.cpp): `dq_accum`, `softmax_d`, `dk_expanded` and
    `dv_expanded`. Deterministic kernels take more.
    """
    query, key = _arguments(operator)[1:3]
    samples, heads, tokens, size = query.shape
    rows = samples * heads * round_up(tokens, 128)
    workspace = rows * 4 * (round_up(size, 32 if size <= 128 else 64) + 1)
    if key.shape[1] != heads:
        workspace += 2 * samples * heads * key.shape[2] * size * key.dtype.itemsize
    return KernelMemory(workspace_bytes=workspace)


def _recurrent(operator: Operator, _: Card | None) -> KernelMemory | None:
    """Count cuDNN's reserve: what backward needs of every step, layer and direction.

    cuDNN does not publish its size. This counts what the arithmetic needs: the gates, and for an
    LSTM also the cell and its tanh.
    """
    assert operator.signature is not None
    args = operator.signature[1]
    x, mode, hidden, layers, train, both = args[0], args[6], args[7], args[9], args[12], args[13]
    if str(getattr(train, "text", train)) != "True":
        return None

    values = {0: 1, 1: 1, 2: 6, 3: 4}[mode]
    directions = 2 if str(getattr(both, "text", both)) == "True" else 1
    steps = x.shape[0] if args[14] else x.shape[0] * x.shape[1]  # packed, or padded
    size = steps * layers * directions * hidden * values * x.dtype.itemsize
    outputs = tuple(map(_bytes, operator.outputs[:3]))
    return KernelMemory(output_bytes=(*outputs, size, 0))


def _four_bit_product(operator: Operator, _: Card | None) -> KernelMemory | None:
    """Count the weight that bitsandbytes dequantizes for a product of many rows, and its scales.

    It dequantizes for more than 1536 rows. Up to 4 rows always use the fused kernel. In between a
    table of cards and shapes decides; here dequantizing is assumed, which takes more.
    Source: `gemm_4bit` in bitsandbytes/backends/cuda/ops.py.
    """
    assert operator.signature is not None
    tensors = _arguments(operator)
    rows, columns = operator.signature[1][2]
    if _numel(tensors[0]) // columns <= FUSED_ROWS:
        return None
    size = rows * columns * tensors[0].dtype.itemsize
    scales = [spec for spec in tensors[2:] if spec.dtype is torch.uint8]  # quantized themselves
    return KernelMemory(workspace_bytes=size + sum(2 * 4 * _numel(spec) for spec in scales))


def _list_of(position: int, operator: Operator, _: Card | None) -> KernelMemory | None:
    """Count the one tensor through which NCCL gathers or scatters a list of tensors of one size.

    Other collectives work on the tensors that they are given. So do those of a single tensor, which
    `fully_shard`, DistributedDataParallel and ZeroRedundancyOptimizer use.
    Source: `newLikeFlat` in `allgather` and `reduce_scatter` of ProcessGroupNCCL.cpp.
    """
    assert operator.signature is not None
    specs = tensors_of(("", operator.signature[1][position], ()))
    if len({spec.shape for spec in specs}) > 1:  # these are sent one by one
        return None
    return KernelMemory(workspace_bytes=sum(spec.nbytes for spec in specs))


def _arguments(operator: Operator) -> list[TensorSpec]:
    assert operator.signature is not None
    _, args, kwargs = operator.signature
    keys = (*args, *(key for _, key in kwargs))
    return [key for key in keys if isinstance(key, TensorSpec)]


def _copied_bytes(spec: TensorSpec) -> int:
    step = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size > 1 and stride != step:
            return _bytes(spec)
        step *= size
    return 0


def _numel(spec: TensorSpec) -> int:
    return math.prod(spec.shape)


def _bytes(spec: TensorSpec) -> int:
    return _numel(spec) * spec.dtype.itemsize


RULES: dict[str, Callable[[Operator, Card | None], KernelMemory | None]] = {
    "aten::native_layer_norm": _layer_norm,
    "aten::native_layer_norm_backward": _layer_norm,
    "aten::_fused_rms_norm": _layer_norm,
    "aten::_fused_rms_norm_backward": _layer_norm,
    "aten::binary_cross_entropy_with_logits": _bce_with_logits,
    "aten::logsumexp": _logsumexp,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_cudnn_rnn": _recurrent,
    "bitsandbytes::gemm_4bit": _four_bit_product,
    "c10d::allgather_": functools.partial(_list_of, 0),
    "c10d::reduce_scatter_": functools.partial(_list_of, 1),
}


# What cuDNN's convolutions may take as workspace: a few hypotheses, since nobody publishes
# it.
#
# PyTorch asks cuDNN's heuristics for plans and allocates the workspace that the first one
# wants (ATen/native/cudnn/Conv_v8.cpp, `benchmark` off). If there is not enough memory, the
# next plan is tried. So a step *needs* no workspace, but *takes* some where there is room,
# and how much depends on plans that nobody outside of NVIDIA knows. What is known:
#
# - On tensor cores cuDNN computes in channels-last. Given contiguous (NCHW) tensors, a plan
#   may copy input, output and weight to that layout: in forward, in backward, or in both.
# - A plan may lay out the patches of a strided layer: R x S values for each output value.
# - 1x1 convolutions are matrix products, and depthwise ones use PyTorch's own kernels.
#
# No rule chooses between these: one that was fitted to six convnets missed others by 45 %.
# Instead a prediction replays the caching allocator with each of them and takes the
# weighted median of the peaks. `benchmarks/calibrate_memory.py` finds the weights, and how
# wrong the median is for models that were left out.

HALF_BYTES = 2
FORWARD, BACKWARD = "aten::convolution", "aten::convolution_backward"


class Workspaces(StrEnum):
    """One hypothesis about what the convolutions of a step take."""

    NONE = "none"
    COPIES_IN_FORWARD = "copies in forward"
    COPIES_IN_BACKWARD = "copies in backward"
    COPIES = "copies in both"
    PATCHES = "patches"


def with_workspaces(
    effects: Sequence[KernelMemory | None],
    operators: Sequence[Operator],
    card: Card | None,
    hypothesis: Workspaces,
) -> list[KernelMemory | None]:
    """Return the memory of each operator's kernel, with what its convolutions take.

    Args:
        effects: of each operator, without any workspace of convolutions.
        operators: of the same recording.
        card: None for a card with tensor cores for every format.
        hypothesis: about the workspaces.
    """
    found = list(effects)
    for number, operator in enumerate(operators):
        if operator.signature is not None and operator.name in (FORWARD, BACKWARD):
            size = _bytes_of(operator, card, hypothesis)
            found[number] = KernelMemory(workspace_bytes=size) if size else None
    return found


def take_workspace(operators: Sequence[Operator], card: Card | None) -> bool:
    """Return whether the hypotheses differ for a step: it has a convolution that may take some."""
    every = (Workspaces.COPIES, Workspaces.PATCHES)
    return any(
        _bytes_of(operator, card, hypothesis) > 0
        for operator in operators
        if operator.signature is not None and operator.name in (FORWARD, BACKWARD)
        for hypothesis in every
    )


def middle(peaks: Mapping[Workspaces, int], weights: Mapping[Workspaces, float]) -> Workspaces:
    """Return the hypothesis whose peak is the weighted median; of equal peaks the first one.

    Args:
        peaks: bytes by hypothesis.
        weights: of each, at least 0, and above 0 for one of them.

    >>> peaks = {Workspaces.NONE: 100, Workspaces.COPIES: 130, Workspaces.PATCHES: 180}
    >>> str(middle(peaks, dict.fromkeys(peaks, 1.0)))
    'copies in both'
    """
    half, sum_so_far = sum(weights[hypothesis] for hypothesis in peaks) / 2, 0.0
    for hypothesis in sorted(peaks, key=lambda hypothesis: peaks[hypothesis]):
        sum_so_far += weights[hypothesis]
        if sum_so_far >= half:
            break
    return hypothesis


def _bytes_of(operator: Operator, card: Card | None, hypothesis: Workspaces) -> int:
    assert operator.signature is not None
    args = operator.signature[1]
    is_backward = operator.name == BACKWARD
    x, weight, stride, groups = (
        (args[1], args[2], args[4], args[9])
        if is_backward
        else (args[0], args[1], args[3], args[8])
    )
    y = args[0] if is_backward else operator.outputs[0]
    channels, window = x.shape[1], math.prod(weight.shape[2:])
    if groups == channels > 1 or window == 1 or _is_channels_last(x, weight):
        return 0
    if hypothesis is Workspaces.PATCHES:
        is_strided = any(step > 1 for step in stride)
        return _bytes(y) * window if is_backward and is_strided and groups == 1 else 0

    copies = (Workspaces.COPIES, Workspaces.COPIES_IN_FORWARD)
    if is_backward:
        copies = (Workspaces.COPIES, Workspaces.COPIES_IN_BACKWARD)
    if hypothesis not in copies or not _has_tensor_cores(x, card):
        return 0
    return _bytes(x) + _bytes(y) + _bytes(weight)


def _has_tensor_cores(x: TensorSpec, card: Card | None) -> bool:
    """Return whether the card multiplies this format on tensor cores: fp32 as TF32 from 8.0 on."""
    if card is None or card.compute_capability is None:
        return True
    return card.compute_capability >= ((7, 0) if x.dtype.itemsize == HALF_BYTES else (8, 0))


def _is_channels_last(*specs: TensorSpec) -> bool:
    return any(len(spec.shape) > 3 and spec.shape[1] > 1 and spec.stride[1] == 1 for spec in specs)
