"""`Store`: what operators cost on this machine, kept on disk between processes.

One SQLite file; a row a signature and circumstances (torch, processor, threads, switches). Several
processes may share it. A file that cannot be read or written is left alone: the store then lasts as
long as the process, and `problem` says why. Deleted are only times that a measured run has shown to
be wrong. The file's other table holds measured runs, see `measured_runs.py`.
"""

import contextlib
import functools
import json
import os
import platform
import sqlite3
import sys
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import torch

from memlab.arguments.quoting import shown
from memlab.devices.here import describe
from memlab.errors import MemlabError
from memlab.operators.cost import OperatorCost
from memlab.operators.signatures import Signature, to_text

FILE = "operators-2.sqlite3"  # the number changes with what a row means
OLD_FILES = ("operators-1.sqlite3",)  # which did not say what times were taken under
WAIT_SECONDS = 5.0  # for another process that writes; a batch takes milliseconds
MOST_BYTES, MOST_SECONDS = 2**45, 1e6  # of one operator: what is beyond is damage
# seconds besides a kernel. An operator alone is timed with a Python call that takes a few
# microseconds: where a step needs less around it, the difference comes out below 0, by no more
LEAST_OVERHEAD, MOST_OVERHEAD = -1e-5, 1.0
OVERHEAD = "memlab.overhead."  # begins the name of what an operator takes besides its kernel
MOST_DATE = 1e11  # seconds since 1970: some thousand years
DAMAGED = (ValueError, TypeError, RecursionError)  # what reading a damaged row may raise
MOST_REPEATS = 10**6
NUM_REQUIRED = 5  # fields that a row has had from the beginning
BATCH = 500  # SQLite allows 999 variables in a query, in its oldest builds
TABLES = (
    "CREATE TABLE IF NOT EXISTS cost (circumstances TEXT, operator TEXT, cost TEXT, "
    "PRIMARY KEY (circumstances, operator)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS measured (circumstances TEXT, step TEXT, run TEXT, "
    "PRIMARY KEY (circumstances, step))",
)
Version = tuple[int, int, int]  # of a file, which every write changes


def cache_folder() -> Path:
    """Return where memlab keeps what it can work out again; `MEMLAB_CACHE` overrules.

    Raises:
        MemlabError: it lies in the home of a user who has none here.
    """
    own = os.environ.get("MEMLAB_CACHE")
    try:
        return Path(own).expanduser() if own else _usual_folder()
    except RuntimeError as error:
        named = f"MEMLAB_CACHE={shown(own)} names no folder" if own else "there is no home folder"
        raise MemlabError(
            f"{named} ({error}); set MEMLAB_CACHE to a folder that can be written"
        ) from None


def _usual_folder() -> Path:
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "memlab"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "memlab"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "memlab"
    return Path.home() / ".cache" / "memlab"


