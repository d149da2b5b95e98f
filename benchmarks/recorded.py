"""How far is what memlab predicts for a device from what was recorded on it?

Each recorded run of an eager step is predicted again on this machine, over fake tensors; operators
cost what the record says they did there, so that nothing is timed here. Errors are of the
prediction, in percent of what was recorded; of a setting that was read twice, the time is the
median of both, and what the second reading is off the first is the A/A error. Goals: allocated
1 % median and 3 % at the 95th percentile, reserved 2 and 5, time 5 and 12, each beyond that of A/A.
Models that are set aside (`holdout`) are told apart: no constant was chosen by them.

`--write` puts the headline figures into README.md; tests/matrix/test_recorded.py holds both to it.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memlab
from benchmarks import report
from memlab import Outcome, StepResult, workloads
from memlab._util.units import format_bytes
from memlab.config import Precision
from memlab.devices.cards import Target
from memlab.result import format_percent
from memlab.runtime import isolation
from memlab.store.recorded import DeviceRecord, target_of
from memlab.store.records import RecordedRun
from memlab.techniques.compilation import is_compiled

GOALS = {"allocated": (1.0, 3.0), "reserved": (2.0, 5.0), "time": (5.0, 12.0)}
NUM_WORST = 10
README = Path(__file__).resolve().parents[1] / "README.md"
MARK = "recorded"
NO_CARD = (
    "**No GPU figures are recorded yet**: the CUDA path is written, and has not run on a card. "
    "`python -m benchmarks.gpu_suite --out DIR` records a card in one visit of eight minutes."
)


def shipped() -> list[DeviceRecord]:
    """Return the records that ship with memlab: a person's own are not for README.md."""
    return [record for record in memlab.recordings() if not record.is_own]


def settings(record: DeviceRecord) -> list[list[RecordedRun]]:
    """Return the runs of a record that a prediction can be compared with, by setting."""
    found: dict[str, list[RecordedRun]] = {}
    for run in record.runs:
        result = run.result
        if result.outcome is Outcome.OK and not is_compiled(result.config):
            key = json.dumps([run.workload, dict(run.options), result.config.to_dict()])
            found.setdefault(key, []).append(run)
    return list(found.values())


def held(record: DeviceRecord) -> list[dict[str, Any]]:
    """Return a row a setting: recorded, predicted, and the signed errors in percent."""
    targets = {tf32: target_of(record, tf32=tf32) for tf32 in (False, True)}
    return [
        row(runs, predicted(runs[0], targets[runs[0].result.config.precision is Precision.TF32]))
        for runs in settings(record)
    ]


def predicted(run: RecordedRun, target: Target) -> StepResult:
    """Return the prediction of a recorded run, with the plan that was carried out there."""
    arguments = {"workload": workloads.get(run.workload, **run.options), "target": target}
    arguments |= {"config": run.result.config, "seed": run.seed, "plan": run.plan}
    # fake tensors of a card need a process that sees none; here nothing has to be sent to it
    run = isolation.run if torch.cuda.is_available() else isolation.run_here
    found = run("predict", arguments | {"memory_limit": None}, timeout_seconds=600)
    result: StepResult = found.result
    return result


def row(runs: Sequence[RecordedRun], told: StepResult) -> dict[str, Any]:
    """Return what was recorded beside what is predicted."""
    first = runs[0].result
    every = [seconds for run in runs for seconds in run.result.step_seconds_all]
    seconds = statistics.median(every) if every else None
    twice = len(runs) > 1
    return {
        "model": runs[0].workload,
        "config": str(first.config),
        "holdout": runs[0].holdout,
        "outcome": str(told.outcome),
        "allocated": first.peak_allocated_bytes,
        "allocated %": _error(told.peak_allocated_bytes, first.peak_allocated_bytes),
        "reserved %": _error(told.peak_reserved_bytes, first.peak_reserved_bytes),
        "seconds": seconds,
        "time %": _error(told.step_seconds, seconds),
        "A/A %": _error(runs[-1].result.step_seconds, first.step_seconds) if twice else None,
        "cause": cause(first, told),
    }


def _error(value: float | None, true: float | None) -> float | None:
    return None if value is None or not true else 100 * (value / true - 1)


