"""The loss in chunks: find the linear layer that computes the logits (the head), and replace it.

The head is the output embedding of a transformers model, or otherwise the last `nn.Linear`. It
returns `LazyLogits`, whether the model or the workload computes the loss. If no cross entropy has
used them when backward is over, that is an error. `logits.py` says how the loss and its gradient
are computed. Left out: other kinds of heads (a convolution), logits that are capped or changed
before the loss, and compiled models.
"""

from collections.abc import Iterator

from torch import nn

from memlab.errors import UnsupportedError
from memlab.techniques.compilation import asked_by, is_compiled, without
from memlab.techniques.loss.logits import ChunkedHead, find_head
from memlab.techniques.source import ScriptLines, inlined, together
from memlab.techniques.technique import Control, Equivalence, Refusal, Setup, Technique


def refusals(setup: Setup) -> Iterator[Refusal]:
    """Refuse a compiled step."""
    config = setup.config
    if config.loss_chunks > 1 and is_compiled(config):
        yield Refusal(
            why=f"loss_chunks={config.loss_chunks} with {asked_by(config)} is not implemented: "
            "torch.compile cannot trace logits that are computed later",
            remedies=(without(config), {"loss_chunks": 1}),
        )


def apply(model: nn.Module, num_chunks: int) -> ChunkedHead:
    """Make the head of a model return `LazyLogits`, in place; return its new forward.

    Raises:
        UnsupportedError: the model has no linear head.
    """
    _, linear = find_head(model)
    head = ChunkedHead(linear, num_chunks)
    linear.forward = head  # type: ignore[assignment, method-assign]
    return head


def source(setup: Setup) -> ScriptLines:
    """Return the lines of a script that replace the head."""
    config = setup.config
    if config.loss_chunks == 1:
        return ScriptLines()

    lines = (
        "# the logits of a chunk are freed before the next, so that all are never held at once",
        "_, head = find_head(model)",
        f"head.forward = ChunkedHead(head, {config.loss_chunks})",
    )
    return together([inlined(find_head, ChunkedHead), ScriptLines(model=lines)])


def check_used(model: nn.Module, head: ChunkedHead | None) -> None:
    """Raise UnsupportedError after a backward if a head has computed no loss."""
    if head is None or head.was_used:
        return
    path = next(path for path, module in model.named_modules() if module is head.linear)
    raise UnsupportedError(
        f"{head.asked} does nothing: the output of {path}, the last nn.Linear of this model, was "
        f"not used in a cross entropy; use {head.off}"
    )


def says(setup: Setup) -> str:
    """Return what it does now."""
    if (chunks := setup.config.loss_chunks) == 1:
        return ""
    return (
        f"computes the loss on 1/{chunks} of the tokens at a time and never holds all logits; the "
        "last layer runs again in backward"
    )


CHUNKED_LOSS = Technique(
    fields=("loss_chunks",),
    equivalence=Equivalence.NUMERICAL,
    examples={"loss chunks": {"loss_chunks": 4}},
    refusals=refusals,
    source=source,
    controls=(
        Control(
            field="loss_chunks",
            label="Loss computed",
            named=lambda n: f"loss in {n} chunks" if n > 1 else "loss not in chunks",
            offered=(1, 2, 4, 8, 16, 32, 64),
            in_words=lambda n: f"in {n} chunks" if n > 1 else "all at once",
        ),
    ),
    says=says,
)
