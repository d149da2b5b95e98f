"""Write memlab/prediction/memory.json: how sure predicted memory of a card is, by models left out.

It reads what `python -m benchmarks.gpu_peaks` wrote: for each public run the peak that was measured
and those that memlab predicts, one for each hypothesis about the workspaces of convolutions.

- **Weights.** A hypothesis counts by the inverse square of its error: the mean over models of the
  mean absolute error of its peaks.
- **Reserved bytes.** Each model is predicted with weights from the others. Nine in ten runs lie
  within the half-width.
- **Needed bytes.** Runs under a cap of the allocator bracket what a step needs, most of them
  widely. An error is what the bracket excludes, 0 inside of it, so it may be larger; the half-width
  is the largest but for one run in a hundred, of both families together, since what is needed has
  no workspace. It says what was not contradicted, and is no interval that was earned.
- **Allocated bytes** of whole models were not measured, only of single kernels (kernel_peaks.py),
  where they are right to 0.02 %. So the width of reserved bytes is stated for them too.

How often the stated width holds is told by models left out once more: the width that is held
against a model comes from the others alone. Left out: language models with batches of at most 16,
whose texts were shorter than is known, and runs that were close to the card's capacity.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import report
from memlab.cost_model.cuda_kernels import Workspaces, middle
from memlab.prediction.memory_widths import FILE

COVERAGE = 0.9
OF_NEEDED = 0.99  # of the runs that the width of needed bytes has to cover
SHORTEST_KNOWN_BATCH = 17
Errors = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One public run.

    Attributes:
        model: its name.
        measured: reserved bytes at the peak.
        peaks: predicted bytes by hypothesis; only `NONE` if no convolution may take a workspace.
        needed: predicted bytes.
        trained: a cap in bytes with which it trained, or 0.
        failed: a cap in bytes with which it was out of memory, or 0.
    """

    model: str
    measured: int
    peaks: Mapping[Workspaces, int]
    needed: int
    trained: int
    failed: int

    def error(self, weights: Mapping[Workspaces, float]) -> float:
        """Return the relative error of the peak in the middle, signed."""
        return self.peaks[middle(self.peaks, weights)] / self.measured - 1

    @property
    def needed_error(self) -> float:
        """By how much what is needed is wrong at least, relative."""
        if self.trained and self.trained == self.failed:
            return 0.0  # it did both at one cap: its texts differed in length
        too_high = self.needed / self.trained - 1 if self.trained else 0.0
        return max(too_high, self.failed / self.needed - 1, 0.0)


def runs_of(rows: Sequence[Mapping[str, Any]]) -> list[Run]:
    """Return the runs that can be judged, from the rows of the JSON of `gpu_peaks`."""
    found = []
    for row in rows:
        is_known = row["family"] == "convnets" or row["batch"] >= SHORTEST_KNOWN_BATCH
        if not is_known or int(row["row"]["near_capacity"]):
            continue
        found.append(
            Run(
                model=row["model"],
                measured=int(row["row"]["ground_bytes"]) + row["unseen_bytes"],
                peaks={Workspaces(name): peak for name, peak in row["peaks"].items()},
                needed=row["needed_bytes"],
                trained=int(row["row"]["min_cap_trained"] or 0),
                failed=int(row["row"]["max_cap_oom"] or 0),
            )
        )
    return found


def weights_of(runs: Sequence[Run]) -> dict[Workspaces, float]:
    """Return the weight of each hypothesis; they sum to 1."""
    weights = {}
    for hypothesis in Workspaces:
        alone = {other: float(other is hypothesis) for other in Workspaces}
        errors = _by_model(runs, [abs(run.error(alone)) for run in runs])
        weights[hypothesis] = float(np.mean([each.mean() for each in errors.values()])) ** -2
    return {hypothesis: each / sum(weights.values()) for hypothesis, each in weights.items()}


def errors_left_out(runs: Sequence[Run]) -> list[float]:
    """Return the error of each run, with weights from the runs of other models."""
    weights = {}
    for model in {run.model for run in runs}:
        others = [run for run in runs if run.model != model]
        weights[model] = weights_of(others) if len(runs[0].peaks) > 1 else {Workspaces.NONE: 1.0}
    return [run.error(weights[run.model]) for run in runs]


