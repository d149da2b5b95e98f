"""torch.nn: every module that is given sizes, between two layers.

Left out: containers, losses, lazy modules, and those for quantized training.
"""

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.wild_models.recipe import Recipe, arguments, tensors

WIDTH = 16
LEFT_OUT = ("Loss", "List", "Dict", "Sequential", "Module", "Container")


def names() -> list[str]:
    """Return the modules of torch.nn."""
    return [
        name
        for name, value in vars(nn).items()
        if inspect.isclass(value)
        and issubclass(value, nn.Module)
        and not name.endswith(LEFT_OUT)
        and not name.startswith("Lazy")
    ]


def recipes(name: str) -> Iterator[Recipe]:
    """Yield it over vectors, sequences, images and volumes, then with two inputs."""
    module = getattr(nn, name)
    given = arguments(module, _rules())
    for shape in ((WIDTH,), (WIDTH, WIDTH), (WIDTH, WIDTH, WIDTH), (WIDTH, 8, 8, 8)):
        for inputs in (1, 2, 3):
            build = partial(Around, module, given, inputs)
            yield Recipe(build=build, batch=partial(_batch, shape))


class Around(nn.Module):
    """A layer over the first dimension of a sample, the module, and nothing after it."""

    def __init__(self, module: type[nn.Module], given: dict[str, Any], inputs: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.inputs = inputs
        self.module = module(**given)

    def forward(self, x: torch.Tensor) -> Any:
        """(n, WIDTH, ...) -> whatever the module returns."""
        scaled = x * self.scale.view(-1, *[1] * (x.dim() - 2))
        outputs = self.module(*[scaled] * self.inputs)
        return list(tensors(outputs)) if isinstance(outputs, tuple) else outputs


def _rules() -> dict[str, Any]:
    return {
        "in_features": WIDTH, "out_features": WIDTH, "in1_features": WIDTH, "in2_features": WIDTH,
        "in_channels": WIDTH, "out_channels": WIDTH, "kernel_size": 3, "num_features": WIDTH,
        "num_channels": WIDTH, "num_groups": 4, "normalized_shape": WIDTH, "size": 4,
        "input_size": WIDTH, "hidden_size": WIDTH, "embed_dim": WIDTH, "num_heads": 2,
        "d_model": WIDTH, "nhead": 2, "dim_feedforward": WIDTH, "batch_first": True,
        "output_size": 4, "output_ratio": None, "padding": 1, "scale_factor": 2, "groups": 4,
        "upscale_factor": 2, "downscale_factor": 2, "num_embeddings": WIDTH, "embedding_dim": WIDTH,
        "num_encoder_layers": 1, "num_decoder_layers": 1, "num_parameters": 1, "dim": 1,
        "lambd": 0.5, "threshold": 0.1, "value": 0.0, "dilation": 1, "min_val": -1.0,
        "n_classes": WIDTH, "cutoffs": [4, 8], "unflattened_size": (4, 4),
    }  # fmt: skip


def _batch(shape: tuple[int, ...], n: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(n, *shape),)
