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

from collections.abc import Iterator

import torch

from memlab.config import Attention
from memlab.techniques import attention_setting
from memlab.techniques.attention_setting import (
    attention_parts,
    has_attention,
    implementations_of,
    set_attention,
)
from memlab.techniques.source import ScriptLines, together, whole
from memlab.techniques.technique import Control, Keeps, Refusal, Saving, Setup, Technique
from memlab.torch_private.dispatch import are_tensors_fake

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


def refusals(asked: Setup) -> Iterator[Refusal]:
    """Refuse kernels that this device does not have."""
    chosen, card = asked.config.attention, asked.card
    others: tuple[dict[str, Attention], ...] = (
        {"attention": Attention.SDPA},
        {"attention": Attention.AS_BUILT},
    )
    said = f"attention={str(chosen)!r}"
    if chosen in WITHOUT_CPU and asked.device.type == "cpu":
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


def source(asked: Setup) -> ScriptLines:
    """Return the lines of a script that set the attention implementation."""
    chosen = asked.config.attention
    if chosen is Attention.AS_BUILT:
        return ScriptLines()
    lines = ScriptLines(built=(f"set_attention(model, {str(chosen)!r})",))
    return together([whole(attention_setting), lines])


def says(asked: Setup) -> str:
    """Return what it does now."""
    return SAID.get(asked.config.attention, "")


ATTENTION = Technique(
    fields=("attention",),
    keeps=Keeps.ROUNDED,
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
    savings=(
        Saving(
            setting='`attention="sdpa"`',
            saves="attention weights, of models that were built with eager attention",
            not_for=(
                "models that have it already, as most of transformers; classes without it; "
                "`output_attentions=True`"
            ),
        ),
        Saving(
            setting='`attention="flash_attention_2"`',
            saves=(
                "masks and padding: attention over padded batches stays a flash kernel, "
                "where `sdpa` takes another"
            ),
            costs="the package flash_attn; attention in 16 bits",
            not_for="CPUs; cards before Ampere; attention in fp32",
        ),
        Saving(
            setting='`attention="flex_attention"`',
            saves="masks: they are code, and blocks that they leave out are skipped",
            costs="the first step compiles the kernel",
            not_for="CPUs, where it has no backward; cards before Volta; dropout in attention",
        ),
        Saving(
            setting='`attention="eager"`',
            saves="nothing; it is what others are compared with",
            costs="a matrix of tokens x tokens for each head, sample and layer, and its gradient",
        ),
    ),
)
