"""Memory layout: channels last, in which a pixel's channels lie side by side.

Source: PyTorch's tutorial on channels last. A convolution whose weight lies so writes its result
so, and the layers after it follow; kernels that work in this layout (oneDNN, cuDNN in half
precision) then copy nothing into it and back. Gradients are the same up to the order of sums. Left
out: the batch, which the first convolution lays out for itself. Meant for cards: on a CPU in fp32
(torch 2.13, zoo at its small sizes) the peak falls nowhere and a step is up to 1.7 times as slow.
"""

import torch
from torch import nn

from memlab.errors import UnsupportedError
from memlab.techniques.source import ScriptLines
from memlab.techniques.technique import Keeps, Saving, Setup, Technique, switch

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions of a convolution's weight."""

CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def apply(model: nn.Module) -> None:
    """Put the weights of all convolutions over images or volumes in channels last.

    Raises:
        UnsupportedError: there is none.
    """
    found = [module for module in model.modules() if isinstance(module, CONVOLUTIONS)]
    if not found:
        raise UnsupportedError(
            f"channels_last=True does nothing for {type(model).__name__}: it has no convolution "
            "over images (4-D) or volumes (5-D); use channels_last=False"
        )
    for module in found:
        weight = module.weight
        weight.data = weight.data.contiguous(memory_format=FORMATS[weight.ndim])


def source(asked: Setup) -> ScriptLines:
    """Return what a script lays out."""
    if not asked.config.channels_last:
        return ScriptLines()
    kinds = ", ".join(f"torch.nn.{kind.__name__}" for kind in CONVOLUTIONS)
    formats = ", ".join(f"{ndim}: {format_}" for ndim, format_ in FORMATS.items())
    return ScriptLines(
        before=(f"formats = {{{formats}}}",),
        built=(
            "for module in model.modules():",
            f"    if isinstance(module, ({kinds})):",
            "        weight = module.weight",
            "        format = formats[weight.ndim]",
            "        weight.data = weight.data.contiguous(memory_format=format)",
        ),
    )


def says(asked: Setup) -> str:
    """Return what it does now."""
    if not asked.config.channels_last:
        return ""
    if asked.device.type == "cpu":
        return "convolutions channels last: rarely a gain on a CPU"
    return "convolutions channels last: faster in half precision"


CHANNELS_LAST = Technique(
    fields=("channels_last",),
    keeps=Keeps.ROUNDED,
    examples={"channels last": {"channels_last": True}},
    source=source,
    controls=(switch("channels_last", "channels last", "channels last", "channels first"),),
    says=says,
    savings=(
        Saving(
            setting="`channels_last=True`",
            saves="time of convolutions on tensor cores",
            costs="a copy of the weights when the step is built",
            not_for="models without convolutions",
        ),
    ),
)
