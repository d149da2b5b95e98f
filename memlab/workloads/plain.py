"""Small models of torch.nn alone, for machines that have nothing but core memlab.

They have the parts that a step's cost consists of: attention, norms, convolutions, matrix products.
The transformer reads Python's own reference as text; the others get noise, since nothing that ships
with Python or PyTorch is a set of images.
"""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memlab.workload import Workload
from memlab.workloads.data import text_batch

NUM_BYTES = 256


class PlainBlock(nn.Module):
    """A block of a transformer: norms before causal attention and before two linear layers."""

    def __init__(self, spec: "PlainTransformer") -> None:
        super().__init__()
        size = spec.hidden_size
        self.num_heads = spec.num_heads
        self.attention_norm, self.norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.query_key_value, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return (n, length, hidden) for the same."""
        query, key, value = self.query_key_value(self.attention_norm(hidden)).chunk(3, -1)
        # (n, length, hidden) -> (n, heads, length, hidden / heads)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                             for part in (query, key, value))  # fmt: skip
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        wide = nn.functional.gelu(self.up(self.norm(hidden)))
        out: torch.Tensor = hidden + self.dropout(self.down(wide))
        return out


class PlainLanguageModel(nn.Module):
    """Embeddings, blocks, a norm and a head."""

    def __init__(self, spec: "PlainTransformer") -> None:
        super().__init__()
        self.tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.positions = nn.Embedding(spec.sequence_length, spec.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(spec) for _ in range(spec.num_layers))
        self.norm = nn.LayerNorm(spec.hidden_size)
        self.head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, (n, length, vocabulary), for (n, length) tokens."""
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainTransformer:
    """Sizes of a transformer; tokens are bytes, so of a larger vocabulary 256 entries are read."""

    num_layers: int = 2
    hidden_size: int = 128
    num_heads: int = 4
    sequence_length: int = 64
    vocab_size: int = NUM_BYTES
    dropout: float = 0.0

    def build(self) -> nn.Module:
        """Return the model, randomly initialised."""
        return PlainLanguageModel(self)

    def workload(self, name: str) -> Workload:
        """Return next-byte prediction with this model."""
        return Workload(
            name=name,
            build_model=self.build,
            make_batch=partial(text_batch, sequence_length=self.sequence_length),
            compute_loss=_loss_of_tokens,
        )


class PlainStage(nn.Module):
    """A convolution that may halve the image, a second one beside a shortcut."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(num_out), nn.BatchNorm2d(num_out)
        self.second = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.relu = nn.ReLU()

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return (n, channels out, size / stride, size / stride) for (n, channels, size, size)."""
        hidden = self.relu(self.first_norm(self.first(pixels)))
        out: torch.Tensor = self.relu(hidden + self.second_norm(self.second(hidden)))
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainConvNet:
    """Sizes of a convolutional network; each stage after the first halves the image."""

    image_size: int = 32
    num_channels: int = 3
    hidden_sizes: tuple[int, ...] = (32, 64, 128)
    num_labels: int = 10
    dropout: float = 0.0

    def build(self) -> nn.Module:
        """Return the model, randomly initialised."""
        sizes = (self.num_channels, *self.hidden_sizes)
        stages = [
            PlainStage(before, after, stride=1 if index == 0 else 2)
            for index, (before, after) in enumerate(itertools.pairwise(sizes))
        ]
        pool, last = [nn.AdaptiveAvgPool2d(1), nn.Flatten()], nn.Linear(sizes[-1], self.num_labels)
        return nn.Sequential(nn.Sequential(*stages), *pool, nn.Dropout(self.dropout), last)

    def workload(self, name: str) -> Workload:
        """Return classification of noise with this model."""
        shape = (self.num_channels, self.image_size, self.image_size)
        return _classification(self, name, shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainMlp:
    """Sizes of linear layers with ReLU between them."""

    num_layers: int = 3
    input_size: int = 256
    hidden_size: int = 512
    num_labels: int = 10
    dropout: float = 0.0

    def build(self) -> nn.Module:
        """Return the model, randomly initialised."""
        sizes = (self.input_size, *[self.hidden_size] * self.num_layers)
        layers = [
            nn.Sequential(nn.Linear(before, after), nn.ReLU(), nn.Dropout(self.dropout))
            for before, after in itertools.pairwise(sizes)
        ]
        return nn.Sequential(nn.Sequential(*layers), nn.Linear(sizes[-1], self.num_labels))

    def workload(self, name: str) -> Workload:
        """Return classification of noise with this model."""
        return _classification(self, name, (self.input_size,))


def _classification(spec: PlainConvNet | PlainMlp, name: str, shape: tuple[int, ...]) -> Workload:
    make_batch = partial(noise_batch, shape=shape, num_labels=spec.num_labels)
    return Workload(
        name=name, build_model=spec.build, make_batch=make_batch, compute_loss=_loss_of_labels
    )


def noise_batch(
    n: int, shape: tuple[int, ...], num_labels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return n samples of noise, (n, *shape) float32, and labels, (n,) int64."""
    return torch.randn(n, *shape), torch.randint(num_labels, (n,))


def _loss_of_tokens(model: nn.Module, batch: Any) -> torch.Tensor:
    tokens, targets = batch
    # (n, length, vocabulary) -> (n * length, vocabulary): every sample has the same number of terms
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _loss_of_labels(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)
