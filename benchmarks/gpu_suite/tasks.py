"""Each kind of case carried out: what a line of the record holds of it."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu_suite.bench import SuiteBench
from memlab import Outcome, StepResult
from memlab._util.units import parse_bytes
from memlab.cli.device_visit import (
    REPEATS,
    SEED,
    WARMUP,
    Case,
    about,
    operators,
    run_of,
    why,
)
from memlab.runtime import isolation
from memlab.store.records import Kind

MOST_SECONDS = 120.0  # of one measurement
NUM_ROUNDS = 3
CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second until torch 2.9


def boundary(bench: SuiteBench, case: Case, seconds: float) -> dict[str, Any]:
    """Return the line of the largest batch under a memory limit, found several times over.

    The first round doubles the batch until it fails, then halves what lies between; each one after
    tries both sides of the edge again. At last the first batch must cost what it did before
    anything failed.
    """
    end = time.monotonic() + seconds
    limit = parse_bytes(case.setting)

    def run(batch_size: int) -> StepResult:
        config = dataclasses.replace(case.config, batch_size=batch_size)
        left = max(end - time.monotonic(), 0.1)
        more = {"repeats": 1, "warmup": 0, "memory_limit": limit}
        return bench.measure(dataclasses.replace(case, config=config), left, **more)[0]

    first = run(case.config.batch_size)
    rounds = [list(_raised(run, case.config.batch_size))]
    edge = sorted({*_of(rounds[0], Outcome.OK)[-1:], *_of(rounds[0], Outcome.OUT_OF_MEMORY)[:1]})
    rounds += [[(size, str(run(size).outcome)) for size in edge] for _ in range(NUM_ROUNDS - 1)]
    last = run(case.config.batch_size)
    peaks = [(r.peak_allocated_bytes, r.peak_reserved_bytes) for r in (first, last)]
    return {
        "memory_limit_bytes": limit,
        "rounds": rounds,
        "largest_ok": [max(_of(tried, Outcome.OK), default=0) for tried in rounds],
        "recovered": last.outcome is Outcome.OK and peaks[0] == peaks[1],
        "complete": time.monotonic() < end,
    }


def _of(tried: list[tuple[int, str]], outcome: Outcome) -> list[int]:
    """Return the batch sizes that ended so, the smallest first."""
    return sorted(size for size, ended in tried if ended == outcome)


def _raised(run: Callable[[int], StepResult], batch_size: int) -> Iterator[tuple[int, str]]:
    low, high = 0, 0
    while not high or high - low > max(1, low // 8):
        batch_size = (low + high) // 2 if high else batch_size if not low else 2 * low
        outcome = run(batch_size).outcome
        yield batch_size, str(outcome)
        if outcome is Outcome.OK:
            low = batch_size
        elif outcome is Outcome.OUT_OF_MEMORY:
            high = batch_size
        else:
            return


def verify(bench: SuiteBench, case: Case, seconds: float) -> dict[str, Any]:
    """Return the line of a comparison with the reference step."""
    arguments = bench.arguments_of(case) | {"plan": bench.plan_of(case, seconds)}
    report = bench.run("verify", arguments, timeout_seconds=seconds)
    return {"report": dataclasses.asdict(report) | {"outcome": str(report.outcome)}}


def allocator(bench: SuiteBench, case: Case, seconds: float) -> dict[str, Any]:
    """Return the line of a step under a setting of the allocator, in a process that begins with it.

    A process of its own, since nothing puts a setting back.
    """
    before = {name: os.environ.get(name) for name in CONF}
    os.environ |= dict.fromkeys(CONF, case.setting)
    isolation.measuring.replace()
    try:
        arguments = {"workload": bench.workload(case), "seed": SEED}
        arguments |= {"config": case.config, "device": bench.device, "memory_limit": None}
        arguments |= {"repeats": REPEATS[bench.device.type], "warmup": WARMUP}
        with bench.measuring():
            result: StepResult = isolation.run("measure", arguments, timeout_seconds=seconds)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        isolation.measuring.replace()
    kept = ("outcome", "message", "peak_allocated_bytes", "peak_reserved_bytes", "step_seconds")
    return {name: result.to_dict()[name] for name in kept}


def carry_out(bench: SuiteBench, case: Case, visit: str, seconds: float) -> dict[str, Any]:
    """Return the line of a case.

    Args:
        bench: where.
        case: what.
        visit: that the line belongs to.
        seconds: that are left for it.
    """
    left = min(seconds, MOST_SECONDS)
    if case.kind is Kind.RUN:
        return run_of(bench, case, visit, left).to_line()
    line = about(case, visit)
    other = {Kind.OPERATORS: operators, Kind.BOUNDARY: boundary, Kind.VERIFY: verify,
             Kind.ALLOCATOR: allocator}[case.kind]  # fmt: skip
    try:
        return line | other(bench, case, left)
    except Exception as error:  # whatever a case meets, the next one follows
        outcome, message = why(error)
        return line | {"outcome": str(outcome), "message": message}
