"""What does a rank allocate while it saves a checkpoint: predicted, and in real ranks?

Real ranks are processes of this machine over Gloo, which torch's launcher starts. Each makes two
updates and saves, and memlab's meter counts every allocation: the most bytes that are live during
`save`, and how much more that is than just before. One process without ranks does the same. A
second table is predicted only: it has more ranks, and cards, whose tensors are copied to the host.
Not counted: what is no tensor, such as Python's own lists of what each rank writes.

    python -m benchmarks.saving_peak --quick --out saving_peak.json
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import report
from memlab import StepConfig, StepResult, Workload, workloads
from memlab.devices.cards import Target, resolve
from memlab.memory.meter import Meter, record
from memlab.prediction.predict import predict_in_process
from memlab.runtime.measure import MOST_UNSEEN_BYTES, paused_for, unseen_free_bytes
from memlab.techniques import checkpoints
from memlab.techniques.step import Step, build_step
from memlab.trace import Phase

WORKLOADS: dict[str, dict[str, Any]] = {
    "gpt-small": {"num_layers": 2, "sequence_length": 64},
    "resnet-digits": {},  # with buffers, and rows that do not divide
}
STRATEGIES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one process": {}},
    2: {
        "ddp": {"sharding": "ddp"},
        "zero1": {"sharding": "zero1"},
        "zero3": {"sharding": "zero3"},
        "tensor": {"sharding": "tensor"},
    },
    4: {
        "zero3": {"sharding": "zero3"},
        "hybrid": {"sharding": "hybrid", "shard_group_size": 2},
    },
}
QUICK = (1, 2)
SAMPLES, NUM_UPDATES, MOST_TRIES = 4, 2, 3
MANY = (8, 128, 1024)
CARD = "h100"


def of_name(name: str) -> Workload:
    """Return a workload in the size of this benchmark."""
    return workloads.get(name, **WORKLOADS.get(name, {}))


def config_of(fields: dict[str, Any], world_size: int) -> StepConfig:
    """Return the config of a strategy for this many ranks."""
    ranks = {"world_size": world_size} if world_size > 1 else {}
    return StepConfig(batch_size=SAMPLES * world_size, **fields, **ranks)


def saving_bytes(name: str, config: StepConfig) -> tuple[int, int, int]:
    """Return the most bytes that are live in this process while it saves, and those before it.

    The third number is of bytes that threads of collectives freed unseen: counted too much.
    """
    workload, meter = of_name(name), Meter()

    def run() -> None:
        step = build_step(workload, config, "cpu", mark=partial(meter.mark, -1))
        for index in range(NUM_UPDATES):
            step(partial(meter.mark, index))
        meter.mark(NUM_UPDATES, Phase.OPTIMIZER, 0)
        save(step)
        meter.mark(-1, Phase.TEARDOWN, 0)

    gc.collect()
    with paused_for():
        trace = record(run, meter, torch.device("cpu"))
    live = np.cumsum(trace.nbytes)
    is_saving = np.array([i.step == NUM_UPDATES for i in trace.intervals])[trace.interval]
    first = int(np.flatnonzero(is_saving)[0])
    return int(live[is_saving].max()), int(live[first - 1]), unseen_free_bytes(trace)


def save(step: Step) -> None:
    """Write a checkpoint, all ranks into one folder, and remove it."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        if dist.is_initialized():
            dist.broadcast_object_list(folders)
        checkpoints.save(step, NUM_UPDATES, Path(folders[0]))


def as_rank(world_size: int, names: list[str]) -> None:
    """Be one of the ranks: save under each strategy; rank 0 prints what all have allocated."""
    torch.set_num_threads(1)
    if world_size > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo")
    rows = []
    for strategy, fields in STRATEGIES[world_size].items():
        for name in names:
            every = of_all_ranks(name, config_of(fields, world_size))
            rows.append({"workload": name, "strategy": strategy, "ranks": every})
    if world_size == 1 or dist.get_rank() == 0:
        print(json.dumps(rows), flush=True)
    if world_size > 1:
        dist.barrier()
    os._exit(0)  # Gloo's threads can abort a process that ends in the ordinary way


