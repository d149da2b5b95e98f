"""How large is the file of a recorded step, and how long does a page compute for one move?

The file is what `memlab.prediction.step_file` writes. Moved are batch size, accumulation and memory
budget, in node, which runs the page's JavaScript as Chromium does; drawing is not counted. Each
model is recorded once with one micro-batch and once with three. Moves of which the recording says
nothing are left out; the first tenth, while node compiles, is not.

Goals: 1 MiB for a GPT of 12 layers on a T4 and 4 MiB for a Llama with 70 billion parameters on
eight H100; 8 ms for half of the moves and 16 ms for 95 of 100 of the GPT. A picture at 60 Hz has 16
ms, of which drawing takes the rest.

    python -m benchmarks.page_model --quick --out page_model.json
"""

import json
import random
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import memlab
from benchmarks import report
from benchmarks.sharded_scale import llama
from memlab import StepConfig, Workload
from memlab._util.units import KIB, MIB
from memlab.api import predict_with_size_model
from memlab.prediction.plans import known_frontier
from memlab.prediction.step_file import packed

ROOT = Path(__file__).parents[1]
TIMES = ROOT / "tests" / "page" / "times.js"
NUM_MOVES, NUM_MOVES_QUICK = 1000, 100
MEDIAN_GOAL_MS, HIGH_GOAL_MS = 8.0, 16.0
MOST_SAMPLES, MOST_MICRO_BATCHES = 64, 16  # that a move asks for
SHARDED = StepConfig(
    batch_size=8, world_size=8, sharding="zero3", precision="bf16-mixed", checkpointing="blocks",
    model_cache=False,
)  # fmt: skip
LAYERS_70B, LAYERS_70B_QUICK = 80, 4


def gpt() -> Workload:
    """Return a GPT-2 of 12 layers in its published widths."""
    return memlab.workloads.get(
        "gpt-small", num_layers=12, hidden_size=768, num_heads=12, sequence_length=1024,
        vocab_size=50257,
    )  # fmt: skip


def cases(quick: bool) -> Iterator[tuple[str, Workload, StepConfig, str, int]]:
    """Yield label, workload, config, device and the most bytes that the file may have."""
    model = gpt()
    yield "GPT, 12 layers", model, StepConfig(batch_size=8), "t4", MIB
    yield "GPT, 12 layers", model, StepConfig(batch_size=24, accumulation_steps=3), "t4", MIB
    layers = LAYERS_70B_QUICK if quick else LAYERS_70B
    model, label = llama(layers), f"Llama, {layers} layers"
    yield label, model, SHARDED, "8x-h100", 4 * MIB
    yield label, model, replace(SHARDED, batch_size=24, accumulation_steps=3), "8x-h100", 4 * MIB


def file_of(workload: Workload, config: StepConfig, device: str) -> bytes:
    """Return the file of a step, with the plans of its memory budgets where it can have them."""
    planned = replace(config, memory_budget=0.5)
    memlab.predict(workload, planned, device)  # makes the plans
    found = predict_with_size_model(workload, config, device, timeout_seconds=600)
    if found.size_model is None:
        raise RuntimeError(found.result.message)
    frontier = known_frontier(workload, config, found.result.device, seed=0)
    return packed(found, frontier, config)


def moves(config: StepConfig, count: int) -> list[dict[str, Any]]:
    """Draw settings, as sliders move."""
    rng, ranks = random.Random(0), config.data_parallel_size
    drawn = []
    for _ in range(count):
        steps = rng.choice([config.accumulation_steps, rng.randint(1, MOST_MICRO_BATCHES)])
        samples = steps * rng.randint(1, max(1, MOST_SAMPLES // steps))
        budget = rng.choice([config.memory_budget, round(rng.random(), 2)])
        drawn.append(
            {
                "batchSize": ranks * samples,
                "accumulationSteps": steps,
                "memoryBudget": budget if config.sharding == "none" else config.memory_budget,
            }
        )
    return drawn


def row(
    label: str, workload: Workload, config: StepConfig, device: str, most_bytes: int, num_moves: int
) -> dict[str, Any]:
    """Return the size of a file and the times of moves."""
    data = file_of(workload, config, device)
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(data)
        file.flush()
        done = subprocess.run(
            ["node", TIMES, file.name], input=json.dumps(moves(config, num_moves)),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    found = json.loads(done.stdout)
    answered = [move for move in found["moves"] if move]
    median, high = np.quantile([move["ms"] for move in answered], [0.5, 0.95])
    met = len(data) < most_bytes and median <= MEDIAN_GOAL_MS and high <= HIGH_GOAL_MS
    return {
        "model": label,
        "device": device,
        "micro-batches recorded": config.accumulation_steps,
        "file KiB": len(data) / KIB,
        "reading ms": found["read"],
        "answered": len(answered),
        "estimated": sum(move["how"] == "estimated" for move in answered),
        "most instants": max(move["instants"] for move in answered),
        "median ms": float(median),
        "p95 ms": float(high),
        "goal": report.verdict(bool(met)),
    }


def main() -> None:
    """Write the files and time the moves."""
    given, before = report.options(__file__, __doc__ or ""), report.environment()
    num_moves = NUM_MOVES_QUICK if given.quick else NUM_MOVES
    rows = [row(*case, num_moves) for case in cases(given.quick)]
    report.show(f"{num_moves} moves of batch, accumulation and budget", rows)
    report.write(given, before, {"rows": rows})


if __name__ == "__main__":
    main()
