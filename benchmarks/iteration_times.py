"""How far off are predicted times of a Megatron GPT step on two to eight real A100?

`benchmarks/data/iteration_ms_a100.csv` has the milliseconds of one update that vTrain's authors
measured. Rows without pipeline stages are judged; the others are listed as needing them. Goal: 15 %
median, by leave-one-shape-out.

One number is estimated: the time that the host takes from one operator to the next, which decides
how long a step of small kernels takes. A shape (hidden size and layers) is predicted with the pace
in PACES at which the rows of all other shapes have the least median error.

What was run, by vTrain's files (`src/model`, `config/validation/single`) after Megatron-DeepSpeed:
fp16, each layer checkpointed, no flash attention, dropout 0.1, 50257 tokens, embedding and head
tied, FusedAdam and FusedLayerNorm of apex, fused kernels for scale, mask and softmax, for bias and
GELU, and for bias, dropout and addition. The layer here (`megatron_gpt.py`) is in plain PyTorch.
The file does not say which A100: those of 80 GB are taken, which most machines of eight have.

    data parallel     sharding="ddp", gradients averaged once an update
    tensor parallel   sharding="tensor"
    both              sharding="zero2", tensor_parallel_size: its gathers and reductions send what
                      Megatron's all-reduce does, but each rank updates its own part only

What differs: Megatron has fp32 copies of weights, gradients and states of the optimizer, here they
are fp16; DDP averages gradients while backward goes on, Megatron after it. With tensor parallelism
memlab has no dropout of attention scores, since that would keep it from dividing attention, and no
fused optimizer, since torch.optim has none for DTensors.

A step's time is linear in its layers, so each setting is recorded with 2 and with 4 of them, and
with at most 3 micro-batches: `tests/matrix/test_iteration_times.py` holds that against a whole one.
Rows that differ in no more than these share recordings: 212 for all, eight minutes of a processor.

    python -m benchmarks.iteration_times --out iteration_times.json
"""

import csv
import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.megatron_gpt import Case, workload
from memlab import StepConfig
from memlab.cost_model.traced_step import TracedStep, from_traced_step
from memlab.devices import cards
from memlab.tracing.program import Program

ROWS = Path(__file__).parent / "data" / "iteration_ms_a100.csv"
GOAL = 0.15
CARD = "a100-80"
LAYERS = (2, 4)  # that are recorded
FEW = 3  # micro-batches, which say how long more of them take
PACES = tuple(each / 1e6 for each in (5, 10, 20, 30, 40, 50, 60))  # memlab has 40
QUICK = 40  # every so manieth row
Row = dict[str, str]


def read(path: Path = ROWS) -> list[Row]:
    """Return every row that was measured."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def is_judged(row: Row) -> bool:
    """Return whether a row was measured without pipeline stages."""
    return row["pipeline parallelism"] == "1"


def case_of(row: Row) -> Case:
    """Return the setting of a row."""
    micro_batch, data = int(row["micro batch"]), int(row["data parallelism"])
    return Case(
        hidden=int(row["hidden size"]),
        heads=int(row["attention heads"]),
        sequence=int(row["sequence length"]),
        micro_batch=micro_batch,
        accumulation=int(row["global batch"]) // (data * micro_batch),
        tensor=int(row["tensor parallelism"]),
        data=data,
    )


def config_of(case: Case) -> StepConfig:
    """Return how the ranks trained."""
    given: dict[str, Any] = {
        "batch_size": case.micro_batch * case.data * case.accumulation,
        "accumulation_steps": case.accumulation,
        "precision": "fp16",
        "optimizer": "adamw",
        "checkpointing": "blocks",
        "checkpoint_modules": "Layer",
        "world_size": case.data * case.tensor,
    }
    if case.data > 1:
        given["sync_each_micro_batch"] = False
    if case.tensor == 1:
        return StepConfig(sharding="ddp", optimizer_implementation="fused", **given)
    if case.data == 1:
        return StepConfig(sharding="tensor", **given)
    return StepConfig(sharding="zero2", tensor_parallel_size=case.tensor, **given)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recorded:
    """A recorded step, and what it takes at each pace of the host.

    Attributes:
        program: of the step.
        seconds: of each of its intervals, by pace.
        half_widths: relative, of the time of the step, by pace.
    """

    program: Program
    seconds: dict[float, Any]
    half_widths: dict[float, float]

    def step_seconds(self, num_micro_batches: int, pace: float) -> float:
        """Return the time of a step with so many micro-batches."""
        seconds = self.seconds[pace]
        parts = self.program.parts(num_micro_batches)
        of_step = [part.recorded for part in parts if part.interval.step == 1]
        return float(sum(seconds[at] for at in of_step))


@cache
def recorded(case: Case, num_layers: int) -> Recorded:
    """Return the recorded step of a case."""
    made = from_traced_step(
        at_each_pace, workload(case, num_layers), config_of(case),
        cards.resolve(f"{case.data * case.tensor}x-{CARD}"),
        seed=0, report=lambda _: None, purpose="on fake tensors",
    )  # fmt: skip
    assert isinstance(made, Recorded), made.message
    return made


def at_each_pace(step: TracedStep) -> Recorded:
    """Return what a recorded step takes at each pace of the host."""
    found = {}
    for pace in PACES:
        target = dataclasses.replace(step.target, host_seconds=pace)
        kernels = dataclasses.replace(step, target=target).kernels()
        assert kernels.overlap is not None
        found[pace] = kernels.overlap
    return Recorded(
        program=step.program.without_objects(),
        seconds={x: found[x].interval_seconds for x in PACES},
        half_widths={x: found[x].half_width for x in PACES},
    )


def predicted(case: Case, num_layers: int, pace: float) -> tuple[float, float]:
    """Return the predicted seconds of a step from smaller ones, and the relative half-width."""
    smaller = dataclasses.replace(case, accumulation=min(case.accumulation, FEW))
    few, more = LAYERS

    low, high = (recorded(smaller, n).step_seconds(case.accumulation, pace) for n in LAYERS)
    seconds = low + (num_layers - few) * (high - low) / (more - few)
    return seconds, recorded(smaller, more).half_widths[pace]


def line_of(row: Row, pace: float) -> dict[str, Any]:
    """Return a line; errors are relative to what was measured, signed."""
    case, measured = case_of(row), float(row["iteration time (ms)"])
    seconds, half_width = predicted(case, int(row["# layers"]), pace)
    return {
        "hidden": case.hidden,
        "layers": int(row["# layers"]),
        "micro-batch": case.micro_batch,
        "accumulation": case.accumulation,
        "tensor": case.tensor,
        "data": case.data,
        "host us": 1e6 * pace,
        "measured ms": measured,
        "predicted ms": 1e3 * seconds,
        "error %": 1e5 * seconds / measured - 100,
        "stated %": 100 * half_width,
    }


def shape_of(line: dict[str, Any]) -> tuple[int, int]:
    """Return the hidden size and the layers of a line."""
    return line["hidden"], line["layers"]


def of_left_out_shapes(by_pace: dict[float, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return each line at the pace that suits the lines of all other shapes best.

    Args:
        by_pace: all lines in one order, at each pace.
    """
    shapes = [shape_of(line) for line in next(iter(by_pace.values()))]
    best = {}
    for shape in set(shapes):
        others = {
            pace: [abs(line["error %"]) for line in lines if shape_of(line) != shape]
            for pace, lines in by_pace.items()
        }
        best[shape] = min(others, key=lambda pace: statistics.median(others[pace]))
    return [by_pace[best[shape]][at] for at, shape in enumerate(shapes)]


