"""Run one setting of a sweep, in this process or in one of an executor.

Measurements take turns on a machine, whichever process asks for them, since two at once slow each
other down. A lock on a file in the cache folder decides, which the system releases if its holder is
killed. Predictions need no turn.
"""

import contextlib
import pickle
import platform
import re
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlab.api import measure_only, predict
from memlab.config import StepConfig
from memlab.costs.cost_store import cache_folder
from memlab.errors import ConfigError, MemlabError, UnsupportedError, WorkloadError
from memlab.result import Outcome, Source, StepResult
from memlab.running import Progress
from memlab.sending.by_value import dumps
from memlab.store.claims import hold, is_locked
from memlab.store.keeping import with_note
from memlab.worker.isolation import OnProgress
from memlab.workload import Workload

POLL_SECONDS = 0.05
REFUSALS = (ConfigError, UnsupportedError)  # of a config by this device or this torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is run of each setting.

    Attributes:
        workload: what is trained.
        device: as `measure` or `predict` takes it; None for the fastest of the machine that runs.
        source: whether it is measured or predicted.
        options: further arguments of `measure` or `predict`.
    """

    workload: Workload
    device: str | None
    source: Source
    options: dict[str, Any]


def run(
    task: Task,
    config: StepConfig,
    on_progress: OnProgress | None = None,
    cancel: threading.Event | None = None,
) -> StepResult:
    """Return what one setting costs; a config that is refused is `unsupported`.

    Raises:
        MemlabError: the workload or the device is wrong, as it would be for every setting.
    """
    given: dict[str, Any] = {**task.options, "on_progress": on_progress, "cancel": cancel}
    try:
        if task.source is Source.PREDICTED:
            return predict(task.workload, config, task.device, **given)
        with turn(on_progress, cancel) as problem:
            result = measure_only(task.workload, config, task.device, **given)
        return result if not problem else with_note(result, problem)
    except REFUSALS as error:
        return without_run(task, config, Outcome.UNSUPPORTED, str(error))


def packed(task: Task, config: StepConfig) -> bytes:
    """Return what `run_packed` takes; an executor could not pickle a workload of a notebook.

    Raises:
        WorkloadError: cloudpickle cannot either.
    """
    try:
        return dumps((task, config))
    except Exception as error:  # a lock, a file or a generator, for instance
        raise WorkloadError(
            f"workload {task.workload.name!r} cannot be sent to an executor "
            f"({type(error).__name__}: {error}); create the objects that it uses inside "
            "build_model or make_batch, or sweep without executor"
        ) from error


def run_packed(data: bytes) -> bytes:
    """Run one setting in a process of an executor, and return its result as `unpacked` takes it."""
    task, config = pickle.loads(data)
    return dumps(run(task, config))


def unpacked(data: bytes) -> StepResult:
    """Return the result that a process of an executor has sent."""
    result: StepResult = pickle.loads(data)
    return result


def without_run(task: Task, config: StepConfig, outcome: Outcome, message: str) -> StepResult:
    """Return the result of a setting that was not run to its end."""
    return StepResult(
        outcome=outcome,
        message=message,
        source=task.source,
        device=str(task.device),
        config=config,
        workload_name=task.workload.name,
    )


@contextlib.contextmanager
def turn(
    on_progress: OnProgress | None = None, cancel: threading.Event | None = None
) -> Iterator[str]:
    """Wait until no other sweep measures on this machine; a run that is cancelled goes on at once.

    Yields a sentence that says why no turns can be taken, "" if they can.
    """
    with contextlib.ExitStack() as held:
        is_told, problem = False, ""
        while not (cancel is not None and cancel.is_set()):
            try:
                held.enter_context(hold(_lock(), POLL_SECONDS))
                break
            except (OSError, sqlite3.Error, MemlabError) as error:
                if not is_locked(error):
                    problem = f"Another sweep may have measured at the same time: {error}."
                    break
            if on_progress is not None and not is_told:
                on_progress(Progress(text="waiting for another sweep to measure", fraction=0.0))
                is_told = True
        yield problem


def _lock() -> Path:
    # a folder may be shared between machines
    machine = re.sub(r"[^\w.-]", "_", platform.node()) or "machine"
    return cache_folder() / f"measuring-{machine}.lock"
