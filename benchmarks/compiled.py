"""How far are the peaks that memlab predicts for compiled steps from those that are?

- Each workload of `models.py` is predicted and measured with `compile=True`; on a CPU memlab
  compiles with a backend that partitions the graph of forward and backward and generates no code.
  Beside it stands the predicted peak of the plain step, which is what the compiler's decisions are
  worth. Goal: equal to the byte. What has no prediction says why.
- For a card memlab runs over fake tensors what Inductor writes, without its kernels. Here the same
  is done for the CPU, beside a step that runs the C++ which Inductor writes. Goal: within 3 %.
- `benchmarks/data/compiled_runs.csv`: how far compiled runs of one program were apart on H100 and
  H200, which is in the uncertainty of a compiled step on a card, and which share of the runs of
  each program lies within what the others say.
"""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memlab
from benchmarks import models, report
from memlab import StepConfig
from memlab._util.torch_private.inductor import planned_by_inductor
from memlab.devices.cards import resolve
from memlab.prediction.error_bounds import OF_ONE_PROGRAM
from memlab.prediction.predict import predict_in_process
from memlab.runtime.measure import measure_in_process
from memlab.techniques import compilation
from memlab.tracing import trace_step

BATCH = 4
QUICK = ("tied", "mlp")
RUNS = Path(__file__).resolve().parent / "data" / "compiled_runs.csv"


def judged(name: str, predicted: memlab.StepResult, measured: memlab.StepResult) -> dict[str, Any]:
    """Return how far a prediction is from a measurement."""
    said, real = predicted.peak_allocated_bytes, measured.peak_allocated_bytes
    is_known = said is not None and real is not None
    return {
        "workload": name,
        "predicted": said,
        "measured": real,
        "off bytes": said - real if is_known else None,
        "off %": 100 * (said / real - 1) if is_known else None,
        "why": "" if predicted.outcome is memlab.Outcome.OK else predicted.message,
    }


def line(name: str) -> dict[str, Any]:
    """Return the line of a workload."""
    workload = models.WORKLOADS[name]()
    config = StepConfig(batch_size=BATCH, compile=True)
    predicted = memlab.predict(workload, config, "cpu", progress=False)
    measured = memlab.measure(workload, config, "cpu", repeats=1, progress=False)
    plain = memlab.predict(workload, StepConfig(batch_size=BATCH), "cpu", progress=False)
    return {
        **judged(name, predicted, measured),
        "plain step": plain.peak_allocated_bytes,
        "measured is": str(measured.outcome),
    }


def line_of_inductor(name: str) -> dict[str, Any]:
    """Return the line of a workload whose C++ Inductor writes, in this process."""
    config, here = StepConfig(batch_size=BATCH, compile=True), torch.device("cpu")
    alone: dict[str, Any] = {"seed": 0, "memory_limit": None, "report": lambda _: None}
    workload = models.WORKLOADS[name]()
    measured = measure_in_process(workload, config, here, repeats=1, warmup=0, **alone)
    with planned_by_inductor(here):
        predicted = predict_in_process(workload, config, resolve("cpu"), **alone).result
    return judged(name, predicted, measured)


def line_of_runs(column: str) -> dict[str, Any]:
    """Return how far runs lie of the median of their program."""
    with RUNS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    of_program: dict[str, list[float]] = {}
    for row in rows:
        of_program.setdefault(row["program"], []).append(float(row[column]))
    off = {name: np.abs(np.divide(own, np.median(own)) - 1) for name, own in of_program.items()}
    within: list[bool] = []
    for name, own in off.items():
        others = np.concatenate([each for other, each in off.items() if other != name])
        within += list(own <= np.quantile(others, 0.9))
    every = np.concatenate(list(off.values()))
    return {
        "number": column,
        "programs": len(off),
        "runs": len(every),
        "median off %": 100 * float(np.median(every)),
        "9 of 10 within %": 100 * float(np.quantile(every, 0.9)),
        "within what other programs say %": 100 * float(np.mean(within)),
    }


def show(title: str, lines: list[dict[str, Any]]) -> None:
    """Print a table of peaks, and how many are right."""
    report.show(title, lines)
    known = [each for each in lines if each["off %"] is not None]
    most = max((abs(each["off %"]) for each in known), default=0.0)
    equal = sum(each["off bytes"] == 0 for each in known)
    print(f"\n{len(known)} models, equal to the byte: {equal}; at most {most:.3g} % off")


def main() -> None:
    """Print the tables."""
    options, before = report.options(__file__, __doc__ or ""), report.environment()
    names = QUICK if options.quick else tuple(models.WORKLOADS)
    lines = [line(name) for name in names]
    show("peaks of compiled steps on a CPU", lines)
    compilation.backend = trace_step.backend = lambda device: "inductor"
    by_inductor = [line_of_inductor(name) for name in names]
    show("the same, compiled by Inductor", by_inductor)
    runs = [line_of_runs(f"peak_{kind}_mib") for kind in ("allocated", "reserved")]
    report.show(f"runs of one program on cards (stated: {100 * OF_ONE_PROGRAM:.3g} %)", runs)
    report.write(options, before, {"lines": lines, "by_inductor": by_inductor, "runs": runs})


if __name__ == "__main__":
    main()
