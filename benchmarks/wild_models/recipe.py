"""What a source of models yields, and the rules by which constructors are given arguments."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Loss = Callable[[nn.Module, Any], torch.Tensor]


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the model's own loss where it gives one, else how large its outputs are."""
    outputs = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    own = getattr(outputs, "loss", None)
    if isinstance(own, torch.Tensor):
        return own.mean()

    trained = [t for t in tensors(outputs) if t.requires_grad]
    if not trained:
        raise ValueError("no output depends on a parameter")
    sizes = [(t.abs() if t.is_complex() else t).float().square().mean() for t in trained]
    return torch.stack(sizes).sum()


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How one model is trained.

    Attributes:
        build: returns a new model.
        batch: n -> the arguments of its forward, by name or in order, n samples along dim 0.
        loss: (model, batch) -> a scalar.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Loss = default_loss


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists, mappings and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def arguments(function: Callable[..., Any], rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function takes and the rules name.

    Raises:
        ValueError: it demands one that no rule names.
    """
    given = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in rules:
            given[name] = rules[name]
        elif parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            raise ValueError(f"no rule for the argument {name!r}")
    return given


def images(n: int, channels: int = 3, size: int = 64) -> torch.Tensor:
    """Return n random square images."""
    return torch.randn(n, channels, size, size)
