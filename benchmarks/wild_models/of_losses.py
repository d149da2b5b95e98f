"""Losses: every loss class of torch.nn and of the packages of losses that are installed.

A small layer gives what the loss takes: classes, maps, pairs or triplets of vectors. Each name is
also tried with a teacher, a second layer in the closure of the loss, whose outputs are the target.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.wild_models import torchvision_operators
from benchmarks.wild_models.recipe import Recipe, arguments

torchvision_operators.declare()

MODULES = {
    "torch": "torch.nn",
    "monai": "monai.losses",
    "segmentation": "segmentation_models_pytorch.losses",
    "metric": "pytorch_metric_learning.losses",
}
WIDTH, CLASSES, SIDE = 8, 4, 16
RULES = {
    "num_classes": CLASSES, "n_classes": CLASSES, "embedding_size": CLASSES, "mode": "multiclass",
    "in_features": CLASSES, "cutoffs": [2], "loss": nn.MSELoss(), "spatial_dims": 2,
}  # fmt: skip
Targets = Callable[[int, torch.Tensor], tuple[Any, ...]]  # (n, outputs) -> the loss's arguments


def names() -> list[str]:
    """Return "package/loss" and "teacher/package/loss"."""
    found = []
    for package, module in MODULES.items():
        try:
            given = vars(importlib.import_module(module))
        except ImportError:
            continue
        found += [
            f"{package}/{name}"
            for name, value in given.items()
            if inspect.isclass(value) and issubclass(value, nn.Module) and "Loss" in name
        ]
    return [*found, *(f"teacher/{name}" for name in found)]


def recipes(name: str) -> Iterator[Recipe]:
    """Yield it with each kind of target, the first that plain PyTorch trains counts."""
    *is_taught, package, kind = name.split("/")
    made = getattr(importlib.import_module(MODULES[package]), kind)
    loss = made(**arguments(made, RULES))
    if is_taught:
        for conv in (False, True):
            yield Recipe(build=partial(_layer, conv), batch=partial(_inputs, conv),
                         loss=_taught(loss, _layer(conv)))  # fmt: skip
        return
    for conv, targets in FORMS:
        build = partial(_layer, conv)
        if any(True for _ in loss.parameters()):  # they train with the model
            build = partial(_with, build, loss)
        yield Recipe(build=build, batch=partial(_batch, conv, targets), loss=partial(_loss, loss))


def _layer(conv: bool) -> nn.Module:
    return nn.Conv2d(1, CLASSES, 3, padding=1) if conv else nn.Linear(WIDTH, CLASSES)


def _with(build: Callable[[], nn.Module], loss: nn.Module) -> nn.Module:
    model = build()
    model.add_module("own_loss", loss)
    return model


def _inputs(conv: bool, n: int) -> torch.Tensor:
    return torch.randn(n, 1, SIDE, SIDE) if conv else torch.randn(n, 3, WIDTH)


def _batch(conv: bool, targets: Targets, n: int) -> tuple[Any, ...]:
    """Return inputs, which target is meant, and the target of each sample."""
    x = _inputs(conv, n)
    return (x, *targets(n, x))


def _loss(loss: nn.Module, model: nn.Module, batch: tuple[Any, ...]) -> torch.Tensor:
    x, *targets = batch
    outputs = model(x)
    if outputs.dim() == 3:  # three vectors a sample: as many as the loss takes of them
        first, second, third = outputs.unbind(1)
        pairs = {0: (first, second), 1: (first,), 2: (first, second), 3: (first, second, third)}
        outputs = pairs[int(targets.pop(0)[0, 0])]
    else:
        outputs = (outputs,)
    value = loss(*outputs, *targets)
    return getattr(value, "loss", value).mean()


def _taught(loss: nn.Module, teacher: nn.Module) -> Callable[[nn.Module, Any], torch.Tensor]:
    def compute_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x).sigmoid()
        return loss(model(x), target).mean()

    return compute_loss


def _vectors(number: int, target: Callable[[int], tuple[Any, ...]]) -> Targets:
    """Return targets of vectors; their first says how many vectors the loss takes."""
    return lambda n, x: (torch.full((n, 1), number), *target(n))


FORMS: tuple[tuple[bool, Targets], ...] = (
    (False, _vectors(1, lambda n: (torch.arange(n) % CLASSES,))),
    (False, _vectors(1, lambda n: (torch.randn(n, CLASSES),))),
    (False, _vectors(1, lambda n: (torch.randint(2, (n, CLASSES)).float(),))),
    (False, _vectors(1, lambda n: (torch.randn(n, CLASSES), torch.rand(n, CLASSES) + 0.1))),
    (False, _vectors(2, lambda n: (torch.ones(n),))),
    (False, _vectors(0, lambda n: ())),
    (False, _vectors(3, lambda n: ())),
    (True, lambda n, x: (torch.randint(CLASSES, (n, SIDE, SIDE)),)),
    (True, lambda n, x: (torch.randint(CLASSES, (n, 1, SIDE, SIDE)),)),
    (True, lambda n, x: (torch.randint(2, (n, CLASSES, SIDE, SIDE)).float(),)),
)
