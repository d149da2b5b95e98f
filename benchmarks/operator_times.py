"""How far off is the predicted time of single operators on five real cards?

Each row of `benchmarks/data/operator_ms.csv` (fp32; data/README.md says whose) is predicted twice:
by factors that were fitted to all rows, and by factors fitted without its card. In the same run: a
plain roofline with one efficiency for arithmetic and one for memory, as memlab had before. The
overhead of each measurement, the launch on an idle card, is fitted and added to all of them.

NeuSight, which measured these rows, publishes errors of whole models and not of these rows, so it
is no column here: 2.3 % for training GPT-3 on an H100 that it had not seen ("Forecasting GPU
Performance for Deep Learning Training and Inference", ASPLOS 2025, abstract of arXiv 2407.13853).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import fit_times, operator_rows, report, time_doubt
from benchmarks.fit_times import Array, Operators
from memlab.cost_model.roofline import LAUNCH_SECONDS

PLAIN_COMPUTE, PLAIN_MEMORY = 0.7, 0.9  # of the peak, of the bandwidth
OF_A_MODEL = {"tool": "NeuSight", "what": "training GPT-3 on an H100", "error %": 2.3,
              "source": "arXiv 2407.13853, abstract"}  # fmt: skip
TOOLS = ("without its card", "fitted", "plain roofline")


def predicted() -> tuple[Operators, dict[str, Array]]:
    """Return the rows, and the seconds of each by tool."""
    given = fit_times.operators_of(operator_rows.read())
    values = fit_times.fit_operators(given, np.ones(len(given.measured), dtype=bool))
    seconds = {
        "without its card": fit_times.without_each_card(given),
        "fitted": fit_times.seconds_of_operators(values, given),
        "plain roofline": _plain(given) + values["overhead"],
    }
    return given, seconds


def _plain(given: Operators) -> Array:
    times = []
    for row in given.rows:
        assert row.card.memory_bytes_per_second is not None
        assert row.card.fp32_flops_per_second is not None
        compute = row.work.flops / row.card.fp32_flops_per_second / PLAIN_COMPUTE
        memory = row.work.num_bytes / row.card.memory_bytes_per_second / PLAIN_MEMORY
        times.append(max(compute, memory, LAUNCH_SECONDS))
    return np.array(times)


def lines(given: Operators, seconds: dict[str, Array]) -> list[dict[str, Any]]:
    """Return median and 90th percentile of the absolute error by operator and card, in per cent."""
    found = []
    for kind in np.unique(given.kind):
        for name in np.unique(given.card):
            at = (given.kind == kind) & (given.card == name)
            if at.any():
                line = {"operator": str(kind), "card": str(name), "rows": int(at.sum())}
                found.append(line | _columns(given, seconds, at))
    return found


def _columns(given: Operators, seconds: dict[str, Array], at: Any) -> dict[str, float]:
    columns = {}
    for tool in TOOLS:
        errors = 100 * np.abs(seconds[tool][at] / given.measured[at] - 1)
        columns[f"{tool}: median %"] = round(float(np.median(errors)), 1)
        columns[f"{tool}: p90 %"] = round(float(np.quantile(errors, 0.9)), 1)
    return columns


def summary(given: Operators, seconds: dict[str, Array]) -> list[dict[str, Any]]:
    """Return the same by card, all operators together, and over all."""
    cards = [str(name) for name in np.unique(given.card)]
    chosen = [(name, given.card == name) for name in cards]
    chosen.append(("all", np.ones(len(given.card), dtype=bool)))
    return [{"card": name, **_columns(given, seconds, at)} for name, at in chosen]


def doubt(given: Operators, seconds: dict[str, Array]) -> dict[str, Any]:
    """Return the half-width from mixes of operators, and what it covers on cards left out."""
    errors, names = time_doubt.mixes(given, seconds["without its card"])
    return {
        "half-width %": round(100 * time_doubt.half_width(errors), 1),
        "covered of other cards %": round(100 * time_doubt.coverage(errors, names), 1),
        "mixes": len(errors),
    }


def run() -> dict[str, Any]:
    """Return all results."""
    given, seconds = predicted()
    return {
        "lines": lines(given, seconds),
        "summary": summary(given, seconds),
        "doubt": doubt(given, seconds),
        "published": OF_A_MODEL,
    }


def main() -> None:
    """Predict every row."""
    given, before = report.options(__file__, __doc__ or ""), report.environment()
    results = run()
    report.show("time of single operators: absolute error", results["lines"])
    report.show("by card", results["summary"])
    shown: Sequence[dict[str, Any]] = [results["doubt"]]
    report.show("half-width on a card that was left out", shown)
    report.write(given, before, results)


if __name__ == "__main__":
    main()
