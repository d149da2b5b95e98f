"""Llama 3.1 as torchtitan trained it at the end of 2024, in plain PyTorch.

Source: torchtitan's files of commit 9dec370 (BSD-3-Clause), read and written anew: what is
computed, in which number format, and which outputs are kept are the same. Weights are fp32;
`fully_shard` gathers them in bf16. Norms compute in fp32. Rotary embeddings are complex numbers.
Key and value heads are repeated for attention. Each block is checkpointed: it keeps the outputs of
attention and of every other matrix product, the first, third, fifth and seventh of its seven
("selective" with the option "op"). The loss is computed of logits in fp32.

Left out: the tokenizer and the data (tokens are zeros).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memlab import Workload

aten = torch.ops.aten
KEPT = frozenset(
    (
        aten.mm.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention.default,
    )
)
ROPE_BASE = 500_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes of a Llama; those of the 8B model are the defaults."""

    width: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    num_key_heads: int = 8
    hidden: int = 14336
    vocabulary: int = 128_256
    sequence: int = 8192


class Norm(nn.Module):
    """RMS norm, computed in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input over its root mean square."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.type_as(x) * self.weight


class Attention(nn.Module):
    """Causal attention whose queries outnumber its keys."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.width // sizes.num_heads
        self.repeats = sizes.num_heads // sizes.num_key_heads
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k = nn.Linear(sizes.width, self.head * sizes.num_key_heads, bias=False)
        self.v = nn.Linear(sizes.width, self.head * sizes.num_key_heads, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Return what each token takes from those before it."""
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, -1, self.head) for part in (self.q, self.k, self.v))
        q, k = turned(q, turns), turned(k, turns)
        k, v = self.repeated(k), self.repeated(v)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, length, -1))

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        """Return each head as often as there are queries for it."""
        batch, length, heads, width = x.shape
        more = x.unsqueeze(3).expand(batch, length, heads, self.repeats, width)
        return more.reshape(batch, length, heads * self.repeats, width)


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return heads with rotary embeddings: pairs of numbers as complex ones, turned."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(3).type_as(x)


class Block(nn.Module):
    """Attention and a gated layer, checkpointed."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(sizes.width), Attention(sizes)
        self.norm = Norm(sizes.width)
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Run the block, and keep only some of its outputs for backward."""
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        made: torch.Tensor = checkpoint(self.run, x, turns, context_fn=contexts, **options)
        return made

    def run(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Return the output of the block."""
        x = x + self.attention(self.attention_norm(x), turns)
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def contexts() -> Any:
    """Return what decides, in one forward of a block, which outputs it keeps."""
    counts = {False: 0, True: 0}  # of matrix products, in the forward and when it is run again

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator is aten.mm.default:
            counts[context.is_recompute] += 1
        is_second = operator is aten.mm.default and counts[context.is_recompute] % 2 == 0
        keeps = operator in KEPT and not is_second
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    """The whole model: tokens in, logits out."""

    turns: torch.Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.register_buffer("turns", turns_of(sizes))
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.num_layers))
        self.norm = Norm(sizes.width)
        self.output = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, sequence, vocabulary)."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


def turns_of(sizes: Sizes) -> torch.Tensor:
    """Return complex numbers of length 1, (sequence, half a head)."""
    head = sizes.width // sizes.num_heads
    rates = ROPE_BASE ** -(torch.arange(0, head, 2) / head)
    angles = torch.outer(torch.arange(sizes.sequence), rates)
    return torch.polar(torch.ones_like(angles), angles)


def workload(sizes: Sizes) -> Workload:
    """Return the training of a Llama on sequences of tokens."""
    return Workload(
        name=f"llama, {sizes.num_layers} layers",
        build_model=functools.partial(Llama, sizes),
        make_batch=batches(sizes.sequence),
        compute_loss=loss_of,
    )


def batches(sequence: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that makes batches of tokens and of the tokens that follow them."""

    def make(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.zeros(n, sequence, dtype=torch.int64) for _ in range(2))

    return make


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """Return the cross entropy of logits in fp32."""
    logits = model(batch[0])
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())