def of_all_ranks(name: str, config: StepConfig) -> list[tuple[int, int, int]]:
    """Return the numbers of every rank, again if one of them missed a free."""
    every: list[Any] = []
    for _ in range(MOST_TRIES):
        own = saving_bytes(name, config)
        every = [own] * config.world_size
        if dist.is_initialized():
            dist.all_gather_object(every, own)
        if max(unseen for _, _, unseen in every) < MOST_UNSEEN_BYTES:
            break
    return every


def measured(world_size: int, names: list[str]) -> list[dict[str, Any]]:
    """Return what real ranks allocate: for each strategy and workload a pair for each rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    command = [
        sys.executable, *(launcher if world_size > 1 else []), "-m", "benchmarks.saving_peak",
        "--as-rank", str(world_size), *names,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ranks ended with {done.returncode}: {done.stderr[-2000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def predicted(name: str, config: StepConfig, target: Target) -> tuple[StepResult, ...]:
    """Return what is predicted of each rank that differs."""
    made = predict_in_process(
        of_name(name), config, target,
        seed=0, memory_limit=None, report=lambda progress: None,
    ).result  # fmt: skip
    assert made.outcome == "ok", made.message
    return made.ranks or (made,)


def compared(world_size: int, names: list[str]) -> list[dict[str, Any]]:
    """Return a row for each strategy and workload: the rank that allocates most while it saves."""
    rows = []
    cpu = Target(kind="cpu", card=None, name="cpu")
    for found in measured(world_size, names):
        fields = STRATEGIES[world_size][found["strategy"]]
        of_ranks = predicted(found["workload"], config_of(fields, world_size), cpu)
        peak, before, _ = max(found["ranks"])
        expected = max(rank.saving_peak_bytes or 0 for rank in of_ranks)
        row = {
            "workload": found["workload"],
            "strategy": found["strategy"],
            "ranks": world_size,
            "measured": peak,
            "predicted": expected,
            "error": expected / peak - 1.0,
            "more than before": peak - before,
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def simulated(world_size: int) -> dict[str, Any]:
    """Return what rank 0 of many, and the others, are predicted to take on a card."""
    config = config_of({"sharding": "zero3"}, world_size)
    of_ranks = predicted("gpt2-medium", config, resolve(CARD))
    first = next(rank for rank in of_ranks if 0 in rank.rank_numbers)
    assert first.timeline is not None
    assert first.saving_peak_bytes is not None
    held = int(first.timeline.total_bytes[-1])
    return {
        "ranks": world_size,
        "held between updates": held,
        "rank 0, saving": first.saving_peak_bytes,
        "peak of a step": first.peak_allocated_bytes,
        "host memory": first.saving_host_bytes,
    }


def main() -> None:
    """Compare real ranks, and simulate many."""
    if "--as-rank" in sys.argv:
        at = sys.argv.index("--as-rank")
        as_rank(int(sys.argv[at + 1]), sys.argv[at + 2 :])
    given, before = report.options(__file__, __doc__ or ""), report.environment()
    torch.set_num_threads(1)
    counts = QUICK if given.quick else tuple(STRATEGIES)
    rows = [row for count in counts for row in compared(count, list(WORKLOADS))]
    report.show("most bytes live while a checkpoint is saved, on a CPU", rows)
    many = [simulated(count) for count in MANY]
    report.show(f"gpt2-medium with zero3 on {CARD}: bytes, predicted", many)
    worst = max(abs(row["error"]) for row in rows)
    print(f"at most {worst:.2%} off in {len(rows)} settings")
    report.write(given, before, {"max_error": worst, "rows": rows, "simulated": many})


if __name__ == "__main__":
    main()
