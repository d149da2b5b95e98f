"""How far are the peaks that memlab predicts for compiled steps on a CPU from those that are?

Each workload of `models.py` is predicted and measured with `compile=True`; on a CPU memlab compiles
with a backend that partitions the graph of forward and backward and generates no code. Beside it
stands the predicted peak of the plain step, which is what the compiler's decisions are worth.
Goal: equal to the byte. What has no prediction says why.
"""

from typing import Any

import memlab
from benchmarks import models, report
from memlab import StepConfig

BATCH = 4
QUICK = ("tied", "mlp")


def line(name: str) -> dict[str, Any]:
    """Return the line of a workload."""
    workload = models.WORKLOADS[name]()
    config = StepConfig(batch_size=BATCH, compile=True)
    predicted = memlab.predict(workload, config, "cpu", progress=False)
    measured = memlab.measure(workload, config, "cpu", repeats=1, progress=False)
    plain = memlab.predict(workload, StepConfig(batch_size=BATCH), "cpu", progress=False)
    said, real = predicted.peak_allocated_bytes, measured.peak_allocated_bytes
    return {
        "workload": name,
        "predicted": said,
        "measured": real,
        "off bytes": None if said is None or real is None else said - real,
        "off %": None if said is None or real is None else 100 * (said / real - 1),
        "plain step": plain.peak_allocated_bytes,
        "predicted is": str(predicted.outcome),
        "measured is": str(measured.outcome),
        "why": "" if predicted.outcome is memlab.Outcome.OK else predicted.message,
    }


def main() -> None:
    """Print the table."""
    options, before = report.options(__file__, __doc__ or ""), report.environment()
    names = QUICK if options.quick else tuple(models.WORKLOADS)
    lines = [line(name) for name in names]
    report.show("peaks of compiled steps on a CPU", lines)
    judged = [each for each in lines if each["off %"] is not None]
    most = max((abs(each["off %"]) for each in judged), default=0.0)
    equal = sum(each["off bytes"] == 0 for each in judged)
    print(f"\n{len(judged)} models, equal to the byte: {equal}; at most {most:.3g} % off")
    report.write(options, before, {"lines": lines})


if __name__ == "__main__":
    main()
