"""Fill a sweep: claim settings, have them run, write their results, until none is left.

Every setting is in one place at a time:

    left -> claimed and running -> written
      ^            |
      +------------+   the sweep pauses: its claim is given up
      +------------+   its process has ended: it is tried again, three times at most
      +-> another sweep runs it: asked for again until its result is there, or that sweep is dead
"""

import contextlib
import pickle
import platform
import re
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    wait,
)
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from memlab.api import measure_only, predict
from memlab.config import StepConfig
from memlab.cost_model.cost_store import cache_folder
from memlab.errors import ConfigError, MemlabError, StoreError, UnsupportedError, WorkloadError
from memlab.result import Outcome, Source, StepResult
from memlab.running import Progress
from memlab.runtime.isolation import OnProgress
from memlab.runtime.sending import dumps
from memlab.store.database import (
    Claim,
    RunArguments,
    StoredRun,
    claim,
    finish,
    hold,
    is_locked,
    release,
)
from memlab.store.keeping import not_stored, with_note
from memlab.workload import Workload

# Run one setting of a sweep, in this process or in one of an executor.
#
# Measurements take turns on a machine, whichever process asks for them, since two at once
# slow each other down. A lock on a file in the cache folder decides, which the system
# releases if its holder is killed. Predictions need no turn.

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


