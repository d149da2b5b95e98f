"""`MeasuredRun`: how long a step took when it was measured, stored beside the costs of operators.

A prediction of the same step is compared with it. Rows are checked when they are read; a damaged
row is ignored, and a note says so. The newest `MOST_ROWS` rows are kept.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from memlab.cost_model.cost_store import (
    DAMAGED,
    MOST_BYTES,
    MOST_SECONDS,
    Store,
    circumstances,
    is_date,
    is_number,
    is_whole,
)
from memlab.devices.here import QUIET_SHARE
from memlab.devices.operators import STEADY

MOST_ROWS = 500
MOST_CHARACTERS = 100_000  # of a row; a longer one, with very many files, is not stored
NUM_STEADY = 3  # repeats that are needed to see whether a time is steady
SAME_SECONDS = 3600.0  # an earlier run of the same step counts for this long

Stamp = tuple[int, int, int, int]  # of a file: two dates, its size, its number


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """A measured run of a step.

    Attributes:
        step: the key of the step, from `step_of`.
        least_seconds: minimum of its timed steps. Load only slows, so the step can be this fast.
        median_seconds: median of its timed steps.
        num_repeats: number of timed steps.
        others_share: the share of all processors that other programs used; None if not known.
        peak_bytes: peak of allocated bytes.
        taken_at: date in seconds since 1970.
        in_vain_at: when costs were last taken again because of this run and it still contradicted
            the prediction; None if never.
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
        """Whether nothing is known that may have slowed it, so the step really takes that long."""
        is_alone = self.others_share is not None and self.others_share <= QUIET_SHARE
        is_steady = self.median_seconds <= STEADY * self.least_seconds
        return is_alone and is_steady and self.num_repeats >= NUM_STEADY

    def is_of_present_files(self) -> bool:
        """Return whether the files that it ran with are unchanged."""
        return all(stamp_of(file) == stamp for file, stamp in self.files.items())


def stamp_of(file: str) -> Stamp | None:
    """Return values that change when a file changes; None if the file does not exist."""
    try:
        state = os.stat(file)
    except (OSError, ValueError):
        return None
    return state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino


def write_run(store: Store, run: MeasuredRun) -> None:
    """Store a run for the present circumstances, combined with an earlier run of the same step.

    If the earlier run is from the last hour, the smaller of both times is stored.
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
    """Return the measured run of a step or None, and a note if its row was damaged."""
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
    """Return two runs of the same step combined, with the date of the new one."""
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
        ValueError: it is not such a row, or has a number that is not possible.
    """
    names = {field.name for field in fields(MeasuredRun)} - {"step"}
    if not isinstance(row, dict) or row.keys() != names or not isinstance(row["files"], dict):
        raise ValueError("it is not a row of a run")

    least, others, in_vain_at = row["least_seconds"], row["others_share"], row["in_vain_at"]
    is_valid = (
        is_number(least, 0, MOST_SECONDS)
        and least > 0
        and is_number(row["median_seconds"], least, MOST_SECONDS)
        and (others is None or is_number(others, 0, 1))
        and all(is_whole(row[name], 1, MOST_BYTES) for name in ("peak_bytes", "num_repeats"))
        and is_date(row["taken_at"])
        and (in_vain_at is None or is_date(in_vain_at))
        and all(map(_is_stamp, row["files"].values()))
    )
    if not is_valid:
        raise ValueError("a number is not valid")

    files = {file: tuple(stamp) for file, stamp in row["files"].items()}
    return MeasuredRun(**{**row, "files": files, "step": step})


def _is_stamp(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(type(n) is int for n in value)
