"""How far off is all that memlab says of a card, against what real cards did?

One table of what the other benchmarks of cards find, each number on models or cards that were left
out of whatever was fitted:

- reserved bytes, language models and convnets: `gpu_peaks.py`, judged by `calibrate_memory.py`
- allocated bytes of single kernels, differences between two sizes: `kernel_peaks.py`
- time of single operators: `operator_times.py`, the card left out
- time of whole steps on an RTX 3090, and whether a batch fits: `timm_steps.py`, the model's family
  left out; `--sample` takes so many rows of 793, since all take hours

Peers in the same run: a bare replay of the allocator, a plain roofline; as published: xMem, DNNMem,
SchedTune and LLMem by row, NeuSight by paper. No GPU is used. The packages are those of
`gpu_peaks.py` and `timm_steps.py`.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import (
    calibrate_memory,
    gpu_peaks,
    kernel_peaks,
    operator_times,
    report,
    timm_operators,
    timm_steps,
)
from benchmarks.public_runs import PACKAGES_HELP, use_packages
from memlab.prediction.evidence import CONVOLUTIONS

# median and 90th percentile of absolute errors, and the widest median half-width, in per cent
GOALS = {
    "reserved, language models": (0.2, 1.0, 2.0),
    "reserved, convnets": (1.0, 4.0, 6.0),
    "time of a step, RTX 3090": (8.0, 25.0, 25.0),
}
COVERED = (87.0, 95.0)
OF_FITTING = {"said to fit %": 97.0, "said not to fit %": 80.0}
SAMPLE = 40


def reserved(quick: bool) -> dict[str, Any]:
    """Return the lines of reserved bytes, of memlab and of its peers."""
    rows = [
        gpu_peaks.table_row(row, gpu_peaks.predicted(row))
        for row in gpu_peaks.read(gpu_peaks.PEAKS, quick)
    ]
    every = [run for run in calibrate_memory.evidence_of_peaks(rows) if run.is_known]
    names = {True: "reserved, convnets", False: "reserved, language models"}
    families = {
        name: [run for run in every if (CONVOLUTIONS in run.kernels) == convolutions]
        for convolutions, name in names.items()
    }
    lines = [
        _judged(name, calibrate_memory.line_of(name, runs))
        for name, runs in families.items()
        if len({run.model for run in runs}) > 1
    ]
    seconds = [row["seconds"] for row in rows]
    return {
        "lines": lines,
        "peers": [line for line in gpu_peaks.summary(rows) if line["tool"] != "memlab"],
        "failures %": 100 * float(np.mean([row["fails"] for row in rows])),
        "seconds of a run": {"p50": float(np.median(seconds)),
                             "p95": float(np.quantile(seconds, 0.95))},
    }  # fmt: skip


def _judged(name: str, found: dict[str, Any]) -> dict[str, Any]:
    median, high, widest = GOALS[name]
    is_met = found["median %"] <= median and found["p90 %"] <= high
    is_earned = COVERED[0] <= found["covered %"] <= COVERED[1] and found["width %"] <= widest
    return {
        "number": name,
        "rows": found["runs"],
        "median %": found["median %"],
        "p90 %": found["p90 %"],
        "goal": f"{median:g} / {high:g}: {report.verdict(is_met)}",
        "covered %": found["covered %"],
        "half-width %": found["width %"],
        "earned": f"{COVERED[0]:g}-{COVERED[1]:g}, {widest:g}: {report.verdict(is_earned)}",
    }


def kernels(quick: bool) -> list[dict[str, Any]]:
    """Return the largest errors of each kernel."""
    rows: list[dict[str, Any]] = []
    for sweep in kernel_peaks.read(kernel_peaks.PEAKS, quick):
        rows += kernel_peaks.table_of(sweep, [kernel_peaks.predicted(row) for row in sweep])
    return kernel_peaks.summary(rows)


def steps(sample: int, folder: Path) -> dict[str, Any]:
    """Return the line of the time of steps, and what is said to fit."""
    lines = [
        timm_steps.predicted(row, number, folder) for number, row in timm_steps.chosen_rows(sample)
    ]
    every = timm_steps.left_out(folder)
    by_others = next(line for line in every if line["family"] == "by others")
    found = next(line for line in every if line["family"] == "all")
    found = {**found, "runs": found["rows"], "covered %": by_others["covered %"],
             "width %": by_others["half-width %"]}  # fmt: skip
    return {
        "lines": [_judged("time of a step, RTX 3090", found)],
        "fitting": timm_steps.fitting(lines),
        "failed": [line for line in lines if "failed" in line],
        "seconds of a row": float(np.median([line.get("seconds", np.nan) for line in lines])),
    }


def _fitting_lines(found: dict[str, Any]) -> list[dict[str, Any]]:
    counts = {"said to fit %": "ran", "said not to fit %": "next larger"}
    return [
        {
            "batches": counts[name],
            "rows": found[counts[name]],
            "told": name.removesuffix(" %"),
            "%": found[name],
            "goal": f"{goal:g}: {report.verdict(found[name] is not None and found[name] >= goal)}",
        }
        for name, goal in OF_FITTING.items()
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=SAMPLE, help="rows of timm_steps")
    packages = Path("build/public")
    parser.add_argument("--packages", type=Path, default=packages, help=PACKAGES_HELP)
    parser.add_argument("--steps", type=Path, default=timm_operators.FOLDER, help="kept operators")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/cards.json"))
    parser.add_argument("--quick", action="store_true", help="few rows of each")
    return parser.parse_args()


def main() -> None:
    """Run all parts, and show one table."""
    given = _options()
    use_packages(given.packages)
    before, begin = report.environment(), time.perf_counter()
    results: dict[str, Any] = {"reserved": reserved(given.quick), "kernels": kernels(given.quick)}
    results["operators"] = operator_times.run()
    results["steps"] = steps(4 if given.quick else given.sample, given.steps)
    lines: Sequence[dict[str, Any]] = results["reserved"]["lines"] + results["steps"]["lines"]
    report.show("what memlab says of a card, against real cards, each model left out", lines)
    report.show(
        "batches of timm models on an RTX 3090", _fitting_lines(results["steps"]["fitting"])
    )
    report.show("reserved bytes, peers", results["reserved"]["peers"])
    report.show("allocated bytes of single kernels", results["kernels"])
    report.show("time of single operators, absolute error", results["operators"]["summary"])
    report.show("as published", [results["operators"]["published"]])
    options = report.Options(quick=given.quick, out=given.out)
    report.write(options, before, {**results, "minutes": (time.perf_counter() - begin) / 60})


if __name__ == "__main__":
    main()
