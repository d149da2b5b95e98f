"""x_transformers: encoders and decoders, each with one of its options switched on."""

import inspect
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from benchmarks.wild_models.recipe import Recipe

LENGTH, VOCABULARY = 32, 64


def names() -> list[str]:
    """Return "Decoder.option" and "Encoder.option" for every option that is off by default."""
    from x_transformers import x_transformers as package

    found = []
    for prefix, part in (("", "AttentionLayers"), ("attn_", "Attention"), ("ff_", "FeedForward")):
        for name, parameter in inspect.signature(getattr(package, part)).parameters.items():
            if parameter.default is False and not name.startswith(("causal", "cross", "only")):
                found += [f"Decoder.{prefix}{name}", f"Encoder.{prefix}{name}"]
    return found


def recipes(name: str) -> Iterator[Recipe]:
    """Yield two layers of it."""
    yield Recipe(build=partial(_build, *name.split(".")), batch=_batch, loss=_loss)


def _build(kind: str, option: str) -> nn.Module:
    import x_transformers

    layers = getattr(x_transformers, kind)(dim=64, depth=2, heads=2, **{option: True})
    return x_transformers.TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=layers
    )


def _batch(n: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (n, LENGTH))


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
