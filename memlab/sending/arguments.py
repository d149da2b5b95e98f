"""The arguments of a job as they are sent to a worker."""

import dataclasses
from typing import Any

from memlab.arguments.quoting import is_a
from memlab.errors import WorkloadError
from memlab.sending.by_value import dumps
from memlab.workload import Workload


def in_one_form(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with a workload that cannot be made in other forms.

    Only the caller does that, by a function that may hold a data set or what cannot be sent. Nor
    does a worker need the lengths of all samples.
    """
    workload: Any = arguments.get("workload")
    if not is_a(workload, Workload):
        return arguments
    alone = dataclasses.replace(workload, sample_size=None, choices=None, lengths=None)
    return {**arguments, "workload": alone}


def pickled(arguments: dict[str, Any]) -> bytes:
    """Return the arguments as cloudpickle writes them.

    Raises:
        WorkloadError: they hold what cannot be pickled: a lock, a file or a generator.
    """
    try:
        return dumps(arguments)
    except Exception as error:
        workload = arguments.get("workload")
        raise WorkloadError(
            f"workload {getattr(workload, 'name', '?')!r} cannot be sent to the worker "
            f"({type(error).__name__}: {error}); create the objects that it uses inside "
            "build_model or make_batch, or measure with isolate=False"
        ) from error
