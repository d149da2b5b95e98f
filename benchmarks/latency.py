"""How long does a person wait for a prediction: cold, at a slider, of 7B and of 70B parameters?

Cold: a GPT of 12 layers in a fresh process that has imported everything and predicted one Linear;
both traces, so that other batch sizes follow. Calibration apart: for the CPU the operators are in
the cache already, for a card there are none. Beside it, in pairs of processes, PyTorch's MemTracker
over fake tensors, built and run for two steps of one batch size. Goal: at most 0.35 of its time.

Slider: from a new batch size to the new timeline, as arithmetic alone (goal: 5 ms at the 95th
percentile); the panel's page draws it, no kernel does. Large: Llama with 70B parameters by config
on an H200 that need not be there; goals: 30 s, and 4 GiB of the worker's resident memory at its
most. Fine-tuned: Llama 2 7B with LoRA of rank 16 and 1,024 tokens on an RTX 4090, in a worker that
has predicted something else; then another batch, another length and another base; goals: 3 s, and
0.3 s for each other setting.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils import _pytree as pytree

import memlab
from benchmarks import report
from memlab import StepConfig, Workload
from memlab._util.units import GIB, KIB, MIB
from memlab.api import predict_with_size_model
from memlab.runtime import isolation

RATIO_GOAL, ARITHMETIC_GOAL_MS = 0.35, 5.0
LARGE_GOAL_SECONDS, LARGE_GOAL_BYTES = 30.0, 4 * GIB
NUM_PAIRS, NUM_PAIRS_QUICK = 7, 1
NUM_MOVES, NUM_MOVES_QUICK = 100, 10
CARD = "h200"
LLAMA_70B = {
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "use_cache": False,
}
LENGTH_70B = 2048
FIRST_GOAL_SECONDS, NEXT_GOAL_SECONDS = 3.0, 0.3


def gpt() -> Workload:
    """Return a GPT-2 of 12 layers; how wide they are costs a prediction nothing."""
    return memlab.workloads.get("gpt-small", num_layers=12)


def tiny() -> Workload:
    """Return one Linear."""
    return Workload(
        name="tiny",
        build_model=lambda: nn.Linear(8, 8),
        make_batch=lambda n: torch.randn(n, 8),
        compute_loss=lambda model, x: model(x).square().mean(),
    )


def llama_70b() -> Workload:
    """Return Llama with 70B parameters by config (transformers), on random tokens."""

    def build() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        model: nn.Module = LlamaForCausalLM(LlamaConfig(**LLAMA_70B))
        return model

    return Workload(
        name="llama-70b",
        build_model=build,
        make_batch=lambda n: torch.randint(LLAMA_70B["vocab_size"], (n, LENGTH_70B)),
        compute_loss=lambda model, ids: model(input_ids=ids, labels=ids).loss,
    )


def predict_here(workload: Workload, device: str) -> None:
    """Predict in this process."""
    from memlab.devices.cards import resolve
    from memlab.prediction.predict import predict_in_process

    found = predict_in_process(
        workload,
        StepConfig(),
        resolve(device),
        seed=0,
        memory_limit=None,
        report=lambda progress: None,
    )
    if found.result.outcome != "ok":
        raise RuntimeError(found.result.message)


def track_here(workload: Workload, device: str) -> None:
    """Have MemTracker see two steps over fake tensors in this process, on the CPU."""
    batch = workload.make_batch(StepConfig().batch_size)
    with FakeTensorMode() as mode:
        model = workload.build_model().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = pytree.tree_map_only(torch.Tensor, mode.from_tensor, batch)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, batch)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                workload.compute_loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        tracker.get_tracker_snapshot("peak")


SIDES: dict[str, tuple[Callable[[Workload, str], None], str]] = {
    "memlab, cpu": (predict_here, "cpu"),
    f"memlab, {CARD}": (predict_here, CARD),
    "MemTracker": (track_here, "cpu"),
}


def cold(side: str) -> None:
    """Print the seconds of a first prediction in this process, and those of a second."""
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    function, device = SIDES[side]
    function(tiny(), device)
    workload, seconds = gpt(), []
    for _ in range(2):
        start = time.perf_counter()
        function(workload, device)
        seconds.append(time.perf_counter() - start)
    print(json.dumps(seconds))


def cold_pairs(num_pairs: int) -> list[dict[str, Any]]:
    """Return medians of every side over rounds of fresh processes, and paired ratios."""
    _cold_seconds("memlab, cpu")  # fills the cache of operators
    orders = [list(SIDES), list(SIDES)[::-1]]
    rounds = [{side: _cold_seconds(side) for side in orders[i % 2]} for i in range(num_pairs)]
    return [_cold_row(side, rounds) for side in SIDES]


def _cold_row(side: str, rounds: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    peer = "MemTracker"
    ratios = [found[side][0] / found[peer][0] for found in rounds]
    low, high = report.median_interval(ratios)
    ratio = statistics.median(ratios)
    return {
        "what": side,
        "pairs": len(rounds),
        "first s": statistics.median(found[side][0] for found in rounds),
        "again s": statistics.median(found[side][1] for found in rounds),
        "first over MemTracker's": ratio,
        "95 %": f"{low:.2f}-{high:.2f}",
        "goal": "" if side == peer else report.verdict(ratio <= RATIO_GOAL),
    }


def _cold_seconds(side: str) -> list[float]:
    done = report.fresh_python(f"from benchmarks.latency import cold; cold({side!r})")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def slider(num_moves: int) -> list[dict[str, Any]]:
    """Return how long moves of the batch slider take, by sums alone."""
    found = predict_with_size_model(gpt(), StepConfig(), CARD)
    if found.size_model is None:
        raise RuntimeError(found.result.message)
    alone = []
    for move in range(num_moves):
        config = StepConfig(batch_size=2 + 3 * move % 62)
        start = time.perf_counter()
        found.size_model.timeline(config.micro_batch_sizes)
        alone.append(time.perf_counter() - start)
    return [_slider_row("timeline alone, by sums", alone, ARITHMETIC_GOAL_MS)]


def _slider_row(what: str, seconds: Sequence[float], goal_ms: float) -> dict[str, Any]:
    median, high = (1e3 * float(q) for q in np.quantile(seconds, [0.5, 0.95]))
    return {
        "a move of the slider": what,
        "moves": len(seconds),
        "median ms": median,
        "p95 ms": high,
        "goal ms": goal_ms,
        "goal": report.verdict(high <= goal_ms),
    }


def large() -> dict[str, Any]:
    """Return time and resident memory of a prediction of 70B parameters in a warm worker."""
    warm = memlab.predict(memlab.workloads.get("gpt-small"), StepConfig(), CARD)
    config = StepConfig(batch_size=1, precision="bf16")
    start = time.perf_counter()
    result = memlab.predict(llama_70b(), config, CARD, timeout_seconds=600)
    seconds = time.perf_counter() - start
    for found in (warm, result):
        if found.outcome != "ok":
            raise RuntimeError(found.message)
    most = worker_bytes()
    met = seconds <= LARGE_GOAL_SECONDS and (most is None or most <= LARGE_GOAL_BYTES)
    return {
        "model": result.workload_name,
        "config": str(config),
        "predicted allocated bytes": result.peak_allocated_bytes,
        "predicted reserved bytes": result.peak_reserved_bytes,
        "s": seconds,
        "worker's most MiB": None if most is None else most / MIB,
        "goal": report.verdict(met),
    }


def fine_tuned() -> list[dict[str, Any]]:
    """Return the seconds of the first answer for 7B with LoRA, and of three other settings."""
    memlab.predict(memlab.workloads.get("gpt-small"), StepConfig(), "rtx-4090")
    first = memlab.workloads.finetune("llama-7b", tokens=1024)
    cases = [
        ("first", first, 2),
        ("another batch", first, 3),
        ("another length", memlab.workloads.finetune("llama-7b", tokens=768), 2),
        ("another base", memlab.workloads.finetune("llama-7b", tokens=1024, base="nf4"), 2),
    ]
    rows = []
    for asked, workload, batch_size in cases:
        begun = worker_seconds(), time.perf_counter()
        result = memlab.predict(workload, StepConfig(batch_size=batch_size), "rtx-4090")
        if result.outcome != "ok":
            raise RuntimeError(result.message)
        seconds, own = time.perf_counter() - begun[1], worker_seconds() - begun[0]
        goal = FIRST_GOAL_SECONDS if asked == "first" else NEXT_GOAL_SECONDS
        rows.append({
            "asked": asked, "of a processor s": own, "s": seconds,
            "goal": f"{goal:g} s: {report.verdict(seconds <= goal)}",
        })  # fmt: skip
    return rows


def worker_seconds() -> float:
    """Return what the predicting worker has taken of a processor; 0 if that is unknown."""
    worker = isolation.predicting.worker
    status = Path(f"/proc/{worker.process.pid}/stat" if worker else "/proc/none")
    if not status.exists():
        return 0.0
    fields = status.read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")  # of user and of system


def worker_bytes() -> int | None:
    """Return the most resident memory that the predicting worker has had; None if unknown."""
    worker = isolation.predicting.worker
    status = Path(f"/proc/{worker.process.pid}/status" if worker else "/proc/none")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * KIB


def main() -> None:
    """Time all four."""
    given, before = report.options(__file__, __doc__), report.environment()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["MEMLAB_CACHE"] = cache  # before the first prediction starts a process
        cold_rows = cold_pairs(NUM_PAIRS_QUICK if given.quick else NUM_PAIRS)
    report.show("first prediction of a 12-layer GPT in a process, calibration apart", cold_rows)
    moves = slider(NUM_MOVES_QUICK if given.quick else NUM_MOVES)
    report.show(f"from a slider to a timeline, 12-layer GPT on {CARD}", moves)
    tuned = fine_tuned()
    report.show("Llama 2 7B with LoRA of rank 16 on an RTX 4090, in a warm worker", tuned)
    biggest = large()
    report.show(f"70B parameters on {CARD}, in a warm worker", [biggest])
    report.write(
        given, before, {"cold": cold_rows, "slider": moves, "fine-tuned": tuned, "large": biggest}
    )


if __name__ == "__main__":
    main()
