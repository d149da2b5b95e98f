"""What the page says about the settings, the runs and the predictions, updated as they change.

Settings change by hand or from code, runs come from a thread or a cell, predictions from a thread
of their own. So everything here is read and written under one lock. An exception in a callback
becomes a sentence on the page, because nobody else would see it. Left out: how a run is started.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from memlab._panel import choices, state, style, texts, verdicts
from memlab._panel.advice import recorded_line
from memlab._panel.asked import Asked
from memlab._panel.forecasts import Estimate, Forecasts, Question
from memlab._panel.job import Latest, PanelJob
from memlab._panel.outlook import Outlook, outlook, with_numbers
from memlab._panel.runs import RunLog
from memlab._panel.texts import Line
from memlab._panel.view import View
from memlab.api import inspect_workload
from memlab.config import FP32_FORMATS
from memlab.errors import MemlabError
from memlab.measuring.inspect import WorkloadFacts
from memlab.result import Outcome
from memlab.running import Progress
from memlab.workload import Workload


class Page:
    """Updates a view with the runs and predictions of the settings that it shows.

    Args:
        view: the view to update.
        asked: reads its controls.
        log: the runs.
        workloads: by name.
        drawn: called in a thread after the pictures were drawn.

    Attributes:
        lock: held while anything here, or the log, is changed.
        job: the run in progress; None if there is none.
        closed: whether the panel was closed.
        forecasts: every prediction.
    """

    def __init__(
        self,
        view: View,
        asked: Asked,
        log: RunLog,
        workloads: Mapping[str, Workload],
        drawn: Callable[[], None],
    ) -> None:
        self._view, self._asked, self._log, self._workloads = view, asked, log, workloads
        self._drawn = drawn
        self.lock = threading.RLock()
        self.job: PanelJob | None = None
        self.closed = False
        self._facts: dict[str, WorkloadFacts | str] = {}  # or the reason why there are none
        self._estimate: Estimate | None = None
        self._looked: Question | None = None  # the question of the shown estimate
        self._doing = ""  # what the worker is doing for a prediction
        self.forecasts = Forecasts(workloads, self._predicted, self._tell_prediction)
        self._find_facts = Latest(self._inspect)
        self._draw = Latest(self._draw_pictures)

    def close(self) -> None:
        """Stop a run that is in progress, and remove every widget from the page and from memory."""
        with self.lock:
            self.closed = True
            if self.job:
                self.job.cancel.set()

        self._find_facts.close()
        self.forecasts.close()
        self._draw.close()
        self._view.close()

    # settings

    def refresh(self) -> None:
        """Update everything that depends on the settings on screen, after any change of them."""
        with self.guarded():
            with self.lock:
                self._explain_settings()
                self._show_outlook()
            self._draw()

    def _explain_settings(self) -> None:
        name, device = self._view.workload.value, self._asked.device
        if self._asked.follow_device():
            self._view.say(self._why_not_here() or "ready")
        if name not in self._facts:
            self._find_facts(name)

        facts = self._facts.get(name)
        known = facts if isinstance(facts, WorkloadFacts) else None
        settings = self._view.controls.settings()
        wrong = state.problems(settings)
        limit = self._view.limit.value.strip()
        header_wrong = self._asked.device_problem or self._asked.limit_problem
        own_loss = choices.zoo_options(self._asked.workload) is None
        self._view.controls.name_formats(self._formats(known))
        self._view.controls.offer_blocks(known is None or bool(known.blocks))
        self._view.explain(
            texts.lines(settings, wrong, known, device=device, name=name, own_loss=own_loss)
        )
        about = header_wrong or (facts if isinstance(facts, str) else None)
        self._view.show_about(texts.about_line(name, known, about, limit))
        self.show_ready(not wrong and not header_wrong)
        self._view.show_code("" if wrong else self._asked.source())

    def _formats(self, facts: WorkloadFacts | None) -> tuple[str, ...]:
        """Return the number formats of the model on screen; empty while they are not known."""
        if choices.zoo_options(self._asked.workload) is not None:
            return FP32_FORMATS  # all models of the zoo are built in fp32
        return facts.parameter_formats if facts else ()

    def show_ready(self, ready: bool) -> None:
        """Enable Run and Stop where they are possible; `ready`: the settings are allowed."""
        by_cell = self.job is not None and self.job.by_cell
        running = self.job is not None
        why = self._why_not_here()
        can_run = self._asked.is_here or self._asked.is_recorded
        self._view.show_ready(ready and can_run, running=running, by_cell=by_cell, why=why)

    def _why_not_here(self) -> str:
        """Return the words on what Run does for a device that is not in this machine; else ""."""
        if self._asked.is_here:
            return ""
        what = style.PLAYED_BACK if self._asked.is_recorded else style.NOT_HERE
        return f"{self._asked.device} {what}"

    def _inspect(self, name: str) -> None:
        with self.guarded():
            try:
                facts: WorkloadFacts | str = inspect_workload(self._workloads[name])
            except MemlabError as error:
                facts = str(error)

            with self.lock:
                self._facts[name] = facts
            if not self.closed:
                self.refresh()

    # runs

    def tell(self, progress: Progress) -> None:
        """Show the progress of the current run."""
        with self.lock:
            if self.job and not self.job.cancel.is_set():
                by_cell = f" ({style.RUN_BY_CELL})" if self.job.by_cell else ""
                self._view.say(progress.text + by_cell)
                self._view.show_progress(progress.fraction)

    def show_runs(self) -> None:
        """Update the table and the pictures after a run was added or changed."""
        with self.lock:
            last = self._log.last
            if last is None or self.closed:
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

    def show_error(self, error: Exception) -> None:
        """Show an exception on the page."""
        self._view.say(texts.error_text(error), verdicts.BAD)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Show exceptions of the block on the page: a callback or a thread has no caller."""
        try:
            yield
        except Exception as error:
            self.show_error(error)

    # predictions, which arrive in a thread of their own

    def _predicted(self, estimate: Estimate) -> None:
        """Take a prediction of the worker; runs of the same settings get their error from it."""
        with self.guarded():
            with self.lock:
                self._doing = ""
                runs = [run for run in self._log.runs if estimate.question.is_of(run.result)]
                for run in runs:
                    self._log.change(run.number, prediction=with_numbers(estimate.result))
                if runs and not self.closed:
                    self._view.table.show()

            self._draw()

    def _tell_prediction(self, text: str) -> None:
        with self.guarded(), self.lock:
            self._doing = text
            if not self.closed:
                self._show_outlook()

    def outlook(self) -> Outlook:
        """Return the best estimate so far for the settings on screen."""
        question = self._asked.question
        plain = question.plain if question else None
        known = self.forecasts.known(plain) if plain else None
        return outlook(self._log, question, self._estimate, self._doing, with_numbers(known))

    def _show_outlook(self) -> None:
        now, limit = self.outlook(), self._asked.limit_or_none
        if now.is_pending and now.question not in (None, self._looked):
            return  # a lookup follows soon; clearing the numbers before it would make them flicker
        if now.run is None and now.estimate is not None and now.estimate.may_need_replay(limit):
            return  # as above

        fit = now.fit(limit)
        if self._asked.limit_problem:
            fit = verdicts.Verdict(verdicts.OPEN, "the limit is not a size")
        self._view.show_outlook(fit, now.costs())
        self._view.show_stale(now.note())
        self._view.show_advice(self._not_recorded() or now.advice(self._log.runs, limit))

    def _not_recorded(self) -> Line | None:
        """Return the closest recorded settings, where those on screen are not recorded."""
        if self._asked.question is None or not self._asked.is_recorded:
            return None
        near = self._asked.nearest_recorded
        return recorded_line(self._asked.config, near, self._asked.recorded_sizes)

    def _draw_pictures(self, _: object) -> None:
        with self.guarded():
            question, limit = self._asked.question, self._asked.limit_or_none
            estimate = self.forecasts.look(question, limit) if question else None
            if question and (estimate is None or not estimate.exact):
                self.forecasts.ask(question)
            elif question and question.plain:
                self.forecasts.ask(question.plain)  # the saving of recomputation is relative to it

            with self.lock:
                self._estimate, self._looked = estimate, question
                self._show_outlook()
                now, where = self.outlook(), (self._view.workload.value, self._view.device_name)
                scene = now.scene(self._log, where, self._asked.limit_or_none)

            self._view.pictures.draw(scene)
            self._drawn()
