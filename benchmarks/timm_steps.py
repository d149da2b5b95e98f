"""How far off is the predicted time of 793 training steps of timm models on an RTX 3090?

Each row of `benchmarks/data/timm_rtx3090.csv` is recorded over fake tensors; no GPU is used. The
rows ran PyTorch 1.12, so attention is recorded unfused. A row is also proof that its batch fits
the card, and nearly always that the next larger one that was tried does not: what memlab says of
both is in the same JSON. With CUDA 11.3 a process loaded all kernels at its start, so less of the
card was left than today (`OLD_CONTEXT_BYTES`).

    python -m benchmarks.timm_steps --sample 40

A row takes half a minute or more, so `--sample` takes that many in a seeded order. Its distinct
operators are kept in `build/timm_operators` for `benchmarks/fit_times.py`. The factors in use were
fitted to such rows; `--left-out` fits once more without families of models and shows the errors of
these, and what the stated half-width covers.

timm goes into the folder that benchmarks/gpu_peaks.py describes:
    pip install --no-deps --target build/public timm==1.0.31
Goals: median 8 % and 25 % at the 90th percentile, half-width at most 25 % covering 87-95 %.
"""

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import fit_times, report, time_doubt, timm_operators
from benchmarks.public_runs import PACKAGES_HELP, use_packages
from memlab._util.units import MIB
from memlab.cost_model.roofline import table
from memlab.cost_model.traced_step import Failure, TracedStep
from memlab.prediction.predict import _size_model, _taken

# What a process held beside the allocator before kernels were loaded one by one (CUDA 11.7), on an
# RTX 3090: 1001 MiB (pytorch issue 54564) and 1687 MiB (issue 55277) for one tensor; kernels of
# cuDNN come on top, so the larger.
OLD_CONTEXT_BYTES = 1687 * MIB
BATCHES = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2)  # as they were tried
GOALS = {"median %": 8, "p90 %": 25, "half-width %": 25, "covered %": (87, 95)}


def next_larger(batch: int) -> int | None:
    """Return the batch that was tried before this one; None if this was the first."""
    larger = [size for size in BATCHES if size > batch]
    return min(larger, default=None)


def predicted(row: dict[str, str], number: int, folder: Path) -> dict[str, Any]:
    """Return one line: the measured and the predicted time, and what is said to fit."""
    start = time.perf_counter()
    batch = int(row["batch"])

    def judge(step: TracedStep) -> dict[str, Any]:
        timm_operators.keep(number, step.program, folder)
        card = step.target.card
        assert card is not None
        kernels = step.kernels()
        held = _taken(step.program, kernels, step.config, step.target)
        size_model = _size_model(step.program, kernels, held)
        larger = next_larger(batch)
        room = card.memory_bytes - OLD_CONTEXT_BYTES
        return {
            "seconds": size_model.step_seconds((batch,)),
            "half_width": kernels.seconds_half_width,
            "fits": size_model.fits((batch,), room),
            "next_fits": size_model.fits((larger,), room)
            if larger and size_model.covers((larger,))
            else None,
        }

    found = timm_operators.recorded(row, judge)
    line = {"model": row["model"], "layout": row["layout"], "batch": batch}
    line |= {"family": fit_times.family_of(row["model"]), "measured ms": float(row["step_ms"])}
    if isinstance(found, Failure):
        return line | {"failed": found.message}
    milliseconds = 1e3 * found.pop("seconds")
    error = 100 * (milliseconds / line["measured ms"] - 1)
    line |= {"predicted ms": milliseconds, "error %": error, **found}
    return line | {"seconds": time.perf_counter() - start}


def summary(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return median and 90th percentile of the absolute error by family and over all."""
    done = [line for line in lines if "failed" not in line]
    families = sorted({line["family"] for line in done})
    groups = [(family, [line for line in done if line["family"] == family]) for family in families]
    return [_line(name, chosen) for name, chosen in (*groups, ("all", done)) if chosen]


def _line(name: str, chosen: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(line["error %"]) for line in chosen]
    inside = [
        abs(line["measured ms"] / line["predicted ms"] - 1) <= line["half_width"] for line in chosen
    ]
    return {
        "family": name,
        "rows": len(chosen),
        "median %": float(np.median(errors)),
        "p90 %": float(np.quantile(errors, 0.9)),
        "bias %": float(np.median([line["error %"] for line in chosen])),
        "covered %": 100 * float(np.mean(inside)),
        "half-width %": 100 * float(np.median([line["half_width"] for line in chosen])),
    }


def fitting(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the share of batches that ran and are said to fit, and of larger ones said not to."""
    ran = [line["fits"] for line in lines if "fits" in line]
    larger = [line["next_fits"] for line in lines if line.get("next_fits") is not None]
    return {
        "ran": len(ran),
        "said to fit %": 100 * float(np.mean(ran)) if ran else None,
        "next larger": len(larger),
        "said not to fit %": 100 * float(1 - np.mean(larger)) if larger else None,
    }


def left_out(folder: Path) -> list[dict[str, Any]]:
    """Return errors and coverage of the kept steps, each by the fit without its family."""
    of_operators = fit_times.fit_of_operators()
    steps = fit_times.steps_in(folder, of_operators)
    seconds = fit_times.without_each_family(steps, of_operators)
    families = [fit_times.family_of(name) for name in steps.names]
    errors = time_doubt.errors(steps.measured, seconds)
    share = fit_times.share_of(time_doubt.ERRATIC, of_operators, steps)
    widths = time_doubt.stated(*time_doubt.widths(errors, share), share)
    lines = [
        {"family": family, "measured ms": 1e3 * measured, "predicted ms": 1e3 * given,
         "error %": 100 * (given / measured - 1), "half_width": float(width)}
        for family, measured, given, width in zip(
            families, steps.measured, seconds, widths, strict=True)
    ]  # fmt: skip
    found = summary(lines)
    covered, median = time_doubt.coverage_of_families(errors, share, families)
    return [*found, {"family": "by others", "rows": len(errors), "covered %": 100 * covered,
                     "half-width %": 100 * median}]  # fmt: skip


def chosen_rows(sample: int | None) -> list[tuple[int, dict[str, str]]]:
    """Return numbered rows in a seeded order, so that samples of any size nest."""
    rows = list(enumerate(timm_operators.rows()))
    random.Random(0).shuffle(rows)
    return rows[:sample]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=None, help="so many rows in a seeded order")
    parser.add_argument("--left-out", action="store_true", help="fit without each family")
    parser.add_argument("--steps", type=Path, default=timm_operators.FOLDER, help="kept operators")
    parser.add_argument("--packages", type=Path, default=Path("build/public"), help=PACKAGES_HELP)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/timm_steps.json"))
    parser.add_argument("--quick", action="store_true", help="4 rows")
    return parser.parse_args()


def main() -> None:
    """Record and predict."""
    given = _options()
    use_packages(given.packages)
    before = report.environment()
    lines = []
    for number, row in chosen_rows(4 if given.quick else given.sample):
        lines.append(predicted(row, number, given.steps))
        print(*lines[-1].values(), flush=True)
    found = summary(lines)
    report.show("step time of timm models on an RTX 3090, absolute error", found)
    results: dict[str, Any] = {"goals": GOALS, "rows": lines, "summary": found}
    results |= {"fitting": fitting(lines), "doubt": table().doubt}
    print(results["fitting"])
    if given.left_out:
        results["left_out"] = left_out(given.steps)
        report.show("the same by fits without each family", results["left_out"])
    report.write(report.Options(quick=given.quick, out=given.out), before, results)


if __name__ == "__main__":
    main()
