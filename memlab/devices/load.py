"""How much of the processors other programs use while a time is taken.

Left out: what other programs do to caches and memory, which no counter shows.
"""

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")  # Linux; elsewhere the load is not known
SHORTEST_SECONDS = 0.05  # the counters of Linux tick a hundred times a second
QUIET_SHARE = 0.1
WINDOW_SECONDS = 0.1
IDLE_COLUMNS = (3, 4)  # of the first line of `STAT`: idle, and waiting for disks


class LoadWatch:
    """Counts what other programs use of the processors, from its making on."""

    def __init__(self) -> None:
        self._start = _counters()

    def others_share(self) -> float | None:
        """Return their share of all processors, 0..1; None where or while it is not known."""
        if self._start is None or (now := _counters()) is None:
            return None
        wall, busy, own = (after - before for after, before in zip(now, self._start, strict=True))
        if wall < SHORTEST_SECONDS:
            return None
        return min(max((busy - own) / (wall * (os.cpu_count() or 1)), 0.0), 1.0)


def is_quiet() -> bool:
    """Return whether the machine is quiet, after watching for a tenth of a second."""
    watch = LoadWatch()
    time.sleep(WINDOW_SECONDS)
    share = watch.others_share()
    return share is not None and share <= QUIET_SHARE


def _counters() -> tuple[float, float, float] | None:
    """Return seconds: wall time, busy time of all processors, busy time of this process."""
    try:
        line = STAT.read_text().splitlines()[0].split()
        ticks = [int(column) for column in line[1:9]]  # what comes after is counted in these
        busy = sum(ticks) - sum(ticks[column] for column in IDLE_COLUMNS)
        per_second = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None

    return time.perf_counter(), busy / per_second, time.process_time()
