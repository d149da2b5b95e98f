"""The table of runs as the page is told, and as a CSV file."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memlab._panel import state
from memlab._panel.runs import Run, RunLog
from memlab._panel.state import BAD, GOOD, WARN, Verdict, others
from memlab._util.units import format_bytes, format_seconds
from memlab.result import StepResult, signed_percent

NONE = "-"
LIMIT_WORDS = {GOOD: "fits", BAD: "over", WARN: "close to"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunColumn:
    """A column of the table.

    Attributes:
        name: its heading.
        title: what it holds, shown when a person points at the heading.
        show: what it says of a run.
        is_number: whether it is aligned at the right.
        is_long: whether a long text is cut, and shown whole when a person points at it.
        is_optional: whether it is left out where no row has anything to say.
    """

    name: str
    title: str
    show: Callable[[Run], str | Verdict]
    is_number: bool = False
    is_long: bool = False
    is_optional: bool = False


def _number(name: str, title: str, show: Callable[[Run], str]) -> RunColumn:
    """Return a column of numbers that is left out where there are none."""
    return RunColumn(name=name, title=title, show=show, is_number=True, is_optional=True)


COLUMNS = (
    RunColumn(
        name="#",
        title="run, in order, and its name; earlier: run before this panel was made",
        show=lambda run: _numbered(run),
        is_long=True,
    ),
    RunColumn(
        name="workload",
        title="what is trained",
        show=lambda run: run.result.workload_name,
        is_long=True,
    ),
    RunColumn(
        name="device",
        title="where it ran, where it was recorded, or for which it is predicted",
        show=lambda run: run.result.device,
    ),
    _number("batch", "samples in each optimizer update", lambda run: _whole(run, "batch_size")),
    _number(
        "acc.",
        "accumulation: micro-batches in each optimizer update",
        lambda run: _whole(run, "accumulation_steps"),
    ),
    RunColumn(name="precision", title="number format", show=lambda run: run.result.number_format),
    _number(
        "budget",
        "memory budget: the share of the activations that is kept",
        lambda run: f"{run.result.config.memory_budget:.2f}",
    ),
    RunColumn(
        name="other",
        title="what else differs from the defaults",
        show=lambda run: ", ".join(others(run.result.config)) or NONE,
        is_long=True,
        is_optional=True,
    ),
    RunColumn(
        name="limit",
        title="whether the peak fits the limit that was on screen",
        show=lambda run: _limit(run),
        is_optional=True,
    ),
    RunColumn(
        name="outcome",
        title="how the run ended, or that it is a prediction",
        show=lambda run: state.outcome_verdict(run.result),
    ),
    _number(
        "peak predicted",
        "most bytes in live tensors (allocated), predicted",
        lambda run: _bytes(run.predicted, "peak_allocated_bytes"),
    ),
    _number(
        "peak measured",
        "most bytes in live tensors (allocated), measured",
        lambda run: _bytes(run.measured, "peak_allocated_bytes"),
    ),
    _number(
        "peak error",
        "predicted peak divided by measured peak, minus one",
        lambda run: or_none(run.prediction_error, signed_percent),
    ),
    _number(
        "reserved",
        "most bytes that the caching allocator held; predicted in the row of a prediction",
        lambda run: _bytes(run.result, "peak_reserved_bytes"),
    ),
    _number(
        "time predicted",
        "time of one optimizer update, predicted",
        lambda run: _seconds(run.predicted),
    ),
    _number(
        "time measured",
        "median wall time of one optimizer update, measured",
        lambda run: _seconds(run.measured),
    ),
    _number(
        "time error",
        "predicted time divided by measured time, minus one",
        lambda run: or_none(run.time_error, signed_percent),
    ),
    _number(
        "samples/s",
        "batch size divided by the time of one update; predicted in the row of a prediction",
        lambda run: or_none(run.result.samples_per_second, format_rate),
    ),
    RunColumn(
        name="gradients",
        title="whether the gradients are those of the reference step; -: not checked",
        show=lambda run: state.gradients_verdict(run.report) if run.report else NONE,
        is_optional=True,
    ),
)


def told(log: RunLog) -> dict[str, Any]:
    """Return the table of runs as the page is told: the runs on it, the oldest first."""
    runs = log.visible
    columns = [
        column
        for column in COLUMNS
        if not column.is_optional or any(column.show(run) != NONE for run in runs)
    ]
    return {
        "columns": [
            {
                "name": column.name,
                "title": column.title,
                "isNumber": column.is_number,
                "isLong": column.is_long,
            }
            for column in columns
        ],
        "rows": [_row(run, columns, log.compared) for run in runs],
        "canUndo": log.can_undo_clear,
        "total": len(log.runs),
    }


def _row(run: Run, columns: Sequence[RunColumn], compared: int) -> dict[str, Any]:
    result, peak = run.result, run.result.counted_peak
    return {
        "number": run.number,
        "name": run.own_name,
        "label": run.label,
        "settings": state.briefly(result),
        "setting": state.on_sliders(result.config),
        "isPinned": bool(run.name),
        "isPredicted": run.is_predicted,
        "isEarlier": run.is_earlier,
        "isStopped": run.is_stopped,
        "isCompared": run.number == compared,
        "workload": result.workload_name,
        "device": result.device,
        "cells": [cell(column.show(run)) for column in columns],
        "peakBytes": peak and peak.nbytes,
        "kindOfPeak": peak and peak.kind,
        "seconds": result.step_seconds,
        "samplesPerSecond": result.samples_per_second,
    }


def cell(said: str | Verdict) -> str | dict[str, str]:
    """Return a cell of a table as the page is told."""
    return said.told if isinstance(said, Verdict) else said


def limit_verdict(result: StepResult, limit_bytes: int) -> Verdict:
    """Return whether a step fits a limit, in a word before the limit."""
    fit = state.fit_verdict(result, limit_bytes)
    words = f"{LIMIT_WORDS.get(fit.kind, '')} {format_bytes(limit_bytes)}".strip()
    return Verdict(fit.kind, words, fit.text)


def format_rate(samples_per_second: float) -> str:
    """Return a number of samples per second with about three digits."""
    digits = 0 if samples_per_second >= 100 else 1 if samples_per_second >= 10 else 2
    return f"{samples_per_second:,.{digits}f}"


def or_none(value: float | None, show: Callable[[float], str]) -> str:
    """Return a value as it is shown, or `NONE` if there is none."""
    return NONE if value is None else show(value)


def _numbered(run: Run) -> str:
    earlier = "earlier" if run.is_earlier else ""
    return " ".join(part for part in (str(run.number), earlier, run.own_name) if part)


def _limit(run: Run) -> str | Verdict:
    return NONE if run.limit_bytes is None else limit_verdict(run.result, run.limit_bytes)


def _whole(run: Run, field: str) -> str:
    return str(getattr(run.result.config, field))


def _bytes(result: StepResult | None, field: str) -> str:
    return or_none(getattr(result, field, None), format_bytes)


def _seconds(result: StepResult | None) -> str:
    return or_none(result.step_seconds if result else None, format_seconds)


# All runs as a CSV file. Sizes are bytes and times are seconds, as the names of the columns say.

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would compute a text that begins so

CSV_COLUMNS: dict[str, Callable[[Run], Any]] = {
    "run": lambda run: run.number,
    "name": lambda run: run.own_name,
    "is_earlier": lambda run: run.is_earlier,
    "source": lambda run: str(run.result.source),
    "workload": lambda run: run.result.workload_name,
    "device": lambda run: run.result.device,
    "batch_size": lambda run: run.result.config.batch_size,
    "accumulation_steps": lambda run: run.result.config.accumulation_steps,
    "precision": lambda run: run.result.number_format,
    "memory_budget": lambda run: run.result.config.memory_budget,
    "other_settings": lambda run: ", ".join(others(run.result.config)),
    "limit_bytes": lambda run: run.limit_bytes,
    "fits": lambda run: run.result.against_limit(run.limit_bytes).fits,
    "peak_allocated_predicted_bytes": lambda run: _of(run.predicted, "peak_allocated_bytes"),
    "peak_allocated_measured_bytes": lambda run: _of(run.measured, "peak_allocated_bytes"),
    "peak_error_fraction": lambda run: run.prediction_error,
    "peak_reserved_predicted_bytes": lambda run: _of(run.predicted, "peak_reserved_bytes"),
    "peak_reserved_measured_bytes": lambda run: _of(run.measured, "peak_reserved_bytes"),
    "step_predicted_seconds": lambda run: _of(run.predicted, "step_seconds"),
    "step_measured_seconds": lambda run: _of(run.measured, "step_seconds"),
    "time_error_fraction": lambda run: run.time_error,
    "samples_per_second": lambda run: run.result.samples_per_second,
    "outcome": lambda run: str(run.result.outcome),
    "gradients": lambda run: state.gradients_verdict(run.report).text,
    "message": lambda run: run.result.message,
}


def as_csv(runs: Sequence[Run]) -> str:
    """Return one line for each run, below a line with the names of the columns."""
    text = io.StringIO()
    lines = csv.writer(text)
    lines.writerow(CSV_COLUMNS)
    lines.writerows([_plain(show(run)) for show in CSV_COLUMNS.values()] for run in runs)
    return text.getvalue()


def _of(result: Any, field: str) -> Any:
    return getattr(result, field, None)


def _plain(value: Any) -> Any:
    """Return a value as it is written; a text is never a formula."""
    is_formula = isinstance(value, str) and value.startswith(FORMULA)
    return f"'{value}" if is_formula else value
