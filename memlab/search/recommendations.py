"""`Recommendations`: what `recommend` returns, the best first."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from memlab._util.tables import columns_table, facts_table
from memlab._util.units import format_bytes, format_seconds, is_a, shown
from memlab.config import StepConfig
from memlab.errors import ConfigError, WorkloadError
from memlab.result import StepResult, format_percent
from memlab.search.alternatives import time_beside, time_width
from memlab.workload import Value, Workload

# The workloads that `recommend` chooses among: one for each combination of what may be
# chosen.
#
# A combination that a workload refuses, such as a 4-bit base without an adapter, is left
# out with its reason. Combinations that give the same workload, such as two ranks without
# low-rank matrices, are one.

MOST_COMBINATIONS = 64
Choices = Mapping[str, Sequence[Value]]
Chosen = Mapping[str, Value]


@dataclass(frozen=True, kw_only=True, slots=True)
class Combinations:
    """What a search chooses among.

    Attributes:
        names: of what is chosen, in the order in which a person has given them.
        workloads: that can be made, the first of them the given one if it is among them.
        left_out: why others were left out, by the combination in words.
        num_possible: combinations that were not left out; some give the same workload.
    """

    names: tuple[str, ...]
    workloads: tuple[Workload, ...]
    left_out: Mapping[str, str]
    num_possible: int = 1

    def without(self, workload: Workload, why: str) -> "Combinations":
        """Return the combinations without one that turned out to be impossible."""
        kept = tuple(one for one in self.workloads if one.name != workload.name)
        said = choices_in_words(values_of(workload, self.names))
        return replace(
            self,
            workloads=kept,
            left_out={**self.left_out, said: why},
            num_possible=self.num_possible - 1,
        )


def combinations_of(workload: Workload, choices: Choices | None) -> Combinations:
    """Return the workloads of all combinations of these choices; the workload alone for None.

    Raises:
        ConfigError: a name or a value that the workload does not have, too many combinations, or
            none that can be made.
    """
    if choices is None:
        return Combinations(names=(), workloads=(workload,), left_out={})

    asked = _checked(workload, choices)
    made, left_out, num_possible = dict[str, Workload](), dict[str, str](), 0
    possible, refused = set[tuple[str, Value]](), dict[tuple[str, Value], str]()
    for values in _each(asked):
        try:
            one = workload.chosen(**values)
        except WorkloadError as error:
            left_out[choices_in_words(values)] = str(error)
            for pair in values.items():
                refused.setdefault(pair, str(error))
            continue
        num_possible += 1
        made.setdefault(one.name, one)
        possible.update(values.items())

    for name, value in refused:
        if (name, value) not in possible:
            _check_is_had(workload, name, value, asked)
    if not made:
        what, why = next(iter(left_out.items()))
        raise ConfigError(
            f"choices={shown(dict(asked))} leaves nothing to choose: {what}: {why}; add a value "
            "that goes with the others"
        )
    first = made.pop(workload.name, None)
    return Combinations(
        names=tuple(asked),
        workloads=(*([first] if first else []), *made.values()),
        left_out=left_out,
        num_possible=num_possible,
    )


def values_of(workload: Workload, names: Sequence[str]) -> Chosen:
    """Return what a workload was made with, by these names; not what has no effect on it."""
    own = workload.choices
    if own is None:
        return {}
    return {name: own.values[name] for name in names if len(own.offered[name]) > 1}


def choices_in_words(values: Chosen) -> str:
    """Return choices as a person writes them: "adapter='lora', rank=8"."""
    return ", ".join(f"{name}={shown(value)}" for name, value in values.items())


def _each(asked: Mapping[str, tuple[Value, ...]]) -> Iterator[dict[str, Value]]:
    for values in itertools.product(*asked.values()):
        yield dict(zip(asked, values, strict=True))


def _checked(workload: Workload, choices: Any) -> Mapping[str, tuple[Value, ...]]:
    """Return the choices, each as a tuple without repeated values."""
    known = list(workload.choices.values) if workload.choices else []
    has = f"the choices of {workload.name} are {known}" if known else f"{workload.name} has none"
    if not is_a(choices, Mapping):
        raise ConfigError(
            f"choices={shown(choices)} is of type {type(choices).__name__}; allowed is a dict of "
            f"lists, such as choices={_example(workload)}"
        )
    if not choices:
        raise ConfigError(f"choices={shown(choices)} names nothing; pass None to vary nothing")
    asked = dict[str, tuple[Value, ...]]()
    for name, values in choices.items():
        if not is_a(name, str) or name not in known:
            raise ConfigError(f"choices names {shown(name)}; {has}")
        if not is_a(values, list | tuple) or not values or not all(map(_is_value, values)):
            raise ConfigError(
                f"choices[{name!r}]={shown(values)}; allowed is a list of at least one value, each "
                "a text, an int, True, False, None or a tuple of texts"
            )
        asked[name] = tuple(dict.fromkeys(values))
    count = math.prod(map(len, asked.values()))
    if count > MOST_COMBINATIONS:
        raise ConfigError(
            f"choices={shown(dict(asked))} has {count} combinations; allowed are at most "
            f"{MOST_COMBINATIONS}: name fewer values"
        )
    return asked


def _example(workload: Workload) -> str:
    """Return choices as a person may write them for this workload."""
    if workload.choices is None:
        return "{'adapter': ['lora', 'dora']}"
    name, values = next(iter(workload.choices.offered.items()))
    return str({name: [*values[:2]]})


def _is_value(value: Any) -> bool:
    if type(value) is tuple:
        return all(type(one) is str for one in value)
    return value is None or type(value) in (str, int, bool)


def _check_is_had(
    workload: Workload, name: str, value: Value, asked: Mapping[str, tuple[Value, ...]]
) -> None:
    """Raise ConfigError if a value goes with nothing, and not because of what it was put beside."""
    assert workload.choices is not None
    known = workload.choices.offered[name]
    if any(type(value) is type(one) and value == one for one in known):
        return  # only what it was put beside is wrong
    try:
        workload.chosen(**{name: value})
    except WorkloadError as error:
        offered = ", ".join(map(shown, known))
        raise ConfigError(
            f"choices[{name!r}] has {shown(value)}: {error}; {workload.name} offers {offered}"
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recommendation:
    """A setting that fits.

    Attributes:
        result: what the step costs: measured if it was confirmed by a run, else predicted.
        reasons: what each choice and setting saves and costs, and how much of the limit is left.
        predicted: what was predicted, also where it was measured.
        workload: what is trained: the given one, or one that was chosen. `recommend` always sets
            it.
        chosen: what the workload was chosen by, by name; empty if nothing was to be chosen.
    """

    result: StepResult
    reasons: tuple[str, ...]
    predicted: StepResult
    workload: Workload | None = None
    chosen: Mapping[str, Value] = field(default_factory=dict)

    @property
    def config(self) -> StepConfig:
        """The setting."""
        return self.result.config

    @property
    def cost(self) -> str:
        """The time of a step, and its source."""
        seconds = self.result.step_seconds
        width = time_width(self.result)
        about = f" ± {format_percent(width)}" if width else ""
        time = "time not known" if seconds is None else f"{format_seconds(seconds)}{about} a step"
        return f"{time}, {self.result.source}"

    def to_dict(self) -> dict[str, Any]:
        """Return the recommendation as plain JSON types, without timelines."""
        return {
            "workload": self.result.workload_name,
            "chosen": dict(self.chosen),
            "result": replace(self.result, timeline=None).to_dict(),
            "reasons": list(self.reasons),
            "predicted": replace(self.predicted, timeline=None).to_dict(),
        }

    def __str__(self) -> str:
        """Return the setting and its reasons, one to a line."""
        which = f"{choices_in_words(self.chosen)}; " if self.chosen else ""
        first = f"{which}{self.result.settings}: {self.cost}"
        return "\n".join([first, *(f"  {reason}" for reason in self.reasons)])


@dataclass(frozen=True, kw_only=True, slots=True)
class AtLimit:
    """What another limit would mean.

    Attributes:
        limit_bytes: the other limit.
        card: the name of a card that holds as much; "" if the limit is that of none.
        result: the fastest step that is estimated to fit it, on the same device; None if none of
            those tried does.
        best: the step of the best recommendation; None if nothing has a time.
        chosen: by what its workload was chosen, in words; "" if nothing was to be chosen.
    """

    limit_bytes: int
    result: StepResult | None
    best: StepResult | None
    card: str = ""
    chosen: str = ""

    @property
    def slower(self) -> float | None:
        """The time of the step over that of the best, minus 1; None if it is not known."""
        times = self.result and self.result.step_seconds, self.best and self.best.step_seconds
        return times[0] / times[1] - 1.0 if times[0] and times[1] else None

    def __str__(self) -> str:
        """Return a sentence."""
        limit = f"at {format_bytes(self.limit_bytes)}"
        if self.card:
            limit += f", as much as {self.card} can hold"
        if self.result is None:
            return f"{limit}: nothing that was tried fits"
        step = f"{self.chosen}{'; ' * bool(self.chosen)}{self.result.config}"
        change = time_beside(self.result, self.best) if self.best else ""
        if not change:
            return f"{limit}: {step}"
        where = f"estimated for {self.result.device}"
        return f"{limit}: {change} ({where}), with {step}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recommendations(Sequence[Recommendation]):
    """Settings that fit, the best first. It is empty if none does; `message` then says why.

    Attributes:
        fitting: the recommendations, the fastest first; measured ones before predicted ones.
        message: the answer in one sentence.
        limit_bytes: that a step may hold.
        workloads: that the search chose among; the given one alone if nothing was to be chosen.
        too_close: settings so near to the limit that a prediction cannot say whether they fit.
        dropped: settings that were measured, and did not fit or failed; the notes say how.
        other_limits: what other limits would mean.
        on_more_cards: the step predicted on so many of these cards that it fits, where it fits on
            none of them alone; None if that is not known.
        tried: every step that was predicted.
        estimated: other accumulation steps and budgets of these steps, by arithmetic alone.
        num_measured: how many runs were made; a setting may be run twice.
        notes: sentences on what was left out.
    """

    fitting: tuple[Recommendation, ...]
    message: str
    limit_bytes: int
    workloads: tuple[Workload, ...] = ()
    too_close: tuple[Recommendation, ...] = ()
    dropped: tuple[StepResult, ...] = ()
    other_limits: tuple[AtLimit, ...] = ()
    on_more_cards: StepResult | None = None
    tried: tuple[StepResult, ...] = ()
    estimated: tuple[StepResult, ...] = ()
    num_measured: int = 0
    notes: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Recommendation: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Recommendation, ...]: ...
    def __getitem__(self, index: int | slice) -> Recommendation | tuple[Recommendation, ...]:
        """Return a recommendation; 0 is the best."""
        return self.fitting[index]

    def __len__(self) -> int:
        """Return how many settings are recommended."""
        return len(self.fitting)

    def __iter__(self) -> Iterator[Recommendation]:
        """Yield the recommendations, the best first."""
        return iter(self.fitting)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain JSON types, without timelines and without what was tried."""
        return {
            "message": self.message,
            "limit_bytes": self.limit_bytes,
            "recommendations": [one.to_dict() for one in self.fitting],
            "too_close": [one.to_dict() for one in self.too_close],
            "dropped": [replace(one, timeline=None).to_dict() for one in self.dropped],
            "other_limits": [
                {
                    "limit_bytes": one.limit_bytes,
                    "config": one.result and one.result.config.to_dict(),
                    "slower": one.slower,
                }
                for one in self.other_limits
            ],
            "on_more_cards": self.on_more_cards
            and replace(self.on_more_cards, timeline=None).to_dict(),
            "num_measured": self.num_measured,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """Return the message, the recommendations, the other limits and the notes."""
        listed = [f"{number}. {one}" for number, one in enumerate(self.fitting, start=1)]
        near = [f"{one}" for one in self.too_close]
        limits = [str(one) for one in self.other_limits]
        return "\n".join([self.message, *listed, *near, *limits, *self.notes])

    def _repr_html_(self) -> str:
        """Return tables for notebooks: a reason, another limit and a note have a line each."""
        is_chosen = any(one.chosen for one in (*self.fitting, *self.too_close))
        heads = ["", "settings", "time per step", "what each setting does"]
        if is_chosen:
            heads[1:1] = ["chosen"]
            heads[-1] = "what each choice and setting does"
        named = [(str(at), one) for at, one in enumerate(self.fitting, start=1)]
        named += [("too close to say", one) for one in self.too_close]
        lines = []
        for name, one in named:
            first, *others = one.reasons
            chosen = [choices_in_words(one.chosen)] if is_chosen else []
            lines.append([name, *chosen, one.result.settings, one.cost, first])
            lines += [[*[""] * (len(heads) - 1), reason] for reason in others]

        return (
            facts_table(
                "recommended settings",
                {
                    "answer": self.message,
                    "memory limit": format_bytes(self.limit_bytes),
                },
            )
            + columns_table(heads, lines)
            + columns_table(["other limits"], [[one] for one in self.other_limits])
            + columns_table(["notes"], [[note] for note in self.notes])
        )
