"""`Technique`: everything that memlab knows about one technique, in one place.

The file of a technique implements it (`apply`, or another function that `build_step` calls) and
ends with a `Technique`. This object holds its fields, whether results stay equal to those of the
plain step, which settings and devices it refuses, its lines in an exported script and an example.
What it saves and costs is its table in `catalogue.toml`.

`registry.py` lists all techniques. All code that concerns every technique reads this list: the
checks of `build_step`, `script`, the reference step of `verify`, the config that a plan is made
for, docs/combinations.md and docs/saving.md. So nothing can forget a technique that is in the list.

A refusal is data. From this one

    Refusal(
        why="inplace=True with compile=True does nothing: a compiled graph reuses memory by itself",
        remedies=({"inplace": False}, {"compile": False}),
    )

comes the sentence "...; use inplace=False, or compile=False" of the exception and of a prediction's
outcome, and the buttons of the panel.
"""

import dataclasses
import functools
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from memlab.config import StepConfig
from memlab.devices.cards import Card
from memlab.errors import UnsupportedError
from memlab.techniques.source import ScriptLines
from memlab.trace import Category
from memlab.workload import Workload

# `Plan`: which modules of a model are recomputed, and which outputs each of them keeps.
#
# A plan is made from a recorded step (`memlab.prediction.budget_frontier`) and applied by
# `build_step`. It identifies operators by their overload and their number within one call
# of the module. So it is valid for every micro-batch of its model, and for no other model.

Instance = tuple[str, int]
"""The overload of an operator ("aten.mm.default"), and its number among those of one call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A module whose activations are dropped in forward and recomputed in backward.

    Attributes:
        path: of the module.
        keep: operators whose outputs are kept for backward, so that they do not run again.
    """

    path: str
    keep: frozenset[Instance] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is recomputed, and its estimated cost.

    Attributes:
        regions: the modules that are recomputed; none in the plain step.
        saved_bytes: bytes of activations of a micro-batch that are held for backward.
        plain_saved_bytes: the same for the plain step.
        peak_bytes: most bytes allocated at once, estimated from the recorded plain step.
        recompute_seconds: time that running operators again adds; None if times are not known.
    """

    regions: tuple[Region, ...]
    saved_bytes: int
    plain_saved_bytes: int
    peak_bytes: int
    recompute_seconds: float | None

    @property
    def share(self) -> float:
        """The share of the plain step's activations that is held, which a budget limits."""
        return self.saved_bytes / self.plain_saved_bytes if self.plain_saved_bytes else 1.0


