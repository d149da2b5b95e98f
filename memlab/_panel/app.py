"""`Panel`: the controls, the runs and the pictures together, and its interface for code.

Callbacks may run on any thread and during a running cell. So state is changed under a lock, no
callback waits for a measurement, and an exception in one becomes a sentence on the page.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import ipywidgets
import torch

from memlab._panel import asked as cells
from memlab._panel import catalog, choices, state
from memlab._panel.asked import Asked
from memlab._panel.page import Page
from memlab._panel.panel_state import Message, PanelState
from memlab._panel.run_page import RunView
from memlab._panel.runner import BaseEffect, Fitting, Runner
from memlab._panel.runs import History, Run, RunLog, count_runs
from memlab._panel.saved_page import (
    Still,
    as_document,
    divided_words,
    file_for,
    files_of,
    predicted_around,
    write,
)
from memlab._panel.step_view import StepView, view
from memlab._util.checks import anything, checked, of_type
from memlab._util.units import shown
from memlab.config import StepConfig
from memlab.errors import ConfigError, MemlabError
from memlab.prediction.run_result import RunResult
from memlab.result import StepResult
from memlab.runtime.isolation import prewarm
from memlab.store.frames import to_frame
from memlab.workload import Workload

if TYPE_CHECKING:
    import pandas as pd


def _workload_or_result(name: str, value: Any) -> Any:
    is_result = isinstance(value, StepResult | RunResult | str | os.PathLike)
    return value if is_result else of_type(name, value, Workload | None)


@overload
def panel(
    workload: Workload | None = None,
    *,
    device: str | torch.device | None = None,
    memory_limit: int | str | None = None,
    config: StepConfig | None = None,
) -> "Panel": ...
@overload
def panel(
    workload: StepResult | str | os.PathLike[str], *, memory_limit: int | str | None = None
) -> StepView: ...
@overload
def panel(workload: RunResult) -> RunView: ...
@checked(workload=_workload_or_result, memory_limit=anything)
def panel(
    workload: Workload | StepResult | RunResult | str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    memory_limit: int | str | None = None,
    config: StepConfig | None = None,
) -> "Panel | StepView | RunView":
    """Return the panel: sliders for one training step, the button Run, and what the step costs.

    Args:
        workload: what is trained; the zoo can be chosen beside it. None begins with "gpt-small".
            A `StepResult`, or the path of a file that `panel.save` or a command with `--json`
            wrote, is shown as it is, with nothing to run. So is the `RunResult` of a script.
        device: "cpu", "cuda"; None is the accelerator if there is one, else the CPU. Also a card
            that is not here ("h200", "rtx-4090") or its memory ("24GiB"), for which all is
            predicted.
        memory_limit: bytes, or text such as "2GiB", with which the peak of the step is compared.
            None is what the device can hold: a card's memory, or this machine's for a CPU.
        config: the first values of the controls.

    Raises:
        MemlabError: an argument is not allowed; the message names it and what is allowed.

    In JupyterLab the panel of a cell comes back, with its runs and with the settings that the
    arguments do not name, when the cell runs again, also after a restart of the kernel.

    In a notebook, `memlab.panel(workload)` as the last line of a cell shows it. From code:

    >>> shown = panel(device="t4", config=StepConfig(batch_size=8))
    >>> shown.set(batch_size=16)
    >>> shown.config.batch_size
    16
    >>> shown.close()

    A result alone, such as one that was measured elsewhere:

    >>> import memlab
    >>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
    >>> panel(memlab.recorded(workload, StepConfig(batch_size=4), "amd-epyc"), memory_limit="1GiB")
    <memlab view of gpt-small on amd-epyc, recorded, batch_size=4: ok (recorded), peak 36.6 MiB \
