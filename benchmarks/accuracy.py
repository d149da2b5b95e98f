"""How far are the peaks and step times that memlab predicts for a CPU from those that are?

Peak: of each case the truth is the loop and meter of `independent.py` where that loop is the step
(fp32, AdamW), else `memlab.measure`. The peer is PyTorch's MemTracker over fake tensors on the same
cases; what it raises is counted. Goal: median 0.1 %, 95th percentile 1 %, largest 3 %. Where truth
fails (one sample under BatchNorm, no blocks to checkpoint) the prediction must not be ok.

Time: predicted beside two measurements in turn, whose ratio is the A/A error. Goal: median 5 %,
95th percentile 12 %, each beyond that of A/A. Operators are calibrated anew, in a cache that is
thrown away. Peaks of CUDA cards are compared by `gpu_peaks.py`.
"""

import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

import memlab
from benchmarks import models, peers, report
from memlab import StepConfig, StepResult, Workload

GOALS = {"median %": 0.1, "p95 %": 1.0, "max %": 3.0}
TIME_GOALS = {"median %": 5.0, "p95 %": 12.0}
PLAIN = [StepConfig(batch_size=n) for n in (1, 2, 3)]
SPLIT = [StepConfig(batch_size=n, accumulation_steps=k) for n, k in ((8, 2), (7, 3), (11, 5))]
FORMATS = [
    StepConfig(batch_size=5, precision="bf16-mixed"),
    StepConfig(batch_size=9, accumulation_steps=2, precision="bf16-mixed"),
    StepConfig(batch_size=4, precision="bf16"),
    StepConfig(batch_size=6, accumulation_steps=3, precision="bf16"),
]
OTHERS = [
    StepConfig(batch_size=6, optimizer="sgd"),
    StepConfig(batch_size=5, accumulation_steps=2, optimizer="sgd-momentum"),
    StepConfig(batch_size=6, checkpointing="blocks"),
]
FP16 = [StepConfig(batch_size=3, accumulation_steps=2, precision="fp16-mixed")]
CONFIGS = [*PLAIN, *SPLIT, *FORMATS, *OTHERS]
FEW = [PLAIN[1], PLAIN[2], SPLIT[0], FORMATS[0], FORMATS[3], OTHERS[0]]
FEWER = ("densenet121", "vnet")  # seconds a step, or many seconds in the peer
IN_FP16 = ("bert", "encoder", "tied")  # on a CPU it is an order of magnitude slower
QUICK = ("unet-3d", "tied")
SIZED = [StepConfig(batch_size=8), StepConfig(batch_size=13, accumulation_steps=2)]
TIMED = ("gpt-small", "vit-digits", "resnet-digits", "lstm-text", "llama", "unet-3d", "bert", "t5")
TIMED += ("encoder", "depthwise", "convnext", "swin", "gru", "tied", "mlp")
TIMED_QUICK = ("tied",)
NUM_REPEATS = 7
NUM_WORST = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One workload in one configuration."""

    workload: Workload
    config: StepConfig

    @property
    def is_plain(self) -> bool:
        """Whether the independent loop runs this step."""
        config = self.config
        plain = StepConfig(
            batch_size=config.batch_size, accumulation_steps=config.accumulation_steps
        )
        return config == plain


def cases(quick: bool) -> list[Case]:
    """Return what is compared, workload by workload."""
    found = []
    for name in QUICK if quick else models.WORKLOADS:
        workload = models.WORKLOADS[name]()
        configs = FEW if quick or name in FEWER else CONFIGS
        configs = configs + (FP16 if name in IN_FP16 and not quick else [])
        found += [Case(workload=workload, config=config) for config in configs]
    return found


def predicted(case: Case) -> dict[str, Any]:
    """Return what memlab predicts, and how long that took."""
    start = time.perf_counter()
    result = memlab.predict(case.workload, case.config, "cpu", timeout_seconds=600)
    return {
        "outcome": str(result.outcome),
        "predicted": result.peak_allocated_bytes,
        "uncertainty %": 100 * (result.uncertainty or {}).get("peak_allocated_bytes", 0.0),
        "at": str(result.peak_place or result.message),
        "notes": " ".join(result.notes),
        "s": time.perf_counter() - start,
    }


def truth(case: Case, forks: peers.Forks) -> tuple[str, int | str]:
    """Return who measured, and the bytes of the second step, or why there are none."""
    if case.is_plain:
        try:
            found: int | str = peers.independent_peak(forks, case.workload, case.config)
        except RuntimeError as error:
            found = str(error)
        return "independent", found
    result = memlab.measure(
        case.workload, case.config, "cpu", repeats=1, warmup=0, timeout_seconds=600
    )
    peak = result.peak_allocated_bytes
    return "measure", result.message if peak is None else peak


def tracker(case: Case, forks: peers.Forks) -> int | str:
    """Return the peer's bytes, or why there are none."""
    return peers.tracker_peak(forks, case.workload, case.config)


