"""`sweep`: one workload under many settings, each run once, whatever is interrupted.

Every setting is in one place at a time:

    left -> claimed and running -> written
      ^            |
      +------------+   the sweep pauses: its claim is given up
      +------------+   its process has ended: it is tried again, three times at most
      +-> another sweep runs it: asked for again until its result is there, or that sweep is dead
"""

import contextlib
import itertools
import os
import pickle
import platform
import re
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memlab._util.checks import MOST_THINGS, anything, checked, count, of_type, seconds, size
from memlab._util.units import is_a, shown
from memlab.api import measure_only, predict
from memlab.config import StepConfig, allowed_value
from memlab.cost_model.cost_store import cache_folder
from memlab.devices.cards import resolve
from memlab.devices.here import resolve_device
from memlab.errors import ConfigError, MemlabError, StoreError, UnsupportedError, WorkloadError
from memlab.result import Outcome, Source, StepResult
from memlab.running import Progress
from memlab.runtime.bar import shows_progress
from memlab.runtime.isolation import OnProgress, teller
from memlab.runtime.sending import dumps
from memlab.store import database
from memlab.store.database import (
    Claim,
    RunArguments,
    StoredRun,
    claim,
    finish,
    owner,
    release,
    store_path,
)
from memlab.store.frames import COSTS, table, to_frame
from memlab.store.identity import workload_key
from memlab.store.recorded import is_here, is_recorded
from memlab.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

