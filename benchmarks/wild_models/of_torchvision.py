"""torchvision: every model that it lists, untrained."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from benchmarks.wild_models import torchvision_operators
from benchmarks.wild_models.recipe import Recipe, images

torchvision_operators.declare()


def names() -> list[str]:
    """Return all models that are trained on pictures or films as they are.

    Left out are the quantized ones, which are not trained.
    """
    from torchvision import models

    return [name for name in models.list_models() if not name.startswith("quantized")]


def recipes(name: str) -> Iterator[Recipe]:
    """Yield it for small images, for those of ImageNet, and for a short film."""
    for batch in (partial(_images, 64), partial(_images, 224), _film):
        yield Recipe(build=partial(_build, name), batch=batch)


def _build(name: str) -> nn.Module:
    from torchvision import models

    options = {"weights_backbone": None} if "_resnet" in name or "_mobilenet" in name else {}
    return models.get_model(name, weights=None, **options)


def _images(size: int, n: int) -> tuple[torch.Tensor, ...]:
    return (images(n, size=size),)


def _film(n: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(n, 3, 8, 64, 64),)
