"""`Line`: the line beside a control."""

import html
from collections.abc import Mapping
from dataclasses import dataclass

from memlab._panel.verdicts import OPEN, SYMBOLS, Verdict


@dataclass(frozen=True, slots=True)
class Line:
    """The line beside a control: what it means now, a verdict, and a remedy to click.

    Attributes:
        text: the explanation, or a sentence that says what is wrong.
        verdict: shown after the text.
        remedy: the label of a button, and the settings that it makes, by field.
        kind: OPEN for an explanation, WARN or BAD for a problem.
    """

    text: str
    verdict: Verdict | None = None
    remedy: tuple[str, Mapping[str, object]] | None = None
    kind: str = OPEN

    def html(self) -> str:
        """Return the line; a warning has a symbol beside its colour."""
        symbol = (
            "" if self.kind == OPEN else f'<span aria-hidden="true">{SYMBOLS[self.kind]}</span> '
        )
        verdict = f" {self.verdict.html()}" if self.verdict else ""
        return (
            f'<div class="memlab-line memlab-line-{self.kind}" title="{html.escape(self.text)}">'
            f"{symbol}{html.escape(self.text)}{verdict}</div>"
        )
