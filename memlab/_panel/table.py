"""The table of runs with its buttons: sort, filter, pin, compare, clear, and a link to a CSV file.

The rows come first, then the link, then the table.
"""

import csv
import html
import io
import threading
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets

from memlab._panel import state
from memlab._panel.runs import Run, RunLog, count_runs
from memlab._panel.state import BAD, GOOD, WARN, Verdict, others
from memlab._util.units import format_bytes, format_seconds
from memlab.result import StepResult, signed_percent

# The table of runs as HTML: its columns, and which rows it shows in which order. No widgets.

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


# All runs as a CSV file, in a link that holds the file itself, so that it works without a
# kernel.
#
# Sizes are bytes and times are seconds, as the names of the columns say.

FILE_NAME = "memlab-runs.csv"
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


NO_ROW = "No run has all of these words."
PIN, COMPARE = "pin", "compare"
CLEAR, UNDO = "clear", "undo clear"
CLEAR_TITLE = "take unpinned runs off the table, but for the last one"
UNDO_TITLE = "put the cleared runs back on the table"


class Table:
    """An HTML table, and beside each of its rows two toggles of the same height.

    Args:
        log: the runs; pin and clear change it.
        changed: called after a pin, a comparison or a clear.
    """

    def __init__(self, log: RunLog, changed: Callable[[], None]) -> None:
        self._log, self._changed = log, changed
        self._writer: int | None = None  # the thread that writes rows: its changes are no person's
        self._written: dict[Any, Any] = {}  # the last value that was written to each widget
        self._table = widgets.HTML(table_html([]), tabbable=True)  # so that keys can scroll it
        self._table.add_class("memlab-grid")
        self._table.add_class("memlab-table")
        self._toggles: list[tuple[Any, Any]] = []  # pin and compare of row i, grown as needed
        self._rows: list[Any] = []  # the boxes that hold them
        self._numbers: list[int] = []  # the run that row i shows, or showed last
        self._named_number = 0  # the run that the name box belongs to, or 0
        self._corner = widgets.HTML("")  # beside the headings
        self._corner.add_class("memlab-corner")
        self._buttons = widgets.VBox([self._corner])
        self._buttons.add_class("memlab-row-buttons")
        self.name = widgets.Text(description="Name", placeholder="pin a run to name it")
        self.name.add_class("memlab-name")
        self.name.tooltip = "what the table and the pictures call the pinned run"
        self.name.disabled = True
        self.name.observe(self._named, "value")
        self.clear = widgets.Button(description=CLEAR, tooltip=CLEAR_TITLE)
        self.clear.add_class("memlab-clear")
        self.clear.on_click(lambda _: self._clear())
        self._make_choices()
        body = widgets.HBox([self._table, self._buttons])
        body.add_class("memlab-table-body")
        self.box = widgets.VBox([self._bar(), body])
        self.box.add_class("memlab-table-box")
        self.show()

    def _make_choices(self) -> None:
        """Make the widgets that choose which rows are shown, and the link to the file."""
        self.order = widgets.Dropdown(options=ORDERS, description="Sort")
        self.order.tooltip = "which run is the first row"
        self.words = widgets.Text(description="Filter", placeholder="words of a row")
        self.words.tooltip = "show the rows that have all of these words, in any column"
        self.stopped = widgets.ToggleButton(description="0 stopped")
        self.stopped.tooltip = "show or hide the runs that were stopped"
        self.stopped.add_class("memlab-stopped")
        for choice in (self.order, self.words, self.stopped):
            choice.observe(lambda _: self.show(), "value")
        self._count, self._link = widgets.HTML(), widgets.HTML()
        self._count.add_class("memlab-count")

    def _bar(self) -> Any:
        bar = widgets.HBox(
            [self._count, self.order, self.words, self.stopped, self._link, self.name, self.clear]
        )
        bar.add_class("memlab-table-bar")
        return bar

    def show(self) -> None:
        """Show the runs of the log that are listed, and what the bar says of them."""
        with self._log.lock:
            self._show()

    def _show(self) -> None:
        visible = self._log.visible
        runs = listed(
            visible,
            words=self.words.value,
            order=self.order.value,
            stopped=self.stopped.value,
        )
        none = f"<p>{NO_ROW}</p>" if visible and not runs and self.words.value.strip() else ""
        self._write(self._table, table_html(runs, self._log.compared) + none)
        self._numbers[: len(runs)] = [run.number for run in runs]
        while len(self._toggles) < len(runs):
            self._toggles.append(self._new_toggles(len(self._toggles)))

        self._writer = threading.get_ident()
        try:
            for run, (pin, compare) in zip(runs, self._toggles, strict=False):
                self._show_toggles(run, pin, compare)
            self._show_name()
        finally:
            self._writer = None

        if len(self._buttons.children) != 1 + len(runs):
            self._buttons.children = [self._corner, *self._rows[: len(runs)]]
        self._show_bar(visible, len(runs))

    def close(self) -> None:
        """Close all rows, also those that are not shown at the moment."""
        self._buttons.children = [self._corner, *self._rows]

    def _show_bar(self, visible: list[Run], num_shown: int) -> None:
        of_all = "" if num_shown == len(visible) else f"{num_shown} of "
        heading = f"runs: {of_all}{len(visible)}" if visible else "runs"
        self._write(self._count, f'<div class="memlab-heading">{html.escape(heading)}</div>')
        self._write(self._link, link(self._log.runs))

        num_stopped = sum(run.is_stopped and not run.name for run in visible)
        self.stopped.description = f"{num_stopped} stopped"
        self.stopped.disabled = not num_stopped

        can_undo = self._log.can_undo_clear
        self.clear.description = UNDO if can_undo else CLEAR
        self.clear.tooltip = UNDO_TITLE if can_undo else CLEAR_TITLE
        self.clear.disabled = not can_undo and all(run.name for run in visible[:-1])

    def _new_toggles(self, row: int) -> tuple[Any, Any]:
        pin, compare = widgets.ToggleButton(), widgets.ToggleButton()
        pin.add_class("memlab-pin")
        compare.add_class("memlab-compare")
        pin.observe(lambda change: self._pinned(row, change), "value")
        compare.observe(lambda change: self._compared(row, change), "value")
        self._rows.append(widgets.HBox([pin, compare]))
        return pin, compare

    def _show_toggles(self, run: Run, pin: Any, compare: Any) -> None:
        # the page's style shows the first word alone; a screen reader reads the run too
        pin.description = f"{PIN} {run.default_name}"
        compare.description = f"{COMPARE} {run.default_name}"
        self._set(pin, bool(run.name))
        self._set(compare, self._log.compared == run.number)
        pin.tooltip = f"keep run {run.number} on the table and name it"
        compare.tooltip = f"draw run {run.number} as a line over what is on screen"
        compare.disabled = run.result.timeline is None

    def _show_name(self) -> None:
        run = self._named_run()
        self._named_number = run.number if run else 0
        self.name.disabled = run is None
        self.name.description = f"Name of run {run.number}" if run else "Name"
        self.name.placeholder = run.default_name if run else "pin a run to name it"
        self._set(self.name, run.own_name if run else "")

    def _named_run(self) -> Run | None:
        """Return the pinned run that the name box belongs to: the compared one, or the latest."""
        pinned = [run for run in self._log.visible if run.name]
        compared = [run for run in pinned if run.number == self._log.compared]
        return next(iter(compared or pinned[::-1]), None)

    def _set(self, widget: Any, value: Any) -> None:
        """Write a value, unless it was written before.

        What differs from it then is what a person has just pressed or typed, which the person's
        thread is about to take.
        """
        is_new = self._written.get(widget) != value
        self._written[widget] = value
        # a name that is being typed may end in a space
        is_there = (widget.value.strip() if isinstance(value, str) else widget.value) == value
        if is_new and not is_there:
            widget.value = value

    @property
    def _is_writing(self) -> bool:
        """Whether this thread, and so no person, has changed a widget."""
        return self._writer == threading.get_ident()

    def _pinned(self, row: int, change: Mapping[str, Any]) -> None:
        if self._is_writing:
            return
        number = self._numbers[row]  # before the lock is free: a new run moves the rows
        with self._log.lock:
            self._log.pin(number, self._log.runs[number - 1].default_name if change["new"] else "")
        self._update()

    def _compared(self, row: int, change: Mapping[str, Any]) -> None:
        if self._is_writing:
            return
        number = self._numbers[row]
        with self._log.lock:
            self._log.compared = number if change["new"] else 0
        self._update()

    def _named(self, change: Mapping[str, Any]) -> None:
        if self._is_writing or not (number := self._named_number):
            return
        with self._log.lock:
            name = change["new"].strip() or self._log.runs[number - 1].default_name
            self._log.change(number, name=name)
        self._update()

    def _clear(self) -> None:
        with self._log.lock:
            if self._log.can_undo_clear:
                self._log.undo_clear()
            else:
                self._log.clear()
        self._update()

    def _update(self) -> None:
        self.show()
        self._changed()

    @staticmethod
    def _write(widget: Any, content: str) -> None:
        if widget.value != content:  # what is on the page already is not sent again
            widget.value = content
