"""What a panel had on screen and what was run in it, kept in one file of lines for the next kernel.

Each line is a JSON object: the cell that it belongs to, and the settings on screen, a run, or the
changes of a run. Lines are only ever appended, by a thread of their own (`line_writer.py`). Which
cell a panel belongs to is known in JupyterLab alone; elsewhere (papermill, a script) nothing is
read or written, so that those begin anew each time. Left out: a policy function among the settings
of a run, of which only the name comes back.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memlab._panel.line_writer import LineWriter
from memlab._panel.runs import Run
from memlab.costs.cost_store import cache_folder
from memlab.errors import MemlabError
from memlab.records.packing import result_from_packed, result_to_packed
from memlab.result import Outcome, StepResult
from memlab.verifying.report import VerifyReport

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
        """Write what still waits to be written."""
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
