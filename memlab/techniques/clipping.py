"""Gradient clipping: if the total norm of all gradients is above a bound, they are scaled down.

Source: `torch.nn.utils.clip_grad_norm_`. The norm is taken once an update, over all micro-batches,
with the loss scale undone. Left out: clipping by value, and by the norm of each parameter alone.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from memlab.techniques.sharding.ranks import is_tensor_parallel
from memlab.techniques.source import UPDATE, ScriptLines, inlined, together
from memlab.techniques.technique import Control, Equivalence, Refusal, Setup, Technique

# Clip gradients by their total norm, also if ranks divide some of the parameters and not
# others.
#
# It is plain PyTorch, of which exported scripts contain what they call.


def clip_gradients(parameters: list[torch.nn.Parameter], max_norm: float) -> None:
    """Scale gradients down to this total norm, in place, if it is larger."""
    alike: dict[Any, list[torch.nn.Parameter]] = {}  # divided over the same ranks, or not at all
    for parameter in parameters:
        alike.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if len(alike) == 1:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return

    norms = []
    for group in alike.values():
        norm: Any = get_total_norm(p.grad for p in group if p.grad is not None)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in alike.values():
        clip_grads_with_norm_(group, max_norm, total)


CLIP = "torch.nn.utils.clip_grad_norm_(parameters, {!r})"
CLIP_DIVIDED = "clip_gradients(parameters, {!r})"
WHY = "# an update is bounded: gradients with a larger total norm are scaled down to it"
UNSCALE = "scaler.unscale_(optimizer)"


def apply(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    """Scale the gradients of an optimizer's parameters down to this total norm, in place."""
    clip_gradients([p for group in optimizer.param_groups for p in group["params"]], max_norm)


def refusals(setup: Setup) -> Iterator[Refusal]:
    """Refuse an optimizer in backward, which frees each gradient before the next is computed."""
    config = setup.config
    if config.max_grad_norm is not None and config.optimizer_in_backward:
        yield Refusal(
            why=f"max_grad_norm={config.max_grad_norm:g} with optimizer_in_backward=True: the "
            "total norm is known only when backward has ended, and each gradient is freed by then",
            remedies=({"optimizer_in_backward": False}, {"max_grad_norm": None}),
        )


def source(setup: Setup) -> ScriptLines:
    """Return the lines of a script that clip before each update."""
    config = setup.config
    if config.max_grad_norm is None or config.is_deepspeed:  # its engine clips by itself
        return ScriptLines()
    is_divided = is_tensor_parallel(config)  # some parameters are DTensors then, and others not
    clip = (CLIP_DIVIDED if is_divided else CLIP).format(config.max_grad_norm)
    has_scaler = config.precision is config.precision.FP16_MIXED
    lines = ScriptLines(update=(*((UNSCALE,) if has_scaler else ()), WHY, clip, UPDATE))
    return together([inlined(clip_gradients), lines]) if is_divided else lines


def says(setup: Setup) -> str:
    """Return what it does now."""
    if (norm := setup.config.max_grad_norm) is None:
        return ""
    return f"gradients whose total norm is above {norm:g} are scaled down to it"


CLIPPING = Technique(
    fields=("max_grad_norm",),
    equivalence=Equivalence.NOT_COMPARED,  # it changes the update on purpose, so both steps clip
    examples={"clipping": {"max_grad_norm": 1.0}},
    refusals=refusals,
    source=source,
    controls=(
        Control(
            field="max_grad_norm",
            label="Clip gradients at",
            named=lambda norm: "no clipping" if norm is None else f"clipped at {norm:g}",
            offered=(None, 0.1, 0.5, 1.0, 5.0),
            in_words=lambda norm: "no clipping" if norm is None else f"{norm:g}",
        ),
    ),
    says=says,
)
