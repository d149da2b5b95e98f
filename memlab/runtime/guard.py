"""A guard for the machine: a step that takes too much memory fails in its own process."""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any, TextIO

from memlab._util.units import KIB
from memlab.devices.here import available_memory_bytes
from memlab.result import Outcome, StepResult

UNGUARDED = (
    "memlab cannot limit a process's memory on this system: a step that takes more than the "
    "machine has slows it down, so give a memory_limit"
)
GUARD_FRACTION = 0.9  # of the memory that is available when a job begins


def limit_memory(guard_bytes: int | None, num_processes: int = 1) -> None:
    """Make allocations fail beyond this much additional memory, on Linux only.

    The limit is on the process's data, which includes memory that is not resident. So the machine
    stays responsive, and a step fails a little earlier than it would have to.

    Args:
        guard_bytes: None is a share of the available memory.
        num_processes: that run at once, and divide this share.
    """
    try:
        import resource
    except ImportError:
        return

    if guard_bytes is None:
        available = available_memory_bytes()
        if available is None:
            return
        guard_bytes = int(available * GUARD_FRACTION / num_processes)

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    now = _data_bytes()
    unlimited = now is None or guard_bytes == sys.maxsize
    limit = hard if unlimited or now is None else now + guard_bytes
    if hard != resource.RLIM_INFINITY:  # set from outside (`ulimit -d`); no limit may be above it
        limit = hard if limit == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def noted(value: Any) -> Any:
    """Return a result with a note if nothing but its own limit protects the machine from it."""
    if not isinstance(value, StepResult) or value.outcome is not Outcome.OK:
        return value
    if importlib.util.find_spec("resource") is not None and _data_bytes() is not None:
        return value
    return dataclasses.replace(value, notes=(*value.notes, UNGUARDED))


def _data_bytes() -> int | None:
    """Return what the system counts as this process's data, in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * KIB
    except OSError:
        pass

    return None


# What a model prints while a job runs: passed on to the worker's output, its beginning kept.

MOST_CHARACTERS = 4000  # of the beginning: a forward runs many times and prints the same again


class Printed:
    """Stands in for a stream: keeps the first part of what is written, and passes everything on.

    Args:
        on: the stream, which is also what anything but writing is left to.
    """

    def __init__(self, on: TextIO) -> None:
        self._on, self._kept, self._left_out = on, "", 0

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stream."""
        return getattr(self._on, name)

    def write(self, text: str) -> int:
        """Write text; return its length."""
        kept = text[: MOST_CHARACTERS - len(self._kept)]
        self._kept += kept
        self._left_out += len(text) - len(kept)
        self._on.write(text)
        return len(text)

    @property
    def text(self) -> str:
        """What was printed; a last line says how much was left out."""
        more = f"\n(and {self._left_out:,} more characters)" if self._left_out else ""
        return self._kept.rstrip("\n") + more

    def into(self, value: Any) -> Any:
        """Return a job's value, with what was printed where it is a result or holds one."""
        if not self._kept:
            return value
        if isinstance(value, StepResult):
            return dataclasses.replace(value, printed=self.text)
        if isinstance(result := getattr(value, "result", None), StepResult):
            return dataclasses.replace(value, result=self.into(result))
        return value
