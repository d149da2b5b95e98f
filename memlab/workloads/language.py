"""Language models on English text, byte by byte: from transformers, and an LSTM of torch.nn."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memlab.errors import WorkloadError
from memlab.workload import Workload
from memlab.workloads.data import text_batch, zoo_import

NUM_BYTES = 256
State = tuple[torch.Tensor, torch.Tensor]
"""Hidden and cell state of a layer, (1, n, hidden) each."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama:
    """Sizes of a Llama, by default those of Llama 3.2 1B; tokens are bytes, as in `Gpt`."""

    num_layers: int = 16
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_heads: int = 32
    num_key_value_heads: int = 8
    sequence_length: int = 1024
    vocab_size: int = 128256
    dropout: float = 0.0

    def build(self) -> nn.Module:
        """Return transformers' Llama of these sizes, randomly initialised."""
        transformers = zoo_import("transformers")
        model: nn.Module = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                num_hidden_layers=self.num_layers,
                hidden_size=self.hidden_size,
                intermediate_size=self.intermediate_size,
                num_attention_heads=self.num_heads,
                num_key_value_heads=self.num_key_value_heads,
                max_position_embeddings=self.sequence_length,
                vocab_size=self.vocab_size,
                attention_dropout=self.dropout,
                tie_word_embeddings=True,
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


class LstmLayer(nn.Module):
    """One layer of an LSTM, and dropout after it."""

    def __init__(self, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(hidden_size, hidden_size, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State]:
        """Return the output for a stretch of time, and the state after it."""
        hidden, state = self.lstm(hidden, state)
        return self.dropout(hidden), state


class LstmChunk(nn.Module):
    """The whole model over one stretch of time: bytes and states in, loss and states out.

    It includes logits and loss, because those can need more memory than all layers together.
    """

    def __init__(self, spec: "Lstm") -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(
            LstmLayer(spec.hidden_size, spec.dropout if layer < spec.num_layers - 1 else 0.0)
            for layer in range(spec.num_layers)
        )
        self.decoder = nn.Linear(spec.hidden_size, spec.vocab_size)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, states: Sequence[State | None]
    ) -> tuple[torch.Tensor, list[State]]:
        """Return the sum of the cross entropies of (n, time) tokens, and the layers' states."""
        hidden, after = self.embedding(tokens), []
        for layer, state in zip(self.layers, states, strict=True):
            hidden, state_after = layer(hidden, state)
            after.append(state_after)

        # (n, time, vocabulary) -> (n * time, vocabulary)
        logits = self.decoder(hidden).flatten(0, 1)
        return nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum"), after


class LstmLanguageModel(nn.Module):
    """An LSTM language model that walks over its text in stretches of time.

    One module is called for each stretch. If it is recomputed, memory holds one stretch and the
    states between stretches. A fused `nn.LSTM` over the whole text has no parts to recompute.
    """

    def __init__(self, spec: "Lstm") -> None:
        super().__init__()
        self.chunk_length = spec.chunk_length
        self.chunk = LstmChunk(spec)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of (n, length) tokens against the byte after each."""
        states: Sequence[State | None] = [None] * len(self.chunk.layers)
        losses = []
        for pair in zip(
            tokens.split(self.chunk_length, 1), targets.split(self.chunk_length, 1), strict=True
        ):
            loss, states = self.chunk(*pair, states)
            losses.append(loss)

        return torch.stack(losses).sum() / targets.numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class Lstm:
    """Sizes of an LSTM language model; tokens are bytes, so of a larger vocabulary 256 are read."""

    hidden_size: int = 256
    num_layers: int = 2
    sequence_length: int = 128
    chunk_length: int = 16
    vocab_size: int = NUM_BYTES
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.chunk_length < 1:
            raise WorkloadError(
                f"chunk_length={self.chunk_length}; allowed is an int of at least 1, the steps of "
                "time that are recomputed together"
            )

    def build(self) -> nn.Module:
        """Return the model, randomly initialised."""
        return LstmLanguageModel(self)

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
    logits = model(input_ids=tokens).logits
    # (n, length, vocabulary) -> (n * length, vocabulary): every sample has the same number of terms
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(*batch)
    return loss
