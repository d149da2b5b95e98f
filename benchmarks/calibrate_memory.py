"""Write how sure predicted memory of a card is: memory.json and evidence.csv of memlab/prediction.

It reads what `python -m benchmarks.gpu_peaks` wrote: for each public run the peak that was measured
and those that memlab predicts, one for each hypothesis about the workspaces of convolutions; what
memlab said of all other rows of `python -m benchmarks.field --tools memlab`; and the times of
`python -m benchmarks.host_pace`, `python -m benchmarks.one_card` and `python -m
benchmarks.older_cards`.

- **Weights.** A hypothesis counts by the inverse square of its error: the mean over models of the
  mean absolute error of its peaks.
- **Evidence.** Each model of `gpu_peaks` is predicted with weights from the others; nothing is
  fitted to the rows of other tables, but the length of the samples of peft's to one of them. The
  half-width of a peak covers nine in ten runs of its kind (`memlab/prediction/evidence.py`).
- **Needed bytes.** Runs under a cap of the allocator bracket what a step needs, most of them
  widely. An error is what the bracket excludes, 0 inside of it, so it may be larger; the half-width
  is the largest but for one run in a hundred, of both families together, since what is needed has
  no workspace. It says what was not contradicted, and is no interval that was earned.

How often the stated width holds is told by models and by cards left out once more: the width that
is held against a model or a card comes from the others alone. It does not rest on runs whose source
leaves something open: language models with batches of at most 16, whose texts were shorter than is
known, runs that were close to the card's capacity, and those of other tables with a guess. What a
card held when convnets were first read is guessed too; no width could be stated without them.
"""

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import host_pace, one_card, peft_table, report
from memlab.cost_model.cuda_kernels import Workspaces, middle
from memlab.devices import cards
from memlab.prediction import evidence
from memlab.prediction.error_bounds import FILE
from memlab.prediction.evidence import (
    CONVOLUTIONS,
    QUANTIZED,
    SHARDED,
    PublicRun,
    half_width,
)

OF_NEEDED = 0.99  # of the runs that the width of needed bytes has to cover
SHORTEST_KNOWN_BATCH = 17
OF_FIELD = ("litgpt_table", "litgpt_hub", "peft_table", "torchtitan", "iteration_times")
KINDS = (
    ("peak_allocated_bytes", False), ("peak_reserved_bytes", False), ("peak_reserved_bytes", True),
)  # fmt: skip
FOUND_BY_ONE_ROW = "the tokens of the longest batch, found by one row"
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
        left_open: what is not known of it; empty if that is nothing.
    """

    model: str
    measured: int
    peaks: Mapping[Workspaces, int]
    needed: int
    trained: int
    failed: int
    left_open: str = ""

    @property
    def is_known(self) -> bool:
        """Whether all is known of it."""
        return not self.left_open

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
    """Return the runs of the rows of the JSON of `gpu_peaks`, in their order."""
    return [
        Run(
            model=row["model"],
            measured=int(row["row"]["ground_bytes"]) + row["unseen_bytes"],
            peaks={Workspaces(name): peak for name, peak in row["peaks"].items()},
            needed=row["needed_bytes"],
            trained=int(row["row"]["min_cap_trained"] or 0),
            failed=int(row["row"]["max_cap_oom"] or 0),
            left_open=_left_open(row),
        )
        for row in rows
    ]


def _left_open(row: Mapping[str, Any]) -> str:
    if row["family"] != "convnets" and row["batch"] < SHORTEST_KNOWN_BATCH:
        return "how long its texts were"
    return "what it took near the card's capacity" if int(row["row"]["near_capacity"]) else ""


def weights_of(runs: Sequence[Run]) -> dict[Workspaces, float]:
    """Return the weight of each hypothesis; they sum to 1."""
    weights = {}
    for hypothesis in Workspaces:
        alone = {other: float(other is hypothesis) for other in Workspaces}
        errors = _by_model(runs, [abs(run.error(alone)) for run in runs])
        weights[hypothesis] = float(np.mean([each.mean() for each in errors.values()])) ** -2
    return {hypothesis: each / sum(weights.values()) for hypothesis, each in weights.items()}


def errors_left_out(runs: Sequence[Run]) -> list[float]:
    """Return the error of each run, with weights from the known runs of other models."""
    weights = {}
    for model in {run.model for run in runs}:
        others = [run for run in runs if run.model != model and run.is_known]
        weights[model] = weights_of(others) if len(runs[0].peaks) > 1 else {Workspaces.NONE: 1.0}
    return [run.error(weights[run.model]) for run in runs]


def _by_model(runs: Sequence[Run], errors: Sequence[float]) -> dict[str, Errors]:
    found = defaultdict(list)
    for run, error in zip(runs, errors, strict=True):
        found[run.model].append(error)
    return {model: np.array(each) for model, each in found.items()}


def table_of(families: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return what memory.json holds, from the runs with convolutions and those of others."""
    every = [run for runs in families.values() for run in runs]
    least = half_width([run.needed_error for run in every], OF_NEEDED)
    return {
        "made_by": "python -m benchmarks.calibrate_memory",
        "weights": {str(h): round(w, 4) for h, w in weights_of(families["convolutions"]).items()},
        "needed": {"half_width": round(least, 4), **_counts(every)},
    }


