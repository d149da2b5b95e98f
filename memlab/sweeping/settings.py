"""The settings of a sweep: a list of configs, or all combinations of a dict of lists."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from memlab.arguments.checks import MOST_THINGS, of_type
from memlab.arguments.quoting import is_a, shown
from memlab.config import StepConfig, allowed_value
from memlab.errors import ConfigError

Configs = Sequence[StepConfig] | Mapping[str, Sequence[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of a sweep.

    Attributes:
        asked: the values of a combination by field; empty for a config of a list.
        config: None if the combination is refused.
        refusal: why; empty if it is not.
    """

    asked: Mapping[str, Any]
    config: StepConfig | None
    refusal: str = ""


def settings_of(configs: Any, base: StepConfig | None) -> tuple[Setting, ...]:
    """Return the settings in order; of a dict the last field varies fastest.

    Raises:
        ConfigError: it is no such list or dict, names a field that does not exist, or holds a value
            that no config allows. A combination of allowed values that is not allowed is a setting
            that is refused.
    """
    if is_a(configs, Mapping):
        return _combinations(_lists(configs), base or StepConfig())
    if base is not None:
        raise ConfigError(
            "base is for a dict of lists; a list holds whole configs, so leave base out"
        )

    try:
        listed = of_type("configs", configs, Sequence[StepConfig])
    except ConfigError as error:
        raise ConfigError(
            f"{error} of StepConfig, or a dict of lists: {{'batch_size': [8, 16]}}"
        ) from error
    if not listed:
        raise ConfigError("configs=[] holds no setting; add a StepConfig")
    return tuple(Setting(asked={}, config=config) for config in listed)


def _lists(configs: Any) -> dict[str, tuple[Any, ...]]:
    """Return the values by field, each of them checked by itself."""
    known = [field.name for field in fields(StepConfig)]
    lists, num_settings = {}, 1
    for name, values in dict(configs).items():
        if name not in known:
            raise ConfigError(
                f"configs name {shown(name)}; allowed is a field of StepConfig: {', '.join(known)}"
            )
        try:
            lists[name] = of_type(f"configs[{name!r}]", values, Sequence[Any])
        except ConfigError as error:
            raise ConfigError(f"{error}: {{{name!r}: [{shown(values)}]}}") from error
        if not lists[name]:
            raise ConfigError(f"configs[{name!r}]=[] holds no value; add one, or leave it out")

        for value in lists[name]:
            allowed_value(name, value)
        num_settings *= len(lists[name])

    if num_settings > MOST_THINGS:
        raise ConfigError(
            f"configs have {num_settings} combinations; allowed are {MOST_THINGS}: shorten a list"
        )
    return lists


def _combinations(lists: Mapping[str, tuple[Any, ...]], base: StepConfig) -> tuple[Setting, ...]:
    found = []
    for values in itertools.product(*lists.values()):
        asked = dict(zip(lists, values, strict=True))
        try:
            found.append(Setting(asked=asked, config=replace(base, **asked)))
        except ConfigError as error:
            found.append(Setting(asked=asked, config=None, refusal=str(error)))
    return tuple(found)
