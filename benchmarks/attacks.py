"""Is nothing left behind, and is the next result right, after processes were killed at any moment?

30 times a worker is killed while it measures, at a random moment of its building, its steps or its
answering, by a signal or by what a model does. 20 times a whole caller, as a notebook's kernel, is
killed (SIGKILL) while its worker is in a C loop that holds the interpreter's lock, or asleep, with
processes that the model started: commands, forks, loader workers, sessions of their own, daemons.

Goal: each kill is an outcome with a sentence, the next three results are right byte for byte, and
every process is gone within two seconds.
"""

import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import report
from memlab import StepConfig, StepResult, Workload, measure
from memlab.runtime import isolation
from memlab.workloads import get

NUM_WORKER_KILLS, NUM_WORKER_KILLS_QUICK = 30, 6
NUM_CALLER_KILLS, NUM_CALLER_KILLS_QUICK = 20, 4
GOAL_SECONDS = 2.0
WAIT_SECONDS = 20.0
FOLDER = "MEMLAB_ATTACK"  # variable: where processes that are left behind note themselves
LEFT_SECONDS = 600  # what is left behind would be there for that long
LATEST_SECONDS = 1.2  # after which a worker is killed
NUM_REPEATS = 1000  # of steps of some milliseconds: it is at work until then, on a fast machine too
BATCH_SIZES = (1, 3, 8)
SLEEP = [sys.executable, "-I", "-S", "-c", f"import time; time.sleep({LEFT_SECONDS})"]


