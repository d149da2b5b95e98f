"""The workloads that `recommend` chooses among: one for each combination of what may be chosen.

A combination that a workload refuses, such as a 4-bit base without an adapter, is left out with its
reason. Combinations that give the same workload, such as two ranks without low-rank matrices, are
one.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memlab.arguments.quoting import is_a, shown
from memlab.errors import ConfigError, WorkloadError
from memlab.workload import Value, Workload

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
        said = in_words(values_of(workload, self.names))
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
            left_out[in_words(values)] = str(error)
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


def in_words(values: Chosen) -> str:
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
