"""Models that nobody here wrote: which packages offer them, and how one of them is trained.

Each `of_*.py` is one package: `names()` lists its registry, and `recipes(name)` yields ways to make
a small model of it with a batch of random numbers, the smallest first. A recipe is derived from
signatures and configurations by rules; no model is known by its name, save where a package has one
constructor argument more. The first recipe that plain PyTorch trains is the one that is tried.
"""

import importlib
import random
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from benchmarks.wild_models.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A package of models.

    Attributes:
        module: of this folder, which knows the package.
        wanted: how many of its models are tried that plain PyTorch trains.
        most_drawn: how many are drawn at most to find these.
    """

    module: str
    wanted: int
    most_drawn: int


SOURCES: dict[str, Source] = {
    "transformers": Source(module="of_transformers", wanted=30, most_drawn=110),
    "timm": Source(module="of_timm", wanted=12, most_drawn=120),
    "torchvision": Source(module="of_torchvision", wanted=9, most_drawn=30),
    "monai": Source(module="of_monai", wanted=10, most_drawn=30),
    "diffusers": Source(module="of_diffusers", wanted=9, most_drawn=40),
    "peft": Source(module="of_peft", wanted=10, most_drawn=36),
    "torch_geometric": Source(module="of_torch_geometric", wanted=10, most_drawn=30),
    "vit_pytorch": Source(module="of_vit_pytorch", wanted=9, most_drawn=24),
    "segmentation_models_pytorch": Source(module="of_segmentation", wanted=6, most_drawn=24),
    "x_transformers": Source(module="of_x_transformers", wanted=6, most_drawn=16),
    "pytorchcv": Source(module="of_pytorchcv", wanted=4, most_drawn=16),
    "zuko": Source(module="of_zuko", wanted=4, most_drawn=10),
    "vector_quantize_pytorch": Source(module="of_vector_quantize", wanted=3, most_drawn=10),
    "torch": Source(module="of_torch", wanted=10, most_drawn=24),
    "losses": Source(module="of_losses", wanted=12, most_drawn=60),
}


def draw(package: str, seed: int) -> list[str]:
    """Return the models of a package in the order in which they are tried.

    A registry that comes in groups ("group/name") is drawn from each group in turn, so that a large
    group does not crowd out the others.

    Raises:
        ImportError: the package is not installed.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(_module(package).names()):
        groups.setdefault(name.partition("/")[0] if "/" in name else "", []).append(name)

    rng = random.Random(f"{seed} {package}")
    for group in groups.values():
        rng.shuffle(group)
    order = list(groups.values())
    rng.shuffle(order)

    turns = [name for turn in zip_longest(*order) for name in turn if name is not None]
    return turns[: SOURCES[package].most_drawn]


def nth_recipe(package: str, name: str, variant: int) -> Recipe:
    """Return one of the ways to make this model, counted from 0.

    It leaves the random numbers as they were, so that the model does not depend on when it is made.

    Raises:
        IndexError: there are fewer ways.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for index, found in enumerate(_module(package).recipes(name)):
            if index == variant:
                way: Recipe = found
                return way
    raise IndexError(f"variant={variant} of {package} {name}; there are fewer")


def _module(package: str) -> Any:
    return importlib.import_module(f"benchmarks.wild_models.{SOURCES[package].module}")
