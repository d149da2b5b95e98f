"""The loss by a package: find the head, and have a package compute its cross entropy.

The head is found, and its loss taken, as for `loss_chunks`. What each package allocates stands in
its file: `of_trl.py`, `of_liger.py`, `of_cut.py`. A prediction runs the package itself over fake
tensors, so what it predicts is what the installed version allocates.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn

from memlab.config import LossKernel, Precision, Sharding
from memlab.errors import UnsupportedError
from memlab.techniques.compiling.compilation import asked_by, is_compiled, without
from memlab.techniques.loss import fused_head, heads, lazy_logits, of_cut, of_liger, of_trl
from memlab.techniques.loss.fused_head import FusedHead
from memlab.techniques.loss.heads import find_head
from memlab.techniques.source import ScriptLines, together, whole
from memlab.techniques.technique import Control, Keeps, Refusal, Saving, Setup, Technique
from memlab.torch_private.dispatch import without_modes

OFF: dict[str, Any] = {"loss_kernel": LossKernel.AS_BUILT}
IN_CHUNKS: dict[str, Any] = {**OFF, "loss_chunks": 16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """What computes a loss.

    Attributes:
        file: of memlab, with the function.
        compute: the function.
        module: that it uses.
        install: what pip installs.
        title: as people name it.
        needs_card: whether it consists of Triton kernels.
        does: a clause on what it computes when.
        gradients: a sentence on how equal they stay.
    """

    file: ModuleType
    compute: Callable[..., torch.Tensor]
    module: str
    install: str
    title: str
    needs_card: bool
    does: str
    gradients: str


PACKAGES: Mapping[LossKernel, Package] = {
    LossKernel.LIGER: Package(
        file=of_liger,
        compute=of_liger.liger_loss,
        module="liger_kernel.transformers",
        install="liger-kernel",
        title="Liger's fused linear cross entropy",
        needs_card=True,
        does="computes the logits of a chunk of tokens at a time, with their gradients, in forward",
        gradients="Liger's fused linear cross entropy adds up the gradient of the head over chunks "
        "of tokens, in the format of the head: in bf16 and fp16 it is rounded more often than that "
        "of the plain loss.",
    ),
    LossKernel.CHUNKED_NLL: Package(
        file=of_trl,
        compute=of_trl.trl_loss,
        module="trl.trainer.utils",
        install="'trl>=1.16'",
        title="trl's chunked loss",
        needs_card=False,
        does="computes the logits in tiles of 4096 tokens and 32768 classes, and again in backward",
        gradients="trl's chunked loss sums the gradients of hidden states and head in fp32: in "
        "fp32 they are the plain ones but for rounding, in bf16 and fp16 they are more exact.",
    ),
    LossKernel.CUT: Package(
        file=of_cut,
        compute=of_cut.cut_loss,
        module="cut_cross_entropy",
        install="cut-cross-entropy",
        title="cut cross-entropy",
        needs_card=True,
        does="computes the logits inside its kernels, in forward and again in backward",
        gradients="Cut cross-entropy leaves out of the gradients what is smaller than its number "
        "format resolves, so they differ a little from those of the plain loss.",
    ),
}


def refusals(asked: Setup) -> Iterator[Refusal]:
    """Refuse settings that a package's loss does not go with, and a package that is missing."""
    config, kernel = asked.config, asked.config.loss_kernel
    if kernel is LossKernel.AS_BUILT:
        return

    said, package = f"loss_kernel={str(kernel)!r}", PACKAGES[kernel]
    name = package.module.split(".")[0]
    if find_spec(name) is None:
        yield Refusal(
            why=f"{said} needs {name}, which is not installed",
            remedies=(IN_CHUNKS,),
            otherwise=f"pip install {package.install}",
        )
    if config.loss_chunks > 1:
        yield Refusal(
            why=f"{said} with loss_chunks={config.loss_chunks}: each computes the loss in a way of "
            "its own",
            remedies=({"loss_chunks": 1}, OFF),
        )
    if is_compiled(config):
        yield Refusal(
            why=f"{said} with {asked_by(config)} is not implemented: torch.compile cannot trace "
            "logits that are computed later",
            remedies=(without(config), OFF),
        )
    if config.sharding is not Sharding.NONE:
        yield Refusal(
            why=f"{said} with sharding={str(config.sharding)!r} is not implemented: no ranks have "
            "tried it",
            remedies=(OFF,),
        )
    if package.needs_card:
        yield from _of_kernels(asked, said, package)


