"""The attention implementation: which code of transformers computes attention.

Models of transformers look up the function of their attention by a name in their config, so one
model can compute it in several ways, equal but for rounding. What they keep for backward differs:

- `eager`: for each layer the whole matrix of attention weights, (samples, heads, tokens, tokens),
  once before and once after its softmax, and a mask of that size.
- `sdpa`, the usual one: a kernel that PyTorch chooses by format, mask and device. Flash attention
  keeps a number per token and head; the math kernel keeps as much as eager attention.
- `flash_attention_2`: the kernels of the package flash_attn. They leave out padding.
- `flex_attention`: a kernel that torch.compile makes, with masks as code.

Left out: attention implementations of other libraries, and one for each part of a model.
"""

import copy
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import torch

from memlab._util.torch_private.tensors import are_tensors_fake
from memlab.config import Attention
from memlab.errors import UnsupportedError
from memlab.techniques.source import ScriptLines, inlined, together
from memlab.techniques.technique import Control, Equivalence, Refusal, Setup, Technique

# Set the attention implementation of a model of transformers, in all of its parts.
#
# It is plain PyTorch, of which exported scripts contain what they call.

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


MATH_KERNEL = "PyTorch's math kernel"
"""Words of the note that says that `sdpa` holds the whole matrix of attention weights."""

WITHOUT_CPU = {
    Attention.FLASH_ATTENTION_2: "the kernels of flash_attn run on CUDA cards",
    # `_validate_device` of torch/nn/attention/flex_attention.py
    Attention.FLEX_ATTENTION: "PyTorch's flex_attention has no backward there",
}
FLEX_ASSUMED = (
    "attention='flex_attention' is predicted as PyTorch's compiled kernel, by what its source "
    "allocates. Not counted is what the first step takes to compile and to time it, and the split "
    "sums of samples of less than 128 tokens. Masks are taken to have no padding."
)
SAID = {
    Attention.EAGER: "eager attention keeps its weights: tokens x tokens numbers a head",
    Attention.SDPA: "PyTorch chooses the kernel of attention",
    Attention.FLASH_ATTENTION_2: "attention by flash_attn, in 16 bits, without padding",
    Attention.FLEX_ATTENTION: "attention by a compiled kernel of PyTorch",
}


def refusals(setup: Setup) -> Iterator[Refusal]:
    """Refuse kernels that this device does not have."""
    chosen, card = setup.config.attention, setup.card
    others: tuple[dict[str, Attention], ...] = (
        {"attention": Attention.SDPA},
        {"attention": Attention.AS_BUILT},
    )
    said = f"attention={str(chosen)!r}"
    if chosen in WITHOUT_CPU and setup.device.type == "cpu":
        yield Refusal(why=f"{said} cannot train on a CPU: {WITHOUT_CPU[chosen]}", remedies=others)
    if chosen is Attention.FLASH_ATTENTION_2 and card is not None and card.is_before_ampere:
        yield Refusal(
            why=f"{said}: flash_attn has no kernels for {card.title}, which is older than Ampere "
            "(compute capability 8.0)",
            remedies=others,
        )
    if chosen is Attention.FLEX_ATTENTION and card is not None and card.is_before_volta:
        yield Refusal(
            why=f"{said}: torch.compile makes no kernels for {card.title}, which is older than "
            "Volta (compute capability 7.0)",  # "GPUTooOldForTriton" of torch/_inductor/exc.py
            remedies=others,
        )


def apply(model: torch.nn.Module, chosen: Attention) -> list[str]:
    """Set the attention implementation of a model that was just built.

    Returns a note where transformers runs eager attention that nobody has chosen, and on what a
    prediction assumes.

    Raises:
        UnsupportedError: the model does not have this implementation.
    """
    if chosen is Attention.AS_BUILT:
        return _told(model)
    set_attention(model, str(chosen))
    is_assumed = chosen is Attention.FLEX_ATTENTION and are_tensors_fake()
    return [FLEX_ASSUMED] if is_assumed else []


def _told(model: torch.nn.Module) -> list[str]:
    """Say which parts of a model run eager attention since transformers has nothing else."""
    found: dict[str, str] = {}
    for part in attention_parts(model):
        if not has_attention(part) or part.config._attn_implementation != "eager":
            continue
        if "sdpa" not in implementations_of(part):
            found[type(part).__name__] = (
                "transformers has no sdpa for it. Full attention keeps a matrix of tokens x tokens "
                "for each head and layer so; local or linear attention keeps less"
            )
        elif getattr(part.config, "output_attentions", False):
            found[type(part).__name__] = (
                "its config says output_attentions=True, which no other attention can return. It "
                "keeps the weights of each head and layer, tokens x tokens where attention is full"
            )
    return [f"{name} runs eager attention: {why}." for name, why in _without_wrappers(found)]


def _without_wrappers(found: dict[str, str]) -> list[tuple[str, str]]:
    """Return the first of the parts with one reason: a model and its base are one thing."""
    first: dict[str, str] = {}
    for name, why in found.items():
        first.setdefault(why, name)
    return [(name, why) for why, name in first.items()]


def source(setup: Setup) -> ScriptLines:
    """Return the lines of a script that set the attention implementation."""
    chosen = setup.config.attention
    if chosen is Attention.AS_BUILT:
        return ScriptLines()
    lines = ScriptLines(built=(f"set_attention(model, {str(chosen)!r})",))
    return together([inlined(set_attention), lines])


def says(setup: Setup) -> str:
    """Return what it does now."""
    return SAID.get(setup.config.attention, "")


ATTENTION = Technique(
    fields=("attention",),
    equivalence=Equivalence.NUMERICAL,
    refusals=refusals,
    source=source,
    controls=(
        Control(
            field="attention",
            label="Attention",
            named=lambda value: f"attention {value}",
            in_words=lambda value: "as built" if value is Attention.AS_BUILT else str(value),
        ),
    ),
    says=says,
)
