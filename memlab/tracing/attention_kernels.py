"""The kernel that CUDA would choose for attention, and why it is not a better one.

`scaled_dot_product_attention` has three kernels for a card, and takes the first that can do what
is asked: flash attention, memory-efficient attention, and the math kernel, which holds the whole
matrix of attention weights. Which one it was, PyTorch does not say. Here the rules that choose are
the rules that explain: each returns why its kernel cannot run, in the order in which PyTorch asks.

Source: `can_use_flash_attention`, `can_use_mem_efficient_attention` and `select_sdp_backend` in
ATen/native/transformers/cuda/sdp_utils.cpp. Left out: cuDNN attention (chosen on Hopper in newer
versions), nested tensors, pointers that are not aligned.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

import torch

from memlab.devices.cards import AMPERE

aten = torch.ops.aten
OF_TORCH = "scaled_dot_product_attention"
Noting = contextlib.AbstractContextManager[None]
HALF = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM = 256  # the largest that flash attention supports
TRAINED_HEAD_DIM = 192  # the largest that it can always train, on cards with little shared memory
LITTLE_SHARED_MEMORY = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
MASK_ALIGNMENT = 16  # of the last dimension of a mask, for the memory-efficient kernel

_capability: tuple[int, int] | None = None
_note: ContextVar[Callable[[AttentionCall], None] | None] = ContextVar("note", default=None)


class AttentionKernel(StrEnum):
    """The kernels of `scaled_dot_product_attention`, the best first."""

    FLASH = "flash"
    EFFICIENT = "memory-efficient"
    MATH = "math"


@dataclass(frozen=True, slots=True)
class Lack:
    """What a kernel cannot do.

    Attributes:
        what: ends a sentence that begins "there is no such kernel for".
        remedy: what a person may do, as "use precision='bf16-mixed'"; "" for nothing.
        is_usual: whether a person knows it by the number format or the card.
    """

    what: str
    remedy: str = ""
    is_usual: bool = False


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of `scaled_dot_product_attention`.

    Attributes:
        kernel: that it runs.
        without_flash: why it is not flash attention.
        without_efficient: why it is not memory-efficient attention either.
        held_bytes: what the kernel holds of the size tokens x tokens: attention weights, or the
            mask in numbers.
        is_by_sample: whether that is of each sample; if not, of all together.
    """

    kernel: AttentionKernel
    without_flash: Lack | None = None
    without_efficient: Lack | None = None
    held_bytes: int = 0
    is_by_sample: bool = True


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What is asked of attention; queries, keys and values are (samples, heads, tokens, dim)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    is_causal: bool
    enable_gqa: bool

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        return self.query, self.key, self.value

    @property
    def needs_grad(self) -> bool:
        """Whether autograd will ask for a backward (`input_requires_grad`)."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)


@contextlib.contextmanager
def kernels_of(capability: tuple[int, int] | None) -> Iterator[None]:
    """Choose only kernels that a card of this compute capability has; None has all of them."""
    global _capability
    efficient_takes_groups()  # asked before a recording, which would see the question
    _capability = capability
    try:
        yield
    finally:
        _capability = None


@contextlib.contextmanager
def noted_by(note: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Tell a function of each call."""
    before = _note.set(note)
    try:
        yield
    finally:
        _note.reset(before)


