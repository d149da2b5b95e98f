"""The table of runs as HTML: its columns, and which rows it shows in which order. No widgets."""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memlab._panel import verdicts
from memlab._panel.runs import Run
from memlab._panel.state import others
from memlab._panel.verdicts import BAD, GOOD, WARN, Verdict
from memlab.arguments.units import format_bytes, format_seconds
from memlab.result import StepResult, signed_percent

NONE = "-"
NEWEST, LEAST, FASTEST = "newest first", "least memory", "most samples/s"
ORDERS = (NEWEST, LEAST, FASTEST)
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
        show=lambda run: verdicts.outcome_verdict(run.result),
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
        show=lambda run: verdicts.gradients_verdict(run.report) if run.report else NONE,
        is_optional=True,
    ),
)


def table_html(runs: Sequence[Run], compared: int = 0) -> str:
    """Return the runs as an HTML table, in their order here; every cell is escaped."""
    columns = [
        column
        for column in COLUMNS
        if not column.is_optional or any(column.show(run) != NONE for run in runs)
    ]
    head = "".join(
        f'<th scope="col"{_kind(column)} title="{html.escape(column.title)}">{column.name}</th>'
        for column in columns
    )
    body = "".join(_row(run, columns, run.number == compared) for run in runs)
    return (
        f'<table class="memlab-runs" aria-label="runs"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )


def listed(runs: Sequence[Run], *, words: str, order: str, stopped: bool) -> list[Run]:
    """Return the runs that the table shows, the first row first.

    Args:
        runs: all that are on the table.
        words: that a row must have all of, in whatever column and in whatever case.
        order: one of `ORDERS`; runs without that number come last.
        stopped: whether runs that were stopped are shown; pinned ones always are.
    """
    wanted = words.lower().split()
    found = [
        run
        for run in runs
        if (stopped or run.name or not run.is_stopped)
        and all(word in text_of(run) for word in wanted)
    ]
    return sorted(found, key=lambda run: _rank(run, order), reverse=True)


def text_of(run: Run) -> str:
    """Return all that the row of a run says, in lower case."""
    cells = (column.show(run) for column in COLUMNS)
    texts = [cell.text if isinstance(cell, Verdict) else cell for cell in cells]
    return " ".join(texts).lower()


def limit_verdict(result: StepResult, limit_bytes: int) -> Verdict:
    """Return whether a step fits a limit, in a word before the limit."""
    fit = verdicts.fit_verdict(result, limit_bytes)
    words = f"{LIMIT_WORDS.get(fit.kind, '')} {format_bytes(limit_bytes)}".strip()
    return Verdict(fit.kind, words, fit.text)


def format_rate(samples_per_second: float) -> str:
    """Return a number of samples per second with about three digits."""
    digits = 0 if samples_per_second >= 100 else 1 if samples_per_second >= 10 else 2
    return f"{samples_per_second:,.{digits}f}"


def or_none(value: float | None, show: Callable[[float], str]) -> str:
    """Return a value as it is shown, or `NONE` if there is none."""
    return NONE if value is None else show(value)


def _rank(run: Run, order: str) -> tuple[float, int]:
    """Return a key that is the largest for the first row."""
    peak = run.result.counted_peak
    best = 0.0
    if order == LEAST:
        best = -peak.nbytes if peak else float("-inf")
    elif order == FASTEST:
        best = run.result.samples_per_second or float("-inf")
    return best, run.number


def _row(run: Run, columns: Sequence[RunColumn], is_compared: bool) -> str:
    cells = "".join(_cell(column, column.show(run)) for column in columns)
    kinds = ["memlab-compared"] * is_compared + ["memlab-predicted"] * run.is_predicted
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    return f"<tr{kind}>{cells}</tr>"


def _cell(column: RunColumn, said: str | Verdict) -> str:
    if isinstance(said, Verdict):
        return f"<td>{said.html()}</td>"
    text = html.escape(said)
    title = f' title="{text}"' if column.is_long else ""
    return f"<td{_kind(column)}{title}>{text}</td>"


def _kind(column: RunColumn) -> str:
    name = "memlab-number" if column.is_number else "memlab-long" if column.is_long else ""
    return f' class="{name}"' if name else ""


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
