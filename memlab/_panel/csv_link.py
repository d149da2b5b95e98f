"""All runs as a CSV file, in a link that holds the file itself, so that it works without a kernel.

Sizes are bytes and times are seconds, as the names of the columns say.
"""

import csv
import html
import io
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from memlab._panel import verdicts
from memlab._panel.runs import Run, count_runs
from memlab._panel.state import others

FILE_NAME = "memlab-runs.csv"
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would compute a text that begins so

COLUMNS: dict[str, Callable[[Run], Any]] = {
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
    "gradients": lambda run: verdicts.gradients_verdict(run.report).text,
    "message": lambda run: run.result.message,
}


def as_csv(runs: Sequence[Run]) -> str:
    """Return one line for each run, below a line with the names of the columns."""
    text = io.StringIO()
    lines = csv.writer(text)
    lines.writerow(COLUMNS)
    lines.writerows([_plain(show(run)) for show in COLUMNS.values()] for run in runs)
    return text.getvalue()


def link(runs: Sequence[Run]) -> str:
    """Return a link that saves all runs as a CSV file; words alone if there are none."""
    if not runs:
        return '<span class="memlab-csv memlab-open">CSV</span>'
    title = html.escape(f"save {count_runs(len(runs))}, cleared ones too, as {FILE_NAME}")
    data = urllib.parse.quote(as_csv(runs), safe="")
    return (
        f'<a class="memlab-csv" download="{FILE_NAME}" title="{title}" '
        f'data-lm-suppress-shortcuts="true" href="data:text/csv;charset=utf-8,{data}">CSV</a>'
    )


def _of(result: Any, field: str) -> Any:
    return getattr(result, field, None)


def _plain(value: Any) -> Any:
    """Return a value as it is written; a text is never a formula."""
    is_formula = isinstance(value, str) and value.startswith(FORMULA)
    return f"'{value}" if is_formula else value
