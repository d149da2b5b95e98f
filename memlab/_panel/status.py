"""The status line: what was said last, and to which settings it belongs. Pure functions.

A sentence about a run stays when the settings change, named and greyed. Any other sentence is about
the settings on screen and goes with them.
"""

import html
from dataclasses import dataclass

from memlab._panel import verdicts
from memlab._panel.questions import Question
from memlab._panel.runs import Run
from memlab._panel.state import briefly
from memlab._panel.verdicts import Verdict

KEPT = "this prediction is in the table"


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """A sentence of the status line.

    Attributes:
        text: the sentence, without the run that it is about.
        kind: of the verdict that colours it; "" for none.
        question: the settings that it belongs to; None while a run goes on, which has its own.
        run: that it is about; None if it is about none.
    """

    text: str
    kind: str = ""
    question: Question | None = None
    run: Run | None = None

    def is_past(self, here: Question | None) -> bool:
        """Return whether the settings on screen are others by now."""
        if self.run is not None:
            return self.run.is_earlier or here is None or not here.is_of(self.run.result)
        return self.question is not None and here != self.question

    def named(self, here: Question | None) -> str:
        """Return the sentence, beginning with the run and what differs from the screen."""
        if self.run is None:
            return self.text
        result = self.run.result
        words = [f"run {self.run.number}", *(["earlier"] if self.run.is_earlier else [])]
        if here is None or result.workload_name != here.workload_name:
            words.append(result.workload_name)
        if here is None or result.device != here.device:
            words.append(f"on {result.device}")
        return f"{', '.join([*words, briefly(result)])}: {self.text}"


def of_run(run: Run) -> Status:
    """Return how a run ended, or that it is a kept prediction, with its notes."""
    result = run.result
    kept = (KEPT,) if run.is_predicted else ()
    text = ". ".join(said.rstrip(".") for said in (*kept, result.message, *result.notes))
    return Status(text=text, kind=verdicts.outcome_verdict(result).kind, run=run)


def as_html(status: Status, here: Question | None) -> str:
    """Return the line as HTML: coloured and marked, or greyed if the settings are others by now."""
    text, is_past = status.named(here), status.is_past(here)
    shown = Verdict(status.kind, text).html() if status.kind else html.escape(text)
    kind = ' class="memlab-past"' if is_past else ""
    return f'<div role="status" aria-live="polite" title="{html.escape(text)}"{kind}>{shown}</div>'