class Equivalence(StrEnum):
    """How equal losses, gradients and weights stay to those of the plain step.

    NOT_COMPARED makes no claim about numbers. `verify` compares two steps with the same batch and
    the same optimizer, so these fields have the same values in both.
    """

    NOT_COMPARED = "it belongs to the reference step"
    BITWISE = "every bit"
    NUMERICAL = "all but rounding"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The settings that a technique is asked about.

    Attributes:
        config: how the step is trained.
        device: where it is trained; only the type of the device counts.
        card: the model of the card, if known; it says which number formats the card supports.
        plan: what to recompute, for a memory budget of the eager engine.
        workload: what is trained, if known.
        own_optimizer: of a workload that is not known, whether it has make_optimizer.
        layers: those that several ranks divide, as `sharding.ranks.Divided` has them, if known.
    """

    config: StepConfig
    device: torch.device
    card: Card | None = None
    plan: Plan | None = None
    workload: Workload | None = None
    own_optimizer: bool = False
    layers: Mapping[str, tuple[str, int | None]] | None = None

    @property
    def has_make_optimizer(self) -> bool:
        """Whether the workload makes its optimizer itself."""
        workload = self.workload
        return self.own_optimizer if workload is None else workload.make_optimizer is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why settings cannot be combined, or cannot be used on this device, and what to do instead.

    Attributes:
        why: a sentence without its full stop that names the fields and their values.
        remedies: settings by field; each of them lifts the refusal. The best comes first.
        otherwise: another remedy, in words: "install scipy".
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
        label: the text beside the control.
        named: returns the words for a value in the table of runs: "loss in 4 chunks".
        offered: the values to choose from, if the type of the field does not give them.
        in_words: returns the words for a value in the list of choices.
        only_with: the values that other fields must have for this field to do anything; of several
            that will do a tuple.
    """

    field: str
    label: str
    named: Callable[[Any], str] = str
    offered: tuple[Any, ...] = ()
    in_words: Callable[[Any], str] = str
    only_with: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def counts(self, settings: Mapping[str, Any]) -> bool:
        """Return whether this field does anything with these settings of all fields."""
        return all(
            settings[name] in value if isinstance(value, tuple) else settings[name] == value
            for name, value in self.only_with.items()
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """What a setting saves, what it costs, and when not to use it: a row of `catalogue.toml`.

    Attributes:
        setting: as a person writes it, in Markdown; several that have the same line.
        saves: bytes or time, and of what.
        costs: in return; "" for nothing.
        not_for: models, devices and other settings with which it saves nothing or is refused.
        offers: the same as fields of `StepConfig`, what changes least first; empty where it is not
            offered, or depends on the other settings.
        searched: whether `memlab.recommend` tries each of them as a step of its own. Numbers of
            micro-batches and memory budgets it finds by arithmetic.
        replaces: by field, the values in place of which it is offered; empty for any other.
        frees: what it lowers; empty where `memlab.explain` does not offer it.
        left: the share of this that stays at every instant; None where nobody can say it.
        rung: its place in `memlab.ladder`, from 1; 0 for none.
    """

    setting: str
    saves: str
    costs: str = ""
    not_for: str = ""
    offers: tuple[Mapping[str, Any], ...] = ()
    searched: bool = True
    replaces: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    frees: tuple[Category, ...] = ()
    left: float | None = None
    rung: int = 0


@functools.cache
def catalogue() -> Mapping[str, tuple[Saving, ...]]:
    """Return what all techniques save, by the switch of each."""
    tables = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
    return {name: tuple(map(_saving, rows)) for name, rows in tables.items()}


def offers_of(switch: str) -> tuple[Mapping[str, Any], ...]:
    """Return all settings that the catalogue offers of one technique, what changes least first.

    >>> offers_of("memory_budget")
    ({'memory_budget': 0.5}, {'memory_budget': 0.2}, {'memory_budget': 0.0})
    """
    return tuple(offer for row in catalogue()[switch] for offer in row.offers)


def _saving(row: Mapping[str, Any]) -> Saving:
    frees = tuple(map(Category, row.get("frees", ())))
    return Saving(**{**row, "offers": tuple(row.get("offers", ())), "frees": frees})


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """Everything that memlab knows about one technique.

    The functions return nothing (no refusal, line, note or text) while the technique is off.

    Attributes:
        fields: the fields of `StepConfig` that belong to it, its switch first. A field belongs to
            one technique only.
        equivalence: how equal the numbers stay to those of the plain step.
        does: the subject of "... changes no bit", for a technique that keeps every bit.
        examples: settings that switch it on, by the name that docs/combinations.md shows.
        changes_plans: whether a plan for a memory budget depends on it.
        refusals: yields the reasons why it cannot be used with these settings.
        source: returns its lines in an exported script.
        notes: returns what a reader of the step's numbers must know.
        controls: the controls of its fields in the panel. A field without a control can only be
            set in code.
        says: returns a clause that explains what it does now, for the line below its controls.
        may_be_faster: whether one of `searches` may make a step faster, besides saving memory.
        frees_states: whether one of them leaves less of parameters or optimizer state on the
            device between two steps.
    """

    fields: tuple[str, ...]
    equivalence: Equivalence
    does: str = ""
    examples: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    changes_plans: bool = True
    refusals: Callable[[Setup], Iterable[Refusal]] = lambda _: ()
    source: Callable[[Setup], ScriptLines] = lambda _: ScriptLines()
    notes: Callable[[Setup], list[str]] = lambda _: []
    controls: tuple[Control, ...] = ()
    says: Callable[[Setup], str] = lambda _: ""
    may_be_faster: bool = False
    frees_states: bool = False

    @property
    def savings(self) -> tuple[Saving, ...]:
        """Its rows of the catalogue, one for each setting that a person chooses."""
        return catalogue().get(self.fields[0], ())

    @property
    def searches(self) -> tuple[Mapping[str, Any], ...]:
        """Alternatives that `memlab.recommend` tries; none for what it leaves alone."""
        return tuple(offer for row in self.savings if row.searched for offer in row.offers)


def switch(field: str, label: str, on: str, off: str, **rest: Any) -> Control:
    """Return the control of a field that is on or off, with the words for both."""
    return Control(field=field, label=label, named=lambda value: on if value else off, **rest)


def refuse(refusals: Iterable[Refusal]) -> None:
    """Raise UnsupportedError for the first of these, if there is one."""
    for refusal in refusals:
        error = UnsupportedError(str(refusal))
        error.remedies = refusal.remedies
        raise error


def in_words(settings: Mapping[str, Any], joint: str = " and ") -> str:
    """Return settings as a person would write them in code.

    >>> in_words({"compile": False, "budget_engine": "eager"})
    "compile=False and budget_engine='eager'"
    """
    plain = {name: str(v) if isinstance(v, StrEnum) else v for name, v in settings.items()}
    return joint.join(f"{name}={value!r}" for name, value in plain.items())
