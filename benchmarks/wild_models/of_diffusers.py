"""diffusers: its models, with the defaults of their constructors made small.

An input is made by its name in `forward`; a picture is tried first, then a film, then tokens.
"""

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.wild_models import torchvision_operators
from benchmarks.wild_models.recipe import Recipe

torchvision_operators.declare()

WIDTH, TOKENS, HEADS, HEAD_WIDTH = 32, 8, 2, 16
BLOCKS = {"down_block_types": ("Down", "Encoder"), "up_block_types": ("Up", "Decoder")}


def names() -> list[str]:
    """Return the models that have a configuration of their own."""
    from diffusers import models

    found = []
    for name in dir(models):
        value = getattr(models, name, None)
        if (
            inspect.isclass(value)
            and issubclass(value, nn.Module)
            and hasattr(value, "from_config")
        ):
            found.append(name)
    return [n for n in found if n not in ("ModelMixin", "MultiControlNetModel")]


def recipes(name: str) -> Iterator[Recipe]:
    """Yield it for pictures, films, tokens and sound, with small blocks and with its own."""
    from diffusers import models

    model = getattr(models, name)
    for level in (0, 1):
        given = _settings(model, level)
        for shape in ("picture", "film", "tokens", "sound"):
            yield Recipe(build=partial(model, **given), batch=partial(_batch, model, given, shape))


def _settings(model: type[nn.Module], level: int) -> dict[str, Any]:
    """Return the arguments of the constructor that a small model changes."""
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(model.__init__).parameters.items():
        value = parameter.default
        if isinstance(value, bool) or value is parameter.empty:
            continue
        if "num_layers" in name or "num_single_layers" in name or name.endswith("_layers"):
            given[name] = 1 if isinstance(value, int) else value
        elif name in ("num_attention_heads", "num_key_value_heads", "num_kv_heads"):
            given[name] = HEADS
        elif name == "attention_head_dim" and isinstance(value, int):
            given[name] = HEAD_WIDTH if value > 8 else value
        elif name in ("sample_size",) and isinstance(value, int | type(None)):
            given[name] = 16
        elif name in ("norm_num_groups", "num_norm_groups"):
            given[name] = 8
        elif name in ("joint_attention_dim", "cross_attention_dim", "caption_channels",
                      "text_embed_dim", "pooled_projection_dim", "text_dim",
                      "caption_projection_dim",
                      "cross_attention_hidden_dim", "hidden_size", "dim"):  # fmt: skip
            given[name] = WIDTH if isinstance(value, int) else value
        elif name == "axes_dims_rope" and isinstance(value, tuple | list):
            given[name] = (4, 4, 8) if len(value) == 3 else value
        elif "block_out_channels" in name and isinstance(value, tuple | list):
            given[name] = _fewer([16 * min(2, i + 1) for i in range(len(value))], level)
        elif name.endswith("block_types") and isinstance(value, tuple | list):
            given[name] = _fewer(list(value), level)
    return {name: value for name, value in given.items() if value is not None}


def _fewer(values: list[Any], level: int) -> tuple[Any, ...]:
    return tuple(values) if level else (*values[:1], values[-1])[: min(2, len(values))]


def _batch(model: type[nn.Module], given: dict[str, Any], shape: str, n: int) -> dict[str, Any]:
    """Return what `forward` demands, by name."""
    defaults = inspect.signature(model.__init__).parameters

    def setting(*keys: str) -> int:
        for key in keys:
            value = given.get(key, defaults[key].default if key in defaults else None)
            if isinstance(value, int):
                return value
        return WIDTH

    channels = setting("in_channels", "latent_channels")
    sizes = {"picture": (channels, 16, 16), "film": (channels, 4, 16, 16),
             "tokens": (TOKENS, channels), "sound": (channels, 64)}  # fmt: skip
    width = setting("joint_attention_dim", "cross_attention_dim", "caption_channels",
                    "text_embed_dim", "text_dim")  # fmt: skip
    makers = {
        "sample": lambda: torch.randn(n, *sizes[shape]),
        "hidden_states": lambda: torch.randn(n, *sizes[shape]),
        "x": lambda: torch.randn(n, *sizes[shape]),
        "timestep": lambda: torch.randint(1000, (n,)),
        "timesteps": lambda: torch.randint(1000, (n,)),
        "encoder_hidden_states": lambda: torch.randn(n, TOKENS, width),
        "encoder_attention_mask": lambda: torch.ones(n, TOKENS),
        "pooled_projections": lambda: torch.randn(n, setting("pooled_projection_dim")),
        "class_labels": lambda: torch.randint(10, (n,)),
        "guidance": lambda: torch.ones(n),
    }
    asked = inspect.signature(model.forward).parameters.values()
    needed = {p.name for p in asked if p.default is p.empty and p.name != "self"}
    optional = {"timestep", "encoder_hidden_states", "class_labels", "pooled_projections"}
    wanted = [p.name for p in asked if p.name in needed | optional and p.name in makers]
    return {name: makers[name]() for name in wanted}
