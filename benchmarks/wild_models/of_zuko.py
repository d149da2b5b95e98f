"""zuko: its normalizing flows, trained by the likelihood of random vectors."""

import inspect
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from benchmarks.wild_models.recipe import Recipe, arguments

FEATURES = 8


def names() -> list[str]:
    """Return the flows that are given a number of features."""
    from zuko import flows

    return [
        name
        for name, value in vars(flows).items()
        if inspect.isclass(value) and "features" in inspect.signature(value).parameters
    ]


def recipes(name: str) -> Iterator[Recipe]:
    """Yield it over eight features."""
    from zuko import flows

    flow = getattr(flows, name)
    given = arguments(flow, {"features": FEATURES, "hidden_features": (32, 32), "components": 4})
    yield Recipe(build=partial(flow, **given), batch=_batch, loss=_loss)


def _batch(n: int) -> torch.Tensor:
    return torch.rand(n, FEATURES)


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return -model().log_prob(batch).mean()
