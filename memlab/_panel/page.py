"""What the page is told of the settings, the runs and the predictions, as they change.

Settings change by hand or from code, runs come from a thread or a cell, predictions from a thread
of their own. So everything here is read and written under one lock. An exception in a callback
becomes a sentence on the page, because nobody else would see it. Left out: how a run is started.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from memlab._panel import catalog, choices, state, table, texts
from memlab._panel import outlook as status
from memlab._panel.asked import Asked
from memlab._panel.cards_table import Elsewhere
from memlab._panel.choices import neighbours
from memlab._panel.job import BaseJob, FitJob, Latest, PanelJob, Throttle
from memlab._panel.outlook import MAKING, Outlook, Status, outlook, recorded_line, with_numbers
from memlab._panel.panel_state import PanelState
from memlab._panel.panes import Panes, evidence_pane, peak_pane, ranks_pane
from memlab._panel.questions import Estimate, Forecasts, Question
from memlab._panel.runs import RunLog
from memlab._panel.step_files import StepFiles
from memlab._panel.texts import Line, as_json
from memlab._util.units import format_bytes
from memlab.api import accumulation_effect, inspect_workload
from memlab.config import FP32_FORMATS, StepConfig
from memlab.errors import ConfigError, MemlabError
from memlab.prediction.step_file import packed_result
from memlab.result import Outcome, Source, StepResult
from memlab.running import Progress
from memlab.runtime.accumulation import AccumulationEffect
from memlab.runtime.inspect import WorkloadFacts
from memlab.runtime.isolation import TOO_LONG
from memlab.techniques import registry
from memlab.workload import Workload

# Held while a panel's workload is looked at: of panels that are closed meanwhile nothing is asked.
INSPECTING = threading.Lock()

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
        asked: reads what is on screen.
        log: of the runs.
        keeper: of the predictions that a person keeps.
        elsewhere: fills the table of cards.
        changed: called after a run was given its prediction.
    """

    def __init__(
        self,
        forecasts: Forecasts,
        asked: Asked,
        log: RunLog,
        keeper: Keeper,
        elsewhere: Elsewhere,
        changed: Callable[[], None],
    ) -> None:
        self._forecasts, self._asked, self._log = forecasts, asked, log
        self._keeper, self._elsewhere, self._changed = keeper, elsewhere, changed

    def on_screen(
        self, question: Question, estimate: Estimate | None, *, is_searching: bool
    ) -> bool:
        """Have predicted what is on screen, then what it is compared with.

        Returns whether an answer will arrive.
        """
        if estimate is None or not estimate.exact:
            return self._forecasts.ask(question)
        # the saving of recomputation is relative to the plain step; a search has the worker first
        if not is_searching and question.plain is not None and self._forecasts.ask(question.plain):
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
        sizes = self._asked.names_by_size
        if not estimate.is_ok:
            self._forecasts.ahead([])
            return
        kind = "cpu" if question.device == "cpu" else "cuda"
        first = [
            replace(question, config=config)
            for config in choices.covering(question.config)
            if not registry.is_refused(config, kind)
        ]
        beside = neighbours(question, state.PRECISIONS, before, sizes)
        self._forecasts.ahead(beside, first)

    def _of_runs(self) -> list[Question]:
        """Return the settings of runs that wait for an exact prediction, and give it to the others.

        It may have come with that of another setting.
        """
        waiting = []
        for run in self._log.own:
            if run.prediction is None and run.result.source is Source.MEASURED:
                question = Question.of(run.result)
                found = self._forecasts.exact(question)
                if found is None:
                    waiting.append(question)
                elif found.outcome is Outcome.OK:
                    with self._log.lock:
                        self._log.change(run.number, prediction=found)
                        self._changed()
        return waiting


