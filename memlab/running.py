"""What all runs share: how they report progress, and which outcome an error becomes."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import CheckpointError

from memlab._util.functions import own_line
from memlab._util.units import is_a, shown
from memlab.errors import ConfigError, MemlabError, UnsupportedError
from memlab.result import Outcome

Found = TypeVar("Found")
SMALLER = "lower memory_budget or batch_size, or raise accumulation_steps"
MAX_CHARACTERS = 300  # of the text of an error that memlab did not raise
CONTINUED = re.compile(r":\s*\n\s*")  # "... because of this error:", and the next line
OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "Cannot allocate memory",
    "could not create a primitive",  # followed by "descriptor" it means that no kernel exists
    "could not create a memory object",
    "can't start new thread",
    "Thread creation failed",
)
NO_KERNEL_TEXTS = ("not implemented for", "could not create a primitive descriptor")
# what to do about torch's own errors in a training step, by a pattern of the error's text
REMEDIES = {
    "closure": "an optimizer whose update runs the model again, such as SAM or L-BFGS, is not "
    "supported: use the one it is built on",
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
    r"device-side assert": "the usual cause is a label or an index that is out of range; "
    "run with device='cpu' to see which one",
    r"Target -?\d+ is out of bounds": "a label must be from 0 to the number of outputs minus one, "
    "or -100 to be ignored; give the last layer as many outputs as there are classes",
    r"index out of range in self": "an index must be below num_embeddings; give the embedding as "
    "many rows as there are tokens, or positions",
    r"target dtype to be Long|dtype int32/int64 for index|scalar types: Long": "labels and indices "
    "must be whole numbers; make them int64 in make_batch with .long()",
    r"same dtype|type \(.+ should be the same|expected scalar type": "two number formats are mixed "
    "in one operator; return floats of the weights' format from make_batch, cast with "
    "x.to(weight.dtype) where the model changes formats itself, or choose another precision: "
    "'as-built' casts nothing, 'fp32' casts the model and the batch, 'bf16-mixed' casts inside the "
    "model where formats differ",
    r"more than 1 value per channel": "BatchNorm takes its statistics over a micro-batch, which "
    "needs two samples; raise batch_size, lower accumulation_steps, or use GroupNorm",
    r"cannot be multiplied|same reduction dim": "the last dimension of a linear layer's input must "
    "equal its in_features; change one of the two",
    r"must be the same as input size": "targets need the same shape as the outputs; use "
    "targets.unsqueeze(1), or outputs.squeeze(1)",
    r"between 0 and 1|unsafe to autocast": "this loss takes probabilities; use "
    "F.binary_cross_entropy_with_logits, which takes the output of the last layer",
    r"view size is not compatible|Cannot view a tensor": "use .reshape instead of .view",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is: what it is doing now, in words, and the fraction that is done, 0..1."""

    text: str
    fraction: float


Report = Callable[[Progress], None]
Run = Callable[[str, dict[str, Any]], Any]
"""Runs a job of the worker, given its name and arguments; the caller chose where and how long."""


class Ended(Exception):
    """A run ended without a result: it was stopped, took too long, or its process is gone.

    `outcome` and the message say which.
    """

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


def explain(error: BaseException, place: object) -> tuple[Outcome, str]:
    """Return the outcome that an error stands for, and one sentence with a remedy.

    Args:
        error: the error that was raised.
        place: where it was raised: a `Place`, or a text that says what was being done.
    """
    text = CONTINUED.sub(": ", str(error).strip())
    text = (text.splitlines() or [""])[0][:MAX_CHARACTERS]
    if isinstance(error, Ended):
        return error.outcome, str(error)
    if isinstance(error, UnsupportedError):
        return Outcome.UNSUPPORTED, str(error)
    if isinstance(error, MemlabError):
        return Outcome.FAILED, str(error)
    if is_out_of_memory(error):
        return Outcome.OUT_OF_MEMORY, out_of_memory(f"in {place}", text.rstrip("."))

    if says_no_kernel(text):
        return Outcome.UNSUPPORTED, no_kernel(place, text)

    if isinstance(error, CheckpointError):
        return Outcome.UNSUPPORTED, (
            "a recomputed module computed something else when it ran again; if it fills a cache, "
            f"build the model with use_cache=False ({text})"
        )

    named = f"{type(error).__name__}: {text.rstrip('.')}" if text else type(error).__name__
    if line := own_line(error):
        named += f" ({line})"
    remedy = next((do for said, do in REMEDIES.items() if re.search(said, str(error))), "")
    return Outcome.FAILED, f"{place} raised {named}" + (f"; {remedy}" if remedy else "")


def out_of_memory(when: str, why: str, remedy: str = SMALLER) -> str:
    """Return the sentence that a person reads when a step runs out of memory.

    >>> out_of_memory("in forward", "the step needs 3.00 GiB", "use a smaller model")
    'out of memory in forward: the step needs 3.00 GiB; use a smaller model'
    """
    return f"out of memory {when}: {why}; {remedy}"


def says_no_kernel(text: str) -> bool:
    """Return whether the text of an error says that an operator has no kernel on this device."""
    return any(said in text for said in NO_KERNEL_TEXTS)


def no_kernel(place: object, text: str) -> str:
    """Return the sentence for an operator that this device cannot run in its number format.

    Args:
        place: where it runs: a `Place`, or a text.
        text: what PyTorch says about it.
    """
    return (
        f"{place}: this device has no kernel for this number format ({text}); choose another "
        "precision, such as 'fp32'"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that no memory is left, in the words of torch or a library."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return (
        isinstance(error, RuntimeError | OSError)
        and any(said in text for said in OUT_OF_MEMORY_TEXTS)
        and not says_no_kernel(text)
    )


def require_ok(results: Found) -> Found:
    """Return what is given, for code that goes on with its numbers.

    Args:
        results: a result (of a step, a run, a check, a loader, a graph), or a list or a mapping.

    Raises:
        MemlabError: a result whose outcome is not ok, which has no numbers; the message is its
            sentence.

    >>> import memlab
    >>> workload = memlab.workloads.get("plain-mlp")
    >>> late = memlab.predict(workload, memlab.StepConfig(), "t4", timeout_seconds=1e-9)
    >>> require_ok([late])
    Traceback (most recent call last):
    memlab.errors.MemlabError: plain-mlp on t4, batch_size=8: timed_out ...
    """
    many: Any = results
    if is_a(results, Mapping):
        many = many.values()
    try:
        outcomes = [(each, each.outcome) for each in ([many] if hasattr(many, "outcome") else many)]
    except Exception:  # of a person's own objects
        raise ConfigError(
            f"results={shown(results)} is no result; pass what memlab.measure or memlab.predict "
            "returned, or a list or a mapping of such"
        ) from None
    for each, outcome in outcomes:
        if outcome is not Outcome.OK:
            why = getattr(each, "why", "")  # of a check of gradients
            raise MemlabError(f"{each}: {why}" if why else str(each))
    return results