def summary(lines: Sequence[dict[str, Any]], of: str) -> list[dict[str, Any]]:
    """Return the errors by what a column has, and how many lie within what is stated."""
    return [
        {of: value, **_errors([line for line in lines if line[of] == value])}
        for value in sorted({line[of] for line in lines})
    ]


def _errors(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    signed = [line["error %"] for line in lines]
    ratios = [line["measured ms"] / line["predicted ms"] for line in lines]
    widths = [line["stated %"] / 100 for line in lines]
    inside = [abs(ratio - 1) <= width for ratio, width in zip(ratios, widths, strict=True)]
    return {
        "rows": len(lines),
        "median %": statistics.median(map(abs, signed)),
        "p90 %": float(np.quantile(np.abs(signed), 0.9)),
        "bias %": statistics.median(signed),
        "within stated %": 100 * statistics.fmean(inside),
    }


def by_both(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the errors by tensor parallelism and micro-batch, with the time of one layer.

    That is a step's time over layers and micro-batches. Where smaller kernels take no less, the
    host takes the time.
    """
    found = []
    for tensor, micro_batch in sorted({(line["tensor"], line["micro-batch"]) for line in lines}):
        own = [x for x in lines if (x["tensor"], x["micro-batch"]) == (tensor, micro_batch)]
        each = {
            f"{kind} ms a layer": statistics.median(
                line[f"{kind} ms"] / line["layers"] / line["accumulation"] for line in own
            )
            for kind in ("measured", "predicted")
        }
        found.append({"tensor": tensor, "micro-batch": micro_batch, **each, **_errors(own)})
    return found


def not_judged(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows that need pipeline stages, counted by their number."""
    stages = [int(row["pipeline parallelism"]) for row in rows if not is_judged(row)]
    return [{"pipeline stages": n, "rows": stages.count(n)} for n in sorted(set(stages))]


def by_shape(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the errors of each shape, with the pace that the other shapes gave."""
    found = []
    for shape in sorted({shape_of(line) for line in lines}):
        own = [line for line in lines if shape_of(line) == shape]
        names = {"hidden": shape[0], "layers": shape[1], "host us": own[0]["host us"]}
        found.append({**names, **_errors(own)})
    return found


def main() -> None:
    """Predict the rows without pipeline stages, and count the others."""
    given, before = report.options(__file__, __doc__ or ""), report.environment()
    rows = read()
    judged = [row for row in rows if is_judged(row)][:: QUICK if given.quick else 1]
    by_pace = {pace: [line_of(row, pace) for row in judged] for pace in PACES}
    lines = of_left_out_shapes(by_pace)
    report.show("a step of a GPT under Megatron, its shape left out", lines)
    found = {of: summary(lines, of) for of in ("tensor", "micro-batch", "hidden", "data")}
    found["shape"], found["tensor and micro-batch"] = by_shape(lines), by_both(lines)
    for of, table in found.items():
        report.show(f"absolute error by {of}", table)
    at_paces = [{"host us": 1e6 * pace, **_errors(by_pace[pace])} for pace in PACES]
    report.show("all at one pace, nothing left out", at_paces)
    whole = _errors(lines)
    report.show("all, each with its shape left out", [whole])
    print(f"goal {GOAL:.0%} median: {report.verdict(whole['median %'] <= 100 * GOAL)}")
    report.show("not judged: what they need is not predicted", not_judged(rows))
    report.write(given, before, {
        "rows": lines, "summary": found, "paces": at_paces, "all": whole,
    })  # fmt: skip


if __name__ == "__main__":
    main()
