"""Language models on English text, byte by byte: GPT-2 from transformers, an LSTM from torch.nn."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memlab.workload import Workload
from memlab.workloads.data import text_batch, zoo_import

NUM_BYTES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpt:
    """Sizes of a GPT-2; tokens are bytes, so of a larger vocabulary only 256 entries are read."""

    num_layers: int = 4
    hidden_size: int = 256
    num_heads: int = 8
    sequence_length: int = 128
    vocab_size: int = NUM_BYTES
    dropout: float = 0.0

    def build(self) -> nn.Module:
        """Return transformers' GPT-2 of these sizes, randomly initialised."""
        transformers = zoo_import("transformers")
        model: nn.Module = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=self.num_layers,
                n_embd=self.hidden_size,
                n_head=self.num_heads,
                n_positions=self.sequence_length,
                vocab_size=self.vocab_size,
                resid_pdrop=self.dropout,
                embd_pdrop=self.dropout,
                attn_pdrop=self.dropout,
                bos_token_id=None,
                eos_token_id=None,
                use_cache=False,
            )
        )
        return model

    def workload(self, name: str) -> Workload:
        """Return next-byte prediction with this model."""
        return Workload(
            name=name,
            build_model=self.build,
            make_batch=partial(text_batch, sequence_length=self.sequence_length),
            compute_loss=_transformers_loss,
        )


class LstmLanguageModel(nn.Module):
    """Embedding, LSTM and decoder: bytes (n, length) to logits (n, length, 256)."""

    def __init__(self, hidden_size: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, hidden_size)
        self.lstm = nn.LSTM(hidden_size, hidden_size, num_layers, batch_first=True, dropout=dropout)
        self.decoder = nn.Linear(hidden_size, NUM_BYTES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the byte that follows each."""
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: torch.Tensor = self.decoder(hidden)
        return logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Lstm:
    """Sizes of an LSTM language model over bytes."""

    hidden_size: int = 256
    num_layers: int = 2
    sequence_length: int = 128
    dropout: float = 0.0

    def build(self) -> nn.Module:
        """Return the model, randomly initialised."""
        return LstmLanguageModel(self.hidden_size, self.num_layers, self.dropout)

    def workload(self, name: str) -> Workload:
        """Return next-byte prediction with this model."""
        return Workload(
            name=name,
            build_model=self.build,
            make_batch=partial(text_batch, sequence_length=self.sequence_length),
            compute_loss=_loss,
        )


def _transformers_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    tokens, targets = batch
    return _cross_entropy(model(input_ids=tokens).logits, targets)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    tokens, targets = batch
    return _cross_entropy(model(tokens), targets)


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    # (n, length, vocabulary) -> (n * length, vocabulary): every sample has the same number of terms
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
