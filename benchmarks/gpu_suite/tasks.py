"""Each kind of case carried out: what a line of the record holds of it."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu_suite import card
from benchmarks.gpu_suite.bench import REPEATS, SEED, WARMUP, Bench, why
from benchmarks.gpu_suite.cases import Case
from benchmarks.gpu_suite.operator_times import time_operators
from memlab import Outcome, StepResult
from memlab.arguments.units import parse_bytes
from memlab.config import Precision
from memlab.operators.signatures import to_text
from memlab.records.records import Kind, RecordedRun, costs_to_line
from memlab.running import Progress
from memlab.techniques.precision import matrix_products
from memlab.worker import isolation

MOST_SECONDS = 120.0  # of one measurement
OPERATOR_SECONDS = 4.0  # of timing those of one case on a card
NUM_ROUNDS = 3
CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second until torch 2.9
BEFORE_READING = {
    "cuda": ("build", "step", "synchronize", "empty_cache", "reset_peak_memory_stats", "seed",
             "step", "synchronize"),
    "cpu": ("build", "step", "seed", "step"),
}  # fmt: skip


def measured_run(bench: Bench, case: Case, visit: str, seconds: float) -> dict[str, Any]:
    """Return the line of a run."""
    held: list[int] = []

    def watch(progress: Progress) -> None:
        if progress.text.startswith("timing") and bench.is_card:
            used = card.used_bytes()
            held.append(0 if used is None else used - bench.at_start_bytes)

    start = time.monotonic()
    result, plan = bench.measure(case, seconds, watch)
    return RecordedRun(
        visit=visit,
        group=case.group,
        workload=case.workload,
        options=case.options,
        holdout=case.holdout,
        seed=SEED,
        result=result,
        plan=plan,
        process_bytes=max(held, default=None),
        wall_seconds=time.monotonic() - start,
        before_reading=BEFORE_READING[bench.device.type],
    ).to_line()


def operators(bench: Bench, case: Case, seconds: float) -> dict[str, Any]:
    """Return the line of the operators of a step: on a CPU as calibrated, on a card timed now."""
    found = bench.told_operators(case, seconds)
    is_tf32 = case.config.precision is Precision.TF32
    line: dict[str, Any] = {"tf32": is_tf32, "overheads": {}, "reasons": {}}
    line |= {"outcome": str(found.outcome), "message": found.message}
    new = [s for s in found.seconds if (s, is_tf32) not in bench.timed]
    if found.costs is not None:
        costs = {s: cost for s, cost in found.costs.operators.items() if s in new}
        line["overheads"] = {str(p): value for p, value in found.costs.overheads.items()}
    else:
        ordered = sorted(new, key=lambda signature: -found.seconds[signature])
        with matrix_products(case.config.precision), bench.measuring():
            costs, reasons = time_operators(ordered, bench.device, min(seconds, OPERATOR_SECONDS))
        line["reasons"] = {to_text(signature): why for signature, why in reasons.items()}
    bench.timed |= {(signature, is_tf32) for signature in costs}
    total = sum(found.seconds.values())
    told = sum(s for signature, s in found.seconds.items() if (signature, is_tf32) in bench.timed)
    return line | {"share_of_step": told / total if total else 0.0} | costs_to_line(costs)


def boundary(bench: Bench, case: Case, seconds: float) -> dict[str, Any]:
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


def verify(bench: Bench, case: Case, seconds: float) -> dict[str, Any]:
    """Return the line of a comparison with the reference step."""
    arguments = bench.arguments_of(case) | {"plan": bench.plan_of(case, seconds)}
    run = isolation.run_here if bench.is_card else isolation.run
    with bench.measuring():
        report = run("verify", arguments, timeout_seconds=seconds)
    return {"report": dataclasses.asdict(report) | {"outcome": str(report.outcome)}}


def allocator(bench: Bench, case: Case, seconds: float) -> dict[str, Any]:
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


def carry_out(bench: Bench, case: Case, visit: str, seconds: float) -> dict[str, Any]:
    """Return the line of a case.

    Args:
        bench: where.
        case: what.
        visit: that the line belongs to.
        seconds: that are left for it.
    """
    left = min(seconds, MOST_SECONDS)
    if case.kind is Kind.RUN:
        return measured_run(bench, case, visit, left)
    about = {"visit": visit, "workload": case.workload, "options": dict(case.options)}
    about |= {"config": case.config.to_dict(), "holdout": case.holdout, "setting": case.setting}
    other = {Kind.OPERATORS: operators, Kind.BOUNDARY: boundary, Kind.VERIFY: verify,
             Kind.ALLOCATOR: allocator}[case.kind]  # fmt: skip
    try:
        return about | other(bench, case, left)
    except Exception as error:  # whatever a case meets, the next one follows
        outcome, message = why(error)
        return about | {"outcome": str(outcome), "message": message}
