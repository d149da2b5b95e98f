"""Write results before they are shown. What was measured is returned whatever the store does."""

import dataclasses
import os
import time
from typing import Any

import torch

from memlab.config import StepConfig
from memlab.devices.here import describe, versions_here
from memlab.errors import MemlabError
from memlab.result import Outcome, Source, StepResult
from memlab.store.database import RunArguments, StoredRun, insert, row_of, store_path, writing
from memlab.store.identity import setting_key, workload_key
from memlab.workload import Workload

SHORT_WAIT_SECONDS = 5.0  # of a single measurement, for a program that holds the store


def kept(
    result: StepResult,
    workload: Workload,
    asked: RunArguments,
    *,
    is_isolated: bool,
    device: torch.device,
) -> StepResult:
    """Write what `measure` found, and return it, with a note if it could not be written.

    A run that was cancelled is not written, since it found nothing.

    Args:
        result: of the run.
        workload: that ran.
        asked: the arguments of the run.
        is_isolated: whether a worker ran it. A sweep does not use what this process ran, whose
            modules may be other than their files.
        device: that it ran on.
    """
    if result.outcome is Outcome.CANCELLED:
        return result

    try:
        key = workload_key(workload)
        hardware = hardware_of(device)
        setting = setting_of(key, result.config, asked, Source.MEASURED, str(device), hardware)
        run = StoredRun(
            stored_at=time.time(),
            result=result,
            asked=asked,
            workload_key=key,
            setting=setting if is_isolated else None,
        )
        problem = write(run, wait_seconds=SHORT_WAIT_SECONDS)
    except Exception as error:  # whatever it is, what was measured is returned
        problem = not_stored(error)
    return result if problem is None else with_note(result, problem)


def write(run: StoredRun, path: str | os.PathLike[str] | None = None, **options: Any) -> str | None:
    """Write a run to the store; return a sentence that says why it could not be, or None."""
    row = row_of(run)
    try:
        with writing(store_path(path), **options) as connection:
            insert(connection, row)
    except MemlabError as error:
        return not_stored(error)
    return None


def not_stored(error: Exception) -> str:
    """Return the note of a result that could not be written."""
    if isinstance(error, MemlabError):
        return f"This result is not in the store: {error}."
    return f"This result is not in the store ({type(error).__name__}: {error})."


def with_note(result: StepResult, note: str) -> StepResult:
    """Return a result with one more note."""
    return dataclasses.replace(result, notes=(*result.notes, note))


def setting_of(
    workload_key: str | None,
    config: StepConfig,
    asked: RunArguments,
    source: Source,
    device: str,
    hardware: dict[str, str],
) -> str | None:
    """Return the identity of a setting: two runs of the same one find the same numbers.

    The time limit is not part of it: a run that ended in time does not depend on it.
    """
    decisive = dataclasses.asdict(asked)
    del decisive["timeout_seconds"]
    versions = versions_here()
    return setting_key(
        workload_key,
        config,
        source=str(source),
        device=device,
        **decisive,
        versions=versions | hardware,
    )


def hardware_of(device: torch.device) -> dict[str, str]:
    """Return what the numbers of a device of this machine depend on: its name, and threads."""
    return {"device_name": describe(device), "threads": str(torch.get_num_threads())}
