"""The loss of a classifier in chunks: which linear layer is its head, and what refuses it.

The head is what a transformers model calls its output embeddings, else the last `nn.Linear` of the
model. It returns `LazyLogits`, whatever computes the loss: the model itself, or the workload. A
first backward in which no cross entropy was taken of them is refused. See `lazy_logits` for how the
loss and its gradient are computed. Left out: heads of other kinds (a convolution), logits that are
capped or otherwise computed with before the loss, and compiled models.
"""

from collections.abc import Iterator

import torch
from torch import nn

from memlab.errors import UnsupportedError
from memlab.techniques.compiling.compilation import asked_by, is_compiled, without
from memlab.techniques.loss import heads, lazy_logits
from memlab.techniques.loss.heads import find_head
from memlab.techniques.loss.lazy_logits import ChunkedHead
from memlab.techniques.source import ScriptLines, together, whole
from memlab.techniques.technique import Control, Keeps, Refusal, Setup, Technique


def refusals(asked: Setup) -> Iterator[Refusal]:
    """Yield what refuses it: a compiled step."""
    config = asked.config
    if config.loss_chunks > 1 and is_compiled(config):
        yield Refusal(
            why=f"loss_chunks={config.loss_chunks} with {asked_by(config)} is not implemented: a "
            "compiled graph does not trace logits without memory",
            remedies=(without(config), {"loss_chunks": 1}),
        )


def apply(model: nn.Module, num_chunks: int) -> None:
    """Make the head of a model return logits that are never whole, in place.

    Raises:
        UnsupportedError: the model has no linear head.
    """
    path, linear = find_head(model)
    head = ChunkedHead(linear, num_chunks)
    linear.forward = head  # type: ignore[assignment, method-assign]
    _refuse_unused(model, path, head)


def source(asked: Setup) -> ScriptLines:
    """Return what a person would add to a script: the head of their model waits for its loss."""
    config = asked.config
    if config.loss_chunks == 1:
        return ScriptLines()
    lines = (
        "_, head = find_head(model)",
        f"head.forward = ChunkedHead(head, {config.loss_chunks})",
    )
    return together([whole(lazy_logits, heads), ScriptLines(model=lines)])


def _refuse_unused(model: nn.Module, path: str, head: ChunkedHead) -> None:
    """Arrange for UnsupportedError in the first backward if no loss was taken in chunks."""

    def judge(_: torch.Tensor) -> None:
        for hook in hooks:
            hook.remove()
        if not head.was_used:
            raise UnsupportedError(
                f"loss_chunks={head.num_chunks} does nothing: no cross entropy was taken of "
                f"what {path} returns, the last nn.Linear of this model; use loss_chunks=1"
            )

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(judge) for p in trainable]


def says(asked: Setup) -> str:
    """Return what it does now."""
    if (chunks := asked.config.loss_chunks) == 1:
        return ""
    return (
        f"the loss is taken of 1/{chunks} of the tokens at a time, so that logits are never whole; "
        "the head runs once more in backward"
    )


CHUNKED_LOSS = Technique(
    fields=("loss_chunks",),
    keeps=Keeps.ROUNDED,
    examples={"loss chunks": {"loss_chunks": 4}},
    refusals=refusals,
    source=source,
    controls=(
        Control(
            field="loss_chunks",
            label="Loss in",
            named=lambda n: f"loss in {n} chunks" if n > 1 else "loss in one piece",
            offered=(1, 2, 4, 8, 16, 32, 64),
            in_words=lambda n: f"{n} chunks" if n > 1 else "one piece",
        ),
    ),
    says=says,
)