allocated, 24.7 ms a step>
    """
    if isinstance(workload, StepResult | RunResult | str | os.PathLike):
        unused: dict[str, Any] = {"device": device, "config": config}
        if isinstance(workload, RunResult):
            unused["memory_limit"] = memory_limit
        for name, value in unused.items():
            if value is not None:
                raise ConfigError(f"{name}={shown(value)} has no effect on a result: leave it out")
        if isinstance(workload, RunResult):
            return RunView(result=workload)
        return view(workload, memory_limit)
    made = Panel(workload, device=device, memory_limit=memory_limit, config=config)
    cells.replace_former(made)
    return made


class Panel:
    """A live panel. Show it by making it the last line of a cell.

    Attributes:
        result: the `StepResult` of the last run or kept prediction, or None.
        prediction: the predicted `StepResult` of what is on screen, or None.
        results: a pandas frame of all runs and kept predictions, cleared ones included.
        config: the `StepConfig` on screen.
        workload: the `Workload` on screen.
    """

    def __init__(
        self,
        workload: Workload | None = None,
        *,
        device: str | torch.device | None = None,
        memory_limit: int | str | None = None,
        config: StepConfig | None = None,
    ) -> None:
        workloads = choices.offered_workloads(workload)
        self._history = History(cells.place())
        self._log = RunLog(self._history.runs(), self._history.note_run, self._history.note_changes)
        name = choices.name_of(device)
        fields = {
            "workload": next(iter(workloads)),
            "choices": None,
            "sample_size": None,
            "device": name,
            "memory_limit": choices.limit_text(memory_limit) or None,
            "check_gradients": False,
            **state.from_config(config or StepConfig()),
        }
        self._told = PanelState(self._hear, catalog=catalog.catalog(workloads, name))
        self._asked = Asked(fields, workloads, self, self._changed)
        self._page = Page(self._told, self._asked, self._log, workloads, self._looked_up)
        self._runner = Runner(self._asked, self._log, self._page)
        self._fitting = Fitting(self._asked, self._page)
        self._base = BaseEffect(self._asked, self._page)
        self._still = Still(self._asked, self._page, self._log, self._told.still)
        self._told.saved = self._still.payload
        prewarm()
        self._come_back(workload=workload, device=device, memory_limit=memory_limit, config=config)
        self._page.change_runs()
        self._page.show_runs()

    def _come_back(self, **asked: object) -> None:
        """Show the settings that the panel of this cell had last, but those that the code names."""
        named = {name for name, value in asked.items() if value is not None}
        named |= set(state.FIELDS) if "config" in named else set()
        if settings := self._asked.not_named(self._history.settings, named):
            with contextlib.suppress(MemlabError):  # they may not be allowed any more
                self.set(**settings)

    # what code may ask

    @property
    def workload(self) -> Workload:
        """The workload on screen, in the sample size on screen.

        Raises:
            WorkloadError: it cannot have that size; the message is the sentence on the page.
        """
        return self._asked.workload

    @property
    def config(self) -> StepConfig:
        """The settings on screen.

        Raises:
            ConfigError: they are not allowed; the message is the sentence on the page.
        """
        return self._asked.config

    @property
    def result(self) -> StepResult | None:
        """The result of the last run, or of a prediction kept since; None before the first.

        Runs of an earlier panel of the same cell do not count.
        """
        own = self._log.own
        return own[-1].result if own else None

    @property
    def prediction(self) -> StepResult | None:
        """The prediction for the settings on screen; None while there is none.

        Its message says whether it was interpolated from a prediction of other batch sizes.
        """
        question = self._asked.question
        limit = self._asked.limit
        estimate = self._page.forecasts.look(question, limit) if question else None
        return estimate.result if estimate else None

    @property
    def results(self) -> "pd.DataFrame":
        """One row for every run and kept prediction, cleared ones included; see `source`.

        `is_earlier` says which are of an earlier panel of the same cell.
        """
        runs = self._log.runs
        frame = to_frame(run.result for run in runs)
        return frame.assign(is_earlier=[run.is_earlier for run in runs])

    @property
    def widget(self) -> PanelState:
        """The panel as one anywidget, for notebooks that ask for that: `mo.ui.anywidget(...)`."""
        return self._told

    def code(self) -> str:
        """Return Python source that measures what is on screen, or predicts it for another card.

        Raises:
            ConfigError: the settings on screen are not allowed.
        """
        return self._asked.source()

    def set(self, **fields: Any) -> None:
        """Set controls from code, as if they were moved by hand.

        Args:
            **fields: fields of `StepConfig` that have a control, `workload` (a name of the list),
                `choices` (a dict by name, such as {"rank": 32}) and `sample_size` (None for those
                of the workload itself), `device`, `memory_limit` (None for what the device can
                hold) and `check_gradients`.

        Raises:
            MemlabError: a name or a value is not allowed, or the panel is closed; nothing is
                changed.
        """
        if self._page.closed:
            raise ConfigError("this panel is closed; make a new one with memlab.panel(...)")

        state.check_names(fields)
        settings = {name: fields[name] for name in state.FIELDS if name in fields}
        if settings:
            config = state.to_config({**self._asked.of_step, **settings})
            settings = {k: v for k, v in state.from_config(config).items() if k in settings}

        others = {name: fields[name] for name in state.OTHER_FIELDS if name in fields}
        others = choices.checked(others, list(self._asked.names))
        self._asked.check_form(others)
        self._page.change({**others, **settings})
        self._of_settings()

    def run(self, **fields: Any) -> StepResult:
        """Set controls, measure what is on screen, wait for it and return the result.

        Args:
            **fields: as for `set`.

        Raises:
            MemlabError: an argument is not allowed, or a run is in progress, or the device is a
                card that is not here, whose prediction `keep` puts on the table. A failure of the
                step itself is an `outcome` of the result.
        """
        self.set(**fields)
        try:
            return self._runner.run()
        finally:
            self._still.renew_now()

    def keep(self, **fields: Any) -> StepResult:
        """Set controls, put the prediction of what is on screen on the table, and return it.

        For a card that is not here, the button *Keep this prediction* does the same. This waits
        for the exact prediction; what cannot be predicted, or does not fit, is kept too.

        Args:
            **fields: as for `set`.

        Raises:
            MemlabError: an argument is not allowed, or the panel is closed meanwhile.
        """
        self.set(**fields)
        wish = self._page.keep()
        wish.is_over.wait()
        if wish.result is None:
            raise ConfigError("not kept: the panel was closed, or its status line says why")
        self._still.renew_now()
        return wish.result

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the step on screen as one HTML file that works without a kernel; return its path.

        In it batch size, accumulation and memory budget can be moved as far as a few predictions
        cover them, which are made for it first; the other settings stay as they are. The file asks
        no other host for anything.

        Args:
            path: of the file, which is replaced if it exists.

        Raises:
            MemlabError: the settings are not allowed, the step cannot be predicted, or the file
                cannot be written; the message says why.
        """
        file = file_for(path)
        config, device = self.config, choices.name_of(self._asked.device)
        # looking at the workload waits for a run that is measured meanwhile
        known = self._page.knows_division
        divided = self._page.divided if known else divided_words(self.workload)
        predictions = predicted_around(self.workload, config, device)
        files, first = files_of(self.workload, predictions), predictions[0].result
        payload = self._still.payload_with(files, first.number_format, divided)
        write(file, as_document(payload, self._still.of(first)))
        return file

    def close(self) -> None:
        """Stop a run that is in progress, and remove the panel from the page and from memory."""
        self._page.close()
        self._still.close()
        self._history.close()
        _keep_one_open()
        for part in (self._told.layout, self._told):
            part.close()

    def __repr__(self) -> str:
        """Return one line."""
        return f"<memlab panel, {count_runs(len(self._log.runs))}, last: {self.result}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Return the widget, and beside it the step and its runs for pages without a kernel."""
        widget = {} if self._page.closed else _bundle(self._told)
        return {**widget, "text/plain": repr(self), "text/html": self._still.html()}

    def _ipython_display_(self) -> None:
        """Show the widget, and in a separate output the part that a saved notebook keeps.

        That second output is renewed as more is known; the stylesheet hides it beside a live panel.
        """
        if not self._page.closed:
            cells.show({**_bundle(self._told), "text/plain": repr(self)})
        self._still.show({"text/plain": repr(self)}, cells.show)

    def _looked_up(self) -> None:
        """Keep what is on screen, and renew what a saved notebook shows."""
        if self._asked.question is not None:
            self._history.note_settings(self._asked.to_keep)
        self._still.renew()

    def _changed(self) -> None:
        self._page.refresh()
        self._of_settings()

    def _of_settings(self) -> None:
        self._fitting.refresh()
        self._base.refresh()

    def _hear(self, message: Message) -> None:
        """Do what a person has asked for on the page. What was set before it comes with it."""
        with self._page.guarded():
            if self._page.closed:
                return
            if fields := message.get("fields"):
                self._take(message, fields)
            said: Mapping[str, Callable[[], None]] = {
                "set": lambda: None,  # it is taken by now
                "run": self._runner.start,
                "stop": self._runner.stop,
                "fit": self._fitting.start,
                "compareBase": self._base.start,
                "use": lambda: self._use(message["pane"], message["at"]),
                "open": lambda: self._open(message),
                "pin": lambda: self._pin(message["run"], message["name"]),
                "compare": lambda: self._compare(message["run"]),
                "clear": lambda: self._change_runs(self._log.clear),
                "undoClear": lambda: self._change_runs(self._log.undo_clear),
                "need": lambda: self._page.send(
                    message.get("steps", ()), message.get("runs", ()), csv=bool(message.get("csv"))
                ),
            }
            kind = str(message.get("type"))
            if kind not in said:
                raise ConfigError(f"the page asks for {shown(kind)}, which is unknown: reload it")
            said[kind]()

    def _take(self, message: Message, fields: Mapping[str, Any]) -> None:
        """Set what a page has changed; one that is refused shows again what is set."""
        by, move = str(message["by"]), int(message["move"])
        try:
            with self._page.lock:
                self._page.moved(by, move)
                self._asked.take(fields)
        finally:
            self._changed()

    def _use(self, pane: str, at: int) -> None:
        (self._fitting if pane == "fit" else self._base).use(at)
        self._of_settings()

    def _open(self, message: Message) -> None:
        was_open, by = self._page.panes.is_open("base"), str(message["by"])
        if message.get("begins"):
            self._page.panes.begin(by)
            return
        self._page.panes.open(by, message["panes"])
        self._page.refresh()
        if self._page.panes.is_open("base") and not was_open:
            self._base.start()

    def _pin(self, number: int, name: str | None) -> None:
        """Pin a run under a name, "" for its number; None unpins it."""
        run = self._run(number)
        given = "" if name is None else str(name) or run.default_name
        self._change_runs(lambda: self._log.change(run.number, name=given))

    def _run(self, number: Any) -> Run:
        found = [run for run in self._log.runs if run.number == number]
        if not found:
            raise ConfigError(f"this panel has no run {shown(number)}")
        return found[0]

    def _compare(self, number: int) -> None:
        compared = self._run(number).number if number else 0

        def compare() -> None:
            self._log.compared = compared

        self._change_runs(compare)

    def _change_runs(self, change: Callable[[], None]) -> None:
        with self._page.lock:
            change()
        self._page.change_runs()


def _bundle(told: PanelState) -> dict[str, Any]:
    """Return how the widget is shown."""
    data, _ = told._repr_mimebundle_() or ({}, {})
    return dict(data)


@functools.cache
def _keep_one_open() -> Any:
    """Keep a widget open for as long as the kernel lives.

    JupyterLab ends the kernel's subshell for widgets when the last of them closes. A widget that
    opens at that moment may still send its messages there, so that nobody ever reads them.
    """
    return ipywidgets.Layout()
