"""Resident memory of processes, as Linux counts it; elsewhere nothing is known.

Left out: swap, and what other processes share.
"""

from pathlib import Path

from memlab.arguments.units import KIB

PRIVATE = ("Private_Clean:", "Private_Dirty:")


def resident_bytes(pid: int | str = "self") -> int | None:
    """Return the bytes of a process that are in memory, shared pages included."""
    return _summed(f"/proc/{pid}/status", ("VmRSS:",))


def private_bytes(pid: int | str = "self") -> int | None:
    """Return the bytes of a process that are in memory and that no other process shares."""
    return _summed(f"/proc/{pid}/smaps_rollup", PRIVATE)


def _summed(path: str, names: tuple[str, ...]) -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) for line in lines if line.startswith(names)]
    return sum(found) * KIB if found else None
