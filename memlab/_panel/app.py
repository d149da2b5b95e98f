"""`Panel`: the controls, the runs and the pictures together, and what code may ask of them.

Callbacks may come on any thread and beside a running cell, so state is changed under a lock, no
callback waits for a measurement, and what one raises becomes a sentence on the page.
"""

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memlab._inspect import WorkloadFacts
from memlab._isolation import prewarm
from memlab._panel import cells, choices, snapshot, state, style, texts, verdicts
from memlab._panel.asked import Asked
from memlab._panel.forecasts import Estimate, Forecasts, Question
from memlab._panel.job import Job, Latest
from memlab._panel.outlook import Outlook, outlook, with_numbers
from memlab._panel.runs import Run, RunLog, count_runs
from memlab._panel.view import View
from memlab._running import Progress
from memlab._verify import VerifyReport
from memlab.api import inspect_workload, to_frame
from memlab.config import StepConfig
from memlab.errors import ConfigError, MemlabError
from memlab.memory import cards
from memlab.memory.devices import resolve_device
from memlab.result import Outcome, StepResult
from memlab.workload import Workload

if TYPE_CHECKING:
    import pandas as pd


def panel(
    workload: Workload | None = None,
    *,
    device: str | torch.device | None = None,
    memory_limit: int | str | None = None,
    config: StepConfig | None = None,
) -> "Panel":
    """Return the panel: sliders for one training step, Run, and what it cost.

    Args:
        workload: what is trained; the zoo can be chosen beside it. None begins with "gpt-small".
        device: "cpu", "cuda"; None is the accelerator if there is one, else the CPU. Also a card
            that is not here ("h200", "rtx-4090") or its memory ("24GiB"), for which all is
            predicted.
        memory_limit: bytes, or text such as "2GiB", to hold the step against.
        config: where the controls begin.

    Raises:
        MemlabError: an argument cannot be; the message names it and what is allowed.
    """
    made = Panel(workload, device=device, memory_limit=memory_limit, config=config)
    cells.replace_former(made)
    return made


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """Return the method with what it raises shown on the page, where nobody else would see it."""

    @functools.wraps(method)
    def call(self: "Panel", *arguments: Any) -> None:
        try:
            method(self, *arguments)
        except Exception as error:  # a callback has no caller
            self._show_error(error)

    return call


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
        self._workloads = choices.offered_workloads(workload)
        self._facts: dict[str, WorkloadFacts | str] = {}  # a text says why there are none
        self._log, self._closed = RunLog(), False
        self._saved: cells.Shown | None = None
        self._job: Job | None = None
        self._saved_told: list[tuple[object, ...]] = []
        self._lock = threading.RLock()
        self._estimate: Estimate | None = None
        self._looked: Question | None = None  # what the estimate was looked up for
        self._doing = ""  # what the worker does for a prediction
        device = cards.resolve(device).name
        self._view = View(
            workload_names=list(self._workloads),
            devices=choices.devices(device),
            device=device,
            memory_limit=choices.limit_text(memory_limit) or choices.default_limit(device),
            settings=state.from_config(config or StepConfig()),
            log=self._log,
            changed=self._refresh,
            run=self._run_clicked,
            stop=self._stop_clicked,
        )
        self._asked = Asked(self._view, self._workloads, device)
        self._forecasts = Forecasts(self._workloads, self._predicted, self._tell_prediction)
        self._find_facts = Latest(self._inspect)
        self._draw = Latest(self._draw_pictures)
        prewarm()
        self._refresh()

    # what code may ask

    @property
    def workload(self) -> Workload:
        """The workload on screen."""
        return self._asked.workload

    @property
    def config(self) -> StepConfig:
        """The settings on screen.

        Raises:
            ConfigError: they cannot be; the message is the sentence on the page.
        """
        return self._asked.config

    @property
    def result(self) -> StepResult | None:
        """The result of the last run; None before the first."""
        return self._log.last.result if self._log.last else None

    @property
    def prediction(self) -> StepResult | None:
        """What is predicted for the settings on screen; None while nothing is.

        Its message says whether it was interpolated from a prediction of other batch sizes.
        """
        question = self._asked.question
        estimate = self._forecasts.look(question) if question else None
        limit = self._asked.limit_or_none
        return verdicts.held_against(estimate.result, limit) if estimate else None

    @property
    def results(self) -> "pd.DataFrame":
        """One row for every run since the panel was made, cleared ones included."""
        return to_frame(run.result for run in self._log.runs)

    def code(self) -> str:
        """Return Python source that measures what is on screen, or predicts it for another card.

        Raises:
            ConfigError: the settings on screen cannot be.
        """
        return self._asked.source()

    def set(self, **fields: Any) -> None:
        """Set controls from code, as if they were moved by hand.

        Args:
            **fields: fields of `StepConfig` that have a control, `workload` (a name of the list),
                `device`, `memory_limit` (None for none) and `check_gradients`.

        Raises:
            MemlabError: a name or a value cannot be, or the panel is closed; nothing is changed.
        """
        if self._closed:
            raise ConfigError("this panel is closed; make a new one with memlab.panel(...)")
        state.check_names(fields)
        settings = {name: fields[name] for name in state.FIELDS if name in fields}
        if settings:
            config = state.to_config({**self._view.controls.settings(), **settings})
            settings = {k: v for k, v in state.from_config(config).items() if k in settings}
        others = {name: fields[name] for name in state.HEADER_FIELDS if name in fields}
        self._asked.set(choices.checked(others, list(self._workloads)))
        self._view.controls.set(settings)

    def run(self, **fields: Any) -> StepResult:
        """Set controls, measure what is on screen, wait for it and return the result.

        Args:
            **fields: as for `set`.

        Raises:
            MemlabError: an argument cannot be, or a run is going on. What happens while the step
                runs is the `outcome` of the result.
        """
        self.set(**fields)
        job = self._begin(by_cell=True)
        if job is None:
            raise ConfigError("a run of this panel is going on; press Stop, or wait for its end")
        try:
            run = self._measure(job)
        except MemlabError as error:
            self._show_error(error)
            raise
        except KeyboardInterrupt:
            self._view.say("interrupted", verdicts.OPEN)
            self._view.show_progress(0.0)
            raise
        finally:
            self._end(job)
        return run.result

    def close(self) -> None:
        """Stop a run that is going on and take every widget off the page and out of memory."""
        with self._lock:
            self._closed = True
            if self._job:
                self._job.cancel.set()
        self._find_facts.close()
        self._forecasts.close()
        self._draw.close()
        self._view.close()

    def __repr__(self) -> str:
        """Return one line."""
        return f"<memlab panel, {count_runs(len(self._log.runs))}, last: {self.result}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Return the widgets, and beside them a table and a picture for pages without a kernel."""
        widgets = {} if self._closed else self._view.mimebundle()
        return {**widgets, **self._still()}

    def _ipython_display_(self) -> None:
        """Show the widgets, and in an output of its own what stays of them in a saved notebook.

        That second output is renewed after each run; the stylesheet hides it beside a live panel.
        """
        if not self._closed:
            cells.show({**self._view.mimebundle(), "text/plain": repr(self)})
        self._saved = cells.show(self._still())

    def _still(self) -> dict[str, Any]:
        """Return the last run as a table and a picture."""
        still = snapshot.still(self._log, self._outlook().last, self._asked.limit_or_none)
        return {"text/plain": repr(self), **still}

    # callbacks

    @_guarded
    def _refresh(self) -> None:
        """Say anew what the settings on screen mean, after any change."""
        with self._lock:
            name, device = self._view.workload.value, self._asked.device
            if self._asked.follow_device():
                self._view.say("ready" if self._asked.is_here else f"{device} {style.NOT_HERE}")
            if name not in self._facts:
                self._find_facts(name)
            facts = self._facts.get(name)
            known = facts if isinstance(facts, WorkloadFacts) else None
            settings = self._view.controls.settings()
            wrong = state.problems(settings)
            limit = self._view.limit.value.strip()
            header_wrong = self._asked.device_problem or self._asked.limit_problem
            own_loss = choices.zoo_options(self.workload) is None
            self._view.controls.offer_blocks(known is None or bool(known.blocks))
            self._view.explain(
                texts.lines(settings, wrong, known, device=device, name=name, own_loss=own_loss)
            )
            about = header_wrong or (facts if isinstance(facts, str) else None)
            self._view.show_about(texts.about_line(name, known, about, limit))
            self._show_ready(not wrong and not header_wrong)
            self._view.show_code("" if wrong else self.code())
            self._show_outlook()
        self._draw()

    @_guarded
    def _run_clicked(self, *_: Any) -> None:
        job = self._begin()
        if job is not None:
            threading.Thread(target=self._work, args=(job,), daemon=True).start()

    @_guarded
    def _stop_clicked(self, *_: Any) -> None:
        with self._lock:
            if self._job:
                self._job.cancel.set()
                self._view.say("stopping")

    def _work(self, job: Job) -> None:
        try:
            self._measure(job)
        except Exception as error:  # a thread has no caller
            self._show_error(error)
        finally:
            self._end(job)

    # a run

    def _begin(self, *, by_cell: bool = False) -> Job | None:
        """Return the job of what is on screen, or None while another one runs.

        Raises:
            MemlabError: the settings on screen cannot be, or the device is not here.
        """
        with self._lock:
            if self._job is not None:
                return None
            self._job = Job(
                workload=self.workload,
                config=self.config,
                device=str(resolve_device(self._asked.device)),
                memory_limit=self._asked.limit,
                check_gradients=self._view.check.value,
                by_cell=by_cell,
            )
            self._forecasts.hold(True)
            self._show_ready(True)
            self._view.show_progress(0.0)
            return self._job

    def _measure(self, job: Job) -> Run:
        run: list[Run] = []

        def measured(result: StepResult) -> None:
            question = Question(result.workload_name, result.config, result.device)
            estimate = self._forecasts.look(question)
            with self._lock:
                prediction = with_numbers(estimate.result if estimate else None)
                run.append(self._log.add(result, prediction))
            self._show_runs()

        def checked(report: VerifyReport) -> None:
            with self._lock:
                self._log.change(run[0].number, report=report)
            self._show_runs()

        job.run(self._tell, measured, checked)
        return run[0]

    def _tell(self, progress: Progress) -> None:
        with self._lock:
            if self._job and not self._job.cancel.is_set():
                by_cell = f" ({style.RUN_BY_CELL})" if self._job.by_cell else ""
                self._view.say(progress.text + by_cell)
                self._view.show_progress(progress.fraction)

    def _end(self, job: Job) -> None:
        with self._lock:
            if self._job is job:
                self._job = None
        self._forecasts.hold(False)
        self._refresh()
        prewarm()  # a worker that was stopped or has died is no reason for the next run to wait

    # what is shown

    def _show_ready(self, ready: bool) -> None:
        job = self._job
        by_cell = job is not None and job.by_cell
        why = "" if self._asked.is_here else f"{self._asked.device} {style.NOT_HERE}"
        self._view.show_ready(ready and not why, running=job is not None, by_cell=by_cell, why=why)

    def _show_runs(self) -> None:
        with self._lock:
            last = self._log.last
            if last is None or self._closed:
                return
            self._view.table.show()
            self._view.show_json(last)
            self._view.say(
                ". ".join(s.rstrip(".") for s in (last.result.message, *last.result.notes)),
                verdicts.outcome_verdict(last.result).kind,
            )
            self._view.show_progress(1.0 if last.result.outcome is Outcome.OK else 0.0)
            self._show_outlook()
        self._draw()

    def _show_outlook(self) -> None:
        now, limit = self._outlook(), self._asked.limit_or_none
        if now.is_pending and now.question not in (None, self._looked):
            return  # it is about to be looked up; until then what is shown stays, or it would flash
        fit = now.fit(limit)
        if self._asked.limit_problem:
            fit = verdicts.Verdict(verdicts.OPEN, "the limit is no size")
        self._view.show_outlook(fit, now.costs())
        self._view.show_stale(now.note())
        self._view.show_advice(now.advice(self._log.runs, limit))

    def _outlook(self) -> Outlook:
        question = self._asked.question
        plain = question.plain if question else None
        known = self._forecasts.known(plain) if plain else None
        return outlook(self._log, question, self._estimate, self._doing, with_numbers(known))

    @_guarded
    def _draw_pictures(self, _: Any) -> None:
        question = self._asked.question
        estimate = self._forecasts.look(question) if question else None
        if question and (estimate is None or not estimate.exact):
            self._forecasts.ask(question)
        elif question and question.plain:
            self._forecasts.ask(question.plain)  # what recomputing saves is told against it
        with self._lock:
            self._estimate, self._looked = estimate, question
            self._show_outlook()
            now, where = self._outlook(), (self._view.workload.value, self._view.device_name)
            scene = now.scene(self._log, where, self._asked.limit_or_none)
        self._view.pictures.draw(scene)
        told: list[tuple[object, ...]] = [
            (run.number, run.name, run.report, run.prediction) for run in self._log.visible
        ]
        if self._saved and self._log.visible and self._saved_told != told:
            self._saved_told = told
            self._saved.update(self._still(), raw=True)

    # predictions, told by a thread of their own

    @_guarded
    def _predicted(self, estimate: Estimate) -> None:
        """Take what the worker said: also for runs of that setting, which then know their error."""
        with self._lock:
            self._doing = ""
            runs = [run for run in self._log.runs if estimate.question.is_of(run.result)]
            for run in runs:
                self._log.change(run.number, prediction=with_numbers(estimate.result))
            if runs and not self._closed:
                self._view.table.show()
        self._draw()

    @_guarded
    def _tell_prediction(self, text: str) -> None:
        with self._lock:
            self._doing = text
            if not self._closed:
                self._show_outlook()

    def _show_error(self, error: Exception) -> None:
        self._view.say(texts.error_text(error), verdicts.BAD)

    @_guarded
    def _inspect(self, name: str) -> None:
        try:
            facts: WorkloadFacts | str = inspect_workload(self._workloads[name])
        except MemlabError as error:
            facts = str(error)
        with self._lock:
            self._facts[name] = facts
        if not self._closed:
            self._refresh()
