"""Memory layout: channels last, which stores the channels of one pixel side by side.

Source: PyTorch's tutorial on channels last. A convolution whose weight is channels last writes its
output channels last, and the layers after it follow. Kernels that work in this layout (oneDNN,
cuDNN in half precision) then need not convert their inputs and outputs. Gradients are equal up to
the order of sums. Left out: the batch, which the first convolution converts itself.

It is meant for cards. On a CPU in fp32 (torch 2.13, the zoo at its small sizes) it lowered no peak,
and a step took up to 1.7 times as long.
"""

import torch
from torch import nn

from memlab.errors import UnsupportedError
from memlab.techniques.source import ScriptLines
from memlab.techniques.technique import Equivalence, Setup, Technique, switch

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The memory format by the number of dimensions of a convolution's weight."""

CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def apply(model: nn.Module) -> None:
    """Store the weights of all convolutions over images or volumes channels last.

    Raises:
        UnsupportedError: the model has no such convolution.
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


def source(setup: Setup) -> ScriptLines:
    """Return the lines of a script that convert the weights."""
    if not setup.config.channels_last:
        return ScriptLines()

    kinds = ", ".join(f"torch.nn.{kind.__name__}" for kind in CONVOLUTIONS)
    formats = ", ".join(f"{ndim}: {format_}" for ndim, format_ in FORMATS.items())
    return ScriptLines(
        before=(f"formats = {{{formats}}}",),
        built=(
            "# convolutions whose weights are channels last give outputs of that layout",
            "for module in model.modules():",
            f"    if isinstance(module, ({kinds})):",
            "        weight = module.weight",
            "        format = formats[weight.ndim]",
            "        weight.data = weight.data.contiguous(memory_format=format)",
        ),
    )


def says(setup: Setup) -> str:
    """Return what it does now."""
    if not setup.config.channels_last:
        return ""
    if setup.device.type == "cpu":
        return "convolutions use channels last, which rarely helps on a CPU"
    return "convolutions use channels last, which is faster in half precision"


CHANNELS_LAST = Technique(
    fields=("channels_last",),
    equivalence=Equivalence.NUMERICAL,
    examples={"channels last": {"channels_last": True}},
    source=source,
    controls=(switch("channels_last", "channels last layout", "channels last", "channels first"),),
    says=says,
)
