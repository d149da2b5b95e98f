"""The lines that a visit writes of its cases: what a step cost, and what its operators take."""

import time
from typing import Any

from memlab.config import Precision
from memlab.operators.signatures import to_text
from memlab.records.records import RecordedRun, costs_to_line
from memlab.running import Progress
from memlab.techniques.precision import matrix_products
from memlab.visits import driver
from memlab.visits.bench import SEED, Bench
from memlab.visits.case import Case
from memlab.visits.operator_times import time_operators

OPERATOR_SECONDS = 4.0  # of timing those of one case on a card
BEFORE_READING = {
    "cuda": ("build", "step", "synchronize", "empty_cache", "reset_peak_memory_stats", "seed",
             "step", "synchronize"),
    "cpu": ("build", "step", "seed", "step"),
}  # fmt: skip


def run_of(
    bench: Bench, case: Case, visit: str, seconds: float, memory_limit: int | None = None
) -> RecordedRun:
    """Return a run of a case.

    Args:
        bench: where.
        case: what.
        visit: that its line belongs to.
        seconds: that are left for it.
        memory_limit: bytes that it may not go beyond. A record of what a step costs leaves it out.
    """
    held: list[int] = []

    def watch(progress: Progress) -> None:
        if progress.text.startswith("timing") and bench.is_card:
            used = driver.used_bytes(bench.device)
            held.append(0 if used is None else used - bench.at_start_bytes)

    start = time.monotonic()
    result, plan = bench.measure(case, seconds, watch, memory_limit=memory_limit)
    return RecordedRun(
        visit=visit,
        group=case.group,
        workload=case.workload,
        options=case.options,
        holdout=case.holdout,
        seed=SEED,
        result=result.against_limit(None),
        plan=plan,
        process_bytes=max(held, default=None),
        wall_seconds=time.monotonic() - start,
        before_reading=BEFORE_READING[bench.device.type],
    )


def about(case: Case, visit: str) -> dict[str, Any]:
    """Return what every line but that of a run says of its case."""
    return {
        "visit": visit,
        "workload": case.workload,
        "options": dict(case.options),
        "config": case.config.to_dict(),
        "holdout": case.holdout,
        "setting": case.setting,
    }


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
