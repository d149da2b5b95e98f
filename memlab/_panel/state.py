"""Settings on screen to and from `StepConfig`. No widgets.

A setting on screen may be wrong for a while (accumulation above the batch size, letters in a number
box), so settings are a mapping by field name until `to_config` turns them into a `StepConfig`.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from memlab.config import Precision, Sharding, StepConfig, allowed_value
from memlab.errors import ConfigError
from memlab.result import StepResult
from memlab.techniques.every import CONTROLS

Settings = Mapping[str, Any]

PRECISIONS = tuple(Precision)
FIELDS = tuple(CONTROLS)
DESCRIBED = ("memory_budget", "batch_size", "accumulation_steps", "precision")
SAID_TOGETHER = ("sharding", "world_size")
HEADER_FIELDS = ("workload", "device", "memory_limit", "check_gradients")
OTHER_FIELDS = (*HEADER_FIELDS, "choices", "sample_size")
"""What can be set that is no field of a config."""


def offered(field: str) -> tuple[Any, ...]:
    """Return the choices of a field in the panel; empty for a number or a switch."""
    value = getattr(StepConfig(), field)
    kind: Any = type(value)
    return CONTROLS[field].offered or (tuple(kind) if isinstance(value, StrEnum) else ())


def to_config(settings: Settings) -> StepConfig:
    """Return the config of these settings, without the options of techniques that are off.

    Raises:
        ConfigError: a setting is not allowed; the message is the sentence to show.
    """
    return StepConfig(**{f: value for f, value in settings.items() if counts(f, settings)})


def counts(field: str, settings: Settings) -> bool:
    """Return whether a field has an effect with these settings (a solver needs a budget)."""
    return CONTROLS[field].counts(settings)


def is_sharded(settings: Settings) -> bool:
    """Return whether several ranks share the step."""
    return bool(settings["sharding"] != Sharding.NONE)


def from_config(config: StepConfig) -> dict[str, Any]:
    """Return the settings that show this config.

    Raises:
        ConfigError: the panel has no control for one of its values.
    """
    for field in FIELDS:
        value, choices = getattr(config, field), offered(field)
        is_own = field == "optimizer" and config.has_own_optimizer
        if choices and value not in choices and not is_own:
            names = ", ".join(repr(str(name)) for name in choices)
            raise ConfigError(
                f"{field}={str(value)!r} has no control in the panel; allowed is one of {names}"
            )

    if config.checkpoint_modules != "auto":
        raise ConfigError(
            f"checkpoint_modules={config.checkpoint_modules!r} has no control in the panel; "
            "allowed is 'auto', or memlab.measure for others"
        )

    if config.compile_mode is not config.compile_mode.DEFAULT:
        raise ConfigError(
            f"compile_mode={str(config.compile_mode)!r} has no control in the panel; allowed is "
            "'default', or memlab.measure for others"
        )

    return {field: getattr(config, field) for field in FIELDS}


def check_names(fields: Iterable[str]) -> None:
    """Check that every field has a control.

    Raises:
        ConfigError: a field has no control; the message lists those that have one.
    """
    known = (*FIELDS, *OTHER_FIELDS)
    for name in fields:
        if name not in known:
            raise ConfigError(f"the panel has no control {name!r}; allowed is one of {known}")


def problems(settings: Settings) -> dict[str, str]:
    """Return an error for each field that is not allowed; empty if the settings are valid."""
    return dict(_problems(tuple((name, type(value), value) for name, value in settings.items())))


@functools.lru_cache(maxsize=64)  # a move asks several times, and each time makes many configs
def _problems(typed_settings: tuple[tuple[str, type, Any], ...]) -> dict[str, str]:
    settings = {name: value for name, _, value in typed_settings}
    found = {}
    for field, value in settings.items():
        try:
            allowed_value(field, value)
        except ConfigError as error:
            found[field] = str(error)

    if not found:
        try:
            to_config(settings)
        except ConfigError as error:
            found[_blamed(settings)] = str(error)

    return found


def _blamed(settings: Settings) -> str:
    """Return the field at which to say that these settings, each allowed, do not go together."""
    steps = settings["accumulation_steps"]
    if not is_sharded(settings) or settings["batch_size"] < steps:
        return "accumulation_steps"
    try:
        ranks = to_config({**settings, "batch_size": steps * settings["world_size"]})
    except ConfigError:
        return "world_size"
    divides = settings["batch_size"] % ranks.data_parallel_size == 0
    return "accumulation_steps" if divides else "batch_size"


def nearest_batch(settings: Settings) -> int:
    """Return the next smaller batch size that the ranks on screen can divide, or the least."""
    steps, size = int(settings["accumulation_steps"]), int(settings["batch_size"])
    ranks = to_config({**settings, "batch_size": steps * settings["world_size"]})
    unit = steps * ranks.data_parallel_size
    return max(size // unit, 1) * unit


def parse_number(text: str, kind: type[int] | type[float]) -> Any:
    """Return the number that was typed, or the text itself, which `StepConfig` refuses by name."""
    try:
        return kind(text.strip())
    except ValueError:
        return text.strip()


def largest_accumulation(batch_size: int) -> int:
    """Return the largest power of two up to the batch size."""
    return 1 << (batch_size.bit_length() - 1)


def dividing_accumulation(settings: Settings) -> int:
    """Return the largest power of two up to the one on screen that divides the batch of a rank."""
    samples = to_config({**settings, "accumulation_steps": 1}).rank_batch_size
    return math.gcd(samples, largest_accumulation(settings["accumulation_steps"]))


def describe(result: StepResult) -> str:
    """Return a run's settings in words: the four sliders, then what differs from the defaults."""
    config = result.config
    parts = [
        f"budget {config.memory_budget:g}",
        f"batch {config.batch_size}",
        f"accumulation {config.accumulation_steps}",
        result.number_format,
        *others(config),
    ]

    return ", ".join(parts)


def briefly(result: StepResult) -> str:
    """Return a run's batch size, and what else of its settings differs from the defaults."""
    config, default = result.config, StepConfig()
    parts = [f"batch {config.batch_size}"]
    if config.accumulation_steps != default.accumulation_steps:
        parts.append(f"accumulation {config.accumulation_steps}")
    if config.memory_budget != default.memory_budget:
        parts.append(f"budget {config.memory_budget:g}")
    if config.precision != default.precision:
        parts.append(result.number_format)
    return ", ".join([*parts, *others(config)])


def others(config: StepConfig) -> list[str]:
    """Return, in words, the settings without a slider that differ from the defaults."""
    is_sharded = config.sharding is not Sharding.NONE
    ranks = [f"{config.sharding} x {config.world_size}"] if is_sharded else []
    return ranks + [
        CONTROLS[field].named(value)
        for field in FIELDS
        if field not in (*DESCRIBED, *SAID_TOGETHER)
        and (value := getattr(config, field)) != getattr(StepConfig(), field)
    ]
