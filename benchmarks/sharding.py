"""How close is the predicted peak of a sharded step to that of real ranks?

Each setting runs on real ranks: processes of this machine, which torch's launcher starts, one
thread each, over Gloo. The highest peak of all ranks is compared with the prediction, which is made
in this process. Runs in which a free was not seen (`meters/collective_threads.py`) are repeated.
Not covered: cards, and gradients.

    python -m benchmarks.sharding --quick --out sharding.json
"""

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import report
from memlab import StepConfig, workloads
from memlab.devices.cards import Target
from memlab.measuring import measure
from memlab.meters.collective_threads import paused_for, unseen_free_bytes
from memlab.predicting.predict import predict_in_process
from memlab.result import StepResult

WORKLOADS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt-small": (4, {"num_layers": 3, "sequence_length": 64}),
    "vit-digits": (8, {"num_layers": 3}),
    "resnet-digits": (4, {}),
    "lstm-text": (4, {"sequence_length": 32}),
    "plain-mlp": (16, {}),
}
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hybrid")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "2 micro-batches": {"accumulation_steps": 2},
    "2, averaged once": {"accumulation_steps": 2, "sync_each_micro_batch": False},
    "bf16-mixed": {"precision": "bf16-mixed"},
}
EVERY, QUICK = "", "^(gpt-small|resnet-digits), .*, plain, "
ATTEMPTS, SEEN_BYTES = 8, 1024  # a run is repeated if more bytes were not seen to be freed


def settings(world_size: int, only: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the workload and the fields of a config of each setting whose name has a pattern."""
    made = {}
    for name, strategy, kind in itertools.product(WORKLOADS, STRATEGIES, VARIANTS):
        if name == "lstm-text" and kind == "bf16-mixed":  # no kernel for it on a CPU
            continue
        fields = {
            **VARIANTS[kind],
            "sharding": strategy,
            "world_size": world_size,
            "batch_size": WORKLOADS[name][0] * world_size,
        }
        if strategy == "hybrid":
            fields["shard_group_size"] = 2
        made[f"{name}, {strategy}, {kind}, {world_size} ranks"] = name, fields
    return {name: made[name] for name in made if re.search(only, name)}


def of_name(name: str) -> Any:
    """Return a workload in the size of this benchmark."""
    return workloads.get(name, **WORKLOADS[name][1])


def run_rank(folder: Path, only: str) -> None:
    """Measure all settings as one of the ranks, and write what each took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, (workload, fields) in settings(dist.get_world_size(), only).items():
        for _ in range(ATTEMPTS):
            result, unseen = measured(workload, fields)
            most = torch.tensor([unseen])
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            if most.item() < SEEN_BYTES:
                break
        found[name] = {
            "outcome": str(result.outcome),
            "message": result.message,
            "peak": result.peak_allocated_bytes,
            "first_step_peak": result.first_step_peak_bytes,
            "unseen": most.item(),
        }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(workload: str, fields: dict[str, Any]) -> tuple[StepResult, int]:
    """Return what this rank measured, and the bytes that it did not see freed."""
    module: Any = measure
    traces = []
    record = module.record

    def record_and_keep(*args: Any) -> Any:
        traces.append(record(*args))
        return traces[-1]

    module.record = record_and_keep
    try:
        with paused_for():
            result = measure.measure_in_process(
                of_name(workload), StepConfig(**fields), torch.device("cpu"),
                repeats=1, warmup=0, seed=0, memory_limit=None, report=lambda progress: None,
            )  # fmt: skip
    finally:
        module.record = record
    return result, unseen_free_bytes(traces[-1]) if traces else 0


def of_ranks(world_size: int, only: str) -> list[dict[str, Any]]:
    """Return what each rank measured, by setting."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(world_size), "-m", "benchmarks.sharding", "--rank", folder),
            only,
        ]
        variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=os.environ | variables, capture_output=True)
        return [json.loads((Path(folder) / f"{n}.json").read_text()) for n in range(world_size)]


def compared(world_size: int, only: str) -> list[dict[str, Any]]:
    """Return a row for each setting."""
    ranks, rows = of_ranks(world_size, only), []
    target = Target(kind="cpu", card=None, name="cpu")
    for name, (workload, fields) in settings(world_size, only).items():
        real = [rank[name] for rank in ranks]
        predicted = predict_in_process(
            of_name(workload), StepConfig(**fields), target,
            seed=0, memory_limit=None, report=lambda progress: None,
        ).result  # fmt: skip
        row: dict[str, Any] = {"setting": name, "measured": None, "predicted": None, "error": None}
        if predicted.peak_allocated_bytes and all(rank["peak"] for rank in real):
            peak = max(rank["peak"] for rank in real)
            first = max(rank["first_step_peak"] for rank in real)
            row |= {
                "measured": peak,
                "predicted": predicted.peak_allocated_bytes,
                "error": predicted.peak_allocated_bytes / peak - 1.0,
                "first step, error": (predicted.first_step_peak_bytes or 0) / first - 1.0,
            }
        else:
            row["why"] = f"measured: {real[0]['message']}; predicted: {predicted.message}"
        rows.append(row | {"not seen freed": max(rank["unseen"] for rank in real)})
        print({key: value for key, value in rows[-1].items() if value is not None}, flush=True)
    return rows


def main() -> None:
    """Compare 2 and 4 ranks."""
    given, before = report.options(__file__, __doc__), report.environment()
    torch.set_num_threads(1)
    rows = [
        row
        for world_size in (2, 4)
        for row in compared(world_size, QUICK if given.quick else EVERY)
    ]
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    report.show("peak of the rank that holds most: predicted, over measured", rows)
    print(f"median {statistics.median(errors):.4%}, maximum {max(errors):.4%} of {len(errors)}")
    found = {"median_error": statistics.median(errors), "max_error": max(errors), "rows": rows}
    report.write(given, before, found)


if __name__ == "__main__":
    if "--rank" in sys.argv:
        run_rank(Path(sys.argv[-2]), sys.argv[-1])
    else:
        main()
