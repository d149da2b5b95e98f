"""Devices that memlab can measure on: the CPU and, through `torch.accelerator`, a CUDA card."""

import os
import platform
import time
from pathlib import Path

import torch

from memlab._util.units import KIB, shown
from memlab._version import __version__
from memlab.errors import DeviceError

CGROUP = Path("/sys/fs/cgroup")


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return the device to run on; None means the accelerator if there is one, else the CPU.

    Raises:
        DeviceError: this machine has no such device; the message lists what it has.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type != "cuda":
        accelerator = None  # memory is metered on the CPU and on CUDA only
    if device is None:
        return torch.device(accelerator.type, 0) if accelerator else torch.device("cpu")

    count = torch.accelerator.device_count() if accelerator else 0
    here = ["cpu", *(f"cuda:{i}" for i in range(count))]
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        resolved = None

    if resolved is not None and resolved.type == "cuda" and resolved.index is None:
        resolved = torch.device("cuda", 0)
    if (
        resolved is None
        or str(resolved).removesuffix(":0" if resolved.type == "cpu" else "") not in here
    ):
        said = shown(str(device) if isinstance(device, torch.device) else device)
        raise DeviceError(
            f"device={said} is not in this machine; allowed here is "
            f"{', '.join(repr(name) for name in here)}, or None for the fastest of them"
        )

    return torch.device("cpu") if resolved.type == "cpu" else resolved


def as_device(device: torch.device | str) -> torch.device:
    """Return a device by its name, whether or not this machine has it.

    Raises:
        DeviceError: torch knows no such device.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise DeviceError(
            f"device={shown(device)} is not a device; allowed is 'cpu' or 'cuda'"
        ) from None


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work that was queued; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def describe(device: torch.device) -> str:
    """Return the name of the processor or the card."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)

    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass

    return platform.processor() or platform.machine()


def machine_memory_bytes() -> int | None:
    """Return all memory of this machine, or of its container if that may use less."""
    return _least(_meminfo("MemTotal") or _by_psutil("total"), _cgroup("memory.max"))


def available_memory_bytes() -> int | None:
    """Return the memory that is available to this process, in its machine and its container."""
    return _least(_meminfo("MemAvailable") or _by_psutil("available"), _cgroup_available())


def out_of_memory_kills() -> int:
    """Return how many processes the system has killed for memory since it started."""
    return _field(Path("/proc/vmstat"), "oom_kill") or 0


def _least(*sizes: int | None) -> int | None:
    return min((size for size in sizes if size is not None), default=None)


def _meminfo(name: str) -> int | None:
    kibibytes = _field(Path("/proc/meminfo"), f"{name}:")
    return None if kibibytes is None else kibibytes * KIB


def _by_psutil(name: str) -> int | None:
    """Return one number on a system other than Linux; None without psutil."""
    try:
        # late: it comes with ipykernel, which core memlab does not import
        import psutil  # type: ignore[import-untyped]
    except ImportError:
        return None
    return int(getattr(psutil.virtual_memory(), name))


def _cgroup(name: str) -> int | None:
    """Return one number of this container (cgroup v2) in bytes; None where it has no limit."""
    try:
        return int((CGROUP / name).read_text())
    except (OSError, ValueError):  # no such file, or the word "max"
        return None


def _cgroup_available() -> int | None:
    limit, current = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is None or current is None:
        return None
    # file pages that are not in use are given back before anything fails
    return limit - current + (_field(CGROUP / "memory.stat", "inactive_file") or 0)


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)


def versions_here() -> dict[str, str]:
    """Return the versions that any number depends on: of memlab, torch and Python."""
    return {
        "memlab": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


# How much of the processors other programs use while a time is taken.
#
# Left out: what other programs do to caches and memory, which no counter shows.

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
