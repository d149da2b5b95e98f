"""The table of runs with its buttons: sort, filter, pin, compare, clear, and a link to a CSV file.

The rows themselves are in `rows.py`, the file is in `csv_link.py`.
"""

import html
import threading
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets

from memlab._panel import csv_link
from memlab._panel.rows import ORDERS, listed, table_html
from memlab._panel.runs import Run, RunLog

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
        self._write(self._link, csv_link.link(self._log.runs))

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
