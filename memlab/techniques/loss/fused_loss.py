"""The loss by a package: find the head, and have a package compute its cross entropy.

The head is found, and its loss taken, as for `loss_chunks`. What each package allocates stands in
its function below. A prediction runs the package itself over fake
tensors, so what it predicts is what the installed version allocates.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from memlab._util.torch_private.tensors import without_modes
from memlab.config import LossKernel, Precision, Sharding
from memlab.errors import UnsupportedError
from memlab.techniques.compilation import asked_by, is_compiled, without
from memlab.techniques.loss.logits import ChunkedHead, find_head, reduced
from memlab.techniques.source import ScriptLines, inlined, together
from memlab.techniques.technique import Control, Equivalence, Refusal, Setup, Technique

# The forward of a linear head whose cross entropy a package computes, without all logits.
#
# As in `logits.py`, the head returns logits without memory. Their cross entropy calls
# a function that takes the hidden states and the weight of the head instead of the logits.
# The functions of the packages follow, one each.
#
# It is plain PyTorch, of which exported scripts contain what they call.

Options = tuple[torch.dtype, int, float]  # the format of the logits, the ignored index, smoothing


class FusedHead(ChunkedHead):
    """The forward of a linear head that waits for its loss.

    Attributes:
        kernel: the name of the function.
        compute: takes the head, hidden states (tokens, features), targets (tokens,), options and
            the reduction, and returns the loss.
    """

    field, off = "loss_kernel", "loss_kernel='as-built'"

    def __init__(self, linear: nn.Linear, kernel: str, compute: Callable[..., Any]) -> None:
        super().__init__(linear, 0)
        self.kernel, self.compute = kernel, compute

    @property
    def asked(self) -> str:
        """The setting as a person writes it."""
        return f"loss_kernel={self.kernel!r}"

    def loss(
        self, hidden: torch.Tensor, target: torch.Tensor, options: Options, reduction: str
    ) -> torch.Tensor:
        """Return the cross entropy of some tokens."""
        if options[0] is torch.float64:
            raise UnsupportedError(f"{self.asked} computes in fp32, not in fp64; use {self.off}")
        loss: torch.Tensor = self.compute(self.linear, hidden, target, options, reduction)
        return loss

    def check(self, is_possible: bool, what: str) -> None:
        """Raise UnsupportedError for what the package does not compute."""
        if not is_possible:
            raise UnsupportedError(f"{self.asked} {what}; use {self.off}")


# Cut cross-entropy (`cut_cross_entropy`): the logits are never in the memory of the card at
# all.
#
# A Triton kernel multiplies blocks of the head and the hidden states, and keeps of each
# token the logarithm of its sum of exponentials. Another one does so again in backward, and
# adds each block to the gradients. Beside these gradients only vectors are allocated:
#
#     log-sum-exp, loss      tokens, in fp32 mean logits, order     classes, in fp32 and as
# integers gradient of hidden     tokens x features, in their format gradient of the head
# classes x features, in the format of the hidden states; then, if it has another, in its
# own too; none if it is frozen
#
# By default it leaves out of the gradients what is smaller than the number format resolves
# (`filter_eps`), so they differ a little from those of the plain loss. Source: the
# package's version 25.1.1, and "Cut Your Losses in Large-Vocabulary Language Models", arXiv
# 2411.09009.
#
# It is plain PyTorch, of which exported scripts contain what they call.

HALF = (torch.bfloat16, torch.float16)


def cut_loss(
    linear: nn.Linear, hidden: torch.Tensor, target: torch.Tensor, options: Options, reduction: str
) -> torch.Tensor:
    """Return the cross entropy of hidden states (tokens, features) and targets (tokens,)."""
    from cut_cross_entropy import linear_cross_entropy

    dtype, ignore_index, smoothing = options
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # as it would be for the head
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    takes_bias = "bias" in inspect.signature(linear_cross_entropy).parameters
    why = ""
    if hidden.dtype not in HALF:
        why = f"takes hidden states in bf16 or fp16, not in {dtype}"
    elif smoothing:
        why = "has no label smoothing"
    elif linear.bias is not None and not takes_bias:
        why = "takes no bias in the version that is installed, and the head has one"
    if why:
        raise UnsupportedError(
            f"loss_kernel='cut': cut cross-entropy {why}; use loss_kernel='as-built'"
        )
    more = {} if linear.bias is None else {"bias": linear.bias}
    loss: torch.Tensor = linear_cross_entropy(
        hidden, linear.weight, target, ignore_index=ignore_index, reduction=reduction, **more
    )
    return loss


# Liger's fused linear cross entropy: `LigerFusedLinearCrossEntropyLoss` of `liger_kernel`.
#
# The forward multiplies the head with a chunk of tokens at a time. A Triton kernel replaces
# the logits of a chunk with their gradient where they lie, and two products make of it the
# gradients of hidden states and head. So backward has nothing left to compute but a factor,
# and what is held between forward and backward are these gradients, not the logits:
#
#     chunk of tokens        next_power_of_2(ceil(tokens / ceil(classes / features))), at
# most tokens logits                 chunk x classes, in the format of the hidden states;
# freed in forward gradient of hidden     tokens x features, in their format gradient of the
# head   classes x features, in its format; none if it is frozen
#
# Source: `liger_kernel/ops/fused_linear_cross_entropy.py`, Liger-Kernel 0.8.5.
#
# It is plain PyTorch, of which exported scripts contain what they call.


def liger_loss(
    linear: nn.Linear, hidden: torch.Tensor, target: torch.Tensor, options: Options, reduction: str
) -> torch.Tensor:
    """Return the cross entropy of hidden states (tokens, features) and targets (tokens,)."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    _, ignore_index, smoothing = options
    compute = LigerFusedLinearCrossEntropyLoss(
        ignore_index=ignore_index, label_smoothing=smoothing, reduction=reduction
    )
    loss: torch.Tensor = compute(linear.weight, hidden, target, linear.bias)
    return loss


