"""`BaseEffect`: asks what the quantized base on screen saves and costs, and shows the answer.

The answer is `memlab.compare_base`, by prediction alone. It changes nothing on screen; a change
that may help is a click.
"""

import html
from typing import Any

from memlab._panel import state
from memlab._panel.asked import Asked
from memlab._panel.base_pane import COMPARE
from memlab._panel.beside import Beside
from memlab._panel.choice_row import label, words
from memlab._panel.choices import quantized_base
from memlab._panel.job import BaseJob, Throttle
from memlab._panel.page import Page
from memlab._panel.runner import GOING_ON
from memlab._panel.verdicts import setting_words
from memlab._panel.view import View
from memlab.arguments.tables import columns_table
from memlab.comparing.base_parts import signed
from memlab.comparing.quantized_base import BaseComparison, BaseRemedy, compare_base

HEADS = ("at the peak", "difference", "why")


class BaseEffect:
    """Compares on behalf of the pane, one comparison at a time.

    Args:
        view: of the panel.
        asked: reads what is on screen, and sets the choices of a workload.
        page: shows progress and sentences, and knows whether a run goes on.
    """

    def __init__(self, view: View, asked: Asked, page: Page) -> None:
        self._view, self._asked, self._page = view, asked, page
        self._beside = Beside(view, page)
        self._job: BaseJob | None = None  # of the answer
        self._remedies: tuple[BaseRemedy, ...] = ()  # by row

    def start(self) -> None:
        """Compare in a thread what is on screen, unless the answer to that is there."""
        with self._page.guarded():
            question = self._asked.question
            if self._page.closed or question is None or not self._can_ask:
                return
            job = BaseJob(workload=self._asked.workload, question=question)
            if not self._beside.begin(job):
                text = f"{GOING_ON}; press {COMPARE} once it has ended"
                self._page.say(text)
                if self._job is None:
                    self._view.base.show(text, "")
                return

            self._job, self._remedies = job, ()
            self._view.base.show("Comparing; Stop ends it.", _about(job))
            self.refresh()

            def ask(tell: Throttle) -> BaseComparison:
                config, device = question.config, question.device
                return compare_base(
                    job.workload, config, device, on_progress=tell, cancel=job.cancel
                )

            self._beside.ask(job, ask, self._arrived, self._failed)

    def use(self, at: int) -> None:
        """Set the controls as a change that may help has them."""
        with self._page.guarded():
            if self._job is None or self._is_past or at >= len(self._remedies):
                return
            remedy = self._remedies[at]
            if choices := _other_choices(remedy, self._job):
                self._asked.set({"choices": choices})
            self._view.controls.set(_other_settings(remedy, self._job))
            self._page.say(f"set {_name(remedy, self._job)}: {remedy.effect}, predicted")

    def refresh(self) -> None:
        """Say whether the answer is one to what is on screen, after any change of that."""
        with self._page.guarded():
            if not self._asked.choices_problem:
                self._view.base.offer(quantized_base(self._asked.given))
            self._view.base.mark(
                can_ask=self._can_ask,
                is_past=self._job is not None and self._is_past,
                usable=[remedy.nbytes is not None for remedy in self._remedies],
            )

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

    def _arrived(self, found: BaseComparison) -> None:
        job = self._job
        assert job is not None
        self._remedies = found.remedies
        rows = [[part.name, signed(part.nbytes), part.why] for part in found.parts]
        self._view.base.show(
            f"{found.message[:1].upper()}{found.message[1:]}.",
            _about(job),
            columns_table(HEADS, rows),
            [_row(remedy, job) for remedy in found.remedies],
        )
        self._page.say(found.message)
        self.refresh()

    def _failed(self, text: str) -> None:
        job, self._job = self._job, None  # it can be asked again
        self._view.base.show(text, _about(job) if job else "")
        self.refresh()


def _about(job: BaseJob) -> str:
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


def _row(remedy: BaseRemedy, job: BaseJob) -> str:
    return f"<b>{html.escape(_name(remedy, job))}</b>: {html.escape(remedy.effect)}"
