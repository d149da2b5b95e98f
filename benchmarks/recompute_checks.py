"""Is what is recomputed exact, and what does Python take for it?

Verify: random combinations of small models, some with dropout, with budgets, policies, modules,
micro-batches and formats, by `memlab.verify` in this process. A mismatch is a step that would have
run in silence: recomputing changes a bit of its gradients, or in fp32 they are beyond 1e-5. Where
bf16 alone rounds by more than `memlab.verify` allows (two samples under BatchNorm), that is apart.

Host: what Python takes in recomputed modules beside their operators, the least of many runs; the
source of the constants of `memlab.cost_model.overlap`. Both are run by `recompute.py`.
"""

import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import memlab
from benchmarks import models
from memlab import StepConfig, Workload
from memlab.config import PRESET_POLICIES
from memlab.cost_model import overlap as host_time
from memlab.techniques.checkpointing.checkpointing import apply_plan
from memlab.techniques.technique import Plan, Region

NUM_CALLS = 200
ZOO: dict[str, dict[str, Any]] = {
    "gpt-small": {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "sequence_length": 32},
    "vit-digits": {"num_layers": 2, "hidden_size": 48, "num_heads": 2},
    "resnet-digits": {"hidden_sizes": (8, 16), "depths": (2, 2), "embedding_size": 8},
    "lstm-text": {"hidden_size": 32, "sequence_length": 16},
}
OTHERS = ("bert", "t5", "encoder", "depthwise", "convnext", "swin", "tied", "mlp")
OTHERS_QUICK = ("tied", "mlp")
RECOMPUTE: tuple[dict[str, Any], ...] = (
    {},
    *({"memory_budget": budget} for budget in (0.8, 0.5, 0.2, 0.0)),
    *({"checkpointing": "blocks", "checkpoint_policy": policy} for policy in PRESET_POLICIES),
    {"checkpointing": "blocks", "checkpoint_policy": "aten.mm, aten.addmm, aten.convolution"},
    *({"checkpointing": "blocks", "checkpoint_modules": f"every {k}"} for k in (2, 3)),
)
SPLITS = ((2, 1), (4, 2), (3, 2))
FP32 = "as-built"  # every model here is built in fp32
PRECISIONS = (FP32, FP32, "bf16-mixed")  # fp32 twice as often


def combinations(count: int, quick: bool, seed: int = 0) -> list[tuple[str, StepConfig]]:
    """Return random pairs of a model's name and a configuration; "+" marks dropout."""
    draw = random.Random(seed)
    every = [*ZOO, *(f"{name}+" for name in ZOO), *OTHERS]
    every = list(OTHERS_QUICK) if quick else every
    found = []
    for _ in range(count):
        batch_size, steps = draw.choice(SPLITS)
        config = StepConfig(
            batch_size=batch_size,
            accumulation_steps=steps,
            precision=draw.choice(PRECISIONS),
            **draw.choice(RECOMPUTE),
        )
        found.append((draw.choice(every), config))
    return found


def verified(pairs: Sequence[tuple[str, StepConfig]]) -> list[dict[str, Any]]:
    """Return the outcomes of checking these, counted; mismatches one by one."""
    workloads: dict[str, Workload] = {}
    counts: Counter[tuple[str, str]] = Counter()
    worst, examples = 0.0, dict[tuple[str, str], str]()
    for name, config in sorted(pairs, key=lambda pair: (pair[0], str(pair[1]))):
        if name not in workloads:
            workloads[name] = _tiny(name)
        report = memlab.verify(workloads[name], config, "cpu", timeout_seconds=600, isolate=False)
        if report.outcome != "ok":
            verdict = f"refused ({report.outcome})"
        elif report.bitwise is False or (not report.ok and config.precision == FP32):
            verdict = "MISMATCH"
        elif not report.ok:
            verdict = "rounds by more than the tolerance"
        else:
            verdict = "same bits as without recomputing" if report.bitwise else "within tolerance"
        if config.precision == FP32:
            worst = max(worst, report.max_relative_error or 0.0)
        key = "fp32" if config.precision == FP32 else str(config.precision), verdict
        counts[key] += 1
        examples.setdefault(key, f"{name}, {config}: {report.why}")
        if verdict == "MISMATCH":
            print(f"MISMATCH {name}, {config}: {report}")
    print(f"largest relative error in fp32: {worst:.1e}")
    return [
        {"precision": key[0], "verdict": key[1], "combinations": counts[key], "one": examples[key]}
        for key in sorted(counts)
    ]


def _tiny(name: str) -> Workload:
    zoo = name.rstrip("+")
    if zoo not in ZOO:
        return models.WORKLOADS[name]()
    dropout = 0.2 if name.endswith("+") else 0.0
    return memlab.workloads.get(zoo, dropout=dropout, **ZOO[zoo])


class Chained(nn.Module):
    """One Linear and small pointwise operators after it: all of its time is Python's."""

    def __init__(self, num_operators: int) -> None:
        super().__init__()
        self.linear, self.num_operators = nn.Linear(4, 4), num_operators

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many sines of sines."""
        x = self.linear(x)
        for _ in range(self.num_operators):
            x = x.sin()
        return x


def host() -> dict[str, Any]:
    """Return what Python takes for a recomputed module: its calls, operators, kept ones."""
    few, many = 4, 44
    seconds = {n: [_seconds(n, regions) for regions in _regions()] for n in (few, many)}
    again = {n: _seconds(n, None, forward_only=True) for n in (few, many)}
    hook, keep = (
        (
            (seconds[many][at] - seconds[many][at - 1] - (again[many] if at == 1 else 0.0))
            - (seconds[few][at] - seconds[few][at - 1] - (again[few] if at == 1 else 0.0))
        )
        / (many - few)
        for at in (1, 2)
    )
    region = seconds[few][1] - seconds[few][0] - again[few] - (few + 1) * hook
    return {
        "region us": 1e6 * region,
        "assumed": 1e6 * host_time.REGION_SECONDS,
        "operator us": 1e6 * hook,
        "assumed ": 1e6 * host_time.HOOK_SECONDS,
        "operator where some are kept us": 1e6 * keep,
        "assumed  ": 1e6 * host_time.DISPATCH_SECONDS,
    }


def _regions() -> tuple[tuple[Region, ...], ...]:
    return (), (Region(path="0"),), (Region(path="0", keep=frozenset({("aten.sin.default", 1)})),)


def _seconds(num: int, regions: tuple[Region, ...] | None, *, forward_only: bool = False) -> float:
    """Return the least time of forward and backward: other processes only add to it."""
    model = nn.Sequential(Chained(num))
    if regions:
        facts = {"saved_bytes": 0, "plain_saved_bytes": 1, "peak_bytes": 0}
        apply_plan(model, Plan(regions=regions, recompute_seconds=None, **facts))
    x, seconds = torch.randn(4, 4), []
    for _ in range(NUM_CALLS):
        start = time.perf_counter()
        with torch.set_grad_enabled(not forward_only):
            out = model(x).sum()
        if not forward_only:
            out.backward()
        seconds.append(time.perf_counter() - start)
    return statistics.quantiles(seconds, n=20)[0]
