"""`Store`: the costs of operators on this machine, cached on disk.

It is one SQLite file with a row for each signature and circumstances (torch, processor, threads,
switches). Several processes may share it. A file that cannot be read or written is left alone; then
the store lasts as long as the process, and `problem` says why. Costs are deleted only if a measured
run has shown them to be wrong. A second table holds measured runs, see `measured_runs.py`.
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

from memlab._util.units import shown
from memlab.devices.here import describe
from memlab.devices.operators import OperatorCost, Signature, to_text
from memlab.errors import MemlabError

FILE = "operators-2.sqlite3"  # the number is raised when the meaning of a row changes
OLD_FILES = ("operators-1.sqlite3",)  # did not store the conditions of times
INSTRUCTIONS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # what oneDNN may use of a processor
WAIT_SECONDS = 5.0  # for another process that writes; writing a batch takes milliseconds
MOST_BYTES, MOST_SECONDS = 2**45, 1e6  # of one operator; a larger number means a damaged row
# time of an operator besides its kernel. An operator alone is timed with a Python call of a few
# microseconds; if a step needs less around it, the difference is slightly below 0
LEAST_OVERHEAD, MOST_OVERHEAD = -1e-5, 1.0
OVERHEAD = "memlab.overhead."  # prefix of rows that hold the time besides the kernel
MOST_DATE = 1e11  # seconds since 1970, about three thousand years
DAMAGED = (ValueError, TypeError, RecursionError)  # what reading a damaged row may raise
MOST_REPEATS = 10**6
NUM_REQUIRED = 5  # fields that every row has; later fields may be missing
BATCH = 500  # the oldest builds of SQLite allow 999 variables in a query
TABLES = (
    "CREATE TABLE IF NOT EXISTS cost (circumstances TEXT, operator TEXT, cost TEXT, "
    "PRIMARY KEY (circumstances, operator)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS measured (circumstances TEXT, step TEXT, run TEXT, "
    "PRIMARY KEY (circumstances, step))",
)
Version = tuple[int, int, int]  # of a file; every write changes it


def cache_folder() -> Path:
    """Return the folder of memlab's cache; the environment variable `MEMLAB_CACHE` overrides it.

    Raises:
        MemlabError: the folder is in a home folder that does not exist.
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
    """Return as text what an operator's cost on a CPU depends on, besides its signature."""
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
            **{name: os.environ[name] for name in INSTRUCTIONS if name in os.environ},
        }
    )


@functools.cache
def _processor() -> str:
    return f"{platform.machine()} {describe(torch.device('cpu'))} x{os.cpu_count()}"


CONDITIONS = tuple(field.name for field in fields(OperatorCost))[NUM_REQUIRED:]


def forget_costs() -> None:
    """Delete the cached costs of operators on this machine.

    The next prediction for a CPU runs the operators again. This is rarely needed: times that were
    taken while the machine was busy are taken again automatically once it is quiet.

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
        problem: a sentence that says why nothing is stored on disk; None if it works.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.problem: str | None = None
        try:
            self.path = (cache_folder() if folder is None else folder) / FILE
        except MemlabError as error:
            self.path = Path(FILE)  # never opened
            self.problem = f"Costs of operators are not cached on disk: {error}."

        self._memory: dict[tuple[str, str], OperatorCost] = {}
        self._version: Version | None = None  # of the file that `_memory` was read from
        self._dropped: set[str] = set()  # operators whose row was damaged

    @property
    def notes(self) -> list[str]:
        """Sentences about data of the file that could not be used."""
        notes = [] if self.problem is None else [self.problem]
        if self._dropped:
            notes.append(
                f"{len(self._dropped)} damaged rows of {self.path} were dropped, and their costs "
                "were measured again."
            )

        return notes

    def read(self, signatures: Iterable[Signature]) -> dict[Signature, OperatorCost]:
        """Return the costs that are known under the present circumstances."""
        version = self._version_now()
        if self.problem is None and version != self._version:
            self._memory.clear()  # another process has written to or deleted the file
            self._version = version

        here = circumstances()
        by_text = {to_text(signature): signature for signature in signatures}
        missing = [text for text in by_text if (here, text) not in self._memory]
        for text, cost in self._rows(here, missing):
            self._memory[here, text] = cost

        known = {sig: self._memory.get((here, text)) for text, sig in by_text.items()}
        return {signature: cost for signature, cost in known.items() if cost is not None}

    def write(self, costs: Mapping[Signature, OperatorCost]) -> None:
        """Store these costs for the present circumstances, in one transaction."""
        here = circumstances()
        texts = {to_text(signature): cost for signature, cost in costs.items()}
        rows = [(here, text, _line(cost, here, text)) for text, cost in texts.items()]
        self.query("INSERT OR REPLACE INTO cost VALUES (?, ?, ?)", rows)
        if self.problem is not None:  # otherwise they are read from the file when needed
            self._memory |= {(here, text): cost for text, cost in texts.items()}

    def drop(self, signatures: Iterable[Signature]) -> None:
        """Say in the notes that the rows of these operators were damaged."""
        self._dropped.update(map(to_text, signatures))

    def forget_near(self, dates: Iterable[float], *, within_seconds: float, before: float) -> None:
        """Delete the costs under the present circumstances that were taken near one of these dates.

        Args:
            dates: seconds since 1970; 0 stands for costs without a date.
            within_seconds: how near.
            before: a date; costs that were taken later are kept.
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
        """Run the query on each row and return what it finds; nothing if the file is unusable."""
        if self.problem is not None or not rows:
            return []

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # a connection may not be shared between threads or forks, so each batch opens one
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
        """Set the file's date to now in nanoseconds; the system's own steps are milliseconds.

        So two versions of the file never have the same date, even if it was deleted in between.
        """
        now = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(self.path, ns=(now, now))

    def _version_now(self) -> Version | None:
        """Return a value that changes with every write of the file, without opening it."""
        try:
            state = self.path.stat()
        except (OSError, ValueError):
            return None
        return state.st_ino, state.st_mtime_ns, state.st_size

    def _give_up(self, error: Exception) -> None:
        self.problem = (
            f"Costs of operators are not cached on disk: {self.path} cannot be used ({error}); "
            "delete it, or set MEMLAB_CACHE to a folder that can be written."
        )


