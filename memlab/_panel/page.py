"""What the page says about the settings, the runs and the predictions, updated as they change.

Settings change by hand or from code, runs come from a thread or a cell, predictions from a thread
of their own. So everything here is read and written under one lock. An exception in a callback
becomes a sentence on the page, because nobody else would see it. Left out: how a run is started.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

from memlab._panel import asked as as_code
from memlab._panel import choices, state, texts
from memlab._panel import outlook as status
from memlab._panel.asked import Asked
from memlab._panel.cards_table import CardsTable
from memlab._panel.choices import neighbours
from memlab._panel.controls import RANKS, ranks_line
from memlab._panel.job import BaseJob, FitJob, IdleGarbage, Latest, PanelJob, Throttle
from memlab._panel.outlook import MAKING, Outlook, Status, outlook, recorded_line, with_numbers
from memlab._panel.questions import Estimate, Forecasts, Question
from memlab._panel.runs import RunLog
from memlab._panel.texts import Line
from memlab._panel.view import View
from memlab._util.units import format_bytes
from memlab.api import accumulation_effect, inspect_workload
from memlab.config import FP32_FORMATS, StepConfig
from memlab.errors import ConfigError, MemlabError
from memlab.result import Outcome, Source, StepResult
from memlab.running import Progress
from memlab.runtime.accumulation import AccumulationEffect
from memlab.runtime.inspect import WorkloadFacts
from memlab.runtime.isolation import prewarm
from memlab.store import recorded
from memlab.workload import Workload

# Keeps the table of cards up to date with the settings on screen, without delaying them.

REST_SECONDS = 0.3  # settings at rest for this long are looked up on all cards


class Elsewhere:
    """Fills the table of cards in a thread of its own, while the table is open.

    Args:
        cards: the table.
        asked: reads what is on screen.
        forecasts: of the panel.
        guarded: shows an exception of its block on the page.
    """

    def __init__(
        self,
        cards: CardsTable,
        asked: Asked,
        forecasts: Forecasts,
        guarded: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._cards, self._asked, self._forecasts = cards, asked, forecasts
        self._guarded = guarded
        self._closed = False
        self._fill = Latest(self._fill_cards)

    @property
    def questions(self) -> list[Question]:
        """What the worker has to predict for the table; nothing while it is folded."""
        question = self._asked.question
        return self._cards.questions(question) if question and self._cards.is_open else []

    def refresh(self) -> None:
        """Show what is known about the settings on screen, soon."""
        if self._cards.is_open:
            self._fill()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._fill.close()

    def _fill_cards(self, _: object) -> None:
        with self._guarded():
            question = self._asked.question
            self._cards.mark_past(question)
            time.sleep(REST_SECONDS)  # a slider that moves must not share the processor

            def is_newest() -> bool:
                return not self._closed and self._asked.question == question

            if question is not None and is_newest():
                limits = {name: recorded.capacity(name) for name in self._cards.names}
                limits[question.device] = self._asked.limit
                self._cards.fill(question, limits, self._forecasts, is_newest)


# Predictions that a person keeps: each becomes a row of the table once it is exact. No
# widgets.


@dataclass(kw_only=True, slots=True, eq=False)
class Wish:
    """A prediction that was asked to be kept.

    Attributes:
        question: what is predicted.
        limit_bytes: the limit on screen when it was asked for; None if there was none.
        result: None until it is kept.
        is_over: set once it is kept, or will never be.
    """

    question: Question
    limit_bytes: int | None
    result: StepResult | None = None
    is_over: threading.Event = field(default_factory=threading.Event)


class Keeper:
    """Holds wishes until their predictions are exact; nothing here waits for the worker.

    Args:
        look: as `Forecasts.look`.
        keep: puts a prediction on the table, with the limit on screen.
    """

    def __init__(
        self,
        look: Callable[[Question, int | None], Estimate | None],
        keep: Callable[[StepResult, int | None], object],
    ) -> None:
        self._look, self._keep = look, keep
        self._lock = threading.Lock()
        self._wishes: list[Wish] = []
        self._closed = False

    @property
    def questions(self) -> list[Question]:
        """What the worker has to predict, the oldest wish first."""
        with self._lock:
            return [wish.question for wish in self._wishes]

    def wish(self, question: Question, limit_bytes: int | None) -> Wish:
        """Ask for a prediction to be kept; a second wish for the same one is the first."""
        with self._lock:
            for wish in self._wishes:
                if (wish.question, wish.limit_bytes) == (question, limit_bytes):
                    return wish

            wish = Wish(question=question, limit_bytes=limit_bytes)
            if self._closed:
                wish.is_over.set()
            else:
                self._wishes.append(wish)
            return wish

    def settle(self) -> None:
        """Keep every prediction that is exact by now."""
        with self._lock:
            waiting = list(self._wishes)

        try:
            for wish in waiting:
                self._settle(wish)
        except Exception:
            self._drop(waiting)  # nobody shall wait for what will not come
            raise

    def close(self) -> None:
        """Drop all wishes; whoever waits for one goes on without it."""
        with self._lock:
            self._closed, waiting = True, list(self._wishes)
        self._drop(waiting)

    def _drop(self, wishes: list[Wish]) -> None:
        with self._lock:
            self._wishes = [wish for wish in self._wishes if wish not in wishes]
        for wish in wishes:
            wish.is_over.set()

    def _settle(self, wish: Wish) -> None:
        estimate = self._look(wish.question, wish.limit_bytes)
        if estimate is None or not estimate.exact:
            return

        with self._lock:
            if wish not in self._wishes:  # the panel was closed meanwhile
                return
            self._wishes.remove(wish)

        self._keep(estimate.result, wish.limit_bytes)
        wish.result = estimate.result
        wish.is_over.set()


# `Requests`: what the worker is asked to predict, in which order.
#
# First what is on screen, then what somebody waits for, and at last what may be on screen
# next.


class Requests:
    """Asks for predictions on behalf of a page.

    Args:
        forecasts: every prediction.
        view: of the panel.
        asked: reads what is on screen.
        log: of the runs.
        keeper: of the predictions that a person keeps.
        elsewhere: fills the table of cards.
    """

    def __init__(
        self,
        forecasts: Forecasts,
        view: View,
        asked: Asked,
        log: RunLog,
        keeper: Keeper,
        elsewhere: Elsewhere,
    ) -> None:
        self._forecasts, self._view, self._asked, self._log = forecasts, view, asked, log
        self._keeper, self._elsewhere = keeper, elsewhere

    def on_screen(self, question: Question, estimate: Estimate | None) -> bool:
        """Have predicted what is on screen, then what it is compared with.

        Returns whether an answer will arrive.
        """
        if estimate is None or not estimate.exact:
            return self._forecasts.ask(question)
        # the saving of recomputation is relative to the plain step
        if question.plain is not None and self._forecasts.ask(question.plain):
            return True
        self._forecasts.ahead([])  # what was next to the settings before
        return False

    def later(self) -> None:
        """Have predicted what is kept, what runs are compared with, and the cards of the table."""
        self._forecasts.ask_later(
            [*self._keeper.questions, *self._of_runs(), *self._elsewhere.questions]
        )

    def ahead(self, question: Question, estimate: Estimate, before: Question | None) -> None:
        """Have the neighbours of what is on screen predicted; `before`: what was shown before."""
        offered = [value for _, value in self._view.controls.precision.options]
        sizes = self._asked.names_by_size
        beside = neighbours(question, offered, before, sizes) if estimate.is_ok else []
        self._forecasts.ahead(beside)

    def _of_runs(self) -> list[Question]:
        """Return the settings of runs that wait for an exact prediction, and give it to the others.

        It may have come with that of another setting.
        """
        waiting = []
        for run in self._log.own:
            if run.prediction is None and run.result.source is Source.MEASURED:
                asked = run.result
                question = Question(asked.workload_name, asked.config, asked.device)
                found = self._forecasts.exact(question)
                if found is None:
                    waiting.append(question)
                elif found.outcome is Outcome.OK:
                    with self._log.lock:
                        self._log.change(run.number, prediction=found)
                        self._view.table.show()
        return waiting


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
            return Line(wrong, kind=state.BAD)
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
        what = texts.PLAYED_BACK if self._asked.is_recorded else texts.NOT_HERE
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
        verdict = state.gradient_verdict(divided, known, self._effect_of(name))
        return "" if verdict.kind == state.GOOD else verdict.text

    # runs

    def tell(self, progress: Progress) -> None:
        """Show the progress of the current run, search or comparison."""
        with self.lock:
            if self.job and not self.job.cancel.is_set():
                by_cell = f" ({texts.RUN_BY_CELL})" if self.job.by_cell else ""
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
        self.say(texts.error_text(error), state.BAD)

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
            self.say(f"{what} {texts.KEEPING}", lasts=True)

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
            fit = state.Verdict(state.OPEN, "the limit is not a size")
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


# `Beside`: asks memlab what takes a while in a thread beside the kernel's, one thing at a
# time.
#
# *Stop* ends it as it ends a run. A failure becomes a sentence, because a thread has no
# caller.

T = TypeVar("T")


class Beside:
    """Asks on behalf of a pane of the page.

    Args:
        view: of the panel.
        page: shows progress and sentences, and knows whether a run goes on.
    """

    def __init__(self, view: View, page: Page) -> None:
        self._view, self._page = view, page

    def begin(self, job: FitJob | BaseJob) -> bool:
        """Take the turn of a job; return whether it was free."""
        with self._page.lock:
            if self._page.job is not None:
                return False
            self._page.begin(job)
            self._page.show_ready(True)
            self._view.show_progress(0.0)
            self._page.forecasts.ahead([])  # they would take turns with it in the worker
            return True

    def ask(
        self,
        job: FitJob | BaseJob,
        question: Callable[[Throttle], T],
        arrived: Callable[[T], None],
        failed: Callable[[str], None],
    ) -> None:
        """Ask in a thread, and let the next job begin once it has ended.

        Args:
            job: that has begun.
            question: returns the answer; it tells its progress to what it is given.
            arrived: takes the answer, unless the panel is closed.
            failed: takes a sentence that says why there is none.
        """

        def work() -> None:
            tell = Throttle(self._page.tell)
            try:
                with self._page.guarded():
                    try:
                        answer = question(tell)
                    except Exception as error:  # a thread has no caller
                        self._say(job, error, failed)
                        return
                    tell.drop()  # late progress would overwrite the answer
                    if not self._page.closed:
                        arrived(answer)
            finally:
                tell.close()
                self._end()

        threading.Thread(target=work, daemon=True).start()

    def _say(self, job: FitJob | BaseJob, error: Exception, failed: Callable[[str], None]) -> None:
        was_stopped = job.cancel.is_set()
        text = job.stopped if was_stopped else texts.error_text(error)
        failed(text)
        self._page.say(text, state.OPEN if was_stopped else state.BAD)

    def _end(self) -> None:
        """Let the next job begin."""
        with self._page.lock:
            self._page.job = None
        self._view.show_progress(0.0)
        self._page.refresh()
        prewarm()  # if the job was stopped, its worker is gone
