"""`Panel`: the controls, the runs and the pictures together, and its interface for code.

Callbacks may run on any thread and during a running cell. So state is changed under a lock, no
callback waits for a measurement, and an exception in one becomes a sentence on the page.
"""

import base64
import contextlib
import html
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memlab import plots
from memlab._panel import asked as cells
from memlab._panel import choices, state
from memlab._panel.asked import Asked
from memlab._panel.job import Settling
from memlab._panel.page import Page
from memlab._panel.pictures import Scene
from memlab._panel.runner import BaseEffect, Fitting, Runner
from memlab._panel.runs import History, Run, RunLog, count_runs
from memlab._panel.saved_page import (
    SavedStep,
    as_document,
    divided_words,
    file_for,
    payload_of,
    predicted_around,
    write,
)
from memlab._panel.state import describe
from memlab._panel.table import table_html
from memlab._panel.texts import SCRIPT
from memlab._panel.view import BasePane, FitPane, View
from memlab._util.checks import anything, checked
from memlab.config import StepConfig
from memlab.errors import ConfigError, MemlabError
from memlab.result import StepResult
from memlab.runtime.isolation import prewarm
from memlab.store.frames import to_frame
from memlab.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

# The panel without widgets: a table and a picture for saved notebooks, where no kernel runs.

EMPTY = "memlab panel: no run yet. With a kernel, run this cell and press Run."
PICTURE_SIZE = (9.0, 4.0)


def still_of(log: RunLog, shown: Run | None, limit_bytes: int | None) -> dict[str, str]:
    """Return the table of runs and the picture of one of them, by MIME type."""
    picture = as_png(shown, log.comparison(shown), limit_bytes)
    made = {"text/html": as_html(log.visible, shown, picture)}
    return made | ({"image/png": as_text(picture)} if picture else {})


def as_html(runs: Sequence[Run], shown: Run | None, picture: bytes | None) -> str:
    """Return the table of runs and the timeline of the shown one as a page needs them."""
    if shown is None:
        return f'<div class="memlab-still"><p>{html.escape(EMPTY)}</p></div>{SCRIPT}'

    result = shown.result
    where = f"predicted for {result.device}" if shown.is_predicted else f"on {result.device}"
    title = f"{result.workload_name}, {where}: {describe(result)}"
    image = ""
    if picture:
        source = f"data:image/png;base64,{as_text(picture)}"
        image = f'<img alt="{html.escape(str(result))}" src="{source}">'

    said = f"<p>{html.escape(result.message)}</p>"
    inside = f"<p><b>{html.escape(title)}</b></p>{said}{image}{table_html(runs[::-1])}"
    return f'<div class="memlab-still">{inside}</div>{SCRIPT}'


def as_png(shown: Run | None, comparison: Run | None, limit_bytes: int | None) -> bytes | None:
    """Return the timeline of the shown run, over its prediction if there is one."""
    if shown is None:
        return None

    scene = Scene(
        predicted=shown.prediction,
        shown=shown,
        comparison=comparison,
        runs=(),
        limit_bytes=limit_bytes,
    )
    return plots.to_png(scene.timeline(PICTURE_SIZE))


def as_text(picture: bytes) -> str:
    """Return a picture as notebooks store it."""
    return base64.b64encode(picture).decode()


