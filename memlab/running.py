"""What every run has in common: how it tells its progress, and what an error of it means."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError

from memlab.errors import MemlabError, UnsupportedError
from memlab.result import Outcome

SMALLER = "lower memory_budget or batch_size, or raise accumulation_steps"
MAX_CHARACTERS = 300  # of a foreign error's text
OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "Cannot allocate memory",
    "could not create a primitive",  # with "descriptor" after it, it means another thing
    "could not create a memory object",
    "can't start new thread",
    "Thread creation failed",
)
NO_KERNEL_TEXTS = ("not implemented for", "could not create a primitive descriptor")
# what torch's own errors of a training step leave out: pattern of the error, what to do about it
REMEDIES = {
    r"leaf Variable that requires grad": "the model changes a parameter in place; compute a new "
    "tensor (F.relu(weight), weight + 1), or change it under torch.no_grad()",
    r"modified by an inplace operation": "a tensor that backward needs is changed in place; use "
    "the operator that is not in place (x = x + y, F.relu(x)), or change a clone() of it",
    r"backward through the graph a second time": "the graph of an earlier step is used again; "
    "detach() what is kept from one forward to the next (a hidden state, a cache), and compute in "
    "forward what is computed of parameters elsewhere",
    r"same device|expected device|different devices|at least two devices": "the model or the loss "
    "makes a tensor on another device than its input; make it with device=x.device, or keep it by "
    "register_buffer",
    r"device-side assert": "on a card that is mostly a label or an index out of range; "
    "device='cpu' says which",
    r"Target -?\d+ is out of bounds": "labels are 0 to the number of outputs less one, or -100 to "
    "be ignored; give the last layer as many outputs as there are classes",
    r"index out of range in self": "an index is not below num_embeddings; give the embedding as "
    "many rows as there are tokens, or positions",
    r"target dtype to be Long|dtype int32/int64 for index|scalar types: Long": "labels and indices "
    "are whole numbers; make them int64 in make_batch with .long()",
    r"same dtype|type \(.+ should be the same|expected scalar type": "two number formats meet; "
    "return floats of the weights' format from make_batch, cast with x.to(weight.dtype) where the "
    "model changes formats itself, or choose the precision: 'as-built' leaves a model as it is, "
    "'fp32' casts model and batch, 'bf16-mixed' casts where they meet within the model",
    r"more than 1 value per channel": "BatchNorm takes its statistics over a micro-batch, which "
    "needs two samples; raise batch_size, lower accumulation_steps, or use GroupNorm",
    r"cannot be multiplied|same reduction dim": "the last dimension of what a linear layer is "
    "given is not its in_features; change the one or the other",
    r"must be the same as input size": "targets need the shape of the outputs; use "
    "targets.unsqueeze(1), or outputs.squeeze(1)",
    r"between 0 and 1|unsafe to autocast": "that loss takes probabilities; use "
    "F.binary_cross_entropy_with_logits, which takes what the last layer returns",
    r"view size is not compatible|Cannot view a tensor": "use .reshape in place of .view",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is: what it is doing, in words, and the share that is done, 0..1."""

    text: str
    fraction: float


Report = Callable[[Progress], None]
Run = Callable[[str, dict[str, Any]], Any]
"""Runs what a worker can be asked, by name and arguments, where and as long as a caller said."""


class Ended(Exception):
    """A run ended without a result: `outcome` and the message say how.

    It was stopped, its time limit has passed, or its process is gone.
    """

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


def explain(error: BaseException, place: object) -> tuple[Outcome, str]:
    """Return the outcome that an error of a run means, and one sentence with a remedy.

    Args:
        error: whatever was raised.
        place: where, as text: a `Place`, or what was being done.
    """
    text = (str(error).strip().splitlines() or [""])[0][:MAX_CHARACTERS]
    if isinstance(error, Ended):
        return error.outcome, str(error)
    if isinstance(error, UnsupportedError):
        return Outcome.UNSUPPORTED, str(error)
    if isinstance(error, MemlabError):
        return Outcome.FAILED, str(error)
    if is_out_of_memory(error):
        return Outcome.OUT_OF_MEMORY, f"out of memory in {place}: {text.rstrip('.')}; {SMALLER}"
    if any(unknown in text for unknown in NO_KERNEL_TEXTS):
        return Outcome.UNSUPPORTED, (
            f"{place}: this device has no kernel for this number format ({text}); use "
            "precision='fp32' or 'bf16-mixed'"
        )
    if isinstance(error, CheckpointError):
        return Outcome.UNSUPPORTED, (
            "a recomputed module does not do the same when it is run again; does it "
            f"keep a cache (build the model with use_cache=False)? ({text})"
        )
    named = f"{type(error).__name__}: {text.rstrip('.')}" if text else type(error).__name__
    remedy = next((do for said, do in REMEDIES.items() if re.search(said, str(error))), "")
    return Outcome.FAILED, f"{place} raised {named}" + (f"; {remedy}" if remedy else "")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator, or a library in its name, says that there is no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return (
        isinstance(error, RuntimeError | OSError)
        and any(said in text for said in OUT_OF_MEMORY_TEXTS)
        and not any(said in text for said in NO_KERNEL_TEXTS)
    )
