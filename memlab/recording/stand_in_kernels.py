"""Choose the kernel that CUDA would choose, on the device that stands in for it.

There is such a choice for softmax, RNNs and convolutions; that for attention is in
`stand_in_attention.py`. Left out: the flat buffer for the weights of a cuDNN RNN. Here each weight
has a block of its own, which differs by rounding only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memlab.recording.stand_in_autocast import cast, lower_dtype, without_autocast
from memlab.torch_private.python_device import convolutions_stored_as

aten = torch.ops.aten


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
