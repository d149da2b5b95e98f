"""Choose the kernel that CUDA would choose, on the device that stands in for it.

There is such a choice for attention, softmax, RNNs and convolutions. Left out: cuDNN attention
(chosen on Hopper in newer versions), and the flat buffer for the weights of a cuDNN RNN. Here each
weight has a block of its own, which differs by rounding only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memlab.recording.stand_in_autocast import cast, lower_dtype, without_autocast
from memlab.torch_private.python_device import convolutions_stored_as

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM = 256  # the largest that flash attention supports (sdp_utils.cpp)


_is_ampere = True  # or newer: compute capability 8.0, which flash attention and bf16 need


@contextlib.contextmanager
def kernels_of(capability: tuple[int, int] | None) -> Iterator[None]:
    """Choose only kernels that a card of this compute capability has."""
    global _is_ampere
    _is_ampere = capability is None or capability >= (8, 0)
    try:
        yield
    finally:
        _is_ampere = True


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
    """Run the kernel that CUDA would choose: flash, memory-efficient, or plain arithmetic.

    Source: the order of priority and the conditions in ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    plain = 4 == query.dim() == key.dim() == value.dim() and query.dtype == key.dtype == value.dtype
    head_dim = query.size(-1)
    is_flash = _is_ampere and torch.backends.cuda.flash_sdp_enabled() and head_dim <= FLASH_HEAD_DIM
    # flash attention has no kernel for masks and none for fp32
    if plain and is_flash and attn_mask is None and query.dtype in HALF:
        return _flash(query, key, value, dropout_p, is_causal, scale)

    # the efficient kernel loads 16 bytes at a time, so heads must be aligned to that
    same_heads = query.size(1) == key.size(1) == value.size(1)
    aligned = head_dim % (4 if query.dtype is torch.float32 else 8) == 0
    has_format = _is_ampere or query.dtype is not torch.bfloat16
    is_efficient = aligned and has_format and torch.backends.cuda.mem_efficient_sdp_enabled()
    if plain and same_heads and is_efficient and query.dtype in (*HALF, torch.float32):
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        run = aten._scaled_dot_product_efficient_attention
        out: torch.Tensor = run(
            query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
        return out

    # this one has no conditions, but it allocates the whole matrix of attention weights
    math = aten._scaled_dot_product_attention_math
    out = math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return out


def _flash(
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
    if length % 16:
        mask = torch.nn.functional.pad(mask, (0, -length % 16))[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def softmax(name: str) -> Callable[..., torch.Tensor]:
    """Return `softmax` or `log_softmax`: CUDA's kernel reads fp16 and writes fp32 by itself.

    Source: `softmax` and `log_softmax` in ATen/native/SoftMax.cpp.
    """
    whole = getattr(aten, f"_{name}")

    def kernel(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        is_widened = x.dtype is torch.float16 and dtype is torch.float32
        given = x if dtype is None or is_widened else x.to(dtype)
        out: torch.Tensor = whole(given, dim, is_widened)
        return out

    return kernel


MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t


def recurrent(name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the kernel of a whole RNN: cuDNN's, over all layers and time steps at once."""

    def kernel(
        x: torch.Tensor,
        hx: Any,
        params: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        rest = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
        return _cudnn_rnn(name, x, hx, params, *rest, [])

    return kernel


def _cudnn_rnn(
    name: str,
    x: torch.Tensor,
    hx: Any,
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    batch_sizes: list[int],
) -> tuple[torch.Tensor, ...]:
    hidden, cell = hx if name == "lstm" else (hx, None)
    size = (hidden if cell is None else cell).size(2)
    projected = hidden.size(2) if hidden.size(2) != size else 0
    stride = (4 if has_biases else 2) + (1 if projected else 0)
    dtype = lower_dtype(x.device.type)

    with without_autocast():
        given = (x, params, hidden, cell)
        x, weights, hx, cx = given if dtype is None else [cast(v, dtype) for v in given]
        no_buffer = torch.empty(0, dtype=x.dtype, device=x.device)
        out, hy, cy, _, _ = aten._cudnn_rnn(
            x, weights, stride, no_buffer, hx, cx, MODES[name], size, projected, num_layers,
            batch_first, dropout, train, bidirectional, batch_sizes, None,
        )  # fmt: skip
    return (out, hy) if cell is None else (out, hy, cy)


def recurrent_on_packed(name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return cuDNN's kernel of a whole RNN over packed sequences, (elements, features)."""

    def kernel(
        x: torch.Tensor,
        batch_sizes: torch.Tensor,
        hx: Any,
        params: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[torch.Tensor, ...]:
        rest = (has_biases, num_layers, dropout, train, bidirectional, False)
        return _cudnn_rnn(name, x, hx, params, *rest, batch_sizes.tolist())

    return kernel


def recurrent_backward(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the gradients of cuDNN's RNN, for which PyTorch has no fake implementation.

    Source: `_cudnn_rnn_backward` in ATen/native/cudnn/RNN.cpp, where the gradients of the weights
    are views of one buffer; here each has its own.
    """
    grad_cx = torch.empty_like(hx if cx is None else cx)
    return torch.empty_like(x), torch.empty_like(hx), grad_cx, [
        torch.empty_like(w) for w in weight
    ]  # fmt: skip


@contextlib.contextmanager
def cudnn_memory_format() -> Iterator[None]:
    """Let convolutions return channels-last where cuDNN would.

    It does so if the input or the weight is channels-last. Source:
    `cudnn_conv_suggest_memory_format` in ATen/native/ConvUtils.h.
    """

    def suggested(x: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
        form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.dim())
        if form is None or x.dtype is torch.float64:
            return torch.contiguous_format
        is_last = any(_is_stored_as(t, form) for t in (x, weight))
        return form if is_last else torch.contiguous_format

    with convolutions_stored_as(suggested):
        yield


def _is_stored_as(tensor: torch.Tensor, form: torch.memory_format) -> bool:
    """Return `suggest_memory_format() == form`; a tensor in both formats counts as contiguous."""
    return tensor.is_contiguous(memory_format=form) and not tensor.is_contiguous()
