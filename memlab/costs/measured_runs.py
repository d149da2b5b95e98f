"""`MeasuredRun`: how long a step took when it was really run, kept beside the costs of operators.

A prediction of the same step is held against it. Rows are checked as they are read; a damaged one
is as good as none, and a note says so. The newest `MOST_ROWS` are kept.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from memlab.costs.cost_store import DAMAGED, MOST_BYTES, MOST_SECONDS, Store, circumstances, is_date
from memlab.devices.load import QUIET_SHARE
from memlab.operators.cost import STEADY

MOST_ROWS = 500
MOST_CHARACTERS = 100_000  # of a row: one with more files is not written, nor read
NUM_STEADY = 3  # repeats, to tell whether a time is steady
SAME_SECONDS = 3600.0  # after which an earlier run of the same step says nothing more

Stamp = tuple[int, int, int, int]  # of a file: two dates, its size, its number


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """A measured run of a step.

    Attributes:
        step: which, as `step_of` names it.
        least_seconds: of its timed steps. Load only ever slows, so the step can be this fast.
        median_seconds: of the same.
        num_repeats: how many were timed.
        others_share: of all processors, what other programs used meanwhile; None if not known.
        peak_bytes: allocated.
        taken_at: when, in seconds since 1970.
        in_vain_at: when costs were last taken again because of it, and it still spoke against the
            prediction; None if never.
        files: stamps of the files that the step depends on.
    """

    step: str
    least_seconds: float
    median_seconds: float
    num_repeats: int
    others_share: float | None
    peak_bytes: int
    taken_at: float
    in_vain_at: float | None = None
    files: Mapping[str, Stamp]

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is known that may have slowed it, so that the step takes that long."""
        is_alone = self.others_share is not None and self.others_share <= QUIET_SHARE
        is_steady = self.median_seconds <= STEADY * self.least_seconds
        return is_alone and is_steady and self.num_repeats >= NUM_STEADY

    def is_of_present_files(self) -> bool:
        """Return whether the files are still those that it ran with."""
        return all(stamp_of(file) == stamp for file, stamp in self.files.items())


def stamp_of(file: str) -> Stamp | None:
    """Return what changes with a file; None if it is not there."""
    try:
        state = os.stat(file)
    except (OSError, ValueError):
        return None
    return state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino


def write_run(store: Store, run: MeasuredRun) -> None:
    """Keep a run under the present circumstances, with what an earlier one of the same step says.

    That is the least of both times, where the earlier one is of the last hour.
    """
    old, _ = read_run(store, run.step)
    if old is not None and old.peak_bytes == run.peak_bytes and old.files == run.files:
        run = _joined(old, run)
    row = asdict(run)
    del row["step"]
    line = json.dumps(row)
    if len(line) > MOST_CHARACTERS:
        return
    store.query(
        "INSERT OR REPLACE INTO measured VALUES (?, ?, ?)", [(circumstances(), run.step, line)]
    )
    store.query(
        "DELETE FROM measured WHERE rowid NOT IN "
        "(SELECT rowid FROM measured ORDER BY rowid DESC LIMIT ?)",
        [(MOST_ROWS,)],
    )


def read_run(store: Store, step: str) -> tuple[MeasuredRun | None, str | None]:
    """Return the measured run of a step, None if there is none; and a note on a damaged row."""
    found = store.query(
        "SELECT CASE WHEN length(run) <= ? THEN run END FROM measured "
        "WHERE circumstances = ? AND step = ?",
        [(MOST_CHARACTERS, circumstances(), step)],
    )
    if not found:
        return None, None
    try:
        return _run_from_row(json.loads(found[0][0]), step), None
    except DAMAGED:
        return None, f"A damaged row of a measured run in {store.path} was not used."


def _joined(old: MeasuredRun, new: MeasuredRun) -> MeasuredRun:
    """Return what two runs of the same step say together, as of the date of the new one."""
    in_vain_at = new.in_vain_at or old.in_vain_at
    if not 0 <= new.taken_at - old.taken_at <= SAME_SECONDS:
        return replace(new, in_vain_at=in_vain_at)
    better = old if old.is_quiet and not new.is_quiet else new
    return replace(
        better,
        least_seconds=min(old.least_seconds, new.least_seconds),
        taken_at=new.taken_at,
        in_vain_at=in_vain_at,
    )


def _run_from_row(row: Any, step: str) -> MeasuredRun:
    """Return the run whose fields are in a row, as JSON holds them.

    Raises:
        ValueError: it is no such row, or holds a number that cannot be.
    """
    names = {field.name for field in fields(MeasuredRun)} - {"step"}
    if not isinstance(row, dict) or row.keys() != names or not isinstance(row["files"], dict):
        raise ValueError("it is not a row of a run")
    least, median, others = (
        row[name] for name in ("least_seconds", "median_seconds", "others_share")
    )
    if not 0 < _number(least) <= _number(median):
        raise ValueError("a time is none")
    if others is not None and not 0 <= _number(others) <= 1:
        raise ValueError("a share is none")
    for count, most in ((row["peak_bytes"], MOST_BYTES), (row["num_repeats"], MOST_BYTES)):
        if type(count) is not int or not 0 < count <= most:
            raise ValueError("a number is none")
    dates = [row["taken_at"], *([] if row["in_vain_at"] is None else [row["in_vain_at"]])]
    if not all(map(is_date, dates)):
        raise ValueError("a date is none")
    files = {file: _stamp_from(stamp) for file, stamp in row["files"].items()}
    return MeasuredRun(**{**row, "files": files, "step": step})


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not -MOST_SECONDS <= value <= MOST_SECONDS:
        raise ValueError("it is not a number")
    return float(value)


def _stamp_from(value: Any) -> Stamp:
    if not isinstance(value, list) or len(value) != 4 or any(type(n) is not int for n in value):
        raise ValueError("it is not a stamp of a file")
    return value[0], value[1], value[2], value[3]