def _line(cost: OperatorCost, here: str, text: str) -> str:
    """Return a cost as a row of the file: its fields, and a checksum of them and of their keys."""
    row = list(astuple(cost))
    return json.dumps([*row, _checksum(row, here, text)])


def _cost(line: str, here: str, text: str) -> OperatorCost:
    """Return the cost in a row of the file, for these circumstances and this operator.

    Raises:
        Exception: one of `DAMAGED`, if `_line` did not write the row. A row without a checksum was
            written by an earlier version.
    """
    row = json.loads(line)
    if isinstance(row, list) and len(row) == len(fields(OperatorCost)) + 1:
        *row, checksum = row
        if checksum != _checksum(row, here, text):
            raise ValueError("its checksum is wrong")
    return cost_from_row(row, is_overhead=text.startswith(OVERHEAD))


def _checksum(row: list[Any], here: str, text: str) -> int:
    return zlib.crc32(json.dumps([here, text, row]).encode())


def cost_from_row(row: Any, *, is_overhead: bool = False) -> OperatorCost:
    """Return the cost whose fields are in a row, as JSON holds them.

    Args:
        row: the fields, in order.
        is_overhead: whether it is the time besides a kernel, which may be slightly below 0.

    Raises:
        ValueError: it is not such a row, or has a number that is not possible.
    """
    if not isinstance(row, list) or len(row) not in (NUM_REQUIRED, len(fields(OperatorCost))):
        raise ValueError("it is not a row of a cost")

    outputs, peak, kept, seconds, extrapolated = row[:NUM_REQUIRED]
    if not isinstance(outputs, list) or not isinstance(extrapolated, bool):
        raise ValueError("it is not a row of a cost")

    is_seconds = is_overhead_seconds if is_overhead else _is_time
    is_valid = (
        all(is_whole(nbytes, 0, MOST_BYTES) for nbytes in (*outputs, peak, kept))
        # what is live afterwards was at the peak; extrapolation treats each separately
        and (extrapolated or peak >= sum(outputs) + kept)
        and (seconds is None or is_seconds(seconds))
    )
    if not is_valid:
        raise ValueError("a size or a time is not valid")

    cost = OperatorCost(
        output_bytes=tuple(outputs),
        peak_bytes=peak,
        kept_bytes=kept,
        seconds=seconds,
        extrapolated=extrapolated,
        **dict(zip(CONDITIONS, row[NUM_REQUIRED:], strict=False)),
    )
    if not _has_valid_conditions(cost):
        raise ValueError("the conditions of its time are not valid")
    return cost


def _has_valid_conditions(cost: OperatorCost) -> bool:
    """Return whether the conditions of a cost's time are possible, and do not contradict it."""
    least, median = cost.least_seconds, cost.median_seconds
    is_valid = (
        (cost.num_repeats is None or is_whole(cost.num_repeats, 1, MOST_REPEATS))
        and (cost.others_share is None or is_number(cost.others_share, 0, 1))
        and (cost.taken_at is None or is_date(cost.taken_at))
        and all(value is None or _is_time(value) for value in (least, median))
    )
    if not is_valid or least is None or median is None or cost.seconds is None:
        return is_valid
    return least <= median and (cost.extrapolated or least <= cost.seconds <= median)


def is_whole(value: Any, least: int, most: int) -> bool:
    """Return whether a value from a file is an int within bounds, and no bool."""
    return type(value) is int and least <= value <= most


def is_number(value: Any, least: float, most: float) -> bool:
    """Return whether a value from a file is an int or a float within bounds, and no bool."""
    return type(value) in (int, float) and least <= value <= most


def is_date(value: Any) -> bool:
    """Return whether a value can be a date, in seconds since 1970."""
    return type(value) is float and 0 <= value <= MOST_DATE


def _is_time(seconds: Any) -> bool:
    """Return whether a time can be that of one operator."""
    return is_number(seconds, 0, MOST_SECONDS) and seconds > 0


def is_overhead_seconds(seconds: Any) -> bool:
    """Return whether a time can be that of one operator besides its kernel.

    It is a difference of two times, so it may be slightly below 0.
    """
    return is_number(seconds, LEAST_OVERHEAD, MOST_OVERHEAD)