def half_width(errors: Sequence[float], share: float = COVERAGE) -> float:
    """Return the half-width that covers this share of the errors."""
    return float(np.quantile(np.abs(errors), share, method="higher"))


def coverage(runs: Sequence[Run], errors: Sequence[float]) -> dict[str, Any]:
    """Return how often the width holds for models that are left out of it, and how wide it is."""
    inside, widths = [], []
    for model in sorted({run.model for run in runs}):
        others = [error for run, error in zip(runs, errors, strict=True) if run.model != model]
        width = half_width(others)
        own = [abs(errors[at]) <= width for at, run in enumerate(runs) if run.model == model]
        inside += own
        widths += [width] * len(own)
    return {"covered %": 100 * float(np.mean(inside)), "width %": 100 * float(np.median(widths))}


def _by_model(runs: Sequence[Run], errors: Sequence[float]) -> dict[str, Errors]:
    found = defaultdict(list)
    for run, error in zip(runs, errors, strict=True):
        found[run.model].append(error)
    return {model: np.array(each) for model, each in found.items()}


def line_of(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Return one line of the table: errors and coverage of a family, each model left out."""
    errors = errors_left_out(runs)
    size = 100 * np.abs(errors)
    return {
        "family": name,
        **_counts(runs),
        "median %": float(np.median(size)),
        "p90 %": float(np.quantile(size, 0.9)),
        "max %": float(size.max()),
        **coverage(runs, errors),
    }


def table_of(families: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return what memory.json holds, from the runs with convolutions and those of others."""
    every = [run for runs in families.values() for run in runs]
    least = half_width([run.needed_error for run in every], OF_NEEDED)
    reserved = {
        name: {"half_width": round(half_width(errors_left_out(runs)), 4), **_counts(runs)}
        for name, runs in families.items()
    }
    needed = {name: {"half_width": round(least, 4), **_counts(every)} for name in families}
    return {
        "made_by": "python -m benchmarks.calibrate_memory",
        "coverage": COVERAGE,
        "weights": {str(h): round(w, 4) for h, w in weights_of(families["convolutions"]).items()},
        "half_widths": {
            "peak_allocated_bytes": reserved,
            "peak_reserved_bytes": reserved,
            "needed_bytes": needed,
        },
    }


def of_caps(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Return how many caps there are, how wide they bracket what is needed, and how many agree."""
    brackets = [run.trained / run.failed - 1 for run in runs if run.trained > run.failed > 0]
    return {
        "family": name,
        "caps": sum(bool(run.trained) + bool(run.failed) for run in runs),
        "brackets": len(brackets),
        "median width %": 100 * float(np.median(brackets)) if brackets else None,
        "runs that contradict": sum(run.needed_error > 0 for run in runs),
        "by at most %": 100 * max(run.needed_error for run in runs),
    }


def _counts(runs: Sequence[Run]) -> dict[str, int]:
    return {"runs": len(runs), "models": len({run.model for run in runs})}


def families_of(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs with convolutions that may take a workspace, and the others."""
    return {
        "convolutions": [run for run in runs if len(run.peaks) > 1],
        "others": [run for run in runs if len(run.peaks) == 1],
    }


def main() -> None:
    """Write the table, and show how well it holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    peaks = Path("build/benchmarks/gpu_peaks.json")
    parser.add_argument("--peaks", type=Path, default=peaks, help="the JSON of gpu_peaks")
    given = parser.parse_args()
    families = families_of(runs_of(json.loads(given.peaks.read_text())["rows"]))
    lines = [line_of(name, runs) for name, runs in families.items()]
    report.show("what is needed, against caps", [of_caps(name, r) for name, r in families.items()])
    report.show("peak reserved memory, each model by the others", lines)
    table = table_of(families)
    FILE.write_text(json.dumps(table, indent=1) + "\n")
    print(f"\nwrote {FILE}:\n{FILE.read_text()}")


if __name__ == "__main__":
    main()
