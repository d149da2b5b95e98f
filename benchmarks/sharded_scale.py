"""What does it cost to simulate a rank: of a Llama with 70 billion parameters, among 4096 ranks?

Each row is a prediction in a process of its own: a Llama in the shapes of the 70B model, with fewer
layers and with all 80, in bf16-mixed with zero3 and recomputed blocks, one sequence of 4096 tokens
a rank, on machines of eight H100. Counted are the processor's time and the wall time of the
prediction, and the most that the process held in memory, imports included. One rank is recorded of
each class that holds the same, at most four, and only one of a deep model. The exponents say how
the processor's time grows between rows that record as many ranks: time ~ layers ** exponent. It is
to be at most 1 for layers, and about 0 for ranks.

Not covered: other strategies, and what the model's real ranks would hold.

    python -m benchmarks.sharded_scale --quick --out sharded_scale.json
"""

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.meta_init import resident
from memlab import StepConfig, Workload, workloads
from memlab._util.units import GIB, format_bytes
from memlab.devices import cards
from memlab.prediction.predict import predict_in_process

LLAMA_70B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192,
    "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
CLUSTER = "512x8-h100"
TOKENS = 4096
WHOLE, RANKS = 80, 1024  # layers of the 70B model, and how many ranks share it
LAYERS, LAYERS_QUICK = (5, 10, 20, 40, WHOLE), (2, 4)
WORLD_SIZES, WORLD_SIZES_QUICK = (2, 16, 128, 1024, 4096), (2, 4096)
LAYERS_OF_RANKS = 5  # while the number of ranks varies
LAYERS_OF_RANKS_QUICK = 2
MOST_SECONDS, MOST_BYTES = 60.0, 4 * GIB  # of the whole model among 1024 ranks


def llama(num_layers: int) -> Workload:
    """Return a Llama of this depth in the widths of the 70B model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"llama-{num_layers}.json"
        path.write_text(json.dumps(LLAMA_70B | {"num_hidden_layers": num_layers}))
        return workloads.from_config(path, tokens=TOKENS)


def predicted(num_layers: int, world_size: int) -> dict[str, Any]:
    """Return what a prediction takes in this process, and what it says."""
    torch.set_num_threads(1)
    config = StepConfig(
        batch_size=world_size, world_size=world_size, sharding="zero3", precision="bf16-mixed",
        checkpointing="blocks", model_cache=False,
    )  # fmt: skip
    workload, target = llama(num_layers), cards.resolve(CLUSTER)
    start, processor = time.perf_counter(), time.process_time()
    result = predict_in_process(
        workload, config, target, seed=0, memory_limit=None, report=lambda progress: None
    ).result
    return {
        "layers": num_layers,
        "ranks": world_size,
        "recorded": len(result.ranks),
        "processor, seconds": time.process_time() - processor,
        "wall, seconds": time.perf_counter() - start,
        "resident, bytes": resident("VmHWM"),
        "outcome": str(result.outcome),
        "peak of a rank, bytes": result.peak_allocated_bytes,
        "parameters of a rank, bytes": (result.peak_by_category or {}).get("parameters"),
        "sent by a rank, bytes": result.sent_bytes,
    }


def row(num_layers: int, world_size: int) -> dict[str, Any]:
    """Return one row from a fresh process, and print it."""
    code = f"""
import json
from benchmarks import sharded_scale
print(json.dumps(sharded_scale.predicted({num_layers}, {world_size})))
"""
    done = report.fresh_python(code)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found, flush=True)
    return found


def exponent(rows: Sequence[dict[str, Any]], field: str) -> float:
    """Return by which power of a field the time grows, by least squares; nan if no rows compare.

    Rows are compared with those that record as many ranks only: recorded ranks share one build, so
    the time of two is less than twice that of one.
    """
    x: list[float] = []
    y: list[float] = []
    for recorded in {each["recorded"] for each in rows}:
        alike = [each for each in rows if each["recorded"] == recorded]
        for found, name in ((x, field), (y, "processor, seconds")):
            logarithms = np.log([each[name] for each in alike])
            found.extend(logarithms - logarithms.mean())
    return float(np.dot(x, y) / np.dot(x, x)) if np.any(x) else float("nan")


def main() -> None:
    """Predict fewer and more layers, then fewer and more ranks."""
    given, before = report.options(__file__, __doc__), report.environment()
    depth = LAYERS_OF_RANKS_QUICK if given.quick else LAYERS_OF_RANKS
    by_layers = [row(n, RANKS) for n in (LAYERS_QUICK if given.quick else LAYERS)]
    by_ranks = [row(depth, n) for n in (WORLD_SIZES_QUICK if given.quick else WORLD_SIZES)]
    report.show(f"among {RANKS} ranks", by_layers)
    report.show(f"with {depth} layers", by_ranks)
    of_layers, of_ranks = exponent(by_layers, "layers"), exponent(by_ranks, "ranks")
    grows = f"layers ** {of_layers:.2f}, ~ ranks ** {of_ranks:.3f}"
    print(f"processor's time ~ {grows}")
    whole = next((each for each in by_layers if each["layers"] == WHOLE), None)
    if whole is not None:
        fits = whole["wall, seconds"] < MOST_SECONDS and whole["resident, bytes"] < MOST_BYTES
        print(
            f"{WHOLE} layers among {RANKS} ranks: {whole['wall, seconds']:.1f} s of wall time, "
            f"{whole['processor, seconds']:.1f} s of the processor, "
            f"{format_bytes(whole['resident, bytes'])} in memory: "
            f"{'within' if fits else 'above'} {MOST_SECONDS:.0f} s and {format_bytes(MOST_BYTES)}"
        )
    report.write(given, before, {
        "exponent_of_layers": of_layers, "exponent_of_ranks": of_ranks, "by_layers": by_layers,
        "by_ranks": by_ranks,
    })  # fmt: skip


if __name__ == "__main__":
    main()