def cause(true: StepResult, told: StepResult) -> str:
    """Return where a prediction parts from what was recorded: the category, and both places."""
    if told.outcome is not Outcome.OK:
        return told.message
    parts = []
    ours, theirs = told.peak_by_category or {}, true.peak_by_category or {}
    if ours != theirs and theirs:
        name = max(theirs, key=lambda name: abs(ours.get(name, 0) - theirs[name]))
        size = ours.get(name, 0) - theirs[name]
        parts.append(f"{name} {'+' if size >= 0 else '-'}{format_bytes(abs(size))}")
    if str(told.peak_place) != str(true.peak_place):
        parts.append(f"peak in {told.peak_place}, recorded in {true.peak_place}")
    return "; ".join([*parts, *told.notes])


def spread(rows: Sequence[dict[str, Any]], column: str) -> tuple[float, float] | None:
    """Return median and 95th percentile of the absolute errors; None where there are none."""
    errors = np.abs([row[column] for row in rows if row[column] is not None])
    return (float(np.median(errors)), float(np.quantile(errors, 0.95))) if len(errors) else None


def judge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each number and goal, over all models and over those set aside."""
    same = spread(rows, "A/A %") or (0.0, 0.0)
    lines: list[dict[str, Any]] = []
    for models, chosen in (("all", rows), ("holdout", [r for r in rows if r["holdout"]])):
        for what, goals in GOALS.items():
            found = spread(chosen, f"{what} %")
            if found is None:
                continue
            for index, name in enumerate(("median", "p95")):
                beyond = same[index] if what == "time" else 0.0
                lines.append(
                    {
                        "models": models,
                        "what": what,
                        "of": name,
                        "error %": found[index],
                        "A/A %": beyond if what == "time" else None,
                        "goal %": goals[index],
                        "verdict": report.verdict(found[index] - beyond <= goals[index]),
                    }
                )
    return lines


def worst(rows: Sequence[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    """Return the settings of largest error, with their causes."""
    told = [row for row in rows if row[f"{what} %"] is not None]
    columns = ("model", "config", "holdout", f"{what} %", "cause")
    return [
        {name: each[name] for name in columns}
        for each in sorted(told, key=lambda row: -abs(row[f"{what} %"]))[:NUM_WORST]
    ]


def show(record: DeviceRecord, rows: Sequence[dict[str, Any]]) -> None:
    """Print goals and the ten worst of each number, with their causes."""
    print(f"\n{record}" + (f"\n{record.lines.damage}" if record.lines.damage else ""))
    report.show("errors of prediction, in percent of what was recorded", judge(rows))
    for what in GOALS:
        if found := worst(rows, what):
            report.show(f"the {len(found)} largest errors of {what}", found)


def block(found: Sequence[tuple[DeviceRecord, Sequence[dict[str, Any]]]]) -> str:
    """Return the part of README.md that these records write."""
    lines = [] if any(record.is_card for record, _ in found) else [NO_CARD, ""]
    lines += ["| recorded on | runs | compared | allocated, median / p95 | reserved | time |"]
    lines += ["|---|---|---|---|---|---|"]
    for record, rows in found:
        cells = [_cell(spread(rows, f"{what} %")) for what in GOALS]
        torch = record.runs[0].result.versions.get("torch", "?")
        lines.append(
            f"| {record.title}, torch {torch.partition('+')[0]} | {len(record.runs)} | {len(rows)} "
            f"| {' | '.join(cells)} |"
        )
    lines += ["", *(_repeated(record, rows) for record, rows in found)]
    return "\n".join(["", *lines, ""])


def is_quiet(rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether times can be judged: the device's own second readings keep to the goal."""
    same = spread(rows, "A/A %")
    return same is not None and same[1] <= GOALS["time"][1]


def _repeated(record: DeviceRecord, rows: Sequence[dict[str, Any]]) -> str:
    said = f"{record.title}: read twice, a setting's times differ by {_cell(spread(rows, 'A/A %'))}"
    if is_quiet(rows):
        return f"{said}, and errors of time are judged beyond that."
    return f"{said}: the machine was busy, and no time of this record is judged."


def _cell(found: tuple[float, float] | None) -> str:
    return "-" if found is None else " / ".join(format_percent(value / 100) for value in found)


def main() -> None:
    """Hold every record against its predictions; with --write, put the figures into README.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/recorded.json"))
    parser.add_argument("--write", action="store_true", help="write the figures into README.md")
    given = parser.parse_args()
    before = report.environment()
    found = [(record, held(record)) for record in shipped()]
    for record, rows in found:
        show(record, rows)
    if given.write:
        README.write_text(report.rewritten(README.read_text(), MARK, block(found)))
    results = {record.name: {"goals": judge(rows), "rows": rows} for record, rows in found}
    report.write(report.Options(quick=False, out=given.out), before, results)


if __name__ == "__main__":
    main()
