"""vector_quantize_pytorch: its quantizers between two layers; most keep state from step to step."""

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.wild_models.recipe import Recipe, arguments, tensors

DIM = 32


def names() -> list[str]:
    """Return the quantizers."""
    import vector_quantize_pytorch as package

    return [
        name
        for name, value in vars(package).items()
        if inspect.isclass(value)
        and issubclass(value, nn.Module)
        and "dim" in inspect.signature(value).parameters
    ]


def recipes(name: str) -> Iterator[Recipe]:
    """Yield it over sequences of vectors."""
    import vector_quantize_pytorch as package

    rules = {
        "dim": DIM, "codebook_size": 16, "num_quantizers": 2, "levels": [4, 4, 4], "groups": 2,
        "num_codebooks": 1, "codebook_dim": 16,
    }  # fmt: skip
    quantizer = getattr(package, name)
    given = {k: v for k, v in arguments(quantizer, rules).items() if k not in ("codebook_dim",)}
    yield Recipe(build=partial(Quantized, quantizer, given), batch=_batch)


class Quantized(nn.Module):
    """A layer, a quantizer, a layer."""

    def __init__(self, quantizer: type[nn.Module], given: dict[str, Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.quantizer = quantizer(**given)

    def forward(self, x: torch.Tensor) -> Any:
        """(n, length, DIM) -> the same, and what else the quantizer returns."""
        outputs = self.quantizer(self.first(x))
        first = next(tensors(outputs))
        return self.last(first), outputs


def _batch(n: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(n, 16, DIM),)