# The settings of a sweep: a list of configs, or all combinations of a dict of lists.


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of a sweep.

    Attributes:
        asked: the values of a combination by field; empty for a config of a list.
        config: None if the combination is refused.
        refusal: why; empty if it is not.
    """

    asked: Mapping[str, Any]
    config: StepConfig | None
    refusal: str = ""


def settings_of(configs: Any, base: StepConfig | None) -> tuple[Setting, ...]:
    """Return the settings in order; of a dict the last field varies fastest.

    Raises:
        ConfigError: it is no such list or dict, names a field that does not exist, or holds a value
            that no config allows. A combination of allowed values that is not allowed is a setting
            that is refused.
    """
    if is_a(configs, Mapping):
        return _combinations(_lists(configs), base or StepConfig())
    if base is not None:
        raise ConfigError(
            "base is for a dict of lists; a list holds whole configs, so leave base out"
        )

    try:
        listed = of_type("configs", configs, Sequence[StepConfig])
    except ConfigError as error:
        raise ConfigError(
            f"{error} of StepConfig, or a dict of lists: {{'batch_size': [8, 16]}}"
        ) from error
    if not listed:
        raise ConfigError("configs=[] holds no setting; add a StepConfig")
    return tuple(Setting(asked={}, config=config) for config in listed)


def _lists(configs: Any) -> dict[str, tuple[Any, ...]]:
    """Return the values by field, each of them checked by itself."""
    known = [field.name for field in fields(StepConfig)]
    lists, num_settings = {}, 1
    for name, values in dict(configs).items():
        if name not in known:
            raise ConfigError(
                f"configs name {shown(name)}; allowed is a field of StepConfig: {', '.join(known)}"
            )
        try:
            lists[name] = of_type(f"configs[{name!r}]", values, Sequence[Any])
        except ConfigError as error:
            raise ConfigError(f"{error}: {{{name!r}: [{shown(values)}]}}") from error
        if not lists[name]:
            raise ConfigError(f"configs[{name!r}]=[] holds no value; add one, or leave it out")

        for value in lists[name]:
            allowed_value(name, value)
        num_settings *= len(lists[name])

    if num_settings > MOST_THINGS:
        raise ConfigError(
            f"configs have {num_settings} combinations; allowed are {MOST_THINGS}: shorten a list"
        )
    return lists


def _combinations(lists: Mapping[str, tuple[Any, ...]], base: StepConfig) -> tuple[Setting, ...]:
    found = []
    for values in itertools.product(*lists.values()):
        asked = dict(zip(lists, values, strict=True))
        try:
            found.append(Setting(asked=asked, config=replace(base, **asked)))
        except ConfigError as error:
            found.append(Setting(asked=asked, config=None, refusal=str(error)))
    return tuple(found)


# `SweepTable`: the results of a sweep, in the order of its settings.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SweepTable:
    """What a sweep found.

    Attributes:
        settings: what was asked for, in order; a combination that no config allows has no result.
        by_setting: the result of each setting, or None.
        num_reused: how many results were in the store already.
        notes: sentences that a reader of the results must know.

    >>> import memlab
    >>> workload = memlab.workloads.get("vit-digits")
    >>> table = memlab.sweep(workload, {"batch_size": [2, 4]}, "t4")
    >>> list(table.frame()["batch_size"])
    [2, 4]
    """

    settings: tuple[Setting, ...]
    by_setting: tuple[StepResult | None, ...]
    num_reused: int = 0
    notes: tuple[str, ...] = ()

    @property
    def results(self) -> tuple[StepResult, ...]:
        """The results, without combinations that no config allows."""
        return tuple(result for result in self.by_setting if result is not None)

    @property
    def varied(self) -> list[str]:
        """The fields of the config in which the settings differ."""
        asked = {name for setting in self.settings for name in setting.asked}
        configs = [setting.config for setting in self.settings if setting.config is not None]

        def is_varied(name: str) -> bool:
            return name in asked or len({str(getattr(one, name)) for one in configs}) > 1

        return [each.name for each in fields(StepConfig) if is_varied(each.name)]

    def frame(self) -> "pd.DataFrame":
        """Return one row a setting, in order: the columns of `memlab.to_frame`.

        A combination that no config allows has the values that were asked for, the outcome
        "unsupported" and the reason.
        """
        import pandas as pd

        found = to_frame(self.results)
        found.index = pd.Index([i for i, each in enumerate(self.by_setting) if each is not None])
        refused = {
            i: {**setting.asked, "outcome": str(Outcome.UNSUPPORTED), "message": setting.refusal}
            for i, setting in enumerate(self.settings)
            if setting.config is None
        }
        if not refused:
            return found
        both = found.astype(object).T.to_dict() | refused
        whole = pd.DataFrame.from_dict(both, orient="index").sort_index()
        names = dict.fromkeys([*found.columns, *whole.columns])  # of no results whole has less
        return whole[[name for name in names if name in whole.columns]].infer_objects()

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain JSON types; timelines are left to the store."""
        results = (replace(result, timeline=None) for result in self.results)
        refused = [
            {"settings": {name: _plain(value) for name, value in setting.asked.items()},
             "message": setting.refusal}
            for setting in self.settings
            if setting.config is None
        ]  # fmt: skip
        return {
            "results": [result.to_dict() for result in results],
            "refused": refused,
            "num_reused": self.num_reused,
            "notes": list(self.notes),
        }

    def __len__(self) -> int:
        """Return the number of settings."""
        return len(self.settings)

    def __iter__(self) -> Iterator[StepResult]:
        """Iterate over the results."""
        return iter(self.results)

    def __str__(self) -> str:
        """Return one line: how many settings ended how, and how many were in the store."""
        outcomes = [str(result.outcome) for result in self.results]
        num_refused = len(self.settings) - len(self.results)
        outcomes += [str(Outcome.UNSUPPORTED)] * num_refused
        counts = [f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes)]
        said = f"sweep of {len(self)} settings: {', '.join(counts)}"
        if self.num_reused:
            said += f"; {self.num_reused} were in the store"
        return " ".join([f"{said}.", *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return a table for notebooks: what varies, and what it costs."""
        frame = self.frame()
        shown = [name for name in (*self.varied, *COSTS) if name in frame.columns]
        told = table(frame[shown].dropna(axis="columns", how="all"))
        return replace(told, notes=self.notes)._repr_html_()


def _plain(value: Any) -> Any:
    """Return a value of a setting as JSON has it."""
    return value if value is None or isinstance(value, bool | int | float) else str(value)


# Run one setting of a sweep, in this process or in one of an executor.
#
# Measurements take turns on a machine, whichever process asks for them, since two at once
# slow each other down. A lock on a file in the cache folder decides, which the system
# releases if its holder is killed. Predictions need no turn.

POLL_SECONDS = 0.05
OF_HERE = (futures.ThreadPoolExecutor, futures.ProcessPoolExecutor)
REFUSALS = (ConfigError, UnsupportedError)  # of a config by this device or this torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is run of each setting.

    Attributes:
        workload: what is trained.
        device: as `measure` or `predict` takes it; None for the fastest of the machine that runs.
        source: measured or predicted.
        hardware: what the numbers depend on besides the name of the device.
        options: further arguments of `measure` or `predict`.
    """

    workload: Workload
    device: str | None
    source: Source
    hardware: dict[str, str]
    options: dict[str, Any]

    def without_run(self, config: StepConfig, outcome: Outcome, message: str) -> StepResult:
        """Return the result of a setting that was not run to its end."""
        return StepResult(
            outcome=outcome, message=message, source=self.source, device=str(self.device),
            config=config, workload_name=self.workload.name,
        )  # fmt: skip


def task_of(
    workload: Workload,
    device: str | torch.device | None,
    executor: futures.Executor | None,
    options: dict[str, Any],
) -> Task:
    """Return what is run: measured where the device is, predicted where it is nowhere.

    Raises:
        DeviceError: it is no device and no card that memlab knows.
    """
    is_elsewhere = executor is not None and not isinstance(executor, OF_HERE)
    name, source = None if device is None else str(device), Source.MEASURED
    hardware = dict[str, str]()
    if is_elsewhere and (name is None or re.fullmatch(r"(cpu|cuda)(:\d+)?", name)):
        hardware = {"device_name": "of the machines of an executor"}
    elif is_here(device):
        here = resolve_device(device)
        name, hardware = str(here), database.hardware_of(here)
    else:
        source = Source.PREDICTED
        name = name if is_recorded(device) else resolve(device).name
    return Task(workload=workload, device=name, source=source, hardware=hardware, options=options)


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
        return result if not problem else database.with_note(result, problem)
    except REFUSALS as error:
        return task.without_run(config, Outcome.UNSUPPORTED, str(error))


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
    """Run one setting in a process of an executor, and return its result, pickled."""
    task, config = pickle.loads(data)
    return dumps(run(task, config))


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
                held.enter_context(database.hold(_lock(), POLL_SECONDS))
                break
            except (OSError, sqlite3.Error, MemlabError) as error:
                if not database.is_locked(error):
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


@dataclass(kw_only=True, slots=True, eq=False)
class SweepLoop:
    """Runs the settings of a sweep.

    Attributes:
        configs: the settings.
        identities: of each in the store; None if the workload has none.
        task: what is run of each.
        asked: the arguments that are stored with each result.
        workload_key: see `memlab.store.identity`.
        path: of the store.
        owner: of the claims.
        executor: None runs one setting after another in this thread.
        tell: called in this thread, with how far the sweep is.
        show: called in this thread, with each result after it was written.
        pause: while it is set, no further setting is begun.
        cancel: once it is set, the sweep ends.
        results: of the settings that have ended, by index.
        num_reused: how many of them the store had.
        problem: why nothing more can be run; empty if it can.
    """

    configs: Sequence[StepConfig]
    identities: Sequence[str | None]
    task: Task
    asked: RunArguments
    workload_key: str | None
    path: Path
    owner: str
    executor: futures.Executor | None
    tell: OnProgress
    show: Callable[[StepResult], None]
    pause: threading.Event
    cancel: threading.Event
    results: dict[int, StepResult] = field(default_factory=dict)
    num_reused: int = 0
    problem: str = ""
    left: deque[int] = field(default_factory=deque)  # indices of what has not begun
    running: dict[futures.Future[Any], int] = field(default_factory=dict)
    elsewhere: dict[int, Claim] = field(default_factory=dict)  # claimed by other sweeps
    ask_at: float = 0.0  # when to ask for them again
    num_crashes: Counter[int] = field(default_factory=Counter)
    told: str = ""  # what was said last
    unwritten: dict[int, StoredRun] = field(default_factory=dict)  # what the store has not taken

    def __post_init__(self) -> None:
        self.left.extend(range(len(self.configs)))

    def run(self) -> None:
        """Run until every setting has a result, or the sweep is cancelled.

        Raises:
            MemlabError: the workload or the device is wrong. What was written before stays.
        """
        try:
            while self.left or self.running or self.elsewhere:
                if self.cancel.is_set() or self.problem:
                    self._take_back()
                    self.left.clear()
                    self.elsewhere.clear()
                elif self.pause.is_set():
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
        if self.elsewhere and time.monotonic() >= self.ask_at:
            self.left.extend(self.elsewhere)
            self.elsewhere.clear()

        most = MOST_AT_ONCE if self.executor is not None else 1
        while self.left and len(self.running) < most and not self._is_held_up():
            index = self.left.popleft()
            if self._is_mine(index):
                self._start(index)
                if self.executor is None:
                    return  # its result is written before the next one begins

        if self.elsewhere and not self.running:
            self._tell_waiting()

    def _is_held_up(self) -> bool:
        return bool(self.cancel.is_set() or self.pause.is_set() or self.problem)

    def _is_mine(self, index: int) -> bool:
        """Return whether to run a setting; it is not if the store or another sweep has it."""
        setting = self.identities[index]
        if setting is None:
            return True

        try:
            found = claim(self.path, setting, self.owner, self.asked.timeout_seconds or 0.0)
        except StoreError:
            return True  # writing its result will fail too, and then a note says so
        if isinstance(found, StoredRun):
            self.num_reused += 1
            self._keep(index, replace(found.result, config=self.configs[index]))
            return False
        if found.owner != self.owner:
            self.elsewhere[index] = found
            self.ask_at = time.monotonic() + ASK_SECONDS
            return False
        return True

    def _start(self, index: int) -> None:
        config = self.configs[index]
        if self.executor is None:
            done: futures.Future[StepResult] = futures.Future()
            done.set_result(run(
                self.task, config,
                lambda one: self._tell(f"{config}: {one.text}", one.fraction), self.cancel,
            ))  # fmt: skip
            self.running[done] = index
            return

        self._tell(f"{config}: handed to the executor")
        data = packed(self.task, config)
        try:
            self.running[self.executor.submit(run_packed, data)] = index
        except Exception as error:  # it is broken, was shut down, or is a person's own
            self._put_back(index)
            self._end(error)

    def _take_back(self) -> None:
        """Take from the executor what it has not begun."""
        for future in list(self.running):
            if not future.done() and future.cancel():
                self._put_back(self.running.pop(future))

    def _put_back(self, index: int) -> None:
        """Leave a setting to be begun later, here or by another sweep."""
        self.left.append(index)
        setting = self.identities[index]
        if setting is not None:
            with contextlib.suppress(StoreError):  # it is given up when the sweep ends
                release(self.path, setting, self.owner)

    def _collect(self) -> None:
        """Write the results that are there; wait for a moment if there is none."""
        if not self.running:
            if self.elsewhere or self.pause.is_set():
                time.sleep(POLL_SECONDS)
            return

        done, _ = futures.wait(
            list(self.running), timeout=POLL_SECONDS, return_when=futures.FIRST_COMPLETED
        )
        for future in done:
            index = self.running.pop(future)
            result = self._result_of(future, self.configs[index])
            if result is None or self._is_tried_again(index, result):  # None: the executor lost it
                self._put_back(index)
            else:
                self._finish(index, result)

    def _is_tried_again(self, index: int, result: StepResult) -> bool:
        if result.outcome is not Outcome.CRASHED:
            return False
        self.num_crashes[index] += 1
        is_over = self.num_crashes[index] >= MOST_TRIES
        return not (is_over or self.cancel.is_set() or self.problem)

    def _result_of(self, future: futures.Future[Any], config: StepConfig) -> StepResult | None:
        """Return the result of a future; None if it was cancelled or its executor is broken."""
        try:
            value = future.result()
            found: StepResult = value if isinstance(value, StepResult) else pickle.loads(value)
            return found
        except MemlabError:
            raise
        except futures.CancelledError:
            return None
        except Exception as error:
            if isinstance(error, futures.BrokenExecutor):
                self._end(error)
                return None
            said = f"the executor could not run it ({type(error).__name__}: {error})"
            return self.task.without_run(config, Outcome.CRASHED, said)

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
        stored = StoredRun(
            stored_at=time.time(), result=result, asked=self.asked,
            workload_key=self.workload_key, setting=self.identities[index],
        )  # fmt: skip
        try:
            finish(self.path, stored, self.owner)
        except Exception as error:  # whatever it is, what was measured is returned
            self.unwritten[index] = stored
            return database.with_note(result, database.not_stored(error))
        return result

    def _rescue(self) -> None:
        """Write what an executor has ended, where an error or an interrupt has ended this loop."""
        for future, index in self.running.items():
            if future.done() and not future.cancelled() and future.exception() is None:
                result = self._result_of(future, self.configs[index])
                if result is not None and result.outcome is Outcome.OK:
                    self._written(index, result)

    def _keep(self, index: int, result: StepResult) -> None:
        self.results[index] = result
        self._tell(f"{result.config}: {result.outcome}")
        self.show(result)

    def _write_again(self) -> None:
        """Write what could not be written, in case the cause has gone."""
        for index, stored in self.unwritten.items():
            try:
                finish(self.path, stored, self.owner)
            except Exception:  # as in `_written`
                return  # its note, and those of the others, say why
            self.results[index] = stored.result

    def _tell_waiting(self) -> None:
        """Say which sweep is waited for, once until something else was said."""
        index, held = next(iter(self.elsewhere.items()))
        since = datetime.fromtimestamp(held.claimed_at).strftime("%Y-%m-%d %H:%M:%S")
        text = (
            f"waiting for another sweep, which has claimed {len(self.elsewhere)} of them: "
            f"{self.configs[index]} is claimed by {held.owner} since {since}"
        )
        if text != self.told:
            self._tell(text)

    def _tell(self, text: str, fraction: float = 0.0) -> None:
        self.told = text
        total, ended = len(self.configs), len(self.results)
        said = f"{ended} of {total} settings have ended; {text}"
        share = min((ended + fraction) / total, 1.0)
        self.tell(Progress(text=said, fraction=share))


NO_IDENTITY = (
    "The workload cannot be pickled, or is too large, to be recognised. So a later sweep does not "
    "find these results and runs every setting again."
)


@checked(
    configs=anything, path=anything, repeats=count(1), memory_limit=size, timeout_seconds=seconds
)
@shows_progress
def sweep(
    workload: Workload,
    configs: Sequence[StepConfig] | Mapping[str, Sequence[Any]],
    device: str | torch.device | None = None,
    *,
    base: StepConfig | None = None,
    executor: futures.Executor | None = None,
    repeats: int = 5,
    warmup: int = 1,
    seed: int = 0,
    memory_limit: int | str | None = None,
    timeout_seconds: float = 120,
    path: str | os.PathLike[str] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    progress: bool = True,
    on_result: Callable[[StepResult], None] | None = None,
    pause: threading.Event | None = None,
    cancel: threading.Event | None = None,
) -> SweepTable:
    """Run one workload under many settings and return a table of what each costs.

    Each result is written to the store (`memlab.results`) before it is shown. A sweep that was
    interrupted, even by `kill -9`, is resumed by the same call: a setting that the store has for
    the same code of the workload, config, device, versions, seed, limit and repeats is not run
    again, unless it has failed. Two sweeps at once share the settings between them. One measurement
    runs at a time on a machine.

    Args:
        workload: what is trained.
        configs: configs, or a dict of lists of which all combinations are run. A combination that
            no config allows is a row of the table with the reason.
        device: measured if it is in this machine, else predicted, as `memlab.predict` takes it.
        base: what a dict of lists varies; None is `StepConfig()`.
        executor: runs the settings; None runs one after another in this thread. For an executor of
            other machines, such as `dask.distributed.Client(...).get_executor()`, "cpu" and "cuda"
            are devices of those machines, and a setting counts as run whichever of them ran it.
        repeats: timed steps of each setting.
        warmup: untimed steps before them.
        seed: set before the model, the batch and each step.
        memory_limit: as for `measure`.
        timeout_seconds: after which a setting ends as `timed_out`.
        path: of another store.
        on_progress: called in this thread with a `Progress`, its fraction that of the whole sweep.
        progress: as for `measure`.
        on_result: called in this thread with each result, after it was written.
        pause: while this event is set, no further setting is begun.
        cancel: once this event is set, the sweep ends; what has not ended is `cancelled`. What an
            executor is running is waited for.

    Raises:
        MemlabError: an argument is not allowed, or the store cannot be used when the sweep begins.
            A store that fails later becomes a note of the results that are not in it.

    >>> import memlab
    >>> workload = memlab.workloads.get("vit-digits")
    >>> table = memlab.sweep(workload, {"batch_size": [8], "accumulation_steps": [2, 16]}, "t4")
    >>> [str(outcome) for outcome in table.frame()["outcome"]]
    ['ok', 'unsupported']
    """
    settings = settings_of(configs, base)
    options: dict[str, Any] = {
        "seed": seed, "memory_limit": memory_limit, "timeout_seconds": timeout_seconds,
    }  # fmt: skip
    task = task_of(workload, device, executor, options)
    if task.source is Source.MEASURED:
        options |= {"repeats": repeats, "warmup": warmup}

    asked = RunArguments(
        seed=seed,
        repeats=options.get("repeats"),
        warmup=options.get("warmup"),
        memory_limit_bytes=size("memory_limit", memory_limit),
        timeout_seconds=timeout_seconds,
    )
    key = workload_key(workload)
    configs, identities, index_of = _wanted(settings, key, task, asked)
    file = store_path(path)
    with owner(file) as name:
        loop = SweepLoop(
            configs=configs, identities=identities, task=task, asked=asked, workload_key=key,
            path=file, owner=name, executor=executor, tell=teller(on_progress),
            show=teller(on_result, "on_result", "a StepResult"),
            pause=pause or threading.Event(), cancel=cancel or threading.Event(),
        )  # fmt: skip
        loop.run()

    not_run = "stopped before it began; call sweep again to run what is left"
    found = [
        loop.results.get(i) or task.without_run(config, Outcome.CANCELLED, not_run)
        for i, config in enumerate(configs)
    ]
    notes = [loop.problem, NO_IDENTITY if key is None else _of_other_code(file, workload, key)]
    return SweepTable(
        settings=settings,
        by_setting=tuple(None if index is None else found[index] for index in index_of),
        num_reused=loop.num_reused,
        notes=tuple(note for note in notes if note),
    )


def _wanted(
    settings: Sequence[Setting], key: str | None, task: Task, asked: RunArguments
) -> tuple[list[StepConfig], list[str | None], list[int | None]]:
    """Return what to run, each setting once, its identities, and the index for every setting."""
    configs, identities, index_of = list[StepConfig](), list[str | None](), list[int | None]()
    first: dict[str, int] = {}
    for each in settings:
        if each.config is None:
            index_of.append(None)
            continue
        identity = database.setting_of(
            key, each.config, asked, task.source, str(task.device), task.hardware
        )
        said = identity or str(asdict(each.config))
        if said not in first:
            first[said] = len(configs)
            configs.append(each.config)
            identities.append(identity)
        index_of.append(first[said])
    return configs, identities, index_of


def _of_other_code(file: Path, workload: Workload, key: str) -> str:
    """Return a note on results under the name of a workload that are of other code or data."""
    number = 0
    # notes of the results say why, if the store can no longer be used
    with contextlib.suppress(StoreError), database.reading(file) as connection:
        if connection is not None:
            number = connection.execute(
                "SELECT count(*) FROM result WHERE workload_name = ? AND workload_key != ?",
                (workload.name, key),
            ).fetchone()[0]
    if not number:
        return ""
    return (
        f"The store has {number} results of another workload named {workload.name!r}: its code, or "
        "whole numbers in its batch, are different. They were not used."
    )
