"""`Runner`: measures what is on screen, for the button Run in a thread and for code in its cell."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from memlab._panel import choices, state, texts
from memlab._panel.asked import Asked
from memlab._panel.catalog import label, words
from memlab._panel.choices import quantized_base
from memlab._panel.job import BaseJob, FitJob, PanelJob, Throttle
from memlab._panel.outlook import MAKING, with_numbers
from memlab._panel.page import Page
from memlab._panel.questions import Question
from memlab._panel.runs import Run, RunLog
from memlab._panel.state import setting_words
from memlab._util.units import format_bytes, signed_bytes
from memlab.config import StepConfig
from memlab.devices.here import resolve_device
from memlab.errors import ConfigError, DeviceError, MemlabError
from memlab.result import FitStatus, StepResult, format_percent
from memlab.running import Progress
from memlab.runtime.isolation import prewarm
from memlab.runtime.verify_report import VerifyReport
from memlab.search.alternatives import time_beside
from memlab.search.answer import Recommendations
from memlab.search.quantized_base import BaseComparison, BaseRemedy, compare_base
from memlab.search.recommend import recommend
from memlab.search.search import BestSoFar
from memlab.store.recorded import is_recorded
from memlab.techniques.registry import CONTROLS

GOING_ON = "a run, a search or a comparison of this panel is going on"


class Runner:
    """Starts and stops the runs of a panel, of which there is one at a time.

    Args:
        asked: the settings on screen.
        log: takes the results.
        page: shows them.
    """

    def __init__(self, asked: Asked, log: RunLog, page: Page) -> None:
        self._asked, self._log, self._page = asked, log, page

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
            self._page.say("interrupted", state.OPEN)
            self._page.show_progress("", 0.0)
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
                check_gradients=self._asked.checks_gradients,
                by_cell=by_cell,
            )
            page.begin(job)
            page.forecasts.hold(True)
            return job

    def _measure(self, job: PanelJob) -> Run:
        run: list[Run] = []

        def measured(result: StepResult) -> None:
            estimate = self._page.forecasts.look(Question.of(result), result.memory_limit_bytes)
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
                self._page.end()
        self._page.forecasts.hold(False)
        self._page.refresh()
        prewarm()  # if this run stopped its worker, the next one does not wait for another


# `Beside`: asks memlab what takes a while in a thread beside the kernel's, one thing at a
# time.
#
# *Stop* ends it as it ends a run. A failure becomes a sentence, because a thread has no
# caller.

T = TypeVar("T")


class Beside:
    """Asks on behalf of a pane of the page.

    Args:
        page: shows progress and sentences, and knows whether a run goes on.
    """

    def __init__(self, page: Page) -> None:
        self._page = page

    def begin(self, job: FitJob | BaseJob) -> bool:
        """Take the turn of a job; return whether it was free."""
        with self._page.lock:
            if self._page.job is not None:
                return False
            self._page.begin(job)
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
            self._page.end()
        self._page.show_progress("", 0.0)
        self._page.refresh()
        prewarm()  # if the job was stopped, its worker is gone


# `Fitting`: what *Fit for me* searches, where it moves the sliders, and what it says of it.
#
# The search is `memlab.recommend` by prediction, in a thread. Memory budget and
# accumulation are searched anew each time, and so is what an earlier search has set: else a
# larger limit would never bring back what a smaller one took away. Everything else that a
# person has changed stays.

PATIENCE = 20  # seconds
MOST_FITTING, MOST_CLOSE = 5, 3  # of the list
SEARCHED_ANEW = ("memory_budget", "accumulation_steps")
CHANGED_MEANWHILE = (
    "the settings were changed during the search, so nothing more was moved; what fits is listed "
    "below the sliders"
)
LOOKING = "still looking for a faster one"


class Fitting:
    """Searches on behalf of the button, one search at a time.

    Args:
        asked: the settings on screen.
        page: shows progress and sentences, and knows whether a run goes on.
    """

    def __init__(self, asked: Asked, page: Page) -> None:
        self._asked, self._page = asked, page
        self._beside = Beside(page)
        self._job: FitJob | None = None  # of the answer
        self._answer, self._notes = "", tuple[str, ...]()
        self._found: list[StepResult] = []  # by row
        self._moved: set[tuple[str, Any]] = set()  # what searches have set
        self._here: Question | None = None  # where the search has left the sliders
        self._number = 0  # of the search

    def start(self) -> None:
        """Search in a thread for what is on screen; what cannot be searched is said."""
        with self._page.guarded():
            question, problem = self._asked.question, self._page.problem
            if self._page.closed:
                return
            if problem or question is None:
                self._page.say(problem, state.BAD)
                if self._page.job is None:
                    self._job, self._found, self._notes = None, [], ()
                    self._tell(problem)
                return
            workload = self._asked.workload  # it is made, since there is a question
            base = replace(question, config=self._base(question.config))
            job = FitJob(
                workload=workload, question=question, base=base, limit_bytes=self._asked.limit
            )
            if not self._beside.begin(job):
                self._page.say(f"{GOING_ON}; press Fit for me again once it has ended")
                return

            self._job, self._found, self._notes = job, [], ()
            self._here, self._number = question, self._number + 1
            self._tell(f"Searching for about {PATIENCE} s; Stop ends it.")
            self._beside.ask(
                job, partial(self._search, job), partial(self._arrived, job), self._tell
            )

    def use(self, at: int) -> None:
        """Move the sliders to a setting that was found."""
        with self._page.guarded():
            is_row = at in range(len(self._found))
            if self._job is not None and is_row and not self._is_past(self._job):
                self._move(self._job, self._found[at], by="kernel")

    def refresh(self) -> None:
        """Say whether the answer is still one to what is on screen, after any change of that."""
        if self._job is not None:
            with self._page.guarded():
                self._tell(self._answer)

    def _tell(self, answer: str) -> None:
        """Show an answer in a sentence, with what was found."""
        self._answer, job, here = answer, self._job, self._asked.question
        is_past = job is not None and self._is_past(job)
        rows = [
            {
                "settings": _settings(found),
                "price": _price(found, self._found[0]),
                "isClose": found.fit is FitStatus.TOO_CLOSE,
                "isHere": not is_past and here is not None and here.config == found.config,
            }
            for found in self._found
        ]
        told = {"answer": answer, "about": _about(job) if job else "", "isPast": is_past}
        self._page.panes.show(fit={**told, "rows": rows, "notes": list(self._notes)})

    def _search(self, job: FitJob, tell: Throttle) -> Recommendations | None:
        """Return what fits; None if it was stopped after something had been found."""

        def told(progress: Progress) -> None:
            if isinstance(progress, BestSoFar):
                self._improved(job, progress)
            tell(progress)

        try:
            return recommend(
                job.workload,
                job.limit_bytes,
                device=job.question.device,
                config=job.base.config,
                top=MOST_FITTING,
                confirm=0,
                patience=PATIENCE,
                on_progress=told,
                cancel=job.cancel,
            )
        except MemlabError:
            if self._found and job.cancel.is_set():
                return None
            raise

    def _improved(self, job: FitJob, best: BestSoFar) -> None:
        """Show the best so far, and go there unless something was changed meanwhile."""
        with self._page.guarded():
            if self._page.closed or job.cancel.is_set():
                return
            question = replace(job.question, config=best.result.config)
            self._page.forecasts.take(question, best.prediction)
            self._found, self._answer = [best.result], f"This fits; {LOOKING}. Stop keeps this."
            if self._is_untouched(job):
                self._move(job, best.result, f"{LOOKING}; ")
            self.refresh()

    def _is_untouched(self, job: FitJob) -> bool:
        """Return whether nobody has changed anything since the search has moved the sliders."""
        return (self._asked.question, self._asked.limit) == (self._here, job.limit_bytes)

    def _arrived(self, job: FitJob, ranked: Recommendations | None) -> None:
        """Show what was found, and go there unless something was changed meanwhile."""
        if ranked is None:
            where = "on screen" if self._is_untouched(job) else "listed below the sliders"
            self._page.say(f"the search was stopped; the best so far is {where}", state.OPEN)
            return self._tell("The search was stopped; this is the best so far.")
        close = [one.result for one in ranked.too_close[:MOST_CLOSE]]
        self._found, self._notes = [*(one.result for one in ranked), *close], ranked.notes
        self._answer = _sentence(ranked)
        if not self._is_untouched(job):
            self._page.say(CHANGED_MEANWHILE, state.WARN)
        elif not len(ranked):
            self._page.say(ranked.message, state.WARN if close else state.BAD)
        else:
            self._move(job, ranked[0].result)
        self.refresh()

    def _move(self, job: FitJob, found: StepResult, first: str = "", *, by: str = "") -> None:
        """Move the sliders; the page undoes all moves of one search together."""
        target, base = state.from_config(found.config), job.base.config
        self._moved |= {
            (field, value) for field, value in target.items() if value != getattr(base, field)
        }
        self._here = replace(job.question, config=found.config)
        self._page.change(target, by or f"search {self._number}")
        is_close = found.fit is FitStatus.TOO_CLOSE
        kind = state.WARN if is_close else state.GOOD
        said = f"{first}moved to {_settings(found)}: {_price(found, found)}, predicted"
        self._page.say(said, kind)

    def _base(self, config: StepConfig) -> StepConfig:
        """Return a config with what is to be searched at its default."""
        default = StepConfig()
        free = {field for field, value in self._moved if getattr(config, field) == value}
        with contextlib.suppress(ConfigError):  # a person's own setting may need one of these
            config = replace(config, **{f: getattr(default, f) for f in free})
        return replace(config, **{f: getattr(default, f) for f in SEARCHED_ANEW})

    def _is_past(self, job: FitJob) -> bool:
        """Whether what is on screen asks for another search."""
        here = self._asked.question
        if here is None:
            return True
        now = replace(here, config=self._base(here.config)), self._asked.limit
        return now != (job.base, job.limit_bytes)


def _about(job: FitJob) -> str:
    """Return what is searched for, and what stays."""
    limit = "the limit is not known" if job.limit_bytes is None else (
        f"limit {format_bytes(job.limit_bytes)}"
    )  # fmt: skip
    config, default = job.base.config, StepConfig()
    chosen = [
        CONTROLS[field].named(getattr(config, field))
        for field in state.FIELDS
        if field == "optimizer"
        or (field != "batch_size" and getattr(config, field) != getattr(default, field))
    ]
    kept = ", ".join([f"batch {config.batch_size}", *chosen])
    return (
        f"{job.question.workload_name} on {job.question.device}, {limit}. Kept: {kept}. Searched: "
        "memory budget, accumulation, and what else is at its default and leaves the training as "
        "it is but for rounding."
    )


def _sentence(ranked: Recommendations) -> str:
    """Return how many settings fit, or why none does."""
    if not len(ranked):
        return ranked.message[:1].upper() + ranked.message[1:]
    best = ranked[0].result
    first = "fastest" if best.step_seconds is not None else "one that sends least"
    if any(time_beside(one.result, best).startswith("as fast") for one in ranked):
        first = "one that is most likely the fastest"
    return f"{_number(len(ranked))} by prediction, the {first} first."


def _number(fitting: int) -> str:
    return "One setting was found that fits" if fitting == 1 else f"{fitting} settings fit"


def _settings(result: StepResult) -> str:
    """Return what a setting changes from the defaults, in words."""
    words = state.briefly(result).split(", ", 1)
    return words[1] if len(words) > 1 else "the plain step"


def _price(result: StepResult, fastest: StepResult) -> str:
    """Return memory and time, the time against that of the fastest."""
    said = []
    peak, limit = result.counted_peak, result.memory_limit_bytes
    if peak is not None:
        said.append(peak.in_words)
        needed, is_above = peak.needed_bytes, limit is not None and peak.upper_bytes > limit
        if needed is not None and is_above and result.fit is FitStatus.FITS:
            said.append(
                f"can run in {format_bytes(needed)} ± {format_percent(peak.needed_uncertainty)}"
            )
        elif limit and peak.nbytes <= limit:
            said.append(f"{format_percent(1 - peak.nbytes / limit)} free")
    if result.time_words:
        said.append(result.time_words)
        if beside := time_beside(result, fastest, "the first"):
            said.append(beside)
    elif result.communication:
        sent = sum(each.sent_bytes for each in result.communication)
        said.append(f"a rank sends {format_bytes(sent)} a step")
    return ", ".join(said)


# `BaseEffect`: asks what the quantized base on screen saves and costs, and shows the answer.
#
# The answer is `memlab.compare_base`, by prediction alone. It changes nothing on screen; a
# change that may help is a click.

AGAIN = "once it has ended, open this again"


class BaseEffect:
    """Compares on behalf of the pane, one comparison at a time.

    Args:
        asked: the settings on screen.
        page: shows progress and sentences, and knows whether a run goes on.
    """

    def __init__(self, asked: Asked, page: Page) -> None:
        self._asked, self._page = asked, page
        self._beside = Beside(page)
        self._job: BaseJob | None = None  # of the answer
        self._answer = "Not compared yet."
        self._found: BaseComparison | None = None

    def start(self) -> None:
        """Compare in a thread what is on screen, unless the answer to that is there."""
        with self._page.guarded():
            question = self._asked.question
            if self._page.closed or question is None or not self._can_ask:
                return
            job = BaseJob(workload=self._asked.workload, question=question)
            if not self._beside.begin(job):
                self._page.say(f"{GOING_ON}; {AGAIN}")
                self._tell(f"{GOING_ON}; {AGAIN}")
                return

            self._job, self._found = job, None
            self._tell("Comparing; Stop ends it.")

            def ask(tell: Throttle) -> BaseComparison:
                config, device = question.config, question.device
                return compare_base(
                    job.workload, config, device, on_progress=tell, cancel=job.cancel
                )

            self._beside.ask(job, ask, self._arrived, self._failed)

    def use(self, at: int) -> None:
        """Set the controls as a change that may help has them."""
        with self._page.guarded():
            job, found = self._job, self._found
            if job is None or found is None or self._is_past:
                return
            if at not in range(len(found.remedies)):
                return
            remedy = found.remedies[at]
            choices = _other_choices(remedy, job)
            changes = {"choices": choices} if choices else {}
            self._page.change({**changes, **_other_settings(remedy, job)})
            self._page.say(f"set {_name(remedy, job)}: {remedy.effect}, predicted")

    def refresh(self) -> None:
        """Say whether the answer is one to what is on screen, after any change of that."""
        if self._job is not None:
            with self._page.guarded():
                self._tell(self._answer)

    @property
    def _can_ask(self) -> bool:
        """Whether what is on screen has a quantized base, and another answer than that shown."""
        if self._asked.question is None or quantized_base(self._asked.given) is None:
            return False
        return self._job is None or self._is_past

    @property
    def _is_past(self) -> bool:
        """Whether the answer is of other settings than those on screen."""
        return self._job is None or self._asked.question != self._job.question

    def _tell(self, answer: str) -> None:
        """Show an answer in a sentence, with the causes and the changes that may help."""
        self._answer, job, found = answer, self._job, self._found
        parts, remedies = (found.parts, found.remedies) if found else ((), ())
        self._page.panes.show(
            base={
                "answer": answer,
                "about": _about_base_effect(job) if job else "",
                "isPast": job is not None and self._is_past,
                "canAsk": self._can_ask,
                "causes": [[part.name, signed_bytes(part.nbytes), part.why] for part in parts],
                "rows": [
                    {
                        "name": _name(remedy, job),
                        "effect": remedy.effect,
                        "leads": remedy.nbytes is not None,
                    }
                    for remedy in remedies
                    if job is not None
                ],
            }
        )

    def _arrived(self, found: BaseComparison) -> None:
        self._found = found
        self._tell(f"{found.message[:1].upper()}{found.message[1:]}.")
        self._page.say(found.message)

    def _failed(self, text: str) -> None:
        self._job = None  # it can be asked again
        self._tell(text)


def _about_base_effect(job: BaseJob) -> str:
    config = job.question.config
    settings = ", ".join([f"batch {config.batch_size}", *state.others(config)])
    return f"{job.question.workload_name} on {job.question.device}, {settings}."


def _other_settings(remedy: BaseRemedy, job: BaseJob) -> dict[str, Any]:
    """Return the settings of a change, by field."""
    before = job.question.config
    return {
        field: value
        for field, value in state.from_config(remedy.result.config).items()
        if value != getattr(before, field)
    }


def _other_choices(remedy: BaseRemedy, job: BaseJob) -> dict[str, Any]:
    """Return the choices of the workload of a change, by name."""
    own, before = remedy.workload.choices, job.workload.choices
    if own is None or before is None:
        return {}
    return {name: value for name, value in own.values.items() if value != before.values[name]}


def _name(remedy: BaseRemedy, job: BaseJob) -> str:
    """Return a change as the controls name it."""
    settings = [setting_words(*item) for item in _other_settings(remedy, job).items()]
    chosen = [f"{label(name)}: {words(to)}" for name, to in _other_choices(remedy, job).items()]
    return ", ".join([*chosen, *settings])
