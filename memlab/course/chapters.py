"""`chapter`: a chapter of the course in its notebook: guesses, answers, and what to remember."""

import functools
import json
import numbers
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memlab._util.units import MIB, is_a, shown
from memlab.course import (
    allocator,
    giants,
    lengths,
    limits,
    operators,
    parts,
    quantized,
    ranks,
    recomputing,
    scripts,
    steps,
    updates,
)  # fmt: skip
from memlab.course.exercise import BLANK, Exercise, is_blank, texts
from memlab.errors import ConfigError
from memlab.result import StepResult

SUBJECTS = (
    steps, operators, allocator, limits, parts, recomputing, updates, giants, quantized, lengths,
    scripts, ranks,
)  # fmt: skip
NUM_REMEMBERED = 3
REFERENCE, MISTAKE = "reference", "mistake "
ANSWERS = re.compile(rf"|{REFERENCE}|{MISTAKE}[1-9]")
LEFT_OUT: dict[str, Any] = {"timeline": None, "peak_holdings": ()}  # of a saved result: large
RIGHT, NOT_YET, WRONG = "right", "not yet", "not right"
SIGNS = {RIGHT: "✓", NOT_YET: "…", WRONG: "✗"}


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a chapter is about.

    Attributes:
        number: of the chapter.
        title: its question.
        notebook: name of its file.
        needs: what a reader should know, in words.
        remember: three sentences.
    """

    number: int
    title: str
    notebook: str
    needs: str
    remember: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What memlab says of an answer.

    Attributes:
        number: of the exercise, such as "1.2".
        verdict: "right", "not yet" where there is no answer, or "not right".
        said: the hint, or what to do.
    """

    number: str
    verdict: str
    said: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the answer is right."""
        return self.verdict == RIGHT

    def __repr__(self) -> str:
        said = self.said.removesuffix(".")  # as messages of errors end
        return f"{self.number}: {self.verdict}" + (f": {said}." if said else ".")

    def _repr_markdown_(self) -> str:
        number, said = repr(self).split(": ", 1)
        verdict, colon, hint = said.partition(":")
        return f"{SIGNS[self.verdict]} **{number}: {verdict}**{colon}{hint}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """A number that was guessed before a run.

    Attributes:
        nbytes: None where no number was given.
        said: about the guess.
    """

    nbytes: float | None
    said: str

    def __repr__(self) -> str:
        return self.said

    def on(self, figure: Any) -> Any:
        """Draw the guess into a picture of bytes, and return the picture.

        Args:
            figure: such as `memlab.plots.timeline` returns, whose first axes have bytes upwards.
        """
        if self.nbytes is not None and figure.axes:  # a picture may only say something
            axes = figure.axes[0]
            near = axes.get_yticklabels()[0]  # in whose colour and size it is written
            color, size = near.get_color(), near.get_size()
            axes.axhline(self.nbytes, color=color, linestyle="--", linewidth=1)
            axes.annotate("your guess", (1, self.nbytes), xycoords=("axes fraction", "data"),
                          xytext=(-4, 2), textcoords="offset points", ha="right",
                          color=color, size=size)  # fmt: skip
            low, high = axes.get_ylim()
            axes.set_ylim(low, max(high, 1.1 * self.nbytes))
        return figure


def chapter(number: int, answers: str = "") -> "Chapter":
    """Open a chapter of the course.

    Args:
        number: of the chapter.
        answers: what stands in for answers that are left blank: "" for nothing, "reference" for
            memlab's own, "mistake 1" for a common mistake. The tests run each chapter so.

    Raises:
        ConfigError: there is no such chapter, or answers are asked for in another way.

    >>> chapter(1).check("1.1", ...)
    1.1: not yet: put your answer in place of the dots.
    """
    abouts = _all()
    if is_a(number, bool) or not is_a(number, int) or number not in abouts:
        allowed = ", ".join(map(str, abouts))
        raise ConfigError(f"number={shown(number)} is no chapter; allowed are {allowed}")
    if not (is_a(answers, str) and ANSWERS.fullmatch(answers)):
        raise ConfigError(
            f"answers={shown(answers)} is not known; allowed are '', 'reference' and 'mistake 1' "
            "and so on"
        )
    return Chapter(about=abouts[number], answers=answers)


@functools.cache
def _all() -> dict[int, About]:
    rows = texts()["chapter"]
    found = [About(**row | {"remember": tuple(row["remember"])}) for row in rows]
    return {each.number: each for each in found}


@dataclass(kw_only=True, slots=True)
class Chapter:
    """A chapter that is open in a notebook.

    Attributes:
        about: what it is about.
        answers: what stands in for blank answers.
        verdicts: by exercise, of the last answer.

    >>> opened = chapter(1)
    >>> opened.check("1.1", 4 * (1024 * 4096 + 4096))
    1.1: right.
    >>> opened.finish().is_complete
    False
    """

    about: About
    answers: str = ""
    verdicts: dict[str, Checked] = field(default_factory=dict)

    @property
    def exercises(self) -> dict[str, Exercise]:
        """The exercises of the chapter, by number."""
        start = f"{self.about.number}."
        every = (each for subject in SUBJECTS for each in subject.EXERCISES)
        return {each.number: each for each in every if each.number.startswith(start)}

    def __repr__(self) -> str:
        return f"Chapter {self.about.number}. {self.about.title} Needs: {self.about.needs}"

    def guess(self, name: str, mib: Any) -> Guess:
        """Keep a guess, made before a run.

        Args:
            name: what is guessed, in words.
            mib: the number, in MiB; `...` for none.

        >>> chapter(1).guess("peak", 40)
        Your guess of the peak: 40.0 MiB. It is drawn below.
        """
        if mib is BLANK:
            said = f"No guess of the {name} yet: put a number of MiB in place of the dots."
            return Guess(nbytes=None, said=said)
        if is_a(mib, bool) or not is_a(mib, numbers.Real) or not 0 < mib < float("inf"):
            said = f"{shown(mib)} is no guess: give a number of MiB above 0."
            return Guess(nbytes=None, said=said)
        said = f"Your guess of the {name}: {mib:,.1f} MiB. It is drawn below."
        return Guess(nbytes=float(mib) * MIB, said=said)

    def check(self, number: str, answer: Any) -> Checked:
        """Say whether an answer is right, or what kind of mistake it has.

        Args:
            number: of the exercise, such as "1.2".
            answer: as the exercise asks for it; `...` for none yet.

        Raises:
            ConfigError: the chapter has no such exercise.
        """
        number = str(number)  # 1.2 is meant
        if number not in self.exercises:
            allowed = ", ".join(self.exercises)
            raise ConfigError(f"number={shown(number)} is no exercise here; allowed are {allowed}")
        exercise = self.exercises[number]
        if is_blank(answer):
            answer = self._stand_in(exercise)
        if is_blank(answer):
            said = "put your answer in place of the dots"
            found = Checked(number=number, verdict=NOT_YET, said=said)
        else:
            hint = exercise.hint(answer)
            found = Checked(number=number, verdict=WRONG if hint else RIGHT, said=hint)
        self.verdicts[number] = found
        return found

    def _stand_in(self, exercise: Exercise) -> Any:
        if not self.answers:
            return BLANK
        made = list(exercise.mistakes.values())
        place = 0 if self.answers == REFERENCE else int(self.answers.removeprefix(MISTAKE))
        return made[place - 1]() if 0 < place <= len(made) else exercise.reference()

    def finish(self) -> "Finished":
        """Say which exercises are answered, what to remember, and where to go on."""
        rows = {number: self.verdicts.get(number) for number in self.exercises}
        return Finished(about=self.about, verdicts=rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The end of a chapter: its exercises with their verdicts, None for one not tried."""

    about: About
    verdicts: dict[str, Checked | None]

    @property
    def is_complete(self) -> bool:
        """Whether all exercises are answered right."""
        return all(verdict and verdict.is_right for verdict in self.verdicts.values())

    def save(self, path: str, results: Iterable[StepResult] = (), **numbers: Any) -> None:
        """Write verdicts, results and other numbers as JSON; `memlab compare` reads the results.

        Args:
            path: of the file; "" writes none.
            results: of the chapter, without their timelines.
            **numbers: what else there is, as JSON types.

        Raises:
            OSError: the file cannot be written.
        """
        verdicts = {number: str(verdict) for number, verdict in self.verdicts.items()}
        rows = [each.to_dict() | LEFT_OUT for each in results]
        if path:
            saved = {"schema": 1, "verdicts": verdicts, "results": rows, **numbers}
            Path(path).write_text(json.dumps(saved, indent=1))

    def __repr__(self) -> str:
        return "\n".join([*self._answered(), *self.about.remember, self._next()])

    def _repr_markdown_(self) -> str:
        remember = [f"{place}. {said}" for place, said in enumerate(self.about.remember, 1)]
        lines = [f"- {said}" for said in self._answered()]
        return "\n".join([*lines, "", "**To remember**", "", *remember, "", self._next()])

    def _answered(self) -> list[str]:
        return [f"{number}: {verdict.verdict if verdict else NOT_YET}"
                for number, verdict in self.verdicts.items()]  # fmt: skip

    def _next(self) -> str:
        following = _all().get(self.about.number + 1)
        if following is None:
            return (
                "That was the last chapter: what follows is your own script, and its next change."
            )
        return f"Next: [{following.title}]({following.notebook})"