def evidence_of_peaks(rows: Sequence[Mapping[str, Any]]) -> list[PublicRun]:
    """Return the runs of `gpu_peaks`, each predicted with the weights of other models."""
    found, made = [], runs_of(rows)
    given = {id(run): row["row"] for row, run in zip(rows, made, strict=True)}
    for runs in families_of(made).values():
        for run, error in zip(runs, errors_left_out(runs), strict=True):
            row = given[id(run)]
            found.append(
                PublicRun(
                    number="peak_reserved_bytes", device=_card(row["gpu"]), model=run.model,
                    kernels=(CONVOLUTIONS,) if len(run.peaks) > 1 else (), precision="fp32",
                    setting=f"fp32, {row['optimizer']}, batch of {row['batch_size']}",
                    measured=run.measured, predicted=round(run.measured * (1 + error)),
                    left_open=run.left_open,
                    source=f"Stone-ResearchLife/xMem@{row['commit'][:12]}",
                )
            )  # fmt: skip
    return found


def evidence_of_field(rows: Sequence[Mapping[str, Any]]) -> list[PublicRun]:
    """Return the rows of whole steps of other tables that memlab has an answer to."""
    found = []
    for row in rows:
        setting, said = row["setting"], row["said"]["memlab"]
        if setting["table"] not in OF_FIELD:
            continue
        if setting["recipe"].get("experiment") == peft_table.LENGTHS_BY:  # it found the length
            continue
        kinds = {QUANTIZED: str(setting["base"]).startswith("nf4"), SHARDED: setting["cards"] > 1}
        told: dict[str, Any] = {
            "device": setting["card"]["name"], "model": setting["model"]["name"],
            "kernels": tuple(kind for kind, is_there in kinds.items() if is_there),
            "precision": setting["precision"], "setting": _in_words(setting),
            "left_open": "; ".join(one for one in row["guessed"] if one != FOUND_BY_ONE_ROW),
            "source": row["source"].removeprefix("github:").partition(":")[0],
        }  # fmt: skip
        if row["bytes"] and "bytes" in said:
            number = f"peak_{setting['reads']}_bytes"
            found.append(
                PublicRun(number=number, measured=row["bytes"], predicted=said["bytes"], **told)
            )
        if row["seconds"] and "step_seconds" in said:
            found.append(PublicRun(number="step_seconds", measured=row["seconds"],
                                   predicted=said["step_seconds"], **told))  # fmt: skip
    return found


def evidence_of_convnets(steps: Sequence[Mapping[str, Any]]) -> list[PublicRun]:
    """Return the steps of `host_pace`: gradients set to zero, forward and backward."""
    return [
        PublicRun(
            number="step_seconds", device=step["card"], model=step["model"],
            kernels=(CONVOLUTIONS,), precision=step["format"],
            setting=f"{step['format']}, no update, batch of {host_pace.BATCH}",
            measured=step["ms"] / 1e3, predicted=step[str(host_pace.OWN)] / 1e3,
            left_open="the copy of the batch", source=host_pace.SOURCE,
        )
        for step in steps
    ]  # fmt: skip


def evidence_of_one_card(steps: Sequence[Mapping[str, Any]]) -> list[PublicRun]:
    """Return the steps of `one_card`, or of `older_cards`."""
    found = []
    for step in steps:
        is_resnet, is_o2 = step["model"] not in one_card.SIZES, step["format"] == one_card.O2
        how = "SGD" if is_resnet else f"AdamW, {one_card.TOKENS} tokens"
        beyond = f"samples {step['beyond'] + 1} to " if step.get("beyond") else ""
        left_open = [] if is_resnet or is_o2 else ["what its optimizer waited for the host"]
        left_open += ["how many watts its laptop allowed"] if step.get("laptop") else []
        precision = "fp16" if is_o2 else step["format"]
        in_words = "fp16 with fp32 copies" if is_o2 else precision
        found.append(PublicRun(
            number="step_seconds", device=step["card"], model=step["model"],
            kernels=(CONVOLUTIONS,) if is_resnet else (), precision=precision,
            setting=f"{in_words}, {how}, {beyond or 'batch of '}{step['batch']}",
            measured=step["ms"] / 1e3, predicted=step["predicted ms"] / 1e3,
            left_open=" and ".join(left_open),
            source=step["source"],
        ))  # fmt: skip
    return found


