"""Evaluation between two steps, as PyTorch loops and transformers' `Trainer` do it.

Each batch is computed without gradients and in the mode of `eval()`: dropout is off, batch norm
uses its running statistics, recomputed modules save nothing. Precision and offloading are those of
the training step. What is kept of a batch: everything that the model returned beside its loss and
its caches, and the labels. A variable of the loop keeps its value until the next batch replaces
it, so the outputs of one batch are still there while the next one is computed. Source:
`evaluation_loop` and `EvalLoopContainer` of transformers 5.

Left out: `metrics` on the host, and labels that are neither an entry "labels" of the batch nor its
last part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memlab.errors import UnsupportedError
from memlab.stages.run_settings import Evaluation, EvaluationOutputs
from memlab.step import Step, own_batch
from memlab.techniques import precision
from memlab.techniques.batch_tensors import moved
from memlab.torch_private import pytree
from memlab.trace import Mark, Phase

END = -1  # the number of what comes after the last batch or token
CACHES = ("past_key_values", "mems", "cache_params")


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation without gradients; afterwards each module is as it was."""
    was = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in was:
            module.training = training


@contextlib.contextmanager
def in_forward(step: Step) -> Iterator[None]:
    """Run a forward pass in the precision of a step, with its offloaded weights."""
    with (
        step.run_in(),
        precision.matrix_products(step.config.precision),
        precision.autocast(step.config, step.device),
        step.offloader or contextlib.nullcontext(),
    ):
        yield


def evaluate(step: Step, settings: Evaluation, num_batches: int, mark: Mark) -> None:
    """Evaluate the first batches of an evaluation set; nothing of it remains.

    Raises:
        UnsupportedError: outputs are to be kept, and there are none.
    """
    found: list[Any] = []
    hook = None
    if settings.keeps:
        hook = step.run_model.register_forward_hook(lambda _, __, out: found.append(out))
    kept: Any = None
    total: Any = 0.0
    try:
        with evaluating(step.model):
            for index in range(num_batches):
                mark(Phase.DATA, index)
                made = step.workload.make_batch(settings.batch_size)
                batch = own_batch(made, step.config, step.device)
                batch = batch if step.device.type == "cpu" else moved(batch, step.device)
                del made

                mark(Phase.FORWARD, index)
                with in_forward(step):
                    loss = step.workload.compute_loss(step.run_model, batch)
                total = total + loss.detach()
                if settings.keeps:
                    outputs = _outputs(found.pop(), step.model, batch)
                    kept = _joined(kept, outputs, settings.keep_outputs)
                del loss
            mark(Phase.TEARDOWN, END)
    finally:
        if hook is not None:
            hook.remove()


def _joined(kept: Any, outputs: list[torch.Tensor], how: EvaluationOutputs) -> Any:
    """Return what is kept after another batch."""
    if how is EvaluationOutputs.LIST:
        return [*(kept or []), outputs]
    if kept is None:
        return outputs
    # all of them: the old ones live until the whole list has been made
    return [torch.cat((old, new), dim=0) for old, new in zip(kept, outputs, strict=True)]


def _outputs(out: Any, model: nn.Module, batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output that an evaluation keeps, and the labels.

    Raises:
        UnsupportedError: the model returns nothing beside its loss.
    """
    if isinstance(out, Mapping):
        config = getattr(model, "config", None)
        ignored = getattr(config, "keys_to_ignore_at_inference", None) or CACHES
        out = [value for name, value in out.items() if name not in (*ignored, "loss")]
    leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    found = [leaf.detach() for leaf in leaves if leaf.ndim]
    if not found:
        raise UnsupportedError(
            f"keep_outputs: {type(model).__name__} returns its loss alone, so there are no outputs "
            "to keep; use keep_outputs='none'"
        )
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(batch, tuple | list) and len(batch) > 1:
        labels = batch[-1]
    return [*found, labels.detach()] if isinstance(labels, torch.Tensor) else found
