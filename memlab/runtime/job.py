"""What a worker and its caller agree on: the job, and the kinds of messages."""

from dataclasses import dataclass

from memlab.runtime.sending import Values

KINDS = frozenset({"ready", "progress", "sources", "stale", "result", "raised", "unloadable"})
"""Kinds of messages."""
LOST_STATUS = 76  # exit status of a worker that cannot answer, because its socket was closed
PREDICTING = frozenset(
    {"predict", "plan", "layers", "operators", "graph", "per_sample", "loss", "predict_run"}
)
"""Functions that run no real step."""

WITH_RANKS = frozenset({"measure_ranks", "verify_ranks"})  # functions that start processes


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a worker is asked to do.

    Attributes:
        function: name in `FUNCTIONS`.
        arguments: of that function, pickled by cloudpickle: unpickled only after `path` is set.
        path: the caller's `sys.path`.
        folder: the caller's working folder.
        own_files: files of the caller's own modules, by module name.
        own_values: values that are set on these modules, see `runtime/sending.py`.
        environment: the caller's environment variables.
        threads: the caller's number of threads for one operator.
        step: a key that identifies the step, see `runtime/same_step.py`; None if there is none.
        guard_bytes: most memory that the job may take before allocations fail; None is a share of
            the available memory.
    """

    function: str
    arguments: bytes
    path: list[str]
    folder: str
    own_files: dict[str, str]
    own_values: Values
    environment: dict[str, str]
    threads: int
    step: str | None = None
    guard_bytes: int | None = None


def beginning(number: int) -> str:
    """Return the line that separates a job's output from earlier output."""
    return f"\nmemlab begins job {number}\n"
