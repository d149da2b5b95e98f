"""Set the attention implementation of a model of transformers, in all of its parts.

An exported script contains a copy of this file, so it imports nothing from memlab but an error.
"""

import copy
import importlib.util
import sys
from typing import Any

import torch

from memlab.errors import UnsupportedError

SUPPORT = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}
"""The attribute by which a class of transformers says that it has an implementation."""

SETS = "set_attn_implementation"  # asked of classes: wrappers of peft pass on what they lack


def set_attention(model: torch.nn.Module, implementation: str) -> None:
    """Set the attention implementation in copies of the configs of the model and of its parts.

    Raises:
        UnsupportedError: a part of the model does not have it.
    """
    parts = attention_parts(model)
    asked = f"attention={implementation!r}"
    if not parts:
        raise UnsupportedError(
            f"{asked} does nothing for {type(model).__name__}, which is no model of transformers: "
            "only these have attention implementations to choose from; use attention='as-built'"
        )
    if not any(has_attention(part) for part in parts):
        raise UnsupportedError(
            f"{asked} does nothing for {type(model).__name__}, which has no attention; "
            "use attention='as-built'"
        )
    if implementation == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise UnsupportedError(
            f"{asked} needs the package flash_attn, which is not installed; pip install flash-attn "
            "on the machine with the card, or use attention='sdpa'"
        )

    for part in parts:
        name, allowed = type(part).__name__, implementations_of(part)
        choices = " or ".join(f"attention={each!r}" for each in ["as-built", *allowed])
        if implementation not in allowed:
            raise UnsupportedError(
                f"{asked}: {name} of transformers does not have it; use {choices}"
            )
        if implementation != "eager" and getattr(part.config, "output_attentions", False):
            raise UnsupportedError(
                f"{asked}: the config of {name} says output_attentions=True, and only eager "
                "attention has the weights that it asks for; use attention='eager', or leave "
                "output_attentions out"
            )

    _copy_configs(model)
    for part in _outermost(model):
        if part.config._attn_implementation != implementation or part.config.sub_configs:
            part.set_attn_implementation(implementation)
    for part in parts:
        if (built := part.config._attn_implementation) != implementation:
            raise UnsupportedError(
                f"{asked}: {type(part).__name__} chooses its attention when it is built, here "
                f"{built!r}; use attention='as-built', and give attn_implementation="
                f"{implementation!r} where the model is built"
            )


def attention_parts(model: torch.nn.Module) -> list[Any]:
    """Return the models of transformers in a model, which may be one of them itself."""
    return [module for module in model.modules() if hasattr(type(module), SETS)]


def has_attention(part: torch.nn.Module) -> bool:
    """Return whether a model of transformers has attention: Mamba and convolutions have none.

    Classes of attention have the word in their names, or look their function up in a table. What
    RWKV calls attention is a recurrence without heads.
    """
    config: Any = part.config
    names = {**vars(config), **getattr(config, "attribute_map", {})}
    if not any("head" in name for name in names):
        return False
    return any(
        "Attention" in type(module).__name__
        or hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS")
        for module in part.modules()
    )


def implementations_of(part: Any) -> list[str]:
    """Return the implementations that the class of a model of transformers has."""
    return ["eager", *(name for name, flag in SUPPORT.items() if getattr(part, flag, False))]


def _outermost(model: torch.nn.Module) -> list[Any]:
    """Return the models of transformers that are not part of another one."""
    inner = {
        id(module)
        for part in attention_parts(model)
        for module in part.modules()
        if module is not part
    }
    return [part for part in attention_parts(model) if id(part) not in inner]


def _copy_configs(model: torch.nn.Module) -> None:
    """Give the model configs of its own: others may be built from the same ones."""
    copies: dict[int, object] = {}  # a part often shares its config with the model
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if hasattr(type(value), "_attn_implementation"):
                setattr(module, name, copy.deepcopy(value, copies))
