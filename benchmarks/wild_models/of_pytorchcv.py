"""pytorchcv: every network of its model provider, untrained."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from benchmarks.wild_models import torchvision_operators
from benchmarks.wild_models.recipe import Recipe, images

torchvision_operators.declare()


def names() -> list[str]:
    """Return the registry."""
    from pytorchcv import model_provider

    return list(model_provider._models)


def recipes(name: str) -> Iterator[Recipe]:
    """Yield it for images of two sizes."""
    for size in (32, 64, 224):
        yield Recipe(build=partial(_build, name, size), batch=partial(_batch, size))


def _build(name: str, size: int) -> nn.Module:
    from pytorchcv.model_provider import get_model

    try:
        return get_model(name, pretrained=False, in_size=(size, size))
    except TypeError:
        return get_model(name, pretrained=False)


def _batch(size: int, n: int) -> tuple[torch.Tensor, ...]:
    return (images(n, size=size),)
