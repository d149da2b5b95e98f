"""Layers of litgpt's fine-tuning of October 2023, in plain PyTorch: 4 bits, LoRA, adapters, norms.

Source: `lit_gpt/{model,lora,adapter,adapter_v2,rmsnorm}.py` of Lightning-AI/litgpt (Apache-2.0),
and `MatMul4Bit` of bitsandbytes 0.41.1 (MIT), read and written anew. What is computed, in which
number format, and what is kept for backward are the same; names and structure are not. What costs
memory besides the products themselves:

- LoRA keeps a copy of its input after dropout, the mask of the dropout, and its output before it is
  scattered into the columns of query and value (`index_copy` keeps its source for backward).
- A product in 4 bits of this version of bitsandbytes keeps its input, though nothing reads it, in
  an attribute: it is freed with the graph, not when backward has passed. And it dequantizes to
  fp16, then casts: two copies of the weight for a moment.
- A trained scale keeps the output that it scales; RMS norms compute in fp32 and keep that.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

LORA_DROPOUT = 0.05
EPSILON = 1e-5


class FourBitProduct(torch.autograd.Function):
    """The product of an input with a weight in 4 bits, as bitsandbytes 0.41.1 has it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """Dequantize the weight, and multiply in the number format of the input."""
        ctx.kept = (x, weight) if ctx.needs_input_grad[0] else (None, None)
        return functional.linear(x, dequantized(weight, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Dequantize the weight once more, and return the gradient of the input."""
        (gradient,) = gradients
        return gradient @ dequantized(ctx.kept[1], gradient.dtype), None, None


def dequantized(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight as it was before it was quantized, in another number format."""
    from bitsandbytes.functional import dequantize_4bit  # late: an extra

    wide: torch.Tensor = dequantize_4bit(weight, weight.quant_state)
    return wide.to(dtype)


class FourBitLinear(nn.Module):
    """A frozen linear layer in NF4, which is quantized from fp16 when it is moved to a device."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, is_double: bool) -> None:
        super().__init__()
        from bitsandbytes.nn import Params4bit  # late: an extra

        weight = torch.empty(outputs, inputs, dtype=torch.float16)
        how = {"compress_statistics": is_double, "quant_type": "nf4", "module": self}
        self.weight: Any = Params4bit(weight, False, **how)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product and the bias."""
        made: torch.Tensor = FourBitProduct.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return made


class LowRankQkv(nn.Module):
    """A layer that makes query, key and value at once, with LoRA on query and value.

    Attributes:
        base: the frozen layer, (width, query + key + value).
        outputs: of the query and of the value.
    """

    def __init__(self, base: nn.Module, width: int, outputs: tuple[int, int], rank: int) -> None:
        super().__init__()
        self.base, self.outputs, self.dropout = base, outputs, nn.Dropout(LORA_DROPOUT)
        self.low_rank_in = nn.Parameter(torch.zeros(2 * rank, width))
        self.low_rank_out = nn.Parameter(torch.zeros(sum(outputs), rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return query, key and value, (n, tokens, all of their columns)."""
        base: torch.Tensor = self.base(x)
        narrow = functional.linear(self.dropout(x), self.low_rank_in).transpose(-2, -1)
        wide = self._widened(narrow, self.low_rank_out.unsqueeze(-1)).transpose(-2, -1)
        return base + 2.0 * self._scattered(wide, base.shape[-1])  # alpha is twice the rank

    def _widened(self, narrow: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.outputs[0] == self.outputs[1]:
            return functional.conv1d(narrow, weight, groups=2)
        parts = zip(narrow.chunk(2, dim=1), weight.split(self.outputs), strict=True)
        return torch.cat([functional.conv1d(*part) for part in parts], dim=1)

    def _scattered(self, wide: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Return the columns of query and value among zeros for the key."""
        query, value = self.outputs
        columns = [*range(query), *range(num_columns - value, num_columns)]
        rows = wide.transpose(0, 1)
        zeros = rows.new_zeros((*rows.shape[:-1], num_columns)).view(-1, num_columns)
        index = torch.tensor(columns, device=zeros.device)
        filled = zeros.index_copy(1, index, rows.reshape(-1, query + value))
        return filled.view(*rows.shape[:-1], num_columns).transpose(0, 1)


class Scaled(nn.Module):
    """A frozen layer whose output is shifted and scaled by what is trained: the second adapter."""

    def __init__(self, base: nn.Module, outputs: int) -> None:
        super().__init__()
        self.base = base
        self.scale, self.shift = (
            nn.Parameter(torch.ones(outputs)),
            nn.Parameter(torch.zeros(outputs)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output, shifted and scaled."""
        scaled: torch.Tensor = self.scale * (self.base(x) + self.shift)
        return scaled


class RmsNorm(nn.Module):
    """RMS norm, computed in fp32 or in the number format of its input."""

    def __init__(self, width: int, *, in_fp32: bool) -> None:
        super().__init__()
        self.weight, self.in_fp32 = nn.Parameter(torch.ones(width)), in_fp32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input over its root mean square."""
        wide = x.float() if self.in_fp32 else x
        squares = torch.mean(wide * wide, dim=-1, keepdim=True)
        return (self.weight * (wide * torch.rsqrt(squares + EPSILON))).to(x.dtype)


def turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Return heads (..., tokens, columns) with rotary embeddings, worked out in fp32."""
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cosines + swapped * sines).to(x.dtype)
