"""`Technique`: one way to train a step otherwise, and all that is said of it, in one place.

A technique's file says what it does to a model (`apply`, or another function that `build_step`
calls) and ends with a `Technique`: its fields, what it leaves of the plain step's numbers, what
refuses it, its lines in a script, an example, and what it saves and costs. `every.py` lists them
all. Whatever goes through the techniques reads that list: the checks of `build_step`, `script`, the
reference step of `verify`, the config that a plan is made for, docs/combinations.md and
docs/saving.md. So a technique that is not in the list does nothing, and one that is cannot be
forgotten anywhere.

A refusal is data. From this one

    Refusal(
        why="inplace=True with compile=True does nothing: a compiled graph reuses memory by itself",
        remedies=({"inplace": False}, {"compile": False}),
    )

comes the sentence "...; use inplace=False, or compile=False" of the exception and of a prediction's
outcome, and the buttons of the panel.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from memlab.config import StepConfig
from memlab.devices.cards import Card
from memlab.errors import UnsupportedError
from memlab.plan import Plan
from memlab.techniques.source import ScriptLines
from memlab.workload import Workload


class Keeps(StrEnum):
    """What a technique leaves of the plain step's losses, gradients and weights.

    Belonging to the reference step is not a matter of numbers: `verify` compares two steps of the
    same batch and optimizer, so that these fields have the same values in both.
    """

    REFERENCE = "it belongs to the reference step"
    BITS = "every bit"
    ROUNDED = "all but rounding"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a technique is asked about.

    Attributes:
        config: how the step is trained.
        device: where; only its type counts.
        card: the card that it is, where that is known: which number formats it has.
        plan: what to recompute, for a memory budget of the eager engine.
        workload: what is trained, where that is known.
    """

    config: StepConfig
    device: torch.device
    card: Card | None = None
    plan: Plan | None = None
    workload: Workload | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why settings cannot be together, or not on this device, and what to do instead.

    Attributes:
        why: a sentence without its full stop that names the fields and their values.
        remedies: settings that each lift it, by field, the best first.
        otherwise: what else can be done, in words: "install scipy".
    """

    why: str
    remedies: tuple[Mapping[str, Any], ...] = ()
    otherwise: str = ""

    def __str__(self) -> str:
        """Return the sentence that a person reads."""
        ways = [*map(in_words, self.remedies), *([self.otherwise] if self.otherwise else [])]
        if not ways:
            return self.why
        return f"{self.why}; {'use ' if self.remedies else ''}{', or '.join(ways)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """The words for one field, in the panel and in its table of runs.

    Attributes:
        field: of `StepConfig`.
        label: beside its control.
        named: returns what a value is called in a table of runs: "loss in 4 chunks".
        offered: the values to choose from, where the type of the field does not say them.
        in_words: returns what a value is called among these.
        only_with: values of other fields without which it does nothing.
    """

    field: str
    label: str
    named: Callable[[Any], str] = str
    offered: tuple[Any, ...] = ()
    in_words: Callable[[Any], str] = str
    only_with: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """A line of docs/saving.md: what a setting saves, what it costs, and when not to use it.

    Attributes:
        setting: as a person writes it, in Markdown; several that have the same line.
        saves: bytes or time, and of what.
        costs: in return; "" for nothing.
        not_for: models, devices and other settings with which it saves nothing or is refused.
    """

    setting: str
    saves: str
    costs: str = ""
    not_for: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """All that is said of one technique.

    Attributes:
        fields: of `StepConfig` that belong to it, its switch first; no other technique has them.
        keeps: what it leaves of the plain step's numbers.
        does: what it does, for "... changes no bit"; where it keeps every bit.
        examples: fields that show it at work, by what docs/combinations.md calls them.
        changes_plans: whether a plan for a memory budget depends on it.
        refusals: yields what refuses it as it is asked for; nothing where it is off.
        source: returns its lines in a script; none where it is off.
        notes: returns what a reader of the step's numbers must know; nothing where it is off.
        controls: of its fields in the panel; a field without one is for code alone.
        says: returns a clause on what it does now, for the line below its controls; "" if nothing.
        savings: its lines in docs/saving.md, one for each setting that a person chooses.
    """

    fields: tuple[str, ...]
    keeps: Keeps
    does: str = ""
    examples: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    changes_plans: bool = True
    refusals: Callable[[Setup], Iterable[Refusal]] = lambda _: ()
    source: Callable[[Setup], ScriptLines] = lambda _: ScriptLines()
    notes: Callable[[Setup], list[str]] = lambda _: []
    controls: tuple[Control, ...] = ()
    says: Callable[[Setup], str] = lambda _: ""
    savings: tuple[Saving, ...] = ()


def switch(field: str, label: str, on: str, off: str, **rest: Any) -> Control:
    """Return the control of a field that is on or off, with what both are called."""
    return Control(field=field, label=label, named=lambda value: on if value else off, **rest)


def refuse(refusals: Iterable[Refusal]) -> None:
    """Raise UnsupportedError for the first of these, if there is one."""
    for refusal in refusals:
        raise UnsupportedError(str(refusal))


def in_words(settings: Mapping[str, Any]) -> str:
    """Return settings as a person writes them.

    >>> in_words({"compile": False, "budget_engine": "eager"})
    "compile=False and budget_engine='eager'"
    """
    plain = {name: str(v) if isinstance(v, StrEnum) else v for name, v in settings.items()}
    return " and ".join(f"{name}={value!r}" for name, value in plain.items())