class Page:
    """Tells the page what is known of the settings on screen, and of the runs.

    Args:
        told: what the page is told.
        asked: the settings on screen.
        log: the runs.
        workloads: by name.
        looked_up: called in a thread after what is on screen was looked up.

    Attributes:
        lock: that of the log, held while the log or anything here is changed.
        job: what goes on; None if nothing does.
        closed: whether the panel was closed.
        forecasts: every prediction.
        panes: what has been opened.
    """

    def __init__(
        self,
        told: PanelState,
        asked: Asked,
        log: RunLog,
        workloads: Mapping[str, Workload],
        looked_up: Callable[[], None],
    ) -> None:
        self._told, self._asked, self._log, self._workloads = told, asked, log, workloads
        self._looked_up = looked_up
        self.lock = log.lock
        self.job: PanelJob | FitJob | BaseJob | None = None
        self.closed = False
        self._move: dict[str, Any] = {"by": "kernel", "move": 0}  # that made what is on screen
        self._facts: dict[str, WorkloadFacts | str] = {}  # or the reason why there are none
        self._estimate: Estimate | None = None
        self._looked: Question | None = None  # the question of the shown estimate
        self._before: Question | None = None  # the one that was shown before it
        self._doing = ""  # what the worker is doing for a prediction
        self._said = Status(text="")
        self._text, self._fraction = "", 0.0  # of what goes on
        self.panes, self._files = Panes(told), StepFiles()
        self._tell_doing = Throttle(self._tell_prediction)
        self.forecasts = Forecasts(workloads, self._predicted, self._tell_doing)
        self._keeper = Keeper(self.forecasts.look, self._add_kept)
        self._effects: dict[str, AccumulationEffect] = {}
        self._find_facts, self._find_effect = Latest(self._inspect), Latest(self._judge)
        self._stop_judging = threading.Event()
        self._look = Latest(self._look_up)
        self._elsewhere = Elsewhere(asked, self.forecasts, self.panes, self.guarded)
        self.show_progress("", 0.0)
        self._requests = Requests(
            self.forecasts, asked, log, self._keeper, self._elsewhere, self._tell_runs
        )

    def close(self) -> None:
        """Stop what goes on, and tell the page nothing more."""
        with self.lock:
            self.closed = True
            if self.job:
                self.job.cancel.set()
            self._stop_judging.set()

        self._find_facts.close()
        self._find_effect.close()
        self._keeper.close()
        self.forecasts.close()
        self._tell_doing.close()
        self._look.close()
        self._elsewhere.close()
        self._asked.close()

    def begin(self, job: PanelJob | FitJob | BaseJob) -> None:
        """Note the job that begins; what micro-batches do is not looked for beside it."""
        self.job = job
        self._stop_judging.set()
        self.show_progress("", 0.0)

    def end(self) -> None:
        """Note that nothing goes on any more."""
        self.job = None
        self.show_progress("", self._fraction)

    # settings

    def moved(self, by: str, move: int) -> None:
        """Note which move of which view, of a search or of the kernel made what is on screen."""
        self._move = {"by": by, "move": move}

    def refresh(self) -> None:
        """Tell everything that depends on the settings on screen, after any change of them."""
        with self.guarded():
            with self.lock, self._told.together():
                self._tell_settings()
                self._tell_answer()
            self._look()

    def change(self, fields: Mapping[str, Any], by: str = "kernel") -> None:
        """Set settings, as checked, from code or `by` a search."""
        with self.lock:
            self._asked.set({name: fields[name] for name in fields if name in state.OTHER_FIELDS})
            self._asked.set_step({n: fields[n] for n in fields if n in state.FIELDS})
            self.moved(by, self._move["move"] + 1)
        self.refresh()

    def _tell_settings(self) -> None:
        self._asked.follow_device()
        self._asked.follow_workload()
        name = self._asked.name
        if name not in self._facts:
            self._find_facts(name)
        alike = self._facts_of(name) or self._facts_of(self._asked.given.name)
        # of another size formats and blocks are the same, so that no control moves meanwhile
        has_blocks = alike is None or bool(alike.blocks)
        if not has_blocks:
            self._asked.set_step({"checkpointing": "none"})
        config = None if self._asked.wrong else self._asked.config
        if config is not None and config.accumulation_steps * config.data_parallel_size > 1:
            self._find_effect(name)
        form = catalog.form(
            self._asked.listed,
            self._asked.given,
            self._asked.of_step,
            formats=self._formats(alike),
            has_blocks=has_blocks,
        )
        self._told.tell(form=form, asked={**self._move, "fields": as_json(self._asked.fields)})
        if self.panes.is_open("code"):
            self.panes.show(code=self._asked.code() if not self.problem else [])

    def _facts_of(self, name: str) -> WorkloadFacts | None:
        facts = self._facts.get(name)
        return facts if isinstance(facts, WorkloadFacts) else None

    def _formats(self, facts: WorkloadFacts | None) -> tuple[str, ...]:
        """Return the number formats of the model on screen; empty while they are not known."""
        if choices.zoo_options(self._asked.given) is not None:
            return FP32_FORMATS  # all models of the zoo are built in fp32
        return facts.parameter_formats if facts else ()

    @property
    def problem(self) -> str:
        """Why nothing can be run or searched with what is on screen; "" if it can."""
        asked = self._asked
        of_header = asked.device_problem or asked.limit_problem
        of_form = asked.choices_problem or asked.size_problem
        of_step = next(iter(asked.wrong.values()), MAKING if asked.is_being_made else "")
        return of_header or of_form or of_step

    def _lines(self) -> dict[str, Any]:
        """Return what is said of each control."""
        asked, name = self._asked, self._asked.name
        facts, settings, wrong = self._facts_of(name), asked.of_step, asked.wrong
        lines = texts.lines(
            settings, wrong, facts, device=asked.device, name=name, effect=self._effect_of(name)
        )
        header_wrong = asked.device_problem or asked.limit_problem
        of_ranks = texts.ranks_line(
            settings,
            wrong,
            texts.setup_of(settings, wrong, asked.device),
            is_here=not header_wrong and asked.is_here,
            num_cards=asked.num_cards,
        )
        return {
            "lines": {field: line.told for field, line in lines.items()},
            "more": lines["more"].told,
            "optimizer": lines["optimizer"].told,
            "ranks": of_ranks.told,
            "choices": self._choices_line(facts).told,
            "size": self._size_line(None if wrong else asked.config).told,
            "about": self._about(name, header_wrong).told,
        }

    def _choices_line(self, facts: WorkloadFacts | None) -> Line:
        own, problem = self._asked.listed.choices, self._asked.choices_problem
        if own is None:
            return Line("")
        return texts.wrong_choices_line(problem, own) if problem else texts.choices_line(facts)

    def _size_line(self, config: StepConfig | None) -> Line:
        own, problem = self._asked.given.sample_size, self._asked.size_problem
        if own is None:
            return Line("")
        if problem:
            return texts.wrong_size_line(problem, own)
        if self._asked.is_being_made:
            return Line(f"{MAKING} with {own.name} {self._asked.fields['sample_size']}")
        size = self._asked.sample_size
        return texts.size_line(size, config) if size else Line("")

    def _about(self, name: str, wrong: str | None) -> Line:
        """Return the line below the header: about the limit or the device, or else the workload."""
        if wrong:
            return Line(wrong, kind=state.BAD)
        typed, whose = self._asked.limit_text, choices.of_capacity(self._asked.device)
        told = texts.limit_line(typed, self._asked.capacity, whose)
        return told or texts.about_line(name, self._facts.get(name))

    def say(self, text: str, kind: str = "", *, lasts: bool = False) -> None:
        """Show a sentence in the status line.

        Args:
            text: the sentence.
            kind: of the verdict that colours it; "" for none.
            lasts: whether it stays until the next one, and not only as long as the settings do.
        """
        question = None if lasts else self._asked.question
        with self.lock:
            self._said = Status(text=text, kind=kind, question=question)
            if not self.closed:
                self._told.tell(answer={**self._told.answer, "status": self._status})

    @property
    def _status(self) -> dict[str, Any]:
        here = self._asked.question
        if self._said.run is None and self._said.is_past(here):
            last = self._log.last
            self._said = status.of_run(last) if last else Status(text="")
        idle = Status(text=self._why_not_here)
        return status.told(self._said if self._said.text else idle, here)

    @property
    def _why_not_here(self) -> str:
        """The words on what Run does for a device that is not in this machine; else ""."""
        if self._asked.device_problem or self._asked.is_here:
            return ""
        what = texts.PLAYED_BACK if self._asked.is_recorded else texts.NOT_HERE
        return f"{self._asked.device} {what}"

    # what is known of a workload

    def _inspect(self, name: str) -> None:
        with INSPECTING, self.guarded():
            if self.closed:
                return
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
        """Find out what micro-batches do to the gradient, once; *Fit for me* asks for it too."""
        with self.guarded():
            with self.lock:
                if self.closed or self.job is not None or name in self._effects:
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
        divided = config.divided_further()
        if divided is None:
            return ""
        name = self._asked.name
        verdict = state.gradient_verdict(divided, self._facts_of(name), self._effect_of(name))
        return "" if verdict.kind == state.GOOD else verdict.text

    @property
    def divided(self) -> str:
        """What micro-batches do to the gradient of the workload on screen; "" if nothing."""
        name = self._asked.name
        return state.divided_words(self._facts_of(name), self._effect_of(name))

    @property
    def knows_division(self) -> bool:
        """Whether `divided` rests on the workload as it was looked at."""
        name = self._asked.name
        return self._facts_of(name) is not None and self._effect_of(name) is not None

    # runs

    def tell(self, progress: Progress) -> None:
        """Show the progress of the current run, search or comparison."""
        with self.lock:
            if self.job and not self.job.cancel.is_set():
                by_cell = f" ({texts.RUN_BY_CELL})" if self.job.by_cell else ""
                self.show_progress(progress.text + by_cell, progress.fraction)

    def show_progress(self, text: str, fraction: float) -> None:
        """Show what goes on, and how far it is."""
        self._text, self._fraction = text, fraction
        by_cell = texts.RUN_BY_CELL if self.job and self.job.by_cell else ""
        job = {"running": self.job is not None, "byCell": by_cell, "text": text}
        self._told.tell(job={**job, "fraction": fraction})

    def show_runs(self) -> None:
        """Show the table after a run was added or changed."""
        with self.lock:
            last = self._log.last
            self._tell_runs()
            if last is None or self.closed:
                return

            self._said = status.of_run(last)
            if not last.is_predicted:
                is_done = last.result.outcome is Outcome.OK and not last.is_earlier
                self.show_progress(self._text, 1.0 if is_done else 0.0)
            self._tell_answer()

        self._look()

    def change_runs(self) -> None:
        """Show the table after a person has changed it: a pin, a name, a comparison."""
        self._tell_runs()
        self.refresh()

    def _tell_runs(self) -> None:
        if not self.closed:
            self._told.tell(runs=table.told(self._log))

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

        self._look()
        return wish

    def _add_kept(self, result: StepResult, limit_bytes: int | None) -> None:
        with self.lock:
            self._log.add(result, limit_bytes=limit_bytes)
        self.show_runs()

    def _predicted(self, estimate: Estimate) -> None:
        """Take a prediction of the worker; runs of the same settings get their error from it."""
        with self.guarded():
            self._tell_doing.drop()  # late progress would be told of nothing
            with self.lock:
                self._doing = ""
                same = [run for run in self._log.own if estimate.question.is_of(run.result)]
                runs = [run for run in same if not run.is_predicted and run.prediction is None]
                for run in runs:
                    self._log.change(run.number, prediction=with_numbers(estimate.result))
                if runs:
                    self._tell_runs()

            self._look()

    def _tell_prediction(self, text: str) -> None:
        with self.guarded(), self.lock:
            self._doing = text
            if not self.closed:
                self._tell_answer()

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

    def _tell_answer(self) -> None:
        """Tell what is known of the settings on screen."""
        now, limit, asked = self.outlook(), self._asked.limit, self._asked
        fit = now.fit(limit)
        if asked.limit_problem:
            fit = state.Verdict(state.OPEN, "the limit is not a size")
        question, capacity = now.question, asked.capacity
        when, printed = now.printed
        source = "run" if now.run else "prediction" if now.predicted else "none"
        whose = choices.of_capacity(asked.device)
        self._told.tell(
            answer={
                **self._move,
                "workload": asked.name,
                "device": asked.device,
                "family": self._files.family(question) if question else None,
                "steps": self.steps,
                "exact": now.estimate is not None and now.estimate.exact,
                "limitBytes": limit,
                "usableBytes": capacity,
                "usableWords": f"{format_bytes(capacity)}: {whose}" if capacity else "none",
                "ready": not self.problem,
                "keeps": not (asked.device_problem or asked.can_run),
                "why": self._why_not_here,
                "fit": fit.told,
                "costs": now.costs(),
                "source": source,
                "run": now.run and now.run.number,
                "compared": self._compared,
                # the page may know more by itself until this was looked up
                "note": "" if now.is_pending and question != self._looked else now.note(),
                "advice": self._advice(now, limit).told,
                **self._lines(),
                "divided": self.divided,
                "failure": self._failure(now),
                "printed": {"when": when, "text": printed} if printed else None,
                "doing": self._doing,
                "status": self._status,
            }
        )

    @property
    def _compared(self) -> dict[str, Any] | None:
        """The run that is compared, with its recorded steps; those of an earlier model are gone."""
        run = self._log.compared_run
        if run is None or run.is_earlier:
            return None
        asked = Question.of(run.result)
        steps = self._files.numbers(self.forecasts.recorded(asked), asked.config)
        return {"run": run.number, "steps": steps}

    def _advice(self, now: Outlook, limit: int | None) -> Line:
        try:
            said = self._said_of_division
            return self._not_recorded() or now.advice(self._log.own, limit, said)
        except Exception as error:  # the answer stands without it
            self._said = Status(text=texts.error_text(error), kind=state.BAD)
            return Line("")

    def _failure(self, now: Outlook) -> dict[str, str] | None:
        """Return a title and a sentence if the model cannot be trained; None if it can."""
        name = self._asked.name
        facts = self._facts.get(name)
        if isinstance(facts, str):
            return {"title": f"{name} cannot be built", "sentence": facts}
        failed = now.failure
        if failed is None:
            return None
        if failed.outcome is Outcome.TIMED_OUT:
            said = failed.message.removesuffix(f"; {TOO_LONG}")
            sentence = f"{said}. Run measures the step without a prediction."
            title = f"A training step of {name} takes too long to predict"
            return {"title": title, "sentence": sentence}
        how = "failed" if failed.source is Source.MEASURED else "fails"
        return {"title": f"A training step of {name} {how}", "sentence": failed.message}

    def _not_recorded(self) -> Line | None:
        """Return the closest recorded settings, where those on screen are not recorded."""
        if self._asked.question is None or not self._asked.is_recorded:
            return None
        near = self._asked.nearest_recorded
        return recorded_line(self._asked.config, near, self._asked.recorded_sizes)

    def _look_up(self, _: object) -> None:
        with self.guarded():
            question, limit = self._asked.question, self._asked.limit
            estimate = self.forecasts.look(question, limit) if question else None
            if question != self._looked and self._looked is not None:
                self._before = self._looked
            is_searching = isinstance(self.job, FitJob)
            is_asked = question is not None and self._requests.on_screen(
                question, estimate, is_searching=is_searching
            )
            with self.lock:
                self._estimate, self._looked = estimate, question
                self._tell_answer()

            self._keeper.settle()
            self._requests.later()
            self._show_panes()
            self._looked_up()
            if question and estimate and not is_asked and self.job is None:
                self._requests.ahead(question, estimate, self._before)
                self._find_effect(question.workload_name)  # for advice to divide the batch
            self._elsewhere.refresh()

    def _show_panes(self) -> None:
        now, limit = self.outlook(), self._asked.limit
        run = now.run.result if now.run else None
        at_peak = run if run is not None and run.peak_by_category else now.predicted
        if self.panes.is_open("peak") and at_peak is not None:
            self.panes.show(peak=peak_pane(at_peak, limit))
        if self.panes.is_open("evidence"):
            self.panes.show(evidence=evidence_pane(now.predicted))
        if self.panes.is_open("ranks"):
            self.panes.show(ranks=ranks_pane(at_peak, limit))

    # what a page asks for

    def send(self, steps: Iterable[int], runs: Iterable[int], *, csv: bool) -> None:
        """Send step files and runs by number, and all runs as a CSV file."""
        with self.guarded():
            for number in steps:
                if (file := self._files.file(number)) is not None:
                    self._told.send_file("step", number, file)
            for number in runs:
                if 0 < number <= len(self._log.runs):
                    file = packed_result(self._log.runs[number - 1].result)
                    self._told.send_file("run", number, file)
            if csv:
                self._told.send_csv(table.as_csv(self._log.runs))

    @property
    def steps(self) -> list[int]:
        """The numbers of the recorded steps that tell of what is on screen."""
        question = self._asked.question
        if question is None:
            return []
        return self._files.numbers(self.forecasts.recorded(question), question.config)

    def step_files(self) -> list[str]:
        """Return the files of these steps in base64."""
        return self._files.as_text(self.steps)