def compare(
    found: Sequence[Case], libraries: tuple[str, ...] = peers.LIBRARIES
) -> list[dict[str, Any]]:
    """Return a row a case: truth, prediction and peer, with signed errors in percent.

    The three go on side by side, each in processes of its own: bytes do not depend on the load.
    """
    forks = [peers.Forks(libraries) for _ in (truth, tracker)]
    with ThreadPoolExecutor(3) as pool:
        columns = [
            pool.submit(_each, predicted, found),
            pool.submit(_each, truth, found, forks[0]),
            pool.submit(_each, tracker, found, forks[1]),
        ]
        rows = zip(found, *(column.result() for column in columns), strict=True)
    for one in forks:
        one.close()
    return [_row(*row) for row in rows]


def _each(function: Callable[..., Any], found: Sequence[Case], *more: Any) -> list[Any]:
    values = []
    for index, case in enumerate(found):
        values.append(function(case, *more))
        _say(f"{function.__name__}: {case.workload.name}, {case.config}", index, len(found))
    return values


def _row(case: Case, foretold: dict[str, Any], true: tuple[str, Any], peer: Any) -> dict[str, Any]:
    by, bytes_or_why = true
    return {
        "model": case.workload.name,
        "config": str(case.config),
        "truth by": by,
        "truth": bytes_or_why,
        **foretold,
        "error %": signed_error(foretold["predicted"], bytes_or_why),
        "MemTracker": peer,
        "its error %": signed_error(peer, bytes_or_why),
    }


def signed_error(value: Any, true: Any) -> float | None:
    """Return by how many percent a number lies above the truth; None if either is not a number."""
    if isinstance(value, int | float) and isinstance(true, int | float):
        return 100 * (value / true - 1)
    return None


def spread(errors: Sequence[float]) -> dict[str, float | None]:
    """Return median, 95th percentile and maximum of the absolute values; None of nothing."""
    if not errors:
        return dict.fromkeys(GOALS)
    size = np.abs(np.asarray(errors))
    values = (np.median(size), np.quantile(size, 0.95), size.max())
    return {name: float(value) for name, value in zip(GOALS, values, strict=True)}


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line a workload, and one of all: cases that run, and how far off they are."""
    return [
        {
            "model": name,
            "cases": len(true),
            "predicted": len(judged := [r for r in true if r["error %"] is not None]),
            **spread([row["error %"] for row in judged]),
            "within its uncertainty": sum(map(_is_inside, judged)),
        }
        for name, true in _by_model(rows)
    ]


def beside_peer(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the same where the peer has a number too: memlab's errors and the peer's."""
    lines = []
    for name, true in _by_model(rows):
        both = [row for row in true if None not in (row["error %"], row["its error %"])]
        ours = spread([row["error %"] for row in both])
        theirs = spread([row["its error %"] for row in both])
        line = {"model": name, "cases": len(both)}
        line |= {f"memlab {key}": value for key, value in ours.items()}
        lines.append(line | {f"MemTracker {key}": value for key, value in theirs.items()})
    return lines