def attention_traced(
    note: Callable[[AttentionCall], None],
) -> tuple[Callable[[], Noting], Callable[[torch.fx.GraphModule], Noting]]:
    """Return the contexts of `compiled_inside_of_modes` in which calls are noted once.

    TorchDynamo begins again where it must break a graph, so the last calls before a graph is
    planned are its own; planning runs them again.
    """
    heard: list[AttentionCall] = []

    def planning(graph: torch.fx.GraphModule) -> Noting:
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        nodes = [node for part in parts for node in part.graph.nodes]
        count = sum(getattr(node.target, "__name__", "") == OF_TORCH for node in nodes)
        for call in heard[len(heard) - count :]:
            note(call)
        heard.clear()
        return noted_by(lambda call: None)

    return lambda: noted_by(heard.append), planning


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run the kernel that CUDA would choose: flash, memory-efficient, or plain arithmetic."""
    asked = AttentionInputs(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    call = call_of(asked)
    note = _note.get()
    if note is not None:
        note(call)
    if call.kernel is AttentionKernel.FLASH:
        return flash(query, key, value, dropout_p, is_causal, scale)
    if call.kernel is AttentionKernel.EFFICIENT:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        run = aten._scaled_dot_product_efficient_attention
        out: torch.Tensor = run(
            query, key, value, bias, asked.needs_grad, dropout_p, is_causal, scale=scale
        )[0]
        return out

    math = aten._scaled_dot_product_attention_math
    out = math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return out


def call_of(asked: AttentionInputs) -> AttentionCall:
    """Return which kernel runs, and why no better one does."""
    without_flash = why_not_flash(asked)
    if without_flash is None:
        return AttentionCall(AttentionKernel.FLASH)
    without_efficient = why_not_efficient(asked)
    if without_efficient is None:
        return AttentionCall(AttentionKernel.EFFICIENT, without_flash, None, *_mask_bytes(asked))
    return AttentionCall(
        AttentionKernel.MATH, without_flash, without_efficient, _weight_bytes(asked)
    )


def why_not_flash(asked: AttentionInputs) -> Lack | None:
    """Return what of this flash attention cannot do; None if it runs."""
    query, key, value = asked.tensors
    head_dim = query.size(-1)
    if not torch.backends.cuda.flash_sdp_enabled():
        return Lack("calls while torch.backends.cuda.enable_flash_sdp is off")
    if (lack := _shapes(asked)) is not None:
        return lack
    if asked.mask is not None:
        remedy = "leave the mask out where nothing is padded"
        if query.dtype in HALF and (_capability is None or _capability >= AMPERE):
            remedy += ", or use attention='flash_attention_2', which leaves padding out"
        return Lack("attention with a mask", remedy)
    if not head_dim == key.size(-1) == value.size(-1):
        return Lack(f"values of {value.size(-1)} numbers beside queries of {head_dim}")
    if head_dim > FLASH_HEAD_DIM:
        return Lack(f"heads of {head_dim} numbers, more than {FLASH_HEAD_DIM}")
    if _capability is not None and _capability < AMPERE:
        return Lack("cards older than Ampere", is_usual=True)
    is_trained = head_dim <= TRAINED_HEAD_DIM or (head_dim > 224 and not asked.dropout)
    if asked.needs_grad and _capability in LITTLE_SHARED_MEMORY and not is_trained:
        return Lack(f"training heads of {head_dim} numbers on this card")
    if asked.is_causal and query.size(-2) != key.size(-2):
        return Lack("causal attention over more keys than queries")
    if query.dtype not in HALF:
        remedy = "use precision='bf16-mixed'" if query.dtype is torch.float32 else ""
        return Lack(_name(query), remedy, is_usual=True)
    return _heads(asked, takes_groups=True)


def why_not_efficient(asked: AttentionInputs) -> Lack | None:
    """Return what of this memory-efficient attention cannot do; None if it runs."""
    query, _, value = asked.tensors
    if not torch.backends.cuda.mem_efficient_sdp_enabled():
        return Lack("calls while torch.backends.cuda.enable_mem_efficient_sdp is off")
    if (lack := _shapes(asked)) is not None:
        return lack
    step = _alignment(query)
    for size in (query.size(-1), value.size(-1)):
        if size % step:
            return Lack(f"heads of {size} numbers, which is no multiple of {step}")
    if query.size(-1) != asked.key.size(-1):
        return Lack("queries and keys of different sizes")
    if (lack := _heads(asked, takes_groups=efficient_takes_groups())) is not None:
        return lack
    is_old = _capability is not None and _capability < AMPERE
    formats = (torch.float16, torch.float32) if is_old else (*HALF, torch.float32)
    return None if query.dtype in formats else Lack(_name(query))


def _shapes(asked: AttentionInputs) -> Lack | None:
    query, key, value = asked.tensors
    if not 4 == query.dim() == key.dim() == value.dim():
        return Lack("tensors that do not have 4 dimensions")
    if not query.dtype == key.dtype == value.dtype:
        return Lack("queries, keys and values in different number formats")
    if not query.size(0) == key.size(0) == value.size(0):
        return Lack("queries and keys of different batch sizes")
    return None


def _heads(asked: AttentionInputs, *, takes_groups: bool) -> Lack | None:
    """Return what a kernel lacks for these numbers of heads."""
    heads, of_keys, of_values = (tensor.size(-3) for tensor in asked.tensors)
    if heads == of_keys == of_values:
        return None
    if takes_groups and asked.enable_gqa and of_keys == of_values and not heads % of_keys:
        return None
    return Lack("heads that share keys (enable_gqa)")


def _alignment(query: torch.Tensor) -> int:
    """Return what head sizes must be a multiple of (`minimum_gemm_alignment`)."""
    capability = _capability or AMPERE
    is_half = query.dtype in HALF
    has_tensor_cores = capability >= AMPERE or (capability >= (7, 0) and is_half)
    if has_tensor_cores:
        return 8 if is_half else 4
    return 1


@functools.cache
def efficient_takes_groups() -> bool:
    """Return whether the memory-efficient kernel of this PyTorch takes heads that share keys.

    It does since pull request 191085 of PyTorch. The fake kernel of its backward tells: gradients
    of keys then have as many heads as the keys.
    """
    query, key = (torch.empty(1, heads, 8, 8, device="meta") for heads in (2, 1))
    numbers = torch.empty(1, 2, 32, device="meta")
    of_random = torch.empty((), dtype=torch.long, device="meta")
    backward = aten._scaled_dot_product_efficient_attention_backward
    gradients = backward(
        query, query, key, key, None, query, numbers, of_random, of_random, 0.0,
        [True, True, True, False],
    )  # fmt: skip
    return bool(gradients[1].shape == key.shape)


def _weight_bytes(asked: AttentionInputs) -> int:
    """Return the bytes of a sample's attention weights, which 16 bits compute in fp32.

    Source: `_scaled_dot_product_attention_math` in ATen/native/transformers/attention.cpp.
    """
    query, key, _ = asked.tensors
    heads = query.shape[1:-2].numel()
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    itemsize = query.dtype.itemsize if allowed else max(4, query.dtype.itemsize)
    return heads * query.size(-2) * key.size(-2) * itemsize


def _mask_bytes(asked: AttentionInputs) -> tuple[int, bool]:
    """Return the bytes of the mask that a call makes of its own, and whether of each sample."""
    mask, samples = asked.mask, asked.query.size(0)
    is_padded = mask is not None and bool(mask.size(-1) % MASK_ALIGNMENT)
    if mask is None or (mask.dtype is not torch.bool and not is_padded):
        return 0, True
    itemsize = asked.query.dtype.itemsize if mask.dtype is torch.bool else mask.dtype.itemsize
    rows = mask.numel() // mask.size(-1)
    nbytes = rows * (mask.size(-1) + -mask.size(-1) % MASK_ALIGNMENT) * itemsize
    is_by_sample = mask.dim() == 4 and mask.size(0) == samples
    return (nbytes // samples if is_by_sample else nbytes), is_by_sample


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Run flash attention. Heads are padded to a multiple of 8, as the kernel requires."""
    head_dim = query.size(-1)
    pad = -head_dim % 8
    padded = [torch.nn.functional.pad(t, (0, pad)) if pad else t for t in (query, key, value)]
    run = aten._scaled_dot_product_flash_attention
    out: torch.Tensor = run(*padded, dropout_p, is_causal, False, scale=scale or head_dim**-0.5)[0]
    return out[..., :head_dim] if pad else out


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the mask as the efficient kernel needs it: additive, aligned to 16, for all heads."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(
            mask.logical_not(), -torch.inf
        )

    length = mask.size(-1)
    if length % MASK_ALIGNMENT:
        mask = torch.nn.functional.pad(mask, (0, -length % MASK_ALIGNMENT))[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
