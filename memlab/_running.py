"""What every run has in common: how it tells its progress, and what an error of it means."""

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is: what it is doing, in words, and the share that is done, 0..1."""

    text: str
    fraction: float


Report = Callable[[Progress], None]


class Expired(Exception):
    """A run that nobody can interrupt from outside was stopped, or its time limit has passed."""

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
    if isinstance(error, Expired):
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
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Outcome.FAILED, f"{place} raised {named}"


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