MOST_TRIES = 3  # of a setting whose process ends
MOST_AT_ONCE = 64  # settings that an executor holds, so that another sweep finds some to run
ASK_SECONDS = 0.5  # between two questions whether another sweep has ended a setting
OnResult = Callable[[StepResult], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One setting to run.

    Attributes:
        config: of the step.
        setting: its identity in the store; None if the workload has none.
    """

    config: StepConfig
    setting: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """What a sweep is filled with.

    Attributes:
        task: what is run of each setting.
        asked: the arguments that are stored with each result.
        workload_key: see `memlab.store.identity`.
        path: of the store.
        owner: of the claims.
        executor: None runs one setting after another in this thread.
        tell: called in this thread, with how far the sweep is.
        show: called in this thread, with each result after it was written.
        pause: while it is set, no further setting is begun.
        cancel: once it is set, the sweep ends.
    """

    task: Task
    asked: RunArguments
    workload_key: str | None
    path: Path
    owner: str
    executor: Executor | None
    tell: OnProgress
    show: OnResult
    pause: threading.Event
    cancel: threading.Event


class SweepLoop:
    """Runs the settings of a sweep.

    Attributes:
        results: of the settings that have ended, by index.
        num_reused: how many of them the store had.
        problem: why nothing more can be run; empty if it can.
    """

    def __init__(self, wanted: Sequence[Wanted], means: Means) -> None:
        self.results: dict[int, StepResult] = {}
        self.num_reused = 0
        self.problem = ""
        self._wanted, self._means = wanted, means
        self._left = deque(range(len(wanted)))
        self._running: dict[Future[Any], int] = {}
        self._elsewhere: dict[int, Claim] = {}  # of other sweeps
        self._ask_at = 0.0
        self._num_crashes = [0] * len(wanted)
        self._told = ""
        self._unwritten: dict[int, StoredRun] = {}

    def run(self) -> None:
        """Run until every setting has a result, or the sweep is cancelled.

        Raises:
            MemlabError: the workload or the device is wrong. What was written before stays.
        """
        try:
            while self._left or self._running or self._elsewhere:
                if self._means.cancel.is_set() or self.problem:
                    self._take_back()
                    self._left.clear()
                    self._elsewhere.clear()
                elif self._means.pause.is_set():
                    self._take_back()
                else:
                    self._begin()
                self._collect()
        finally:
            self._take_back()
            self._rescue()

        self._write_again()

    def _begin(self) -> None:
        """Begin as many settings as may run at once."""
        if self._elsewhere and time.monotonic() >= self._ask_at:
            self._left.extend(self._elsewhere)
            self._elsewhere.clear()

        most = MOST_AT_ONCE if self._means.executor is not None else 1
        while self._left and len(self._running) < most and not self._is_held_up():
            index = self._left.popleft()
            if self._is_mine(index):
                self._start(index)
                if self._means.executor is None:
                    return  # its result is written before the next one begins

        if self._elsewhere and not self._running:
            self._tell_waiting()

    def _is_held_up(self) -> bool:
        return bool(self._means.cancel.is_set() or self._means.pause.is_set() or self.problem)

    def _is_mine(self, index: int) -> bool:
        """Return whether to run a setting; it is not if the store or another sweep has it."""
        means, setting = self._means, self._wanted[index].setting
        if setting is None:
            return True

        try:
            found = claim(means.path, setting, means.owner, means.asked.timeout_seconds or 0.0)
        except StoreError:
            return True  # writing its result will fail too, and then a note says so
        if isinstance(found, StoredRun):
            self.num_reused += 1
            self._keep(index, replace(found.result, config=self._wanted[index].config))
            return False
        if found.owner != means.owner:
            self._elsewhere[index] = found
            self._ask_at = time.monotonic() + ASK_SECONDS
            return False
        return True

    def _start(self, index: int) -> None:
        means, config = self._means, self._wanted[index].config
        if means.executor is None:
            done: Future[StepResult] = Future()
            done.set_result(run(means.task, config, self._teller(config), means.cancel))
            self._running[done] = index
            return

        self._tell(f"{config}: handed to the executor")
        data = packed(means.task, config)
        try:
            self._running[means.executor.submit(run_packed, data)] = index
        except Exception as error:  # it is broken, was shut down, or is a person's own
            self._put_back(index)
            self._end(error)

    def _take_back(self) -> None:
        """Take from the executor what it has not begun."""
        for future in list(self._running):
            if not future.done() and future.cancel():
                self._put_back(self._running.pop(future))

    def _put_back(self, index: int) -> None:
        """Leave a setting to be begun later, here or by another sweep."""
        self._left.append(index)
        setting = self._wanted[index].setting
        if setting is not None:
            with contextlib.suppress(StoreError):  # it is given up when the sweep ends
                release(self._means.path, setting, self._means.owner)

    def _collect(self) -> None:
        """Write the results that are there; wait for a moment if there is none."""
        if not self._running:
            if self._elsewhere or self._means.pause.is_set():
                time.sleep(POLL_SECONDS)
            return

        done, _ = wait(list(self._running), timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        for future in done:
            index = self._running.pop(future)
            result = self._result_of(future, self._wanted[index].config)
            if result is None or self._is_tried_again(index, result):  # None: the executor lost it
                self._put_back(index)
            else:
                self._finish(index, result)

    def _is_tried_again(self, index: int, result: StepResult) -> bool:
        if result.outcome is not Outcome.CRASHED:
            return False
        self._num_crashes[index] += 1
        is_over = self._num_crashes[index] >= MOST_TRIES
        return not (is_over or self._means.cancel.is_set() or self.problem)

    def _result_of(self, future: Future[Any], config: StepConfig) -> StepResult | None:
        """Return the result of a future; None if it was cancelled or its executor is broken."""
        try:
            value = future.result()
            return value if isinstance(value, StepResult) else unpacked(value)
        except MemlabError:
            raise
        except CancelledError:
            return None
        except Exception as error:
            if isinstance(error, BrokenExecutor):
                self._end(error)
                return None
            said = f"the executor could not run it ({type(error).__name__}: {error})"
            return without_run(self._means.task, config, Outcome.CRASHED, said)

    def _end(self, error: Exception) -> None:
        self.problem = (
            f"The executor takes no more settings ({type(error).__name__}: {error}). Call sweep "
            "again with a new one; what is in the store is not run again."
        )

    def _finish(self, index: int, result: StepResult) -> None:
        """Write a result, and only then show it. A run that was cancelled found nothing."""
        if result.outcome is Outcome.CANCELLED:
            self.results[index] = result
        else:
            self._keep(index, self._written(index, result))

    def _written(self, index: int, result: StepResult) -> StepResult:
        """Write a result and return it, with a note if it could not be written."""
        means, wanted = self._means, self._wanted[index]
        stored = StoredRun(
            stored_at=time.time(),
            result=result,
            asked=means.asked,
            workload_key=means.workload_key,
            setting=wanted.setting,
        )
        try:
            finish(means.path, stored, means.owner)
        except Exception as error:  # whatever it is, what was measured is returned
            self._unwritten[index] = stored
            return with_note(result, not_stored(error))
        return result

    def _rescue(self) -> None:
        """Write what an executor has ended, where an error or an interrupt has ended this loop."""
        for future, index in self._running.items():
            if future.done() and not future.cancelled() and future.exception() is None:
                result = self._result_of(future, self._wanted[index].config)
                if result is not None and result.outcome is Outcome.OK:
                    self._written(index, result)

    def _keep(self, index: int, result: StepResult) -> None:
        self.results[index] = result
        self._tell(f"{result.config}: {result.outcome}")
        self._means.show(result)

    def _write_again(self) -> None:
        """Write what could not be written, in case the cause has gone."""
        for index, stored in self._unwritten.items():
            try:
                finish(self._means.path, stored, self._means.owner)
            except Exception:  # as in `_written`
                return  # its note, and those of the others, say why
            self.results[index] = stored.result

    def _teller(self, config: StepConfig) -> OnProgress:
        return lambda progress: self._tell(f"{config}: {progress.text}", progress.fraction)

    def _tell_waiting(self) -> None:
        """Say which sweep is waited for, once until something else was said."""
        index, held = next(iter(self._elsewhere.items()))
        since = datetime.fromtimestamp(held.claimed_at).strftime("%Y-%m-%d %H:%M:%S")
        text = (
            f"waiting for another sweep, which has claimed {len(self._elsewhere)} of them: "
            f"{self._wanted[index].config} is claimed by {held.owner} since {since}"
        )
        if text != self._told:
            self._tell(text)

    def _tell(self, text: str, fraction: float = 0.0) -> None:
        self._told = text
        total, ended = len(self._wanted), len(self.results)
        said = f"{ended} of {total} settings have ended; {text}"
        share = min((ended + fraction) / total, 1.0)
        self._means.tell(Progress(text=said, fraction=share))
