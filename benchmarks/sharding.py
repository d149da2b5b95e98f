"""How close is the predicted peak of a sharded step to real ranks, and how equal its updates?

Each setting runs on real ranks: processes of this machine, which torch's elastic launcher starts,
one thread each, over Gloo. The highest peak of all ranks is compared with the prediction, which is
made in this process. For the plain variants three updates are compared with those of one process.
Not covered: cards.

    python -m benchmarks.sharding --quick --out sharding.json
"""

import itertools
import re
import statistics
from typing import Any

import torch

from benchmarks import report
from benchmarks.ranks import Ranks
from memlab import Outcome, StepConfig, StepResult, workloads
from memlab.devices.cards import Target
from memlab.prediction.predict import predict_in_process

WORKLOADS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt-small": (4, {"num_layers": 3, "sequence_length": 64}),
    "vit-digits": (8, {"num_layers": 3}),
    "resnet-digits": (4, {}),
    "lstm-text": (4, {"sequence_length": 32}),
    "plain-mlp": (16, {}),
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": "ddp"},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2"},
    "zero3": {"sharding": "zero3"},
    "hybrid": {"sharding": "hybrid", "shard_group_size": 2},
    "tensor": {"sharding": "tensor"},
    "zero3 and tensor": {"sharding": "zero3", "tensor_parallel_size": 2},
    "ddp and tensor": {"sharding": "ddp", "tensor_parallel_size": 2},
    "zero1 and tensor": {"sharding": "zero1", "tensor_parallel_size": 2},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "2 micro-batches": {"accumulation_steps": 2},
    "2, averaged once": {"accumulation_steps": 2, "sync_each_micro_batch": False},
    "bf16-mixed": {"precision": "bf16-mixed"},
}
EVERY, QUICK = "", "^(gpt-small|resnet-digits), .*, plain, "


def settings(world_size: int, only: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the workload and the fields of a config of each setting whose name has a pattern."""
    made = {}
    for name, strategy, kind in itertools.product(WORKLOADS, STRATEGIES, VARIANTS):
        if name == "lstm-text" and kind == "bf16-mixed":  # no kernel for it on a CPU
            continue
        if strategy == "tensor" and kind == "2, averaged once":  # it averages none
            continue
        fields = {
            **VARIANTS[kind],
            **STRATEGIES[strategy],
            "world_size": world_size,
            "batch_size": WORKLOADS[name][0] * world_size,
        }
        made[f"{name}, {strategy}, {kind}, {world_size} ranks"] = name, fields
    return {name: made[name] for name in made if re.search(only, name)}


def of_name(name: str) -> Any:
    """Return a workload in the size of this benchmark."""
    return workloads.get(name, **WORKLOADS[name][1])


def compared(ranks: Ranks, world_size: int, only: str) -> list[dict[str, Any]]:
    """Return a row for each setting."""
    rows = []
    for name, (workload, fields) in settings(world_size, only).items():
        measured, predicted = in_ranks(ranks, workload, fields), simulated(workload, fields)
        row: dict[str, Any] = {"setting": name, "measured": None, "predicted": None, "error": None}
        if measured.peak_allocated_bytes and predicted.peak_allocated_bytes:
            first = max(rank.first_step_peak_bytes or 0 for rank in measured.ranks)
            row |= {
                "measured": measured.peak_allocated_bytes,
                "predicted": predicted.peak_allocated_bytes,
                "error": predicted.peak_allocated_bytes / measured.peak_allocated_bytes - 1.0,
                "first step, error": (predicted.first_step_peak_bytes or 0) / first - 1.0,
            }
        if measured.outcome is not Outcome.OK or predicted.outcome is not Outcome.OK:
            row["why"] = f"measured: {measured.message}; predicted: {predicted.message}"
        if ", plain, " in name:
            row["gradient error"] = gradient_error(ranks, workload, fields)
        rows.append(row)
        print({key: value for key, value in row.items() if value is not None}, flush=True)
    return rows


def in_ranks(ranks: Ranks, workload: str, fields: dict[str, Any]) -> StepResult:
    """Return what real ranks measure; if they come to no end, what they measure once more.

    On a busy machine a thread of Gloo sometimes waits for ever.
    """
    result = ranks.measured(of_name(workload), StepConfig(**fields))
    if result.outcome is Outcome.TIMED_OUT:
        print(f"run once more: {result.message}", flush=True)
        result = ranks.measured(of_name(workload), StepConfig(**fields))
    return result


def simulated(workload: str, fields: dict[str, Any]) -> StepResult:
    """Return what is predicted of the rank that holds the most."""
    target = Target(kind="cpu", card=None, name="cpu")
    return predict_in_process(
        of_name(workload), StepConfig(**fields), target,
        seed=0, memory_limit=None, report=lambda progress: None,
    ).result  # fmt: skip


def gradient_error(ranks: Ranks, workload: str, fields: dict[str, Any]) -> float | None:
    """Return the largest relative error of a gradient in three updates, against one process.

    Each update begins with the weights and the optimizer state of that process.
    """
    return ranks.verified(of_name(workload), StepConfig(**fields)).max_relative_error


def main() -> None:
    """Compare 2 and 4 ranks."""
    given, before = report.options(__file__, __doc__), report.environment()
    torch.set_num_threads(1)
    ranks = Ranks()
    try:
        rows = [
            row
            for world_size in (2, 4)
            for row in compared(ranks, world_size, QUICK if given.quick else EVERY)
        ]
    finally:
        ranks.end()
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    report.show("peak of the rank that holds most: predicted, over measured", rows)
    gradients = max(row.get("gradient error") or 0.0 for row in rows)
    print(f"median {statistics.median(errors):.4%}, maximum {max(errors):.4%} of {len(errors)}")
    print(f"largest relative error of a gradient: {gradients:.1e}")
    found = {
        "median_error": statistics.median(errors),
        "max_error": max(errors),
        "max_gradient_error": gradients,
        "rows": rows,
    }
    report.write(given, before, found)


if __name__ == "__main__":
    main()
