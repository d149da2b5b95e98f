"""timm: every architecture that it lists, untrained, on small images where it takes them."""

from collections.abc import Iterator
from functools import partial

from torch import nn

from benchmarks.wild_models import torchvision_operators
from benchmarks.wild_models.recipe import Recipe, images

torchvision_operators.declare()

SIZES = (64, 96, 128)


def names() -> list[str]:
    """Return all architectures."""
    import timm

    return list(timm.list_models())


def recipes(name: str) -> Iterator[Recipe]:
    """Yield it for small images, and as it was published."""
    import timm

    settings = timm.get_pretrained_cfg(name)
    own = settings.input_size[-1] if settings is not None else 224
    for size in SIZES:
        yield Recipe(build=partial(_build, name, size), batch=partial(_batch, size))
    yield Recipe(build=partial(_build, name, None), batch=partial(_batch, own))


def _build(name: str, size: int | None) -> nn.Module:
    import timm

    if size is not None:
        try:
            return timm.create_model(name, num_classes=10, img_size=size)
        except TypeError:  # most convolutional networks have no such argument
            pass
    return timm.create_model(name, num_classes=10)


def _batch(size: int, n: int) -> tuple[object, ...]:
    return (images(n, size=size),)
