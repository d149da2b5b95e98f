"""Do this process and the worker survive running out of memory, again and again?

50 runs in a row that end out of memory, each with about 100 MiB of activations alive: by the
accounted limit, by an allocation that really fails, and by the physical guard. Then 50 runs that
end well, for comparison. Goal: this process alive, the same worker back, and the resident memory of
each within 50 MiB of where it began, which is after a few runs of each kind.
"""

import itertools
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import report
from memlab import StepConfig, Workload
from memlab._util.units import MIB, parse_bytes
from memlab.api import inspect_workload
from memlab.runtime import isolation

NUM_RUNS, NUM_RUNS_QUICK, REPORT_EVERY = 50, 10, 10
GOAL_BYTES = 50 * MIB
GUARD_BYTES = 512 * MIB
LIMIT = "32MiB"
CYCLE = ("accounted limit", "failed allocation") * 4 + ("accounted limit", "physical guard")
WIDTH, DEPTH, BATCH_SIZE = 1024, 24, 1024  # 4 MiB an activation
SETTLE_SECONDS = 0.5


class AskTooMuch(nn.Module):
    """Asks for 2**50 bytes, which no allocator has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x; it never gets that far."""
        return x + torch.empty(2**50, dtype=torch.uint8)[0]


class TakeAll(nn.Module):
    """Takes and touches memory until there is none; 64 GiB at most."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x; under a guard it never gets that far."""
        taken = [torch.ones(2**24) for _ in range(2**10)]
        return x + taken[0][0]


def stack(last: type[nn.Module] = nn.Identity) -> Workload:
    """Return a regression with many activations and little arithmetic, and a module at its end."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, WIDTH), *(nn.Sigmoid() for _ in range(DEPTH)), last())

    return Workload(
        name=f"stack and {last.__name__}",
        build_model=build,
        make_batch=lambda n: torch.randn(n, 8),
        compute_loss=lambda model, x: model(x).square().mean(),
    )


def provoke(kind: str) -> str:
    """Run once in the worker, in a way that ends as `kind` says, and return the outcome."""
    arguments: dict[str, Any] = {
        "workload": stack(
            {"failed allocation": AskTooMuch, "physical guard": TakeAll}.get(kind, nn.Identity)
        ),
        "config": StepConfig(batch_size=BATCH_SIZE, optimizer="sgd"),
        "device": torch.device("cpu"),
        "repeats": 1,
        "warmup": 0,
        "seed": 0,
        "memory_limit": parse_bytes(LIMIT) if kind == "accounted limit" else None,
    }
    guard_bytes = GUARD_BYTES if kind == "physical guard" else None
    try:
        run = isolation.run("measure", arguments, timeout_seconds=120, guard_bytes=guard_bytes)
        return str(run.outcome)
    except isolation.Ended as ended:
        return f"{ended.outcome}, and the worker with it"


def series(kinds: list[str], expected: str) -> list[dict[str, Any]]:
    """Return memory and outcomes before the runs and after every ten of them."""
    rows = [_row(0, [], expected)]
    outcomes = []
    for index, kind in enumerate(kinds, start=1):
        outcomes.append(provoke(kind))
        if index % REPORT_EVERY == 0:
            rows.append(_row(index, outcomes, expected))
    return rows


def judge(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far the memory went, and whether that and the outcomes are as the goal says."""
    grown = {
        name: max(abs(row[name] - rows[0][name]) for row in rows)
        for name in ("here MiB", "worker MiB")
    }
    same_worker = len({row["worker pid"] for row in rows}) == 1
    as_expected = all(row["as expected"] == row["runs"] for row in rows)
    is_met = max(grown.values()) * MIB <= GOAL_BYTES and same_worker and as_expected
    return {
        "here, largest change MiB": grown["here MiB"],
        "worker, largest change MiB": grown["worker MiB"],
        "same worker": same_worker,
        "outcomes as expected": as_expected,
        "goal": report.verdict(is_met),
    }


def _row(num_runs: int, outcomes: list[str], expected: str) -> dict[str, Any]:
    # a worker gives memory back after it has answered: once it answers again, that is done
    inspect_workload(stack())
    time.sleep(SETTLE_SECONDS)
    pid = isolation.measuring.worker.process.pid
    return {
        "runs": num_runs,
        "as expected": sum(outcome == expected for outcome in outcomes),
        "worker pid": pid,
        "here MiB": _resident_bytes(os.getpid()) / MIB,
        "worker MiB": _resident_bytes(pid) / MIB,
        "other outcomes": ", ".join(sorted({o for o in outcomes if o != expected})) or "-",
    }


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Warm up, then run out of memory, then run well."""
    given, before = report.options(__file__, __doc__), report.environment()
    num_runs = NUM_RUNS_QUICK if given.quick else NUM_RUNS
    for kind in sorted({*CYCLE, "normal"}):
        print(f"warm-up, {kind}: {provoke(kind)}, {provoke(kind)}", flush=True)
    provoked = series(list(itertools.islice(itertools.cycle(CYCLE), num_runs)), "out_of_memory")
    report.show("resident memory over runs that end out of memory", provoked)
    after = provoke("normal")
    normal = series(["normal"] * num_runs, "ok")
    report.show("resident memory over runs that end well", normal)
    verdicts = [
        {"runs": "out of memory", **judge(provoked)},
        {"runs": "normal", **judge(normal)},
    ]
    report.show(f"goal: within {GOAL_BYTES // MIB} MiB; a normal run afterwards: {after}", verdicts)
    rows = {"out_of_memory": provoked, "normal": normal}
    report.write(given, before, {"verdicts": verdicts, "normal_run_after": after, **rows})


if __name__ == "__main__":
    main()
