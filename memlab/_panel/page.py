"""What the page says about the settings, the runs and the predictions, updated as they change.

Settings change by hand or from code, runs come from a thread or a cell, predictions from a thread
of their own. So everything here is read and written under one lock. An exception in a callback
becomes a sentence on the page, because nobody else would see it. Left out: how a run is started.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from memlab._panel import as_code, choices, state, status, style, texts, verdicts
from memlab._panel.advice import recorded_line
from memlab._panel.asked import Asked
from memlab._panel.controls import RANKS
from memlab._panel.elsewhere import Elsewhere
from memlab._panel.forecasts import Forecasts
from memlab._panel.idle_garbage import IdleGarbage
from memlab._panel.job import BaseJob, FitJob, Latest, PanelJob
from memlab._panel.keeping import Keeper, Wish
from memlab._panel.line import Line
from memlab._panel.outlook import MAKING, Outlook, outlook, with_numbers
from memlab._panel.questions import Estimate, Question
from memlab._panel.rank_lines import ranks_line
from memlab._panel.requests import Requests
from memlab._panel.runs import RunLog
from memlab._panel.status import Status
from memlab._panel.view import View
from memlab.api import accumulation_effect, inspect_workload
from memlab.arguments.units import format_bytes
from memlab.config import FP32_FORMATS, StepConfig
from memlab.errors import ConfigError, MemlabError
from memlab.measuring.inspect import WorkloadFacts
from memlab.result import Outcome, Source, StepResult
from memlab.running import Progress
from memlab.verifying.accumulation import AccumulationEffect
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
        lock: that of the log, held while the log or anything here is changed.
        job: the run, or the search of *Fit for me*, in progress; None if there is none.
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
        self.lock = log.lock
        self.job: PanelJob | FitJob | BaseJob | None = None
        self.closed = False
        self._facts: dict[str, WorkloadFacts | str] = {}  # or the reason why there are none
        self._estimate: Estimate | None = None
        self._looked: Question | None = None  # the question of the shown estimate
        self._before: Question | None = None  # the one that was shown before it
        self._doing = ""  # what the worker is doing for a prediction
        self._said = Status(text="")
        self.forecasts = Forecasts(workloads, self._predicted, self._tell_prediction)
        self._keeper = Keeper(self.forecasts.look, self._add_kept)
        self._effects: dict[str, AccumulationEffect] = {}
        self._find_facts, self._find_effect = Latest(self._inspect), Latest(self._judge)
        self._stop_judging = threading.Event()
        self._draw = Latest(self._draw_pictures)
        view.pictures.said_of_division = self._said_of_division
        self._garbage = IdleGarbage()
        self._elsewhere = Elsewhere(view.cards, asked, self.forecasts, self.guarded)
        self._requests = Requests(self.forecasts, view, asked, log, self._keeper, self._elsewhere)

    def close(self) -> None:
        """Stop a run that is in progress, and remove every widget from the page and from memory."""
        with self.lock:
            self.closed = True
            if self.job:
                self.job.cancel.set()
            self._stop_judging.set()

        self._find_facts.close()
        self._find_effect.close()
        self._keeper.close()
        self.forecasts.close()
        self._draw.close()
        self._elsewhere.close()
        self._garbage.close()
        self._asked.close()
        self._view.close()

    # settings

    def begin(self, job: PanelJob | FitJob | BaseJob) -> None:
        """Note the job that begins; what micro-batches do is not looked for beside it."""
        self.job = job
        self._stop_judging.set()

    def refresh(self) -> None:
        """Update everything that depends on the settings on screen, after any change of them."""
        with self.guarded():
            with self.lock:
                self._explain_settings()
                self._show_outlook()
            self._draw()

    def _explain_settings(self) -> None:
        self._asked.follow_device()
        self._asked.follow_workload()
        name, device = self._asked.name, self._asked.device
        if name not in self._facts:
            self._find_facts(name)

        facts = self._facts.get(name)
        known = facts if isinstance(facts, WorkloadFacts) else None
        given = self._facts.get(self._asked.given.name)
        # of another size formats and blocks are the same, so that no control moves meanwhile
        alike = known or (given if isinstance(given, WorkloadFacts) else None)
        settings = self._view.controls.settings()
        wrong = self._asked.wrong
        header_wrong = self._asked.device_problem or self._asked.limit_problem
        wrong_form = self._asked.choices_problem or self._asked.size_problem
        is_right = not (wrong or header_wrong or wrong_form)
        is_ready = is_right and not self._asked.is_being_made
        config = None if wrong else state.to_config(settings)
        if config is not None and config.accumulation_steps * config.data_parallel_size > 1:
            self._find_effect(name)
        self._view.controls.name_formats(self._formats(alike))
        self._view.controls.offer_blocks(alike is None or bool(alike.blocks))
        lines = texts.lines(
            settings, wrong, known, device=device, name=name, effect=self._effect_of(name)
        )
        asked = texts.setup_of(settings, wrong, device)
        is_here, cards = not header_wrong and self._asked.is_here, self._asked.num_cards
        of_ranks = ranks_line(settings, wrong, asked, is_here=is_here, num_cards=cards)
        self._view.explain({**lines, RANKS: of_ranks})
        self._explain_choices(known)
        self._explain_size(None if wrong else state.to_config(settings))
        self._view.show_about(self._about(name, facts, header_wrong))
        self.show_ready(is_ready)
        if self._view.is_code_open:
            self._view.show_code(as_code.as_html(self._asked.code()) if is_ready else "")
        self._show_status()

    def _explain_choices(self, facts: WorkloadFacts | None) -> None:
        own, offered = self._asked.listed.choices, self._asked.given.choices
        if own is None or offered is None:
            return
        row, problem = self._view.choices, self._asked.choices_problem
        row.enable(offered)
        if problem:
            row.explanation.show(texts.wrong_choices_line(problem, own))
        else:
            row.explanation.show(texts.choices_line(facts))

    def _explain_size(self, config: StepConfig | None) -> None:
        own, problem = self._asked.given.sample_size, self._asked.size_problem
        if own is not None and problem:
            self._view.size.explanation.show(texts.wrong_size_line(problem, own))
        elif own is not None and self._asked.is_being_made:
            wanted = f"{own.name} {self._view.size.value}"
            self._view.size.explanation.show(Line(f"{MAKING} with {wanted}"))
        elif own is not None and (size := self._asked.sample_size):
            self._view.size.explanation.show(texts.size_line(size, config))

    def _about(self, name: str, facts: WorkloadFacts | str | None, wrong: str | None) -> Line:
        """Return the line below the header: about the limit or the device, or else the workload."""
        capacity, whose = self._asked.capacity, choices.of_capacity(self._asked.device)
        self._view.show_capacity(f"{format_bytes(capacity)}: {whose}" if capacity else "none")
        if wrong:
            return Line(wrong, kind=verdicts.BAD)
        typed = self._view.limit.value.strip()
        return texts.limit_line(typed, capacity, whose) or texts.about_line(name, facts)

    def _formats(self, facts: WorkloadFacts | None) -> tuple[str, ...]:
        """Return the number formats of the model on screen; empty while they are not known."""
        if choices.zoo_options(self._asked.given) is not None:
            return FP32_FORMATS  # all models of the zoo are built in fp32
        return facts.parameter_formats if facts else ()

    def say(self, text: str, kind: str = "", *, lasts: bool = False) -> None:
        """Show a sentence in the status line.

        Args:
            text: the sentence.
            kind: of the verdict that colours it; "" for none.
            lasts: whether it stays until the next one, and not only as long as the settings do.
        """
        self._said = Status(text=text, kind=kind, question=None if lasts else self._asked.question)
        self._show_status()

    def _show_status(self) -> None:
        here = self._asked.question
        if self._said.run is None and self._said.is_past(here):
            last = self._log.last
            self._said = status.of_run(last) if last else Status(text="")
        idle = Status(text=self._why_not_here())
        self._view.show_status(status.as_html(self._said if self._said.text else idle, here))

    def show_ready(self, ready: bool) -> None:
        """Enable Run and Stop where they are possible; `ready`: the settings are allowed."""
        by_cell = self.job is not None and self.job.by_cell
        running = self.job is not None
        why = self._why_not_here()
        keeps = not self._asked.can_run
        self._view.show_ready(ready, running=running, by_cell=by_cell, keeps=keeps, why=why)
        # enabled while something runs, which is said: a button that is disabled loses the focus
        self._view.fit.show_ready(ready and not self._asked.is_recorded)

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

    def _effect_of(self, name: str) -> AccumulationEffect | None:
        """Return what micro-batches do to the gradient; None while that is not known."""
        if choices.zoo_options(self._asked.given) is not None:  # a test tries all of these
            return AccumulationEffect(same="yes", why="the loss is a mean over the samples")
        return self._effects.get(name)

    def _judge(self, name: str) -> None:
        """Find out what micro-batches do to the gradient, once."""
        with self.guarded():
            with self.lock:
                if self.closed or self.job is not None or self._effect_of(name) is not None:
                    return
                stop = self._stop_judging = threading.Event()
            effect = accumulation_effect(self._workloads[name], cancel=stop)
            with self.lock:
                if stop.is_set():  # it is asked for again once the job has ended
                    return
                self._effects[name] = effect
            if not self.closed:
                self.refresh()

    def _said_of_division(self, config: StepConfig) -> str:
        """Return what more micro-batches would do to the gradient; empty if nothing."""
        facts, name = self._facts.get(self._asked.name), self._asked.name
        known = facts if isinstance(facts, WorkloadFacts) else None
        divided = config.divided_further()
        if divided is None:
            return ""
        verdict = verdicts.gradient_verdict(divided, known, self._effect_of(name))
        return "" if verdict.kind == verdicts.GOOD else verdict.text

    # runs

    def tell(self, progress: Progress) -> None:
        """Show the progress of the current run, search or comparison."""
        with self.lock:
            if self.job and not self.job.cancel.is_set():
                by_cell = f" ({style.RUN_BY_CELL})" if self.job.by_cell else ""
                self.say(progress.text + by_cell, lasts=True)
                self._view.show_progress(progress.fraction)

    def show_runs(self) -> None:
        """Update the table and the pictures after a run was added or changed."""
        with self.lock:
            last = self._log.last
            if last is None or self.closed:
                return

            self._view.table.show()
            self._view.show_json(last)
            self._said = status.of_run(last)
            self._show_status()
            if not last.is_predicted:
                is_done = last.result.outcome is Outcome.OK and not last.is_earlier
                self._view.show_progress(1.0 if is_done else 0.0)
            self._show_outlook()

        self._draw()

    def show_error(self, error: Exception) -> None:
        """Show an exception on the page."""
        self.say(texts.error_text(error), verdicts.BAD)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Show exceptions of the block on the page: a callback or a thread has no caller."""
        try:
            yield
        except Exception as error:
            self.show_error(error)

    # predictions, which arrive in a thread of their own

    def keep(self) -> Wish:
        """Add the prediction on screen to the table, at once or as soon as it is exact.

        Raises:
            MemlabError: the settings or the limit on screen are not allowed.
        """
        config, device = self._asked.config, choices.name_of(self._asked.device)
        if problem := self._asked.limit_problem:
            raise ConfigError(problem)

        question = Question(self._asked.workload.name, config, device)
        with self.lock:
            wish = self._keeper.wish(question, self._asked.limit)
            what = f"the prediction for batch {config.batch_size} on {device}"
            self.say(f"{what} {style.KEEPING}", lasts=True)

        self._draw()
        return wish

    def _add_kept(self, result: StepResult, limit_bytes: int | None) -> None:
        with self.lock:
            self._log.add(result, limit_bytes=limit_bytes)
        self.show_runs()

    def _predicted(self, estimate: Estimate) -> None:
        """Take a prediction of the worker; runs of the same settings get their error from it."""
        with self.guarded():
            with self.lock:
                self._doing = ""
                same = [run for run in self._log.own if estimate.question.is_of(run.result)]
                runs = [run for run in same if not run.is_predicted and run.prediction is None]
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
        return outlook(
            self._log,
            question,
            self._estimate,
            self._doing,
            with_numbers(known),
            is_being_made=self._asked.is_being_made,
        )

    def _show_outlook(self) -> None:
        now, limit = self.outlook(), self._asked.limit
        if now.is_pending and now.question not in (None, self._looked):
            return  # a lookup follows soon; clearing the numbers before it would make them flicker
        if now.run is None and now.estimate is not None and now.estimate.may_need_replay(limit):
            return  # as above

        self._view.show_failure(self._failure(now))
        self._view.show_printed(*now.printed)
        fit = now.fit(limit)
        if self._asked.limit_problem:
            fit = verdicts.Verdict(verdicts.OPEN, "the limit is not a size")
        self._view.show_outlook(fit, now.costs())
        self._view.show_stale(now.note())
        try:
            said = self._said_of_division
            advice = self._not_recorded() or now.advice(self._log.own, limit, said)
        except Exception as error:  # the answer stands without it
            advice = Line("")
            self.show_error(error)
        self._view.show_advice(advice)

    def _failure(self, now: Outlook) -> tuple[str, str] | None:
        """Return a title and a sentence if the model cannot be trained; None if it can."""
        name = self._asked.name
        facts = self._facts.get(name)
        if isinstance(facts, str):
            return f"{name} cannot be built", facts
        failed = now.failure
        if failed is None:
            return None
        how = "failed" if failed.source is Source.MEASURED else "fails"
        return f"A training step of {name} {how}", failed.message

    def _not_recorded(self) -> Line | None:
        """Return the closest recorded settings, where those on screen are not recorded."""
        if self._asked.question is None or not self._asked.is_recorded:
            return None
        near = self._asked.nearest_recorded
        return recorded_line(self._asked.config, near, self._asked.recorded_sizes)

    def _draw_pictures(self, _: object) -> None:
        with self.guarded():
            try:
                self._draw_what_is_asked()
            except Exception:
                self._view.show_stale(texts.NOT_DRAWN)
                raise

    def _draw_what_is_asked(self) -> None:
        question, limit = self._asked.question, self._asked.limit
        estimate = self.forecasts.look(question, limit) if question else None
        if question != self._looked and self._looked is not None:
            self._before = self._looked
        is_asked = question is not None and self._requests.on_screen(question, estimate)
        with self.lock:
            self._estimate, self._looked = estimate, question
            self._show_outlook()
            where = (self._asked.name, self._view.device_name)
            if question:
                where = (question.workload_name, question.device)
            now = self.outlook()
            known = self.forecasts.known_of(question) if question else []
            scene = now.scene(self._log, where, self._asked.limit, known)

        # before the pictures, since somebody may wait for it
        self._keeper.settle()
        self._requests.later()
        self._view.pictures.draw(scene)
        for error in self._view.pictures.failed:
            self.show_error(error)
        self._drawn()
        self._garbage.note(self._view.pictures.num_drawn)
        if question and estimate and not is_asked and self.job is None:
            self._requests.ahead(question, estimate, self._before)
            self._find_effect(question.workload_name)  # for advice to divide the batch
        self._elsewhere.refresh()
