"""Does a sweep lose or repeat anything if its worker, its kernel or a write is killed?

A sweep of 200 settings of a small model is measured for real. In 20 of them the worker is killed
while it runs the step. The kernel, here a Python process that calls `memlab.sweep`, is killed by
`kill -9` twice while it runs a setting, and a third time in the middle of a write: after the row of
a result was written, and before its transaction ended. Each time the same call is made again in a
new process. Goal: of the results that were in the store at a kill none is lost, and none of those
settings is run again.

A run whose result was not yet in the store at a kill is not finished, and is run again; the table
counts these too.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memlab
from benchmarks import report
from memlab import StepConfig, StepResult, Workload
from memlab.runtime import isolation
from memlab.search import sweep as sweep_tasks
from memlab.search.sweep import SweepTable
from memlab.store import database

NUM_WORKER_KILLS, NUM_QUICK_KILLS = 20, 4
NUM_BATCHES, NUM_QUICK_BATCHES = 50, 6
WIDTH = 16
POLL_SECONDS = 0.02
CHILD = "import sys; from benchmarks.sweeps import child; child(*sys.argv[1:])"


def workload() -> Workload:
    """Return the small model that is swept."""
    return Workload(
        name="sweep benchmark",
        build_model=lambda: nn.Linear(WIDTH, WIDTH),
        make_batch=lambda n: torch.randn(n, WIDTH),
        compute_loss=lambda model, x: model(x).square().mean(),
    )


def settings(num_batches: int) -> dict[str, list[Any]]:
    """Return four settings for each batch size."""
    return {
        "batch_size": list(range(1, num_batches + 1)),
        "precision": ["fp32", "bf16-mixed"],
        "optimizer": ["sgd", "adamw"],
    }


def name_of(config: StepConfig) -> str:
    """Return a setting as one word."""
    return f"{config.batch_size}/{config.precision}/{config.optimizer}"


def swept(path: str, num_batches: int, **options: Any) -> SweepTable:
    """Run the sweep, or what is left of it."""
    return memlab.sweep(
        workload(), settings(num_batches), "cpu", path=path, repeats=1, warmup=0, **options
    )


def child(path: str, log: str, num_batches: str, killed: str, write: str) -> None:
    """Sweep in a process that will be killed.

    Args:
        path: of the store.
        log: a file of lines: which settings began, ended and lost their worker.
        num_batches: see `settings`.
        killed: the settings whose worker is killed in their first run, with commas between.
        write: kill this process in the middle of this write; 0 for none.
    """
    sweep_tasks.measure_only = _noted(Path(log), set(killed.split(",")))
    database.insert = _killed_at(int(write))
    swept(path, int(num_batches))


def _noted(log: Path, killed: set[str]) -> Any:
    measure = sweep_tasks.measure_only

    def measure_and_note(workload: Workload, config: StepConfig, *rest: Any, **options: Any) -> Any:
        name = name_of(config)
        is_first = f"begin {name}" not in _lines(log)
        _note(log, f"begin {name}")

        def kill_once(progress: Any) -> None:
            nonlocal is_first
            if is_first and name in killed and isolation.measuring.worker is not None:
                is_first = False
                _note(log, f"kill {name}")
                os.kill(isolation.measuring.worker.process.pid, signal.SIGKILL)

        result: StepResult = measure(
            workload, config, *rest, **{**options, "on_progress": kill_once}
        )
        if result.outcome == "ok":
            _note(log, f"end {name}")
        return result

    return measure_and_note


def _killed_at(number: int) -> Any:
    insert, count = database.insert, 0

    def insert_and_die(*arguments: Any) -> None:
        nonlocal count
        insert(*arguments)
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return insert_and_die


def _note(log: Path, line: str) -> None:
    with log.open("a") as stream:
        stream.write(line + "\n")


def _lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def stored(path: Path) -> Counter[str]:
    """Return how often each setting is in the store."""
    if not path.exists():
        return Counter()
    return Counter(name_of(result.config) for result in memlab.stored_results(path=path))


@contextlib.contextmanager
def sweeping(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run `child` in a process of its own."""
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{Path.cwd()}{os.pathsep}{path}"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Sweep, kill, and count."""
    given = report.options(__file__, __doc__ or "")
    before = report.environment()
    num_batches = NUM_QUICK_BATCHES if given.quick else NUM_BATCHES
    num_kills = NUM_QUICK_KILLS if given.quick else NUM_WORKER_KILLS
    total = 4 * num_batches
    names = [f"{size}/{precision}/{optimizer}" for size in range(1, num_batches + 1)
             for precision in ("fp32", "bf16-mixed") for optimizer in ("sgd", "adamw")]  # fmt: skip
    killed = ",".join(random.Random(0).sample(names, num_kills))

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "results.sqlite3", Path(folder) / "runs.txt"
        at_kills: list[tuple[set[str], Counter[str]]] = []
        # two kills of the kernel, at a quarter and at a half; then one in the middle of a write
        for number, (share, write) in enumerate([(0.25, 0), (0.5, 0), (1.0, total // 4)]):
            with sweeping(path, log, num_batches, killed, write) as process:
                goal = int(share * total) if not write else total * 10
                while process.poll() is None and _begun(log).total() < goal:
                    time.sleep(POLL_SECONDS)
                if process.poll() is None:
                    process.kill()
                status = process.wait()
            if status != -signal.SIGKILL:
                raise RuntimeError(f"sweep {number} ended with status {status} and was not killed")
            at_kills.append((set(stored(path)), _begun(log)))

        with sweeping(path, log, num_batches, killed, 0) as process:
            status = process.wait()
        if status != 0:
            raise RuntimeError(f"the last sweep ended with status {status}")
        results = _counted(total, stored(path), _lines(log), at_kills)

    results["seconds"] = time.perf_counter() - started
    report.show("a sweep whose processes are killed", [
        {"what": what, "count": count} for what, count in results.items()
    ])  # fmt: skip
    is_met = results["finished results lost"] == results["finished settings run again"] == 0
    is_met = is_met and results["rows"] == results["settings in the store"] == total
    print(f"goal: nothing finished is lost, nothing is run twice: {report.verdict(is_met)}")
    report.write(given, before, {"results": results, "met": is_met})


def _begun(log: Path) -> Counter[str]:
    return Counter(line.split()[1] for line in _lines(log) if line.startswith("begin"))


def _counted(
    total: int, rows: Counter[str], lines: list[str], at_kills: list[tuple[set[str], Counter[str]]]
) -> dict[str, Any]:
    """Return what the kills have cost."""
    begun = Counter(line.split()[1] for line in lines if line.startswith("begin"))
    ended = Counter(line.split()[1] for line in lines if line.startswith("end"))
    lost = {name for there, _ in at_kills for name in there if name not in rows}
    again = {name for there, then in at_kills for name in there if begun[name] > then[name]}
    return {
        "settings": total,
        "settings in the store": len(rows),
        "rows": rows.total(),
        "workers killed": sum(line.startswith("kill") for line in lines),
        "kernels killed": len(at_kills) - 1,
        "kernels killed during a write": 1,
        "finished results lost": len(lost),
        "finished settings run again": len(again),
        "runs that ended before their result was written": ended.total() - len(rows),
        "runs that were begun": begun.total(),
    }


if __name__ == "__main__":
    main()
