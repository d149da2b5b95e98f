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
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from memlab import _inspect, _loading, _measure, _verify
from memlab._sources import Sources, read_no_bytecode
from memlab.memory.devices import available_memory_bytes
from memlab.units import KIB

GUARD_FRACTION = 0.9  # of the memory that is available when a job begins


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a worker is asked to do.

    Attributes:
        function: name in `FUNCTIONS`.
        arguments: of that function, pickled by cloudpickle: unpickled only after `path` is set.
        path: the caller's `sys.path`.
        folder: the caller's working folder.
        own_files: of the caller's own modules, by name.
        threads: the caller's number of threads for one operator.
        guard_bytes: most memory that the job may take before allocations fail; None: a share of
            what is available.
    """

    function: str
    arguments: bytes
    path: list[str]
    folder: str
    own_files: dict[str, str]
    threads: int
    guard_bytes: int | None = None


def _predict(**arguments: Any) -> Any:
    from memlab._predict import predict_in_process  # 50 ms that `import memlab` need not wait for

    return predict_in_process(**arguments)


def _plan(**arguments: Any) -> Any:
    from memlab._plan import plan_in_process  # as above

    return plan_in_process(**arguments)


def _operators(**arguments: Any) -> Any:
    from memlab._operator_costs import operators_in_process  # as above

    return operators_in_process(**arguments)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "measure": _measure.measure_in_process,
    "predict": _predict,
    "plan": _plan,
    "operators": _operators,
    "verify": _verify.verify_in_process,
    "loading": _loading.loading_in_process,
    "inspect": _inspect.inspect_in_process,
}


def main() -> None:
    """Serve jobs until the caller is gone."""
    faulthandler.enable()
    threading.Thread(target=_end_with_caller, daemon=True).start()
    sys.stdin = open(os.devnull)  # noqa: SIM115 - a model that asks gets no answer at once
    read_no_bytecode()
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)  # or a model's own processes would hold it
    sources, switches = Sources(), _switches()
    gc.freeze()
    connection.send(("ready", os.getpid()))
    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, OSError):
            return
        if sources.changed(job.own_files) or _switches() != switches:
            connection.send(("stale", None))
            return
        started_ns = time.time_ns()
        answer = _serve(job, connection)
        sources.note(started_ns)
        connection.send_bytes(_pickled(answer))
        del job, answer
        _give_memory_back()


def _serve(job: Job, connection: Connection) -> tuple[str, Any]:
    """Return ("result", value), or ("unloadable" or "raised", what was raised, as text)."""
    sys.path[:] = job.path
    torch.set_num_threads(job.threads)
    try:
        os.chdir(job.folder)
        arguments = pickle.loads(job.arguments)
    except BaseException as error:  # whatever a person's own module raises while it is imported
        return "unloadable", f"{type(error).__name__}: {error}"
    limit_memory(job.guard_bytes)
    try:
        return "result", FUNCTIONS[job.function](
            **arguments, report=lambda progress: connection.send(("progress", progress))
        )
    except BaseException as error:
        return "raised", f"{type(error).__name__}: {error}"
    finally:
        limit_memory(sys.maxsize)


def _pickled(answer: tuple[str, Any]) -> bytes:
    """Return what `Connection.recv` reads; a result's config may hold a function of a notebook."""
    import cloudpickle  # as above

    pickled: bytes = cloudpickle.dumps(answer)
    return pickled


def _switches() -> tuple[object, ...]:
    """Return torch's global switches; a job that turned one would change every later one."""
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_deterministic_debug_mode(),
    )


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


def _end_with_caller() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
