"""MONAI: every network of `monai.networks.nets`, in two dimensions where it takes a number."""

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.wild_models import torchvision_operators
from benchmarks.wild_models.recipe import Recipe, arguments

torchvision_operators.declare()


def names() -> list[str]:
    """Return the networks, each class once."""
    from monai.networks import nets

    found = {}
    for _, value in sorted(vars(nets).items()):
        if inspect.isclass(value) and issubclass(value, nn.Module):
            found.setdefault(id(value), value.__name__)
    return list(found.values())


def recipes(name: str) -> Iterator[Recipe]:
    """Yield it for images and for volumes."""
    from monai.networks import nets

    network = getattr(nets, name)
    for dims, size in ((2, 32), (3, 32), (2, 64), (3, 64)):
        given = arguments(network, _rules(dims, size))
        channels = given.get("in_channels", 1)
        yield Recipe(
            build=partial(network, **given), batch=partial(_batch, (channels, *[size] * dims))
        )
    for shape in ((16,), (4, 32)):
        yield Recipe(build=partial(network, **arguments(network, _rules(2, 32))),
                     batch=partial(_batch, shape))  # fmt: skip


def _rules(dims: int, size: int) -> dict[str, Any]:
    shape = (size,) * dims
    return {
        "spatial_dims": dims, "dimensions": dims, "in_channels": 1, "out_channels": 2,
        "n_input_channels": 1, "num_classes": 2, "img_size": shape, "input_size": shape,
        "image_size": shape, "in_shape": (1, *shape), "patch_size": 8, "classes": 2,
        "channels": (8, 16, 32), "strides": (2, 2), "init_filters": 8, "init_features": 8,
        "feature_size": 12, "hidden_size": 48, "mlp_dim": 64, "num_layers": 2, "num_heads": 4,
        "growth_rate": 8, "num_channels": (8, 16, 16), "latent_size": 4, "start_shape": (4, 4, 4),
        "kernel_size": 3, "upsample_kernel_size": 2, "num_channel_initial": 8,
        "depth": 2, "out_kernel_initializer": "kaiming_uniform", "out_activation": None,
        "out_shape": (2,), "hidden_channels": (8, 8), "latent_channels": 4, "norm_num_groups": 4,
        "num_channels_d": 8, "num_layers_d": 2, "block": "basic", "layers": (1, 1, 1, 1),
        "block_inplanes": (8, 8, 16, 16), "label_nc": 2, "num_embeddings": 16, "embedding_dim": 8,
        "num_tokens": 32, "max_seq_len": 64, "attn_layers_dim": 32, "attn_layers_depth": 2,
        "attn_layers_heads": 2, "filters": (8, 16, 16),
    }  # fmt: skip


def _batch(shape: tuple[int, ...], n: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(n, *shape),)
