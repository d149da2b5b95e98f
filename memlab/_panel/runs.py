"""The runs of a panel: kept for ever, shown until cleared, pinned to be named. No widgets.

A prediction that a person keeps is a run too, which says that it was predicted.
"""

import atexit
import contextlib
import dataclasses
import json
import threading
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memlab.cost_model.cost_store import cache_folder
from memlab.errors import MemlabError
from memlab.result import Outcome, Source, StepResult
from memlab.runtime.verify_report import VerifyReport
from memlab.store.records import result_from_packed, result_to_packed

MOST_SHOWN = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One press of Run, or of *Keep this prediction*.

    Attributes:
        number: from 1, in the order in which they ended.
        result: what it cost, or would cost.
        prediction: of the same step, made without it; None if there is none.
        limit_bytes: the limit on screen when it was asked for; None if there was none.
        report: the comparison of gradients, if it was asked for.
        name: given when it was pinned; "" while it is not.
        cleared: whether it was taken off the table.
        key: another for each run of any panel.
        is_earlier: whether an earlier panel of this cell ran it, perhaps with another model.
    """

    number: int
    result: StepResult
    prediction: StepResult | None = None
    limit_bytes: int | None = None
    report: VerifyReport | None = None
    name: str = ""
    cleared: bool = False
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_earlier: bool = False

    @property
    def label(self) -> str:
        """How pictures call it: its name, or its number as the table has it."""
        name = self.name or self.default_name
        return f"{name}, predicted" if self.is_predicted else name

    @property
    def default_name(self) -> str:
        """Its name while it is pinned and a person has given it none."""
        return f"run {self.number}"

    @property
    def is_predicted(self) -> bool:
        """Whether it is a prediction that was kept."""
        return self.result.source is Source.PREDICTED

    @property
    def is_stopped(self) -> bool:
        """Whether a person stopped it."""
        return self.result.outcome is Outcome.CANCELLED

    @property
    def predicted(self) -> StepResult | None:
        """What was predicted; None if nothing was."""
        return self.result if self.is_predicted else self.prediction

    @property
    def measured(self) -> StepResult | None:
        """What was measured, here or where it was recorded; None if it was only predicted."""
        return None if self.is_predicted else self.result

    @property
    def prediction_error(self) -> float | None:
        """The signed relative error of the predicted peak allocated; None if there is none."""
        predicted = self.prediction.peak_allocated_bytes if self.prediction else None
        # on a CPU a limit is compared with the whole step, on CUDA it ends the step
        is_whole = self.result.outcome is Outcome.OK or self.result.device == "cpu"
        return _error(predicted, self.result.peak_allocated_bytes) if is_whole else None

    @property
    def time_error(self) -> float | None:
        """The signed relative error of the predicted time per step; None if there is none."""
        predicted = self.prediction.step_seconds if self.prediction else None
        return _error(predicted, self.result.step_seconds)

    @property
    def own_name(self) -> str:
        """The name that a person gave it, or ""."""
        return "" if self.name == self.default_name else self.name


class RunLog:
    """All runs in order.

    Args:
        earlier: the runs with which it begins.
        added: called with each new run.
        changed: called with a changed run and the names of the changed fields.

    Attributes:
        lock: held by whoever changes anything here, since runs end in threads of their own.
        compared: the number of the run that pictures compare with, or 0.
    """

    def __init__(
        self,
        earlier: Iterable[Run] = (),
        added: Callable[[Run], None] = lambda _: None,
        changed: Callable[[Run, Iterable[str]], None] = lambda *_: None,
    ) -> None:
        self.lock = threading.RLock()
        self.runs: list[Run] = list(earlier)
        self.compared = 0
        self._added, self._changed = added, changed
        self._last_cleared: list[int] = []  # the runs of the last clear; empty after the next run
        self._was_compared = 0

    def add(
        self,
        result: StepResult,
        prediction: StepResult | None = None,
        limit_bytes: int | None = None,
    ) -> Run:
        """Add a result as the newest run, with what was predicted for it and the limit on screen.

        Without a limit on screen it is the one under which it ran.
        """
        run = Run(
            number=len(self.runs) + 1,
            result=result,
            prediction=prediction,
            limit_bytes=limit_bytes or result.memory_limit_bytes,
        )
        self.runs.append(run)
        self._last_cleared = []
        self._added(run)
        return run

    def change(self, number: int, **changes: object) -> None:
        """Change fields of one run."""
        self.runs[number - 1] = dataclasses.replace(self.runs[number - 1], **changes)  # type: ignore[arg-type]
        self._changed(self.runs[number - 1], changes)

    def clear(self) -> None:
        """Take every run off the table that is neither pinned nor the last one."""
        found = [r.number for r in self.runs[:-1] if not r.name and not r.cleared]
        if not found:  # the last clear can still be undone
            return
        self._was_compared, self._last_cleared = self.compared, found
        for number in self._last_cleared:
            self.change(number, cleared=True)
            if self.compared == number:
                self.compared = 0

    def undo_clear(self) -> None:
        """Put the runs of the last clear back on the table."""
        for number in self._last_cleared:
            self.change(number, cleared=False)
        if self._was_compared in self._last_cleared:
            self.compared = self.compared or self._was_compared
        self._last_cleared = []

    @property
    def can_undo_clear(self) -> bool:
        """Whether runs were cleared since the last one was added."""
        return bool(self._last_cleared)

    @property
    def own(self) -> list[Run]:
        """The runs of this panel itself, oldest first; the model of earlier ones may be another."""
        return [run for run in self.runs if not run.is_earlier]

    @property
    def last(self) -> Run | None:
        """The newest run."""
        return self.runs[-1] if self.runs else None

    @property
    def visible(self) -> list[Run]:
        """The runs on the table, oldest first."""
        kept = [run for run in self.runs if not run.cleared]
        recent = {run.number for run in kept[-MOST_SHOWN:]}
        return [run for run in kept if run.name or run.number in recent]

    @property
    def compared_run(self) -> Run | None:
        """The run that pictures compare with."""
        return self.runs[self.compared - 1] if self.compared else None


def count_runs(number: int) -> str:
    """Return a number of runs in words."""
    return f"{number} run{'' if number == 1 else 's'}"


def _error(predicted: float | None, measured: float | None) -> float | None:
    """Return predicted divided by measured, minus one; None if either is missing."""
    return predicted / measured - 1 if predicted is not None and measured else None


# Appends lines to a file in a thread of its own, so that nobody waits for the disk.
#
# A line waits for a moment, and a newer one takes its place: of a name that is being typed
# only the last is written. `flush` writes all that waits. It is called when a panel is
# closed and when the kernel ends, so that only a kernel that is killed loses lines, those
# of its last moment.

MOMENT_SECONDS = 1.0
# a full disk, and a value that JSON does not know: neither must stop a panel
UNWRITABLE = (OSError, TypeError, ValueError)


class LineWriter:
    """Lines that wait to be written, in the order in which they were added."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what waits; never held while anything is written
        self._writing = threading.Lock()
        self._waiting: dict[Hashable, tuple[Path, Callable[[], str]]] = {}
        self._timer: threading.Timer | None = None
        atexit.register(self.flush)

    def add(
        self, path: Path, about: Hashable, line: Callable[[], str], *, soon: bool = False
    ) -> None:
        """Have a line appended to a file.

        Args:
            path: of the file, whose folder need not exist.
            about: what the line says; an older line about the same that still waits is dropped.
            line: makes the text of the line, in the thread that writes it.
            soon: whether it does not wait for a newer line.
        """
        with self._lock:
            self._waiting.pop(about, None)
            self._waiting[about] = path, line
            if soon and self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._timer is None:
                self._timer = threading.Timer(0.0 if soon else MOMENT_SECONDS, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Write what waits, and return once it is written."""
        with self._writing:
            with self._lock:
                waiting, self._waiting = self._waiting, {}
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None

            for path, line in waiting.values():
                with contextlib.suppress(*UNWRITABLE):  # the others are written all the same
                    _append(path, line())


def _append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # in one piece, since another kernel may append at the same time
    with path.open("ab", buffering=0) as file:
        file.write(f"{line}\n".encode())


# What a panel had on screen and what was run in it, kept in one file of lines for the next
# kernel.
#
# Each line is a JSON object: the cell that it belongs to, and the settings on screen, a
# run, or the changes of a run. Lines are only ever appended, by a thread of their own
# (`LineWriter`). Which cell a panel belongs to is known in JupyterLab alone; elsewhere
# (papermill, a script) nothing is read or written, so that those begin anew each time. Left
# out: a policy function among the settings of a run, of which only the name comes back.

FILE_NAME = "panels.jsonl"
MOST_RUNS = 100  # that come back; all others stay in the file
# what a line raises that another version of memlab wrote, or that was changed by hand
UNREADABLE = (MemlabError, LookupError, TypeError, ValueError, AttributeError)
RESULTS = {"result", "prediction"}  # fields of a run that hold one
KEPT = ("result", "prediction", "report", "limit_bytes", "name", "cleared")
WRITER = LineWriter()  # of all panels, so that their lines stay in order


class History:
    """The past of the panel of one cell, read when it is made. Nothing here raises.

    Args:
        cell: which cell of which notebook; "" if that is not known, so that nothing is kept.

    Attributes:
        settings: what was on screen last, by field; empty if there is nothing.
    """

    def __init__(self, cell: str) -> None:
        self._cell, self._path = cell, _path() if cell else None
        self._lock, self._closed = threading.Lock(), False
        self.settings: dict[str, Any] = {}
        self._runs: dict[str, dict[str, Any]] = {}  # as they were written, with their changes
        self._noted: Mapping[str, Any] = {}  # the settings that were written last
        for line in self._lines():
            with contextlib.suppress(*UNREADABLE):
                self._take(line)

    def runs(self) -> list[Run]:
        """Return the runs of earlier panels of this cell, oldest first, numbered from 1."""
        found: list[Run] = []
        for key, written in reversed(self._runs.items()):
            if len(found) == MOST_RUNS:
                break
            with contextlib.suppress(*UNREADABLE):
                found.append(Run(number=0, key=key, is_earlier=True, **_from_json(written)))
        return [dataclasses.replace(run, number=i) for i, run in enumerate(found[::-1], start=1)]

    def close(self) -> None:
        """Write what still waits to be written; what is noted later is not."""
        with self._lock:
            self._closed = True
        WRITER.flush()

    def _take(self, line: Mapping[str, Any]) -> None:
        if "settings" in line:
            self.settings = dict(line["settings"])
        elif "run" in line:
            self._runs[line["key"]] = dict(line["run"])
        elif line["key"] in self._runs:
            self._runs[line["key"]] |= line["changes"]

    def note_settings(self, settings: Mapping[str, Any]) -> None:
        """Keep what is on screen, if it is not what was kept last."""
        if settings != self._noted:
            noted = self._noted = dict(settings)
            self._append("settings", lambda: noted, about=())

    def note_run(self, run: Run) -> None:
        """Keep a new run."""
        self._append("run", lambda: _to_json(run), about=(run.key,), soon=True, key=run.key)

    def note_changes(self, run: Run, names: Iterable[str]) -> None:
        """Keep the new values of fields of a run."""
        changed = sorted(names)
        self._append(
            "changes", lambda: _to_json(run, changed), about=(run.key, *changed), key=run.key
        )

    def _append(
        self,
        kind: str,
        content: Callable[[], Mapping[str, Any]],
        *,
        about: Hashable,
        soon: bool = False,
        **others: str,
    ) -> None:
        """Append a line; its content is made in the thread that writes it."""
        if self._path is None:
            return

        def line() -> str:
            return json.dumps({"cell": self._cell, **others, kind: content()})

        with self._lock:
            if not self._closed:
                WRITER.add(self._path, (self._cell, kind, about), line, soon=soon)

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of this cell, the oldest first."""
        if self._path is None:
            return

        WRITER.flush()  # lines of the panel that this one replaces
        begins = json.dumps({"cell": self._cell})[:-1] + ","
        with contextlib.suppress(OSError), self._path.open(encoding="utf-8") as file:
            for line in file:
                if line.startswith(begins):
                    with contextlib.suppress(ValueError):  # the end of a line that was cut off
                        yield json.loads(line)


def _path() -> Path | None:
    try:
        return cache_folder() / FILE_NAME
    except MemlabError:  # there is no home folder
        return None


def _to_json(run: Run, names: Iterable[str] = KEPT) -> dict[str, Any]:
    """Return fields of a run as plain JSON types; `_from_json` gives them back."""
    fields = {name: getattr(run, name) for name in names}
    for name in RESULTS & fields.keys():
        fields[name] = fields[name] and result_to_packed(fields[name])
    if report := fields.get("report"):
        fields["report"] = {**dataclasses.asdict(report), "outcome": str(report.outcome)}
    return fields


def _from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a run that `_to_json` wrote."""
    fields = dict(data)
    for name in RESULTS & fields.keys():
        fields[name] = fields[name] and _result(fields[name])
    if report := fields.get("report"):
        fields["report"] = VerifyReport(**{**report, "outcome": Outcome(report["outcome"])})
    return fields


def _result(written: Mapping[str, Any]) -> StepResult:
    """Return a result; the first panels wrote it without packing it."""
    return result_from_packed(written) if "packed" in written else StepResult.from_dict(written)