def circumstances() -> str:
    """Return all besides the signature that an operator's cost on a CPU depends on, as text."""
    return json.dumps(
        {
            "torch": torch.__version__,
            "processor": _processor(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "mkldnn": torch.backends.mkldnn.enabled,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "flush_denormal": torch.ones(()).mul(1e-40).item() == 0.0,
        }
    )


@functools.cache
def _processor() -> str:
    return f"{platform.machine()} {describe(torch.device('cpu'))} x{os.cpu_count()}"


CONDITIONS = tuple(field.name for field in fields(OperatorCost))[NUM_REQUIRED:]


def forget_costs() -> None:
    """Delete what memlab has learned of the operators of this machine.

    The next prediction for a CPU runs them again. Times that were taken while the machine was busy
    are taken again by themselves, once it is quiet.

    Raises:
        MemlabError: the file cannot be deleted, or `MEMLAB_CACHE` names no folder.

    >>> import memlab
    >>> memlab.forget_costs()  # doctest: +SKIP
    """
    for name in (FILE, *OLD_FILES):
        path = cache_folder() / name
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise MemlabError(
                f"{path} cannot be deleted ({error}); delete it by hand, or set MEMLAB_CACHE to "
                "another folder"
            ) from None


class Store:
    """Costs by signature, for the circumstances of each call.

    Attributes:
        problem: a sentence on why nothing is kept on disk; None while something is.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.problem: str | None = None
        try:
            self.path = (cache_folder() if folder is None else folder) / FILE
        except MemlabError as error:
            self.path = Path(FILE)  # never opened
            self.problem = f"Calibrations are not kept: {error}."
        self._memory: dict[tuple[str, str], OperatorCost] = {}
        self._version: Version | None = None  # of the file that `_memory` was read from
        self._dropped: set[str] = set()  # operators whose row could not be believed

    @property
    def notes(self) -> list[str]:
        """Sentences on what of the file could not be used."""
        notes = [] if self.problem is None else [self.problem]
        if self._dropped:
            notes.append(
                f"{len(self._dropped)} damaged rows of {self.path} were dropped, and what they "
                "said was found again."
            )
        return notes

    def read(self, signatures: Iterable[Signature]) -> dict[Signature, OperatorCost]:
        """Return the costs that are known under the present circumstances."""
        version = self._version_now()
        if self.problem is None and version != self._version:
            self._memory.clear()  # another process has written, or somebody forgot all
            self._version = version

        here = circumstances()
        by_text = {to_text(signature): signature for signature in signatures}
        missing = [text for text in by_text if (here, text) not in self._memory]
        for text, cost in self._rows(here, missing):
            self._memory[here, text] = cost
        known = {sig: self._memory.get((here, text)) for text, sig in by_text.items()}
        return {signature: cost for signature, cost in known.items() if cost is not None}

    def write(self, costs: Mapping[Signature, OperatorCost]) -> None:
        """Keep these costs under the present circumstances, in one transaction."""
        here = circumstances()
        texts = {to_text(signature): cost for signature, cost in costs.items()}
        rows = [(here, text, _line(cost, here, text)) for text, cost in texts.items()]
        self.query("INSERT OR REPLACE INTO cost VALUES (?, ?, ?)", rows)
        if self.problem is not None:  # else they are read from the file, which is another now
            self._memory |= {(here, text): cost for text, cost in texts.items()}

    def drop(self, signatures: Iterable[Signature]) -> None:
        """Say in the notes that what the file said of these operators was damaged."""
        self._dropped.update(map(to_text, signatures))

    def forget_near(self, dates: Iterable[float], *, within_seconds: float, before: float) -> None:
        """Delete the costs under the present circumstances that were taken near one of these dates.

        Args:
            dates: seconds since 1970; 0 stands for costs that do not say when they were taken.
            within_seconds: how near.
            before: a date; what was taken later is kept.
        """
        here, dates = circumstances(), tuple(dates)
        near = []
        for text, line in self.query(
            "SELECT operator, cost FROM cost WHERE circumstances = ?", [(here,)] if dates else []
        ):
            try:
                taken_at = _cost(line, here, text).taken_at or 0.0
            except DAMAGED:
                continue  # it is dropped when it is needed
            is_near = any(abs(taken_at - date) <= within_seconds for date in dates)
            if is_near and taken_at < before:
                near.append((here, text))
        self.query("DELETE FROM cost WHERE circumstances = ? AND operator = ?", near)
        for key in near:
            self._memory.pop(key, None)

    def _rows(self, here: str, texts: list[str]) -> list[tuple[str, OperatorCost]]:
        found = []
        for start in range(0, len(texts), BATCH):
            part = texts[start : start + BATCH]
            marks = ", ".join("?" * len(part))
            query = "SELECT operator, cost FROM cost WHERE circumstances = ?"
            found += self.query(f"{query} AND operator IN ({marks})", [(here, *part)])
        costs = []
        for text, line in found:
            try:
                costs.append((text, _cost(line, here, text)))
            except DAMAGED:
                self._dropped.add(text)
        return costs

    def query(self, query: str, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run the query on each row and return what it finds; nothing if the file will not do."""
        if self.problem is not None or not rows:
            return []
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # opened for each batch: a connection may cross neither threads nor forks
            connection = sqlite3.connect(self.path, timeout=WAIT_SECONDS)
            try:
                with connection:
                    for table in TABLES:
                        connection.execute(table)
                    if query.startswith("SELECT"):
                        return [row for each in rows for row in connection.execute(query, each)]
                    connection.executemany(query, rows)
            finally:
                connection.close()
        except (OSError, ValueError, OverflowError, sqlite3.Error) as error:
            self._give_up(error)
            return []
        self._stamp()
        return []

    def _stamp(self) -> None:
        """Give the file a date of its own: the system's move in steps of some milliseconds.

        So no two contents of it have the same, also of a file that was deleted and written anew.
        """
        now = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(self.path, ns=(now, now))

    def _version_now(self) -> Version | None:
        """Return what tells whether the file was written since, without opening it."""
        try:
            state = self.path.stat()
        except (OSError, ValueError):
            return None
        return state.st_ino, state.st_mtime_ns, state.st_size

    def _give_up(self, error: Exception) -> None:
        self.problem = (
            f"Calibrations are not kept: {self.path} cannot be used ({error}); delete it, or set "
            "MEMLAB_CACHE to a folder that can be written."
        )


def _line(cost: OperatorCost, here: str, text: str) -> str:
    """Return a cost as a row of the file: its fields, and a checksum of them and of their keys."""
    row = list(astuple(cost))
    return json.dumps([*row, _checksum(row, here, text)])


def _cost(line: str, here: str, text: str) -> OperatorCost:
    """Return the cost in a row of the file, for these circumstances and this operator.

    Raises:
        Exception: one of `DAMAGED`, where it is not what `_line` wrote. A row without a checksum is
            of an earlier version.
    """
    row = json.loads(line)
    if isinstance(row, list) and len(row) == len(fields(OperatorCost)) + 1:
        *row, checksum = row
        if checksum != _checksum(row, here, text):
            raise ValueError("its checksum is another")
    return cost_from_row(row, is_overhead=text.startswith(OVERHEAD))


def _checksum(row: list[Any], here: str, text: str) -> int:
    return zlib.crc32(json.dumps([here, text, row]).encode())


def cost_from_row(row: Any, *, is_overhead: bool = False) -> OperatorCost:
    """Return the cost whose fields are in a row, as JSON holds them.

    Args:
        row: the fields, in order.
        is_overhead: of what operators take besides their kernels, which may come out below 0.

    Raises:
        ValueError: it is no such row, or holds a number that no operator can cost.
    """
    if not isinstance(row, list) or len(row) not in (NUM_REQUIRED, len(fields(OperatorCost))):
        raise ValueError("it is no row of a cost")
    outputs, peak, kept, seconds, extrapolated = row[:NUM_REQUIRED]
    if not isinstance(outputs, list) or not isinstance(extrapolated, bool):
        raise ValueError("it is no row of a cost")

    for nbytes in (*outputs, peak, kept):
        if type(nbytes) is not int or not 0 <= nbytes <= MOST_BYTES:
            raise ValueError("a size is none")
    if not extrapolated and peak < sum(outputs) + kept:  # each on a line of its own, else
        raise ValueError("what is alive afterwards is more than the peak")
    if seconds is not None and not (is_overhead_seconds if is_overhead else _is_time)(seconds):
        raise ValueError("a time is none")

    conditions = dict(zip(CONDITIONS, row[NUM_REQUIRED:], strict=False))
    cost = OperatorCost(
        output_bytes=tuple(outputs),
        peak_bytes=peak,
        kept_bytes=kept,
        seconds=seconds,
        extrapolated=extrapolated,
        **conditions,
    )
    _check_conditions(cost)
    return cost


def _check_conditions(cost: OperatorCost) -> None:
    """Raise ValueError for a cost that says what no time was taken under."""
    repeats, share = cost.num_repeats, cost.others_share
    if repeats is not None and (type(repeats) is not int or not 0 < repeats <= MOST_REPEATS):
        raise ValueError("the repeats are no number of them")
    if share is not None and (type(share) not in (int, float) or not 0 <= share <= 1):
        raise ValueError("a share is none")
    if cost.taken_at is not None and not is_date(cost.taken_at):
        raise ValueError("a date is none")

    least, median = cost.least_seconds, cost.median_seconds
    if not all(value is None or _is_time(value) for value in (least, median)):
        raise ValueError("a time is none")
    if least is None or median is None or cost.seconds is None:
        return
    is_between = cost.extrapolated or least <= cost.seconds <= median
    if least > median or not is_between:
        raise ValueError("its times contradict each other")


def is_date(value: Any) -> bool:
    """Return whether a value can be a date, in seconds since 1970."""
    return type(value) is float and 0 <= value <= MOST_DATE


def _is_time(seconds: Any) -> bool:
    """Return whether a time can be that of one operator."""
    return type(seconds) in (int, float) and 0 < seconds <= MOST_SECONDS


def is_overhead_seconds(seconds: Any) -> bool:
    """Return whether a time can be what one operator takes besides its kernel.

    That is a difference of times, and may come out below 0.
    """
    return type(seconds) in (int, float) and LEAST_OVERHEAD <= seconds <= MOST_OVERHEAD
