"""segmentation_models_pytorch: every architecture with every encoder, untrained."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.wild_models import torchvision_operators
from benchmarks.wild_models.recipe import Recipe, images

torchvision_operators.declare()


def names() -> list[str]:
    """Return "architecture/encoder"."""
    import segmentation_models_pytorch as smp

    every = smp.MODEL_ARCHITECTURES_MAPPING
    return [f"{name}/{encoder}" for name in every for encoder in smp.encoders.get_encoder_names()]


def recipes(name: str) -> Iterator[Recipe]:
    """Yield it for images of two sizes."""
    import segmentation_models_pytorch as smp

    architecture, encoder = name.split("/")
    for size in (64, 128, 224):
        build = partial(smp.create_model, architecture, encoder, encoder_weights=None, classes=2)
        yield Recipe(build=build, batch=partial(_batch, size))


def _batch(size: int, n: int) -> tuple[torch.Tensor, ...]:
    return (images(n, size=size),)