@checked(memory_limit=anything)
def panel(
    workload: Workload | None = None,
    *,
    device: str | torch.device | None = None,
    memory_limit: int | str | None = None,
    config: StepConfig | None = None,
) -> "Panel":
    """Return the panel: sliders for one training step, the button Run, and what the step costs.

    Args:
        workload: what is trained; the zoo can be chosen beside it. None begins with "gpt-small".
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
    """
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
        self._settling, self._settings = Settling(), dict[str, Any]()
        self._saved: cells.Shown | None = None
        self._saved_shown: list[tuple[object, ...]] = []
        asked_device, device = device, choices.name_of(device)
        self._view = View(
            workload_names=list(workloads),
            devices=choices.devices(device),
            device=device,
            memory_limit=choices.limit_text(memory_limit),
            settings=state.from_config(config or StepConfig()),
            log=self._log,
            changed=self._changed,
            run=partial(self._run_pressed, typed=False),
            entered=partial(self._run_pressed, typed=True),
            stop=self._stop_clicked,
            fit=FitPane(self._fit_clicked, self._undo_clicked, self._use_clicked),
            base=BasePane(self._base_asked, self._base_used),
        )

        self._asked = Asked(self._view, workloads, self, self._changed)
        self._page = Page(self._view, self._asked, self._log, workloads, self._renew_saved)
        self._runner = Runner(self._view, self._asked, self._log, self._page)
        self._fitting = Fitting(self._view, self._asked, self._page)
        self._base = BaseEffect(self._view, self._asked, self._page)
        prewarm()
        self._come_back(
            workload=workload, device=asked_device, memory_limit=memory_limit, config=config
        )
        self._page.refresh()
        self._base.refresh()
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
            config = state.to_config({**self._view.controls.settings(), **settings})
            settings = {k: v for k, v in state.from_config(config).items() if k in settings}

        others = {name: fields[name] for name in state.OTHER_FIELDS if name in fields}
        others = choices.checked(others, list(self._view.workload.options))
        self._asked.check_form(others)
        self._asked.set(others)
        self._view.controls.set(settings)

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
        return self._runner.run()

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
        shown = SavedStep(
            workload=self.workload,
            device=device,
            config=config,
            limit=self._view.limit.value,
            usable_bytes=self._asked.capacity,
            divided=divided_words(self.workload),
            code=self.code(),
        )
        predictions = predicted_around(self.workload, config, device)
        write(file, as_document(payload_of(shown, predictions), str(predictions[0].result)))
        return file

    def close(self) -> None:
        """Stop a run that is in progress, and remove every widget from the page and from memory."""
        self._settling.close()
        self._page.close()
        self._history.close()

    def __repr__(self) -> str:
        """Return one line."""
        return f"<memlab panel, {count_runs(len(self._log.runs))}, last: {self.result}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Return the widgets, and beside them a table and a picture for pages without a kernel."""
        widgets = {} if self._page.closed else self._view.mimebundle()
        return {**widgets, **self._still()}

    def _ipython_display_(self) -> None:
        """Show the widgets, and in a separate output the part that a saved notebook keeps.

        That second output is renewed after each run; the stylesheet hides it beside a live panel.
        """
        if not self._page.closed:
            cells.show({**self._view.mimebundle(), "text/plain": repr(self)})
        self._saved = cells.show(self._still())

    def _still(self) -> dict[str, Any]:
        """Return the last run as a table and a picture."""
        still = still_of(self._log, self._page.outlook().last, self._asked.limit)
        return {"text/plain": repr(self), **still}

    def _renew_saved(self) -> None:
        """Keep what is on screen, and show the last run in the output that is saved, if changed."""
        if self._asked.question is not None:
            self._history.note_settings(self._asked.to_keep)
        shown: list[tuple[object, ...]] = [
            (run.number, run.name, run.report, run.prediction) for run in self._log.visible
        ]
        if self._saved and shown and self._saved_shown != shown:
            self._saved_shown = shown
            self._saved.update(self._still(), raw=True)

    def _changed(self) -> None:
        begin, settings = time.monotonic(), self._asked.settings
        is_new = settings != self._settings
        self._page.refresh()
        self._fitting.refresh()
        self._base.refresh()
        if is_new:
            self._settings = settings
            self._settling.note(time.monotonic() - begin)

    def _run_pressed(self, *, typed: bool) -> None:
        self._when_settled(self._runner.start, typed=typed)

    def _when_settled(self, start: Callable[[], None], *, typed: bool = False) -> None:
        def call() -> None:
            self._settling.call(start, typed=typed)

        cells.after_main_thread(call, self._settling.patience_seconds)

    def _stop_clicked(self) -> None:
        self._runner.stop()

    def _fit_clicked(self) -> None:
        self._when_settled(self._fitting.start)

    def _undo_clicked(self) -> None:
        self._fitting.undo()

    def _use_clicked(self, at: int) -> None:
        self._fitting.use(at)

    def _base_asked(self) -> None:
        self._when_settled(self._base.start)

    def _base_used(self, at: int) -> None:
        self._base.use(at)