def _card(title: str) -> str:
    card = cards.find(title)
    assert card is not None, title
    return card.name


def _in_words(setting: Mapping[str, Any]) -> str:
    """Return how a run was trained."""
    method, parts = setting["method"], [setting["precision"]]
    if method["kind"] != "full":
        rank = f" of rank {method['rank']}" if "rank" in method else ""
        parts.append(f"{method['kind']}{rank} on a base in {setting['base']}")
    else:
        parts.append(setting["optimizer"])
    parts.append(f"batch of {setting['batch']}")
    if setting["sequence"]:
        parts.append(f"{setting['sequence']:,} tokens")
    if setting["cards"] > 1:
        parts.append(f"{setting['cards']} cards")
    if setting["accumulation"] > 1:
        parts.append(f"{setting['accumulation']} micro-batches")
    if setting["checkpointing"]:
        parts.append("recomputed")
    return ", ".join(parts)


def write(runs: Sequence[PublicRun], file: Path) -> None:
    """Write runs as `public_runs` reads them."""
    with file.open("w", encoding="utf-8", newline="") as out:
        table = csv.DictWriter(out, [each.name for each in fields(PublicRun)], lineterminator="\n")
        table.writeheader()
        for run in runs:
            table.writerow({
                **{each.name: getattr(run, each.name) for each in fields(run)},
                "kernels": "|".join(run.kernels),
                "measured": f"{run.measured:.12g}",
                "predicted": f"{run.predicted:.12g}",
            })  # fmt: skip


def coverage(runs: Sequence[PublicRun], of: Callable[[PublicRun], str]) -> dict[str, Any]:
    """Return how often the width holds for what is left out of it, and how wide it is.

    Args:
        runs: of one kind.
        of: what is left out as a whole: the model or the card of a run.
    """
    inside, widths = [], []
    for name in sorted({of(run) for run in runs}):
        others = [run.error for run in runs if of(run) != name]
        if not others:
            continue
        width = half_width(others)
        own = [abs(run.error) <= width for run in runs if of(run) == name]
        inside += own
        widths += [width] * len(own)
    if not inside:
        return {"covered %": None, "width %": None}
    return {"covered %": 100 * float(np.mean(inside)), "width %": 100 * float(np.median(widths))}


def line_of(name: str, runs: Sequence[PublicRun]) -> dict[str, Any]:
    """Return one line of the table: errors of a kind of runs, and how often its width holds."""
    size = 100 * np.abs([run.error for run in runs])
    of_cards = coverage(runs, lambda run: run.device)
    return {
        "number": name,
        "runs": len(runs),
        "models": len({run.model for run in runs}),
        "cards": len({run.device for run in runs}),
        "median %": float(np.median(size)),
        "p90 %": float(np.quantile(size, 0.9)),
        "max %": float(size.max()),
        "stated %": 100 * half_width(run.error for run in runs),
        **coverage(runs, lambda run: run.model),
        **{f"card left out: {name}": value for name, value in of_cards.items()},
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
    """Write both files, and show how well the widths hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    folder = Path("build/benchmarks")
    for name in ("gpu_peaks", "field", "host_pace", "one_card", "older_cards"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, help=f"the JSON of {name}",
                            default=folder / f"{name}.json")  # fmt: skip
    given = parser.parse_args()
    rows = json.loads(given.gpu_peaks.read_text())["rows"]
    known = [run for run in runs_of(rows) if run.is_known]
    families = families_of(known)
    report.show("what is needed, against caps", [of_caps(name, r) for name, r in families.items()])
    FILE.write_text(json.dumps(table_of(families), indent=1) + "\n")
    runs = evidence_of_peaks(rows)
    runs += evidence_of_field(json.loads(given.field.read_text())["rows"])
    runs += evidence_of_convnets(json.loads(given.host_pace.read_text())["steps"])
    for each in (given.one_card, given.older_cards):
        runs += evidence_of_one_card(json.loads(each.read_text())["steps"])
    write(runs, evidence.FILE)
    evidence.public_runs.cache_clear()
    report.show("how often a width of nine in ten holds, the model or the card left out", [
        line_of(f"{number}, {'no ' * (not each)}convolutions",
                evidence.runs_of_kind(number, convolutions=each))
        for number, each in KINDS
    ])  # fmt: skip
    print(f"\nwrote {FILE} and {evidence.FILE}, {len(runs)} runs")


if __name__ == "__main__":
    main()
