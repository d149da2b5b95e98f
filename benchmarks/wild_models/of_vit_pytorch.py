"""vit_pytorch: every class of its modules that is given an image's size or a number of classes."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.wild_models import torchvision_operators
from benchmarks.wild_models.recipe import Recipe, arguments, images

torchvision_operators.declare()

MARKS = {"image_size", "num_classes", "patch_size"}


def names() -> list[str]:
    """Return "module.class"."""
    import vit_pytorch

    found = []
    for part in pkgutil.iter_modules(vit_pytorch.__path__):
        try:
            module = importlib.import_module(f"vit_pytorch.{part.name}")
        except ImportError:  # asks for a package of its own
            continue
        for name, value in vars(module).items():
            own = inspect.isclass(value) and value.__module__ == module.__name__
            if own and issubclass(value, nn.Module) and _is_model(value):
                found.append(f"{part.name}.{name}")
    return found


def recipes(name: str) -> Iterator[Recipe]:
    """Yield it for images of three sizes, for films and for sequences."""
    module, _, class_name = name.partition(".")
    model = getattr(importlib.import_module(f"vit_pytorch.{module}"), class_name)
    for shape in ((3, 64, 64), (3, 128, 128), (3, 224, 224), (3, 8, 64, 64), (3, 64)):
        given = arguments(model, _rules(shape[-1]))
        yield Recipe(build=partial(model, **given), batch=partial(_batch, shape))


def _is_model(value: type[nn.Module]) -> bool:
    return bool(MARKS & set(inspect.signature(value).parameters))


def _rules(size: int) -> dict[str, Any]:
    return {
        "image_size": size, "patch_size": 16 if size > 64 else 8, "num_classes": 10, "dim": 32,
        "depth": 2, "heads": 2, "mlp_dim": 64, "frames": 8, "frame_patch_size": 2,
        "image_patch_size": 8, "spatial_depth": 2, "temporal_depth": 2, "seq_len": size,
        "dim_head": 16, "cls_depth": 1, "num_register_tokens": 2, "max_tokens_per_depth": (16, 8),
        "num_patches": 16, "local_patch_size": 8, "ndim": 2, "input_shape": (size, size),
    }  # fmt: skip


def _batch(shape: tuple[int, ...], n: int) -> tuple[torch.Tensor, ...]:
    return (images(n, size=shape[-1]) if len(shape) == 3 else torch.randn(n, *shape),)
