"""Settings on screen to and from `StepConfig`, and the code that measures them. No widgets.

A setting on screen may be wrong for a while (accumulation above the batch size, letters in a number
box), so settings are a mapping by field name until `to_config` turns them into a `StepConfig`.
"""

import dataclasses
import keyword
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from memlab._panel.choices import zoo_options
from memlab.arguments.quoting import literal
from memlab.config import (
    Precision,
    StepConfig,
)
from memlab.errors import ConfigError
from memlab.result import StepResult
from memlab.techniques.every import CONTROLS
from memlab.workload import Workload

Settings = Mapping[str, Any]

PRECISIONS = tuple(Precision)
FIELDS = tuple(CONTROLS)
DESCRIBED = ("memory_budget", "batch_size", "accumulation_steps", "precision")
HEADER_FIELDS = ("workload", "device", "memory_limit", "check_gradients")


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
    return all(settings[name] == value for name, value in CONTROLS[field].only_with.items())


def from_config(config: StepConfig) -> dict[str, Any]:
    """Return the settings that show this config.

    Raises:
        ConfigError: the panel has no control for one of its values.
    """
    for field in FIELDS:
        value, choices = getattr(config, field), offered(field)
        if choices and value not in choices:
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
    known = (*FIELDS, *HEADER_FIELDS)
    for name in fields:
        if name not in known:
            raise ConfigError(f"the panel has no control {name!r}; allowed is one of {known}")


def problems(settings: Settings) -> dict[str, str]:
    """Return an error for each field that is not allowed; empty if the settings are valid."""
    found = {}
    for field, value in settings.items():
        alone = {field: value}
        if field == "accumulation_steps" and isinstance(value, int):
            alone["batch_size"] = max(value, 1)

        alone |= CONTROLS[field].only_with
        try:
            StepConfig(**alone)
        except ConfigError as error:
            found[field] = str(error)

    if not found:
        try:
            to_config(settings)
        except ConfigError as error:
            found["accumulation_steps"] = str(error)

    return found


def parse_number(text: str, kind: type[int] | type[float]) -> Any:
    """Return the number that was typed, or the text itself, which `StepConfig` refuses by name."""
    try:
        return kind(text.strip())
    except ValueError:
        return text.strip()


def largest_accumulation(batch_size: int) -> int:
    """Return the largest power of two up to the batch size."""
    return 1 << (batch_size.bit_length() - 1)


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


def others(config: StepConfig) -> list[str]:
    """Return, in words, the settings without a slider that differ from the defaults."""
    return [
        CONTROLS[field].named(value)
        for field in FIELDS
        if field not in DESCRIBED
        and (value := getattr(config, field)) != getattr(StepConfig(), field)
    ]


def source(
    workload: Workload,
    config: StepConfig,
    device: str,
    memory_limit: str,
    *,
    ask: str = "measure",
    check_gradients: bool = False,
    namespace: Mapping[str, Any] | None = None,
) -> str:
    """Return Python source that measures this config, predicts it or plays it back.

    Args:
        workload: of the zoo, or a person's own.
        config: the settings.
        device: the device.
        memory_limit: the typed text; "" for no limit.
        ask: the function to call: "measure", "predict" or "recorded".
        check_gradients: whether the code also compares the gradients.
        namespace: the names of the notebook, among which a person's own workload is found.
    """
    shown = [f"batch_size={config.batch_size}"]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name != "batch_size" and value != field.default:
            shown.append(f"{field.name}={_expression(value, namespace or {})}")

    limit = ""
    if memory_limit and ask != "recorded":
        limit = f", memory_limit={literal(memory_limit)}"

    name, line = workload_source(workload, namespace or {})
    lines = [
        "import memlab",
        "",
        line,
        f"config = memlab.StepConfig({', '.join(shown)})",
        f"result = memlab.{ask}({name}, config, device={literal(device)}{limit})",
        "print(result)",
    ]
    if check_gradients and ask == "measure":
        verified = f"memlab.verify({name}, config, device={literal(device)})"
        lines += [f"report = {verified}", "print(report)"]

    return "\n".join(lines) + "\n"


def workload_source(workload: Workload, namespace: Mapping[str, Any]) -> tuple[str, str]:
    """Return the variable that holds the workload, and the line that creates it or is a comment."""
    if (options := zoo_options(workload)) is not None:
        return "workload", f"workload = {zoo_source(workload.name, options)}"
    own = _variable(workload, namespace)
    if own:
        return own, f"# {own} is the workload that the panel was given"
    return "workload", "# put the workload that the panel was given here, as `workload`"


def zoo_source(name: str, options: Mapping[str, Any]) -> str:
    """Return the call that makes a workload of the zoo."""
    given = "".join(f", {option}={literal(value)}" for option, value in options.items())
    return f"memlab.workloads.get({literal(name)}{given})"


def _expression(value: Any, namespace: Mapping[str, Any]) -> str:
    """Return the value of a setting as Python: a literal, or the variable that holds a function."""
    if not callable(value):
        return literal(value)
    # a function has no literal; an undefined name shows where to put it
    return _variable(value, namespace) or "policy_function"


def _variable(value: Any, namespace: Mapping[str, Any]) -> str | None:
    """Return the name of the notebook's variable that holds this value, if it has one."""
    for name, held in namespace.items():
        is_name = name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")
        if held is value and is_name:
            return name
    return None