def _by_model(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the rows that have a truth, a workload at a time, and all of them."""
    true = [row for row in rows if isinstance(row["truth"], int)]
    names = dict.fromkeys(row["model"] for row in true)
    return [(name, [r for r in true if r["model"] == name]) for name in names] + [("all", true)]


def _is_inside(row: dict[str, Any]) -> bool:
    return abs(row["error %"]) <= row["uncertainty %"]


def judge(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return whether the goals are met, over all cases that can run, and how others end."""
    all_of_them = summarise(rows)[-1]
    cannot = [row for row in rows if not isinstance(row["truth"], int)]
    met = {
        name: all_of_them[name] is not None and all_of_them[name] <= goal
        for name, goal in GOALS.items()
    }
    return {
        "cases that run": all_of_them["cases"],
        **{f"{name} (goal {GOALS[name]})": report.verdict(is_met) for name, is_met in met.items()},
        "not predicted": all_of_them["cases"] - all_of_them["predicted"],
        "cases that cannot run": len(cannot),
        "predicted all the same": sum(row["outcome"] == "ok" for row in cannot),
    }


def worst(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases of largest error, with where the predicted peak stands and its notes."""
    judged = [row for row in rows if row["error %"] is not None]
    keep = ("model", "config", "truth by", "truth", "predicted", "error %", "uncertainty %")
    return [
        {name: row[name] for name in (*keep, "at", "notes")}
        for row in sorted(judged, key=lambda row: -abs(row["error %"]))[:NUM_WORST]
    ]


def silences(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the peer says where it has no number, and how often."""
    said = Counter(
        row["MemTracker"].partition(". ")[0][:90]
        for row in rows
        if isinstance(row["truth"], int) and isinstance(row["MemTracker"], str)
    )
    return [{"cases": count, "MemTracker": text} for text, count in said.most_common()]


def step_times(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return predicted times of a step beside two measurements in turn, in percent of these."""
    rows = []
    for name in names:
        workload = models.WORKLOADS[name]()
        for config in SIZED:
            foretold = memlab.predict(workload, config, "cpu", timeout_seconds=600)
            first, second = (_measured(workload, config) for _ in range(2))
            rows.append(_time_row(foretold, first, second))
            _say(f"timed {name}, {config}", len(rows) - 1, len(names) * len(SIZED))
    return rows


def _measured(workload: Workload, config: StepConfig) -> StepResult:
    return memlab.measure(workload, config, "cpu", repeats=NUM_REPEATS, timeout_seconds=600)


def _time_row(foretold: StepResult, first: StepResult, second: StepResult) -> dict[str, Any]:
    both = first.step_seconds_all + second.step_seconds_all
    return {
        "model": foretold.workload_name,
        "config": str(foretold.config),
        "measured s": statistics.median(both),
        "predicted s": foretold.step_seconds,
        "error %": signed_error(foretold.step_seconds, statistics.median(both)),
        "A/A %": signed_error(second.step_seconds, first.step_seconds),
    }


def judge_times(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return spread of the errors and of A/A, and whether one lies beyond the other by the goal."""
    judged = spread([row["error %"] for row in rows if row["error %"] is not None])
    same = spread([row["A/A %"] for row in rows if row["A/A %"] is not None])
    lines = []
    for name, goal in TIME_GOALS.items():
        line: dict[str, Any] = {"of": name, "steps": len(rows), "predicted": judged[name]}
        met = judged[name] is not None and judged[name] - (same[name] or 0.0) <= goal
        verdict = "not predicted" if judged[name] is None else report.verdict(met)
        lines.append(line | {"A/A": same[name], "goal beyond A/A": goal, "goal": verdict})
    return lines


def _say(text: str, index: int, count: int) -> None:
    if index % 10 == 9 or index == count - 1:
        print(f"{index + 1} of {count}: {text}", flush=True)


def show_peaks(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Print the tables of the peaks and return them."""
    tables = {"summary": summarise(rows), "goals": [judge(rows)], "peer": beside_peer(rows)}
    report.show("peak allocated on this CPU, errors in percent of the truth", tables["summary"])
    report.show("goals", tables["goals"])
    report.show("where MemTracker over fake tensors has a number, in percent", tables["peer"])
    report.show(f"the {NUM_WORST} largest errors", worst(rows))
    if silent := silences(rows):
        report.show("where MemTracker has no number", silent)
    return {**tables, "rows": rows}


def main() -> None:
    """Compare times, then peaks."""
    given, before = report.options(__file__, __doc__), report.environment()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["MEMLAB_CACHE"] = cache  # before the first prediction starts a worker
        # times first: what is timed now is kept, and what follows disturbs it
        times = step_times(TIMED_QUICK if given.quick else TIMED)
        rows = compare(cases(given.quick))
    report.show("step time on this CPU, predicted over measured", times)
    time_goals = judge_times(times)
    report.show("errors of step time in percent", time_goals)
    peaks = show_peaks(rows)
    report.write(given, before, {**peaks, "times": times, "time_goals": time_goals})


if __name__ == "__main__":
    main()