# The loss of trl's `SFTTrainer`: `loss_type="nll"`, which was named `"chunked_nll"` before
# trl 1.
#
# The head multiplies tiles of 4096 tokens and 32768 classes. Of each tile the sums of a
# log-softmax are kept, and backward computes it once more. Gradients are summed in fp32:
# that of the head takes 4 bytes a number while backward computes it
# (`trl/kernels/chunked_logprob.py` of trl 1.16).
#
# On a card only tokens with a label are computed, and a Triton kernel turns a tile into its
# gradient where it lies. On a CPU operators of PyTorch do that, in several tensors as large
# as a tile, so that a small vocabulary takes more memory there than the plain loss.
#
# It is plain PyTorch, of which exported scripts contain what they call.

CLASSES_OF_A_TILE = 32768  # `_CHUNKED_LOGPROB_CHUNK_SIZE` of trl.trainer.utils


def trl_loss(
    linear: nn.Linear, hidden: torch.Tensor, target: torch.Tensor, options: Options, reduction: str
) -> torch.Tensor:
    """Return the cross entropy of hidden states (tokens, features) and targets (tokens,)."""
    from trl.kernels import chunked_logprob

    _, ignore_index, smoothing = options
    if smoothing:
        raise UnsupportedError(
            "loss_kernel='chunked-nll': trl's loss has no label smoothing; use "
            "loss_kernel='as-built'"
        )
    counts = target != ignore_index
    on_card = chunked_logprob._use_triton(hidden.device)
    found, *_ = chunked_logprob.ChunkedLogProbFunction.apply(  # type: ignore[no-untyped-call]
        hidden[counts] if on_card else hidden,
        linear.weight,
        linear.bias,
        target[counts] if on_card else target.clamp(min=0),
        1.0,
        CLASSES_OF_A_TILE,
        None,
        1.0,
        ("log_probs",),
    )
    if on_card:
        found = found.new_zeros(counts.shape).masked_scatter(counts, found)
    else:
        found = found.masked_fill(~counts, 0)
    return reduced(-found, counts, reduction)


OFF: dict[str, Any] = {"loss_kernel": LossKernel.AS_BUILT}
IN_CHUNKS: dict[str, Any] = {**OFF, "loss_chunks": 16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """What computes a loss.

    Attributes:
        compute: the function.
        module: that it uses.
        install: what pip installs.
        title: as people name it.
        needs_card: whether it consists of Triton kernels.
        does: a clause on what it computes when.
        gradients: a sentence on how equal they stay.
    """

    compute: Callable[..., torch.Tensor]
    module: str
    install: str
    title: str
    needs_card: bool
    does: str
    gradients: str


PACKAGES: Mapping[LossKernel, Package] = {
    LossKernel.LIGER: Package(
        compute=liger_loss,
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
        compute=trl_loss,
        module="trl.trainer.utils",
        install="'trl>=1.16'",
        title="trl's chunked loss",
        needs_card=False,
        does="computes the logits in tiles of 4096 tokens and 32768 classes, and again in backward",
        gradients="trl's chunked loss sums the gradients of hidden states and head in fp32: in "
        "fp32 they are the plain ones but for rounding, in bf16 and fp16 they are more exact.",
    ),
    LossKernel.CUT: Package(
        compute=cut_loss,
        module="cut_cross_entropy",
        install="cut-cross-entropy",
        title="cut cross-entropy",
        needs_card=True,
        does="computes the logits inside its kernels, in forward and again in backward",
        gradients="Cut cross-entropy leaves out of the gradients what is smaller than its number "
        "format resolves, so they differ a little from those of the plain loss.",
    ),
}


def refusals(setup: Setup) -> Iterator[Refusal]:
    """Refuse settings that a package's loss does not go with, and a package that is missing."""
    config, kernel = setup.config, setup.config.loss_kernel
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
        yield from _of_kernels(setup, said, package)


def _of_kernels(setup: Setup, said: str, package: Package) -> Iterator[Refusal]:
    """Refuse a CPU, where Triton kernels do not run, and number formats that they do not have."""
    config = setup.config
    if setup.device.type == "cpu":
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
    if setup.card is not None and setup.card.is_before_ampere:
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


def source(setup: Setup) -> ScriptLines:
    """Return the lines of a script that replace the head."""
    kernel = setup.config.loss_kernel
    if kernel is LossKernel.AS_BUILT:
        return ScriptLines()

    package = PACKAGES[kernel]
    lines = (
        f"# {package.title} takes the weight of the head, and never holds all logits",
        f'_, head = find_head(model, "{FusedHead.off}")',
        f"head.forward = FusedHead(head, {str(kernel)!r}, {package.compute.__name__})",
    )
    called = inlined(find_head, FusedHead, package.compute)
    return together([called, ScriptLines(model=lines)])


def notes(setup: Setup) -> list[str]:
    """Return how equal the gradients stay."""
    kernel = setup.config.loss_kernel
    return [] if kernel is LossKernel.AS_BUILT else [PACKAGES[kernel].gradients]


def says(setup: Setup) -> str:
    """Return what it does now."""
    kernel = setup.config.loss_kernel
    return "" if kernel is LossKernel.AS_BUILT else PACKAGES[kernel].does


def _by(kernel: LossKernel) -> str:
    return "the workload" if kernel == LossKernel.AS_BUILT else PACKAGES[kernel].title


FUSED_LOSS = Technique(
    fields=("loss_kernel",),
    equivalence=Equivalence.NUMERICAL,
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
)
