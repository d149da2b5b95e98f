"""`Fitting`: what *Fit for me* searches, where it moves the sliders, and what it says of it.

The search is `memlab.recommend` by prediction, in a thread. Memory budget and accumulation are
searched anew each time, and so is what an earlier search has set: else a larger limit would never
bring back what a smaller one took away. Everything else that a person has changed stays.
"""

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from memlab._panel import state, verdicts
from memlab._panel.asked import Asked
from memlab._panel.beside import Beside
from memlab._panel.fit_pane import MOST_CLOSE, MOST_FITTING, row_html
from memlab._panel.job import FitJob, Throttle
from memlab._panel.page import Page
from memlab._panel.questions import Question
from memlab._panel.runner import GOING_ON
from memlab._panel.view import View
from memlab.arguments.units import format_bytes, format_seconds
from memlab.config import StepConfig
from memlab.errors import ConfigError
from memlab.limits.judgement import Judgement
from memlab.recommending.alternatives import time_beside, time_width
from memlab.recommending.recommend import recommend
from memlab.recommending.recommendations import Recommendations
from memlab.result import StepResult, format_percent
from memlab.techniques.every import CONTROLS

PATIENCE = 20  # seconds
SEARCHED_ANEW = ("memory_budget", "accumulation_steps")
CHANGED_MEANWHILE = (
    "the settings were changed during the search, so nothing was moved; what fits is listed below "
    "the sliders"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Former:
    """What *Undo* brings back: settings, what an earlier search had set of them, and for what."""

    settings: dict[str, Any]
    moved: dict[str, Any]
    place: tuple[str, str]


class Fitting:
    """Searches on behalf of the button, one search at a time.

    Args:
        view: of the panel.
        asked: reads what is on screen.
        page: shows progress and sentences, and knows whether a run goes on.
    """

    def __init__(self, view: View, asked: Asked, page: Page) -> None:
        self._view, self._asked, self._page = view, asked, page
        self._beside = Beside(view, page)
        self._job: FitJob | None = None  # of the answer
        self._found: list[StepResult] = []  # by row
        self._moved: dict[str, Any] = {}  # what a search has set, by field
        self._former: _Former | None = None
        self._set: dict[str, Any] = {}  # where the sliders were moved last

    def start(self) -> None:
        """Search in a thread for what is on screen; what cannot be searched is said."""
        with self._page.guarded():
            question = self._asked.question
            if self._page.closed or question is None:
                return
            workload = self._asked.workload  # it is made, since there is a question
            base = replace(question, config=self._base(question.config))
            job = FitJob(
                workload=workload, question=question, base=base, limit_bytes=self._asked.limit
            )
            if not self._beside.begin(job):
                self._page.say(f"{GOING_ON}; press Fit for me again once it has ended")
                return

            self._job, self._found = None, []
            said = f"Searching for about {PATIENCE} s; Stop ends it, and moves nothing."
            self._view.fit.show(said, _about(job))
            self._view.open_fit()
            self._beside.ask(
                job,
                partial(_searched, job),
                partial(self._arrived, job),
                lambda text: self._view.fit.show(text, _about(job)),
            )

    def use(self, at: int) -> None:
        """Move the sliders to a setting that was found."""
        with self._page.guarded():
            if self._job is not None and at < len(self._found) and not self._is_past(self._job):
                self._move(self._job, self._found[at])

    def undo(self) -> None:
        """Bring back the settings as they were before the sliders were moved."""
        with self._page.guarded():
            if self._former is None:
                return
            former, self._former = self._former, None
            self._moved = former.moved
            self._view.controls.set(former.settings)
            self._page.say("the settings are as they were before Fit for me")

    def refresh(self) -> None:
        """Say whether the answer is still one to what is on screen, after any change of that."""
        with self._page.guarded():
            job, here = self._job, self._asked.question
            is_past = job is None or self._is_past(job)
            configs = [found.config for found in self._found]
            is_there = here is not None and here.config in configs and not is_past
            at = configs.index(here.config) if here is not None and is_there else None
            self._view.fit.mark(at, allowed=not is_past)
            self._view.fit.show_past(job is not None and is_past)
            if self._former and here and _place(here) != self._former.place:
                self._former = None  # those settings are of another model or device
            self._view.fit.offer_undo(self._former is not None)

    def _arrived(self, job: FitJob, ranked: Recommendations) -> None:
        """Show what was found, and go there unless something was changed meanwhile."""
        close = [one.result for one in ranked.too_close[:MOST_CLOSE]]
        self._job, self._found = job, [*(one.result for one in ranked), *close]
        rows = [
            row_html(
                _settings(found),
                _price(found, self._found[0]),
                is_close=found.fit is Judgement.TOO_CLOSE,
            )
            for found in self._found
        ]
        self._view.fit.show(_sentence(ranked), _about(job), rows, ranked.notes)
        is_same = (self._asked.question, self._asked.limit) == (job.question, job.limit_bytes)
        if not is_same:
            self._page.say(CHANGED_MEANWHILE, verdicts.WARN)
        elif not len(ranked):
            self._page.say(ranked.message, verdicts.WARN if close else verdicts.BAD)
        else:
            self._move(job, ranked[0].result)
        self.refresh()

    def _move(self, job: FitJob, found: StepResult) -> None:
        """Set the controls, and remember how they were."""
        settings, target = self._view.controls.settings(), state.from_config(found.config)
        if settings != self._set:  # by a person, since the sliders were moved last
            self._former = None
        if self._former is None and target != settings:
            place = _place(job.question)
            self._former = _Former(settings=settings, moved=self._moved, place=place)
        base = job.base.config
        self._moved = {
            field: value for field, value in target.items() if value != getattr(base, field)
        }
        self._view.controls.set(target)
        self._set = self._view.controls.settings()
        is_close = found.fit is Judgement.TOO_CLOSE
        kind = verdicts.WARN if is_close else verdicts.GOOD
        self._page.say(f"moved to {_settings(found)}: {_price(found, found)}, predicted", kind)
        self.refresh()

    def _base(self, config: StepConfig) -> StepConfig:
        """Return a config with what is to be searched at its default."""
        default = StepConfig()
        free = {f for f, value in self._moved.items() if getattr(config, f) == value}
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


def _searched(job: FitJob, tell: Throttle) -> Recommendations:
    return recommend(
        job.workload,
        job.limit_bytes,
        device=job.question.device,
        config=job.base.config,
        top=MOST_FITTING,
        confirm=0,
        patience=PATIENCE,
        on_progress=tell,
        cancel=job.cancel,
    )


def _place(question: Question) -> tuple[str, str]:
    return question.workload_name, question.device


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
        about = f" ± {format_percent(peak.uncertainty)}" if peak.uncertainty else ""
        said.append(f"{format_bytes(peak.nbytes)}{about} {peak.kind}")
        needed, is_above = peak.needed_bytes, limit is not None and peak.upper_bytes > limit
        if needed is not None and is_above and result.fit is Judgement.FITS:
            about = f" ± {format_percent(peak.needed_uncertainty)}"
            said.append(f"can run in {format_bytes(needed)}{about}")
        elif limit and peak.nbytes <= limit:
            said.append(f"{format_percent(1 - peak.nbytes / limit)} free")
    seconds = result.step_seconds
    if seconds is not None:
        width = time_width(result)
        about = f" ± {format_percent(width)}" if width else ""
        said.append(f"{format_seconds(seconds)}{about} a step")
        if beside := time_beside(result, fastest, "the first"):
            said.append(beside)
    elif result.communication:
        sent = sum(each.sent_bytes for each in result.communication)
        said.append(f"a rank sends {format_bytes(sent)} a step")
    return ", ".join(said)
