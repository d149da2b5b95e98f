"""A GPT as Megatron-DeepSpeed trained it, in plain PyTorch: for `iteration_times.py`.

A fused kernel is the nearest there is: a softmax without a mask, a product with its bias, dropout
and an addition. With tensor parallelism attention scores have no dropout, which would keep memlab
from dividing attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memlab import Workload

VOCABULARY = 50_257
DROPOUT = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model but for its number of layers, and how ranks train it.

    Attributes:
        hidden: size of a token.
        heads: of the attention.
        sequence: tokens of a sample.
        micro_batch: samples of a rank at a time.
        accumulation: micro-batches of an update.
        tensor: ranks that divide each layer.
        data: groups of such ranks that divide the batch.
    """

    hidden: int
    heads: int
    sequence: int
    micro_batch: int
    accumulation: int
    tensor: int
    data: int


class Layer(nn.Module):
    """A layer of Megatron's GPT; tensors are (sequence, n, hidden)."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(case.hidden), nn.LayerNorm(case.hidden)
        self.attention = Attention(case)
        self.widen = nn.Linear(case.hidden, 4 * case.hidden)
        self.narrow = nn.Linear(4 * case.hidden, case.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of tokens."""
        x = x + functional.dropout(self.attention(self.norm_1(x)), DROPOUT)
        wide = functional.gelu(self.widen(self.norm_2(x)), approximate="tanh")
        return x + functional.dropout(self.narrow(wide), DROPOUT)


class Attention(nn.Module):
    """Attention whose scores are in memory, and which computes all of them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.heads, self.is_divided = case.heads, case.tensor > 1
        width = case.hidden
        if self.is_divided:
            self.query, self.key, self.value = (nn.Linear(width, width) for _ in "qkv")
        else:
            self.all_three = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what each token takes from the others; tensors are (sequence, n, hidden)."""
        query, key, value = (each.permute(1, 2, 0, 3) for each in self.parts(x))
        scores = torch.softmax(
            query @ key.transpose(2, 3), dim=-1
        )  # (n, heads, sequence, sequence)
        if not self.is_divided:
            scores = functional.dropout(scores, DROPOUT)
        mixed = (scores @ value).permute(2, 0, 1, 3)
        made: torch.Tensor = self.project(mixed.flatten(2))
        return made

    def parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return query, key and value, (sequence, n, heads, size) each."""
        if self.is_divided:
            made = [part(x) for part in (self.query, self.key, self.value)]
            return [part.unflatten(-1, (self.heads, -1)) for part in made]
        return self.all_three(x).unflatten(-1, (self.heads, -1)).chunk(3, dim=-1)


class Gpt(nn.Module):
    """The whole model: tokens in, logits out."""

    def __init__(self, case: Case, num_layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, case.hidden)
        self.places = nn.Embedding(case.sequence, case.hidden)
        self.layers = nn.ModuleList(Layer(case) for _ in range(num_layers))
        self.norm = nn.LayerNorm(case.hidden)
        self.head = nn.Linear(case.hidden, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, (n, sequence, vocabulary), of tokens (n, sequence)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = functional.dropout(self.tokens(tokens) + self.places(places), DROPOUT)
        x = x.transpose(0, 1).contiguous()
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x.transpose(0, 1).contiguous()))
        return logits


def workload(case: Case, num_layers: int) -> Workload:
    """Return next-token prediction by such a model."""
    return Workload(
        name=f"gpt of {case.hidden}, {num_layers} layers",
        build_model=partial(Gpt, case, num_layers),
        make_batch=partial(make_batch, case.sequence),
        compute_loss=compute_loss,
    )


def make_batch(sequence: int, num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and the tokens that follow them."""
    tokens = torch.zeros(num_samples, sequence, dtype=torch.int64)
    return tokens, tokens


def compute_loss(model: Any, batch: Any) -> torch.Tensor:
    """Return the cross entropy, computed in fp32."""
    logits = model(batch[0])
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())
