"""The pieces of plain PyTorch whose peaks were measured on real cards, by the names in the data.

Source: `benchmark/scripts` of the repository linkedin/Liger-Kernel (BSD-2-Clause, (c) 2024 LinkedIn
Corporation), whose plain PyTorch side is rebuilt here. What is made before the loop over turns and
what inside it decides what is alive at the peak. Parameters' and inputs' gradients stay and are
added to, except for rotary embedding, whose gradients are returned and dropped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Given = Mapping[str, Any]
Outputs = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One piece of PyTorch on its device, to be run several times.

    Attributes:
        forward: returns its outputs, which die at the end of a turn.
        backward: takes them.
        kept: what else is alive beside them.
    """

    forward: Callable[[], Outputs]
    backward: Callable[[Any], None]
    kept: tuple[torch.Tensor, ...] = ()


class SwiGLU(nn.Module):
    """Llama's MLP: three linear layers without bias."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        out: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class RMSNorm(nn.Module):
    """Llama's norm, written in Python: it computes in fp32 whatever its input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (tokens, width)."""
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


class AddRMSNorm(RMSNorm):
    """The sum of a residual stream, then its norm; the sum is returned too."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take and return (tokens, width)."""
        dtype = x.dtype
        x = x.to(torch.float32)
        residual = residual.to(torch.float32)
        x = x + residual
        residual = x
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype), residual.to(dtype)


def dtype_of(given: Given) -> torch.dtype:
    """Return the number format that a config names, as "torch.bfloat16"."""
    found: torch.dtype = getattr(torch, given["dtype"].removeprefix("torch."))
    return found


def _keeping(y: torch.Tensor, gradient: torch.Tensor | None) -> None:
    torch.autograd.backward(y, gradient, retain_graph=True)


def _cross_entropy(given: Given, device: torch.device) -> Kernel:
    rows, classes = given["B"] * given["T"], given["V"]
    x = torch.randn(rows, classes, device=device, requires_grad=True)
    labels = torch.randint(classes, (rows, 1), device=device).squeeze(1)
    loss = nn.CrossEntropyLoss()
    return Kernel(forward=lambda: loss(x, labels), backward=lambda y: y.backward())


def _fused_linear_cross_entropy(given: Given, device: torch.device) -> Kernel:
    rows, width, classes = given["BT"], given["H"], given["V"]
    dtype = dtype_of(given)
    head = nn.Linear(width, classes, bias=False, dtype=dtype).to(device)
    x = torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True)
    labels = torch.randint(classes, (rows, 1), device=device).squeeze(1)
    loss = nn.CrossEntropyLoss()
    return Kernel(forward=lambda: loss(head(x), labels), backward=lambda y: y.backward())


def _layer_norm(given: Given, device: torch.device) -> Kernel:
    dtype = dtype_of(given)
    x = torch.randn(given["M"], given["N"], dtype=dtype, device=device)
    norm = nn.LayerNorm(given["N"], eps=given["eps"]).to(device)
    gradient = torch.randn_like(x)
    x.requires_grad_()
    return Kernel(forward=lambda: norm(x), backward=lambda y: _keeping(y, gradient))


def _rms_norm(given: Given, device: torch.device) -> Kernel:
    x = torch.randn(given["M"], given["H"], dtype=dtype_of(given), device=device)
    norm = RMSNorm(given["H"], given["eps"]).to(device)
    gradient = torch.randn_like(x)
    x.requires_grad_()
    return Kernel(forward=lambda: norm(x), backward=lambda y: _keeping(y, gradient))


def _fused_add_rms_norm(given: Given, device: torch.device) -> Kernel:
    shape, dtype = (given["M"], given["H"]), dtype_of(given)
    norm = AddRMSNorm(given["H"], given["eps"]).to(device)
    x, residual, *gradients = (torch.randn(shape, dtype=dtype, device=device) for _ in range(4))
    x.requires_grad_()
    residual.requires_grad_()
    return Kernel(
        forward=lambda: norm(x, residual),
        backward=lambda outputs: torch.autograd.backward(outputs, gradients),
    )


def _swiglu(given: Given, device: torch.device) -> Kernel:
    width, dtype = given["hidden_size"], dtype_of(given)
    samples = given["B"] if "B" in given else given["bsz"]
    x = torch.randn(samples, given["T"], width, dtype=dtype, device=device, requires_grad=True)
    mlp = SwiGLU(width, given["intermediate_size"]).to(device).to(dtype)
    return Kernel(forward=lambda: mlp(x), backward=lambda y: _keeping(y, torch.randn_like(y)))


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    # the order of the slices is the order in which backward frees their gradients
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def _rope(given: Given, device: torch.device) -> Kernel:
    width = given["H"] if "H" in given else given["hidden_size"]
    tokens = given["T"] if "T" in given else given["seq_len"]
    dtype, size = dtype_of(given), width // given["num_q_heads"]

    def heads(count: int) -> torch.Tensor:
        made = torch.randn(1, tokens, count, size, dtype=dtype, device=device, requires_grad=True)
        return made.transpose(1, 2)

    q, k = heads(given["num_q_heads"]), heads(given["num_kv_heads"])
    gradients = torch.randn_like(q), torch.randn_like(k)
    positions = torch.arange(tokens, device=device, dtype=torch.long).unsqueeze(0)
    frequencies = torch.ones(size // 2, device=device)
    with torch.no_grad():
        angles = (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
        both = torch.cat((angles, angles), dim=-1)
        cos, sin = both.cos().to(dtype), both.sin().to(dtype)
        del angles, both

    def forward() -> Outputs:
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * c + _rotate_half(q) * s, k * c + _rotate_half(k) * s

    def backward(outputs: Any) -> None:
        torch.autograd.grad(outputs, (q, k), gradients, allow_unused=True, retain_graph=True)

    return Kernel(forward=forward, backward=backward, kept=(positions,))


KERNELS: dict[str, Callable[[Given, torch.device], Kernel]] = {
    "cross_entropy": _cross_entropy,
    "fused_linear_cross_entropy": _fused_linear_cross_entropy,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "swiglu": _swiglu,
    "tiled_swiglu": _swiglu,
    "rope": _rope,
}
