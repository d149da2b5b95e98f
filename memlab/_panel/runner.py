"""`Runner`: measures what is on screen, for the button Run in a thread and for code in its cell."""

import threading

from memlab._panel import choices, verdicts
from memlab._panel.asked import Asked
from memlab._panel.job import PanelJob
from memlab._panel.outlook import MAKING, with_numbers
from memlab._panel.page import Page
from memlab._panel.questions import Question
from memlab._panel.runs import Run, RunLog
from memlab._panel.view import View
from memlab.devices.here import resolve_device
from memlab.errors import ConfigError, DeviceError, MemlabError
from memlab.records.recorded import is_recorded
from memlab.result import StepResult
from memlab.verifying.report import VerifyReport
from memlab.worker.isolation import prewarm

GOING_ON = "a run, a search or a comparison of this panel is going on"


class Runner:
    """Starts and stops the runs of a panel, of which there is one at a time.

    Args:
        view: of the panel.
        asked: reads what is on screen.
        log: takes the results.
        page: shows them.
    """

    def __init__(self, view: View, asked: Asked, log: RunLog, page: Page) -> None:
        self._view, self._asked, self._log, self._page = view, asked, log, page

    def start(self) -> None:
        """Measure what is on screen in a thread, or keep its prediction for a device elsewhere.

        What cannot be run, or not yet, is said on the page.
        """
        with self._page.guarded():
            if self._page.closed:
                return
            if self._asked.is_being_made:
                self._page.say(f"{MAKING}; press Run again once it is made")
            elif not self._asked.can_run:
                self._page.keep()
            elif job := self._begin():
                threading.Thread(target=self._work, args=(job,), daemon=True).start()
            else:
                self._page.say(f"{GOING_ON}; press Run again once it has ended")

    def stop(self) -> None:
        """Stop the run that goes on."""
        with self._page.guarded(), self._page.lock:
            if self._page.job:
                self._page.job.cancel.set()
                self._page.say("stopping", lasts=True)

    def run(self) -> StepResult:
        """Measure what is on screen, wait for it and return the result.

        Raises:
            MemlabError: as `Panel.run`.
        """
        job = self._begin(by_cell=True)
        if job is None:
            raise ConfigError(f"{GOING_ON}; press Stop, or wait for its end")

        try:
            run = self._measure(job)
        except MemlabError as error:
            self._page.show_error(error)
            raise
        except KeyboardInterrupt:
            self._page.say("interrupted", verdicts.OPEN)
            self._view.show_progress(0.0)
            raise
        finally:
            self._end(job)

        return run.result

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
        if not self._asked.can_run:
            name = choices.name_of(device)
            raise DeviceError(f"{name} is not in this machine; panel.keep() keeps its prediction")

        workload = self._asked.workload  # which may have to be made
        with page.lock:
            if page.job is not None:
                return None

            job = PanelJob(
                workload=workload,
                config=self._asked.config,
                device=device if is_recorded(device) else str(resolve_device(device)),
                memory_limit=self._asked.typed_limit,
                limit_bytes=self._asked.limit,
                check_gradients=self._view.check.value,
                by_cell=by_cell,
            )
            page.begin(job)
            page.forecasts.hold(True)
            page.show_ready(True)
            self._view.show_progress(0.0)
            return job

    def _measure(self, job: PanelJob) -> Run:
        run: list[Run] = []

        def measured(result: StepResult) -> None:
            question = Question(result.workload_name, result.config, result.device)
            estimate = self._page.forecasts.look(question, result.memory_limit_bytes)
            with self._page.lock:
                # only an exact one: the others are asked for, and taken when they arrive
                exact = estimate.result if estimate and estimate.exact else None
                prediction = with_numbers(exact)
                run.append(self._log.add(result, prediction, job.limit_bytes))

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