class Acts(nn.Module):
    """Does something to its process in its first forward.

    Args:
        action: what it does.
        folder: where processes that are left behind note themselves.
    """

    def __init__(self, action: Callable[[], object], folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.linear = nn.Linear(3, 3)
        self.action = action

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what a linear layer does, if the process is still there."""
        os.environ[FOLDER] = self.folder
        self.action()
        return self.linear(x)


def acting(action: Callable[[], object], folder: str) -> Workload:
    """Return a workload whose model does something to its process."""
    return Workload(
        name=getattr(action, "__name__", "acts"),
        build_model=lambda: Acts(action, folder),
        make_batch=lambda n: torch.randn(n, 3),
        compute_loss=lambda model, x: model(x).square().mean(),
    )


# how a worker can end, from outside at any moment or by what a model does


def abort() -> None:
    """End as a failed assertion in C does."""
    os.abort()


def read_nothing() -> None:
    """Read memory that is not there."""
    ctypes.string_at(0)


def kill_the_keeper() -> None:
    """Kill the process above."""
    os.kill(os.getppid(), signal.SIGKILL)


def close_everything() -> None:
    """Close all descriptors but the standard ones."""
    os.closerange(3, 4096)


def leave_and_end() -> None:
    """End, and leave processes of each kind behind."""
    for leave in LEAVERS.values():
        leave()
    os._exit(3)


ENDINGS = (abort, read_nothing, kill_the_keeper, close_everything, leave_and_end)


# how a model leaves processes behind


def leave_a_command() -> None:
    """Start a command."""
    note(subprocess.Popen(SLEEP).pid)


def leave_a_session() -> None:
    """Start a command in a session of its own."""
    note(subprocess.Popen(SLEEP, start_new_session=True).pid)


def leave_a_fork() -> None:
    """Fork."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(LEFT_SECONDS)
        os._exit(0)
    note(child)


def leave_a_daemon() -> None:
    """Fork twice, so that nobody above knows the second."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            note(os.getpid())
            time.sleep(LEFT_SECONDS)
        os._exit(0)
    os.waitpid(child, 0)


def leave_loader_workers() -> None:
    """Start loader workers that stay."""
    data = torch.utils.data.TensorDataset(torch.zeros(8, 1))
    loader = torch.utils.data.DataLoader(data, num_workers=2, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    held.append(batches)
    for process in batches._workers:
        note(process.pid)


held: list[Any] = []
LEAVERS = {
    "command": leave_a_command,
    "session": leave_a_session,
    "fork": leave_a_fork,
    "daemon": leave_a_daemon,
    "loader workers": leave_loader_workers,
}
NUM_LEFT = 6  # two of them loader workers


def note(pid: int) -> None:
    """Write a process id where the benchmark reads it."""
    (Path(os.environ[FOLDER]) / str(pid)).touch()


def sleep_in_c() -> None:
    """Hold the interpreter's lock for minutes: no thread and no handler of Python's runs."""
    ctypes.PyDLL(None).sleep(LEFT_SECONDS)


def power() -> None:
    """Compute for minutes in one instruction of Python's."""
    _ = 7 ** (10**9)


def sleep() -> None:
    """Wait."""
    time.sleep(LEFT_SECONDS)


STAYING = (sleep_in_c, power, sleep)


def is_there(pid: int) -> bool:
    """Return whether a process runs; one that has ended and waits to be counted does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def seconds_until_gone(pids: list[int]) -> float | None:
    """Return how long processes are still there; None if one stays."""
    start = time.monotonic()
    while any(map(is_there, pids)):
        if time.monotonic() - start > WAIT_SECONDS:
            return None
        time.sleep(0.005)
    return time.monotonic() - start


def noted(folder: Path) -> list[int]:
    """Return the processes that noted themselves."""
    return [int(file.name) for file in folder.iterdir() if file.name.isdigit()]


def answers() -> list[tuple[Any, ...]]:
    """Return what three measurements of another workload say: bytes, category by category."""
    found = []
    for batch_size in BATCH_SIZES:
        result = measure(small(), StepConfig(batch_size=batch_size), "cpu", repeats=1, warmup=0)
        sizes = tuple(sorted((result.peak_by_category or {}).items()))
        found.append((str(result.outcome), result.config.batch_size, sizes, result.loss))
    return found


def small() -> Workload:
    """Return the workload whose results are compared."""
    return get("gpt-small", num_layers=1, hidden_size=32, sequence_length=16)


def kill_worker(index: int, chance: random.Random, right: list[Any]) -> dict[str, Any]:
    """End a worker once, and return how it went."""
    if index % 2:
        ending = ENDINGS[index // 2 % len(ENDINGS)]
        how = ending.__name__
        result, pids = _run(ending, None)
    else:
        seconds = chance.uniform(0, LATEST_SECONDS)
        how = f"SIGKILL after {seconds:.2f} s"
        result, pids = _run(None, seconds)
    gone = seconds_until_gone(pids)
    is_outcome = str(result.outcome) in ("crashed", "ok") and bool(result.message)
    return {
        "how": how,
        "outcome": str(result.outcome),
        "message": result.message[:90],
        "processes": len(pids),
        "gone in s": gone,
        "next three right": answers() == right,
        "goal": report.verdict(is_outcome and gone is not None and gone < GOAL_SECONDS),
    }


def _run(
    ending: Callable[[], object] | None, kill_after: float | None
) -> tuple[StepResult, list[int]]:
    """Measure, and have the model or a timer end the worker; return all processes that it had."""
    with tempfile.TemporaryDirectory() as folder:
        workload = acting(ending, folder) if ending else small()
        worker = isolation.measuring.ensure()
        pid = worker.process.pid
        timer = threading.Timer(kill_after or 0, os.kill, (pid, signal.SIGKILL))
        if kill_after is not None:
            timer.start()
        result = measure(workload, StepConfig(batch_size=2), "cpu", repeats=NUM_REPEATS)
        timer.cancel()
        return result, [pid, *noted(Path(folder))]


def kill_caller(index: int) -> dict[str, Any]:
    """Kill a caller whose worker is busy, and return what is left of it when."""
    stay = STAYING[index % len(STAYING)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, FOLDER: name}
        command = [sys.executable, "-m", "benchmarks.attacks", "--as-caller", str(index)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as caller:
            while not (folder / "ready").exists() and caller.poll() is None:
                time.sleep(0.05)
            time.sleep(0.2)  # it is in its loop then
            worker = int((folder / "ready").read_text())
            pids = [worker, *noted(folder)]
            was_there = all(map(is_there, pids))
            caller.kill()
            gone = seconds_until_gone(pids)
    is_met = was_there and len(pids) == 1 + NUM_LEFT and gone is not None and gone < GOAL_SECONDS
    return {
        "worker is in": stay.__name__,
        "processes": len(pids),
        "gone in s": gone,
        "goal": report.verdict(is_met),
    }


def be_caller(index: int) -> None:
    """Measure a model that starts processes of each kind and never comes back."""
    stay, folder = STAYING[index % len(STAYING)], os.environ[FOLDER]

    def leave_and_stay() -> None:
        for leave in LEAVERS.values():
            leave()
        ready = Path(folder) / "ready"
        ready.with_suffix(".part").write_text(str(os.getpid()))
        ready.with_suffix(".part").rename(ready)
        stay()

    measure(acting(leave_and_stay, folder), StepConfig(), "cpu", timeout_seconds=LEFT_SECONDS)


def _told(row: dict[str, Any]) -> dict[str, Any]:
    print(row, flush=True)  # the whole takes long
    return row


def main() -> None:
    """Kill workers, then callers."""
    if "--as-caller" in sys.argv:
        be_caller(int(sys.argv[-1]))
        return
    given, before = report.options(__file__, __doc__), report.environment()
    chance, right = random.Random(0), answers()
    num = NUM_WORKER_KILLS_QUICK if given.quick else NUM_WORKER_KILLS
    workers = [_told(kill_worker(index, chance, right)) for index in range(num)]
    report.show("workers killed while they measure", workers)
    num = NUM_CALLER_KILLS_QUICK if given.quick else NUM_CALLER_KILLS
    callers = [_told(kill_caller(index)) for index in range(num)]
    report.show("callers killed while their workers are busy", callers)
    verdicts = [
        {
            "kills of": name,
            "number": len(rows),
            "all gone in time": sum(row["goal"] == "met" for row in rows),
            "right afterwards": sum(row.get("next three right", True) for row in rows),
            "slowest s": max((row["gone in s"] or WAIT_SECONDS) for row in rows),
        }
        for name, rows in (("workers", workers), ("callers", callers))
    ]
    report.show(f"goal: all, gone within {GOAL_SECONDS:g} s, and right afterwards", verdicts)
    report.write(given, before, {"verdicts": verdicts, "workers": workers, "callers": callers})


if __name__ == "__main__":
    main()
