"""The process that measurements run in: `python -m memlab.worker FD`.

It serves one job after another over the socket FD until that closes, and ends at once when its
standard input does, so that it never outlives the notebook that started it. A job is a function of
memlab with its arguments, a person's own modules among them; if one of their files has changed
since it was imported, the worker asks to be replaced, so that stale code is never measured.
"""

import ctypes
import faulthandler
import gc
import os
import pickle
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from memlab import _inspect, _measure, _verify
from memlab.memory.devices import available_memory_bytes
from memlab.units import KIB

LIBRARIES = tuple(
    str(Path(p).resolve()) for p in {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix}
)
GUARD_FRACTION = 0.9  # of the memory that is available when a job begins


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a worker is asked to do.

    Attributes:
        function: name in `FUNCTIONS`.
        arguments: of that function, pickled by cloudpickle: unpickled only after `path` is set.
        path: the caller's `sys.path`.
        folder: the caller's working folder.
        threads: the caller's number of threads for one operator.
        guard_bytes: most memory that the job may take before allocations fail; None: a share of
            what is available.
    """

    function: str
    arguments: bytes
    path: list[str]
    folder: str
    threads: int
    guard_bytes: int | None = None


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "measure": _measure.measure_in_process,
    "verify": _verify.verify_in_process,
    "inspect": _inspect.inspect_in_process,
}


class Sources:
    """The files of a person's own modules, as they were when each was imported."""

    def __init__(self) -> None:
        self.stamps: dict[str, tuple[int, int] | None] = {}

    def note(self, job_started_ns: int) -> None:
        """Remember the files of modules that were imported since the last call."""
        for module in list(sys.modules.values()):
            file = _own_file(module)
            stamp = _stamp(file) if file is not None and file not in self.stamps else None
            if file is not None and stamp is not None:  # torch.ops names a file that is not there
                # edited after the job began: it may have been imported before that
                self.stamps[file] = stamp if stamp[0] <= job_started_ns else None

    def changed(self) -> list[str]:
        """Return the files that are no longer what was imported."""
        return [
            file for file, stamp in self.stamps.items() if stamp is None or _stamp(file) != stamp
        ]


def main() -> None:
    """Serve jobs until the caller is gone."""
    faulthandler.enable()
    threading.Thread(target=_end_with_caller, daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    sources = Sources()
    gc.freeze()
    connection.send(("ready", os.getpid()))
    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, OSError):
            return
        if changed := sources.changed():
            connection.send(("stale", changed))
            return
        started_ns = time.time_ns()
        connection.send(_serve(job, connection))
        sources.note(started_ns)
        del job
        _give_memory_back()


def _serve(job: Job, connection: Connection) -> tuple[str, Any]:
    """Return ("result", value), ("unloadable", text) or ("raised", exception)."""
    sys.path[:] = job.path
    os.chdir(job.folder)
    torch.set_num_threads(job.threads)
    try:
        arguments = pickle.loads(job.arguments)
    except Exception as error:  # whatever a person's own module raises while it is imported
        return "unloadable", f"{type(error).__name__}: {error}"
    limit_memory(job.guard_bytes)
    try:
        value = FUNCTIONS[job.function](
            **arguments, report=lambda progress: connection.send(("progress", progress))
        )
        pickle.dumps(value)
    except Exception as error:
        return "raised", RuntimeError(f"{type(error).__name__}: {error}")
    finally:
        limit_memory(sys.maxsize)
    return "result", value


def limit_memory(guard_bytes: int | None) -> None:
    """Let allocations fail beyond this much more memory than now, on Linux; elsewhere do nothing.

    The limit is on the process's data, of which resident memory is a part: so the machine stays
    alive, and a step fails a little before it would have to.
    """
    try:
        import resource
    except ImportError:
        return
    if guard_bytes is None:
        available = available_memory_bytes()
        if available is None:
            return
        guard_bytes = int(available * GUARD_FRACTION)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    now = _data_bytes()
    unlimited = now is None or guard_bytes == sys.maxsize
    limit = hard if unlimited or now is None else now + guard_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _data_bytes() -> int | None:
    """Return what the system counts as this process's data, in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * KIB
    except OSError:
        pass
    return None


def _give_memory_back() -> None:
    gc.collect()
    gc.freeze()  # libraries stay: the next job's collections need not walk through them again
    try:
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory otherwise
    except (OSError, AttributeError):
        return


def is_library(file: str) -> bool:
    """Return whether a file is part of Python or of an installed package."""
    resolved = str(Path(file).resolve())
    return resolved.startswith(LIBRARIES)


def _own_file(module: ModuleType) -> str | None:
    file = getattr(module, "__file__", None)
    if not file or not str(file).endswith(".py") or is_library(file):
        return None
    return str(Path(file).resolve())


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _end_with_caller() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
