"""The table of runs with its buttons: pin, compare, clear. The rows themselves are in `runs.py`."""

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets

from memlab._panel.runs import Run, RunLog, table_html


class Table:
    """An HTML table, and beside each of its rows two toggles of the same height.

    Args:
        log: the runs; pin and clear change it.
        changed: called after a pin, a comparison or a clear.
    """

    def __init__(self, log: RunLog, changed: Callable[[], None]) -> None:
        self._log, self._changed, self._quiet = log, changed, False
        self._table = widgets.HTML(table_html([]))
        self._table.add_class("memlab-table")
        self._toggles: list[tuple[Any, Any]] = []  # pin and compare of row i, grown as needed
        self._rows: list[Any] = []  # the boxes that hold them
        self._numbers: list[int] = []  # the run that row i shows
        self._buttons = widgets.VBox([])
        self._buttons.add_class("memlab-row-buttons")
        self.name = widgets.Text(description="Name", placeholder="pin a run to name it")
        self.name.add_class("memlab-name")
        self.name.disabled = True
        self.name.observe(self._named, "value")
        self.clear = widgets.Button(description="clear", tooltip="take unpinned runs off the table")
        self.clear.on_click(lambda _: self._clear())
        heading = widgets.HTML('<div class="memlab-heading">runs</div>')
        bar = widgets.HBox([heading, self.name, self.clear])
        bar.add_class("memlab-table-bar")
        body = widgets.HBox([self._table, self._buttons])
        body.add_class("memlab-table-body")
        self.box = widgets.VBox([bar, body])
        self.box.add_class("memlab-table-box")
        self.show()

    def show(self) -> None:
        """Show the runs of the log, newest first."""
        runs = list(reversed(self._log.visible))
        self._table.value = table_html(runs[::-1], self._log.compared)
        self._numbers = [run.number for run in runs]
        while len(self._toggles) < len(runs):
            self._toggles.append(self._new_toggles(len(self._toggles)))

        self._quiet = True
        try:
            for run, (pin, compare) in zip(runs, self._toggles, strict=False):
                self._show_toggles(run, pin, compare)
            self._show_name()
        finally:
            self._quiet = False

        if len(self._buttons.children) != len(runs):
            self._buttons.children = self._rows[: len(runs)]

        self.clear.disabled = not any(not run.name for run in runs[1:])

    def close(self) -> None:
        """Close all rows, also those that are not shown at the moment."""
        self._buttons.children = self._rows

    def _new_toggles(self, row: int) -> tuple[Any, Any]:
        pin, compare = widgets.ToggleButton(description="pin"), widgets.ToggleButton()
        compare.description = "compare"
        pin.observe(lambda change: self._pinned(row, change), "value")
        compare.observe(lambda change: self._compared(row, change), "value")
        self._rows.append(widgets.HBox([pin, compare]))
        return pin, compare

    def _show_toggles(self, run: Run, pin: Any, compare: Any) -> None:
        pin.value, compare.value = bool(run.name), self._log.compared == run.number
        pin.tooltip = f"keep run {run.number} on the table and name it"
        compare.tooltip = f"draw the last run against run {run.number}"
        compare.disabled = run.result.timeline is None

    def _show_name(self) -> None:
        run = self._named_run()
        self.name.disabled = run is None
        self.name.description = f"Name of run {run.number}" if run else "Name"
        self.name.placeholder = run.default_name if run else "pin a run to name it"
        # a person who is typing a name may have just typed a space
        if self.name.value.strip() != (name := run.own_name if run else ""):
            self.name.value = name

    def _named_run(self) -> Run | None:
        """Return the pinned run that the name box belongs to: the compared one, or the latest."""
        pinned = [run for run in self._log.visible if run.name]
        compared = [run for run in pinned if run.number == self._log.compared]
        return next(iter(compared or pinned[::-1]), None)

    def _pinned(self, row: int, change: Mapping[str, Any]) -> None:
        if not self._quiet:
            number = self._numbers[row]
            self._log.pin(number, self._log.runs[number - 1].default_name if change["new"] else "")
            self._update()

    def _compared(self, row: int, change: Mapping[str, Any]) -> None:
        if not self._quiet:
            self._log.compared = self._numbers[row] if change["new"] else 0
            self._update()

    def _named(self, change: Mapping[str, Any]) -> None:
        run = self._named_run()
        if not self._quiet and run:
            self._log.change(run.number, name=change["new"].strip() or run.default_name)
            self._update()

    def _clear(self) -> None:
        self._log.clear()
        self._update()

    def _update(self) -> None:
        self.show()
        self._changed()
