"""`Panel`: the controls, the runs and the pictures together, and its interface for code.

Callbacks may run on any thread and during a running cell. So state is changed under a lock, no
callback waits for a measurement, and an exception in one becomes a sentence on the page.
"""

import threading
from typing import TYPE_CHECKING, Any

import torch

from memlab._panel import cells, choices, snapshot, state, verdicts
from memlab._panel.asked import Asked
from memlab._panel.forecasts import Question
from memlab._panel.job import PanelJob
from memlab._panel.outlook import with_numbers
from memlab._panel.page import Page
from memlab._panel.runs import Run, RunLog, count_runs
from memlab._panel.view import View
from memlab.api import to_frame
from memlab.arguments.checks import anything, checked
from memlab.config import StepConfig
from memlab.devices.here import resolve_device
from memlab.errors import ConfigError, MemlabError
from memlab.records.recorded import is_recorded
from memlab.result import StepResult
from memlab.verifying.report import VerifyReport
from memlab.worker.isolation import prewarm
from memlab.workload import Workload

if TYPE_CHECKING:
    import pandas as pd


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
        config: the first values of the controls.

    Raises:
        MemlabError: an argument is not allowed; the message names it and what is allowed.

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
        result: the `StepResult` of the last run, or None.
        prediction: the predicted `StepResult` of what is on screen, or None.
        results: a pandas frame of all runs, cleared ones included.
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
        self._log = RunLog()
        self._saved: cells.Shown | None = None
        self._saved_shown: list[tuple[object, ...]] = []
        device = choices.name_of(device)
        self._view = View(
            workload_names=list(workloads),
            devices=choices.devices(device),
            device=device,
            memory_limit=choices.limit_text(memory_limit) or choices.default_limit(device),
            settings=state.from_config(config or StepConfig()),
            log=self._log,
            changed=lambda: self._page.refresh(),
            run=self._run_clicked,
            stop=self._stop_clicked,
        )

        self._asked = Asked(self._view, workloads, device)
        self._page = Page(self._view, self._asked, self._log, workloads, self._renew_saved)
        prewarm()
        self._page.refresh()

    # what code may ask

    @property
    def workload(self) -> Workload:
        """The workload on screen."""
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
        """The result of the last run; None before the first."""
        return self._log.last.result if self._log.last else None

    @property
    def prediction(self) -> StepResult | None:
        """The prediction for the settings on screen; None while there is none.

        Its message says whether it was interpolated from a prediction of other batch sizes.
        """
        question = self._asked.question
        limit = self._asked.limit_or_none
        estimate = self._page.forecasts.look(question, limit) if question else None
        return estimate.result if estimate else None

    @property
    def results(self) -> "pd.DataFrame":
        """One row for every run since the panel was made, cleared ones included."""
        return to_frame(run.result for run in self._log.runs)

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
                `device`, `memory_limit` (None for none) and `check_gradients`.

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

        others = {name: fields[name] for name in state.HEADER_FIELDS if name in fields}
        self._asked.set(choices.checked(others, list(self._view.workload.options)))
        self._view.controls.set(settings)

    def run(self, **fields: Any) -> StepResult:
        """Set controls, measure what is on screen, wait for it and return the result.

        Args:
            **fields: as for `set`.

        Raises:
            MemlabError: an argument is not allowed, or a run is in progress. A failure of the step
                itself is an `outcome` of the result.
        """
        self.set(**fields)
        job = self._begin(by_cell=True)
        if job is None:
            raise ConfigError("a run of this panel is going on; press Stop, or wait for its end")

        try:
            run = self._measure(job)
        except MemlabError as error:
            self._page.show_error(error)
            raise
        except KeyboardInterrupt:
            self._view.say("interrupted", verdicts.OPEN)
            self._view.show_progress(0.0)
            raise
        finally:
            self._end(job)

        return run.result

    def close(self) -> None:
        """Stop a run that is in progress, and remove every widget from the page and from memory."""
        self._page.close()

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
        still = snapshot.still(self._log, self._page.outlook().last, self._asked.limit_or_none)
        return {"text/plain": repr(self), **still}

    def _renew_saved(self) -> None:
        """Show the last run in the output that a saved notebook keeps, if that has changed."""
        shown: list[tuple[object, ...]] = [
            (run.number, run.name, run.report, run.prediction) for run in self._log.visible
        ]
        if self._saved and shown and self._saved_shown != shown:
            self._saved_shown = shown
            self._saved.update(self._still(), raw=True)

    # a run

    def _run_clicked(self) -> None:
        with self._page.guarded():
            job = self._begin()
            if job is not None:
                threading.Thread(target=self._work, args=(job,), daemon=True).start()

    def _stop_clicked(self) -> None:
        with self._page.guarded(), self._page.lock:
            if self._page.job:
                self._page.job.cancel.set()
                self._view.say("stopping")

    def _work(self, job: PanelJob) -> None:
        try:
            with self._page.guarded():
                self._measure(job)
        finally:
            self._end(job)

    def _begin(self, *, by_cell: bool = False) -> PanelJob | None:
        """Return the job of what is on screen, or None while another one runs.

        Raises:
            MemlabError: the settings on screen are not allowed, or the device is not here.
        """
        page, device = self._page, self._asked.device
        with page.lock:
            if page.job is not None:
                return None

            page.job = PanelJob(
                workload=self.workload,
                config=self.config,
                device=device if is_recorded(device) else str(resolve_device(device)),
                memory_limit=self._asked.limit,
                check_gradients=self._view.check.value,
                by_cell=by_cell,
            )
            page.forecasts.hold(True)
            page.show_ready(True)
            self._view.show_progress(0.0)
            return page.job

    def _measure(self, job: PanelJob) -> Run:
        run: list[Run] = []

        def measured(result: StepResult) -> None:
            question = Question(result.workload_name, result.config, result.device)
            estimate = self._page.forecasts.look(question, result.memory_limit_bytes)
            with self._page.lock:
                prediction = with_numbers(estimate.result if estimate else None)
                run.append(self._log.add(result, prediction))

            self._page.forecasts.doubt(result)
            self._page.show_runs()

        def checked(report: VerifyReport) -> None:
            with self._page.lock:
                self._log.change(run[0].number, report=report)
            self._page.show_runs()

        job.run(self._page.tell, measured, checked)
        return run[0]

    def _end(self, job: PanelJob) -> None:
        with self._page.lock:
            if self._page.job is job:
                self._page.job = None
        self._page.forecasts.hold(False)
        self._page.refresh()
        prewarm()  # if this run stopped its worker, the next one does not wait for another