def _of_kernels(asked: Setup, said: str, package: Package) -> Iterator[Refusal]:
    """Refuse a CPU, where Triton kernels do not run, and number formats that they do not have."""
    config = asked.config
    if asked.device.type == "cpu":
        yield Refusal(
            why=f"{said} needs a CUDA card: {package.title} consists of Triton kernels, which do "
            "not run on a CPU",
            remedies=({"loss_kernel": LossKernel.CHUNKED_NLL}, IN_CHUNKS),
            otherwise="predict the step for a card",
        )
        return

    if config.loss_kernel is LossKernel.LIGER and config.precision is Precision.FP16_MIXED:
        yield Refusal(
            why=f"{said} with precision='fp16-mixed': Liger computes the gradient of the logits in "
            "forward, before the loss is scaled, so that small ones become zero in fp16",
            remedies=({"precision": Precision.BF16_MIXED}, IN_CHUNKS),
        )
    if config.loss_kernel is not LossKernel.CUT:
        return
    if config.precision in (Precision.FP32, Precision.TF32):
        yield Refusal(
            why=f"{said} with precision={str(config.precision)!r}: it takes hidden states in bf16 "
            "or fp16",
            remedies=({"precision": Precision.BF16_MIXED}, IN_CHUNKS),
        )
    if asked.card is not None and asked.card.is_before_ampere:
        yield Refusal(
            why=f"{said} needs an Ampere card or a newer one",
            remedies=({"loss_kernel": LossKernel.CHUNKED_NLL}, IN_CHUNKS),
        )


def apply(model: nn.Module, kernel: LossKernel) -> FusedHead | None:
    """Make the head of a model return logits without memory, in place; return its new forward.

    None, and nothing changes, if the loss is computed as built.

    Raises:
        UnsupportedError: the model has no linear head, or the package cannot be imported.
    """
    if kernel is LossKernel.AS_BUILT:
        return None

    package = PACKAGES[kernel]
    _, linear = find_head(model, FusedHead.off)
    try:
        with without_modes():  # what a package makes when it is imported is no part of the step
            import_module(package.module)
    except ImportError as error:
        raise UnsupportedError(
            f"loss_kernel={str(kernel)!r}: {package.title} cannot be imported here ({error}); "
            f"pip install {package.install}, or use {FusedHead.off}"
        ) from error
    head = FusedHead(linear, str(kernel), package.compute)
    linear.forward = head  # type: ignore[assignment, method-assign]
    return head


def source(asked: Setup) -> ScriptLines:
    """Return the lines of a script that replace the head."""
    kernel = asked.config.loss_kernel
    if kernel is LossKernel.AS_BUILT:
        return ScriptLines()

    package = PACKAGES[kernel]
    lines = (
        f"# {package.title} takes the weight of the head, and never holds all logits",
        f'_, head = find_head(model, "{FusedHead.off}")',
        f"head.forward = FusedHead(head, {str(kernel)!r}, {package.compute.__name__})",
    )
    files = whole(lazy_logits, heads, fused_head, package.file)
    return together([files, ScriptLines(model=lines)])


def notes(asked: Setup) -> list[str]:
    """Return how equal the gradients stay."""
    kernel = asked.config.loss_kernel
    return [] if kernel is LossKernel.AS_BUILT else [PACKAGES[kernel].gradients]


def says(asked: Setup) -> str:
    """Return what it does now."""
    kernel = asked.config.loss_kernel
    return "" if kernel is LossKernel.AS_BUILT else PACKAGES[kernel].does


def _by(kernel: LossKernel) -> str:
    return "the workload" if kernel == LossKernel.AS_BUILT else PACKAGES[kernel].title


READ_BY_OTHERS = "logits that anything but a cross entropy reads"
FUSED_LOSS = Technique(
    fields=("loss_kernel",),
    keeps=Keeps.ROUNDED,
    refusals=refusals,
    source=source,
    notes=notes,
    controls=(
        Control(
            field="loss_kernel",
            label="Loss computed by",
            named=lambda kernel: f"loss by {_by(kernel)}",
            in_words=lambda kernel: _by(kernel),
        ),
    ),
    says=says,
    savings=(
        Saving(
            setting='`loss_kernel="liger"`',
            saves="the logits, their log-softmax and their gradient, but for a chunk of tokens",
            costs="the gradient of the head is held from forward on",
            not_for=f"a CPU; fp16-mixed; {READ_BY_OTHERS}; `torch.compile`",
        ),
        Saving(
            setting='`loss_kernel="cut"`',
            saves="the logits, their log-softmax and their gradient",
            costs="one more product with the head in backward; small gradients are left out",
            not_for=f"a CPU; fp32; cards before Ampere; {READ_BY_OTHERS}; `torch.compile`",
        ),
        Saving(
            setting='`loss_kernel="chunked-nll"`',
            saves="the logits, their log-softmax and their gradient, but for a tile",
            costs="one more product with the head in backward; the gradient of the head in fp32",
            not_for=f"a CPU (a tile is large); {READ_BY_OTHERS}; label smoothing; `torch.compile`",
        ),
    ),
)
