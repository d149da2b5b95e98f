"""An option for each field of `StepConfig`, derived from its dataclass.

`memory_budget` is `--memory-budget`; a switch is `--compile` or `--no-compile`. What a value may be
is checked by `StepConfig`, whose sentence names the field.
"""

from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from enum import StrEnum
from re import DOTALL, MULTILINE, search
from typing import Any, get_args

import click

from memlab.commands.imports import IMPORT_PATH, imported
from memlab.config import PRESET_POLICIES, StepConfig

Command = Callable[..., Any]
FIELDS = {field.name: field for field in fields(StepConfig)}
NUMBERS: dict[Any, str] = {int: "INTEGER", float: "NUMBER"}
SEPARATOR = ","
FUNCTIONS = ("checkpoint_policy", "optimizer")  # may be functions, named by import path


def setting_options(command: Command) -> Command:
    """Add an option for each field of `StepConfig`; one that is not given is None."""
    for field in reversed(FIELDS.values()):
        command = click.option(*_names(field), **_words(field), default=None)(command)
    return command


def listed_setting_options(command: Command) -> Command:
    """Add options that may have several values: "8,16", or an option that is given twice."""
    for field in reversed(FIELDS.values()):
        command = click.option(*_names(field), **_words(field), multiple=True)(command)
    return command


def config_of(given: Mapping[str, Any]) -> StepConfig:
    """Return the config of the options that were given.

    Raises:
        ConfigError: a value is not allowed.
    """
    return StepConfig(**{name: _value(FIELDS[name], text) for name, text in _chosen(given)})


def lists_of(given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values of each option that was given, as `memlab.sweep` takes them."""
    found = {}
    for name, texts in _chosen(given):
        field = FIELDS[name]
        parts = [each for text in texts for each in _parts(field, text)]
        found[name] = [_value(field, part) for part in parts]
    return found


def _chosen(given: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, given[name]) for name in FIELDS if given[name] not in (None, ())]


def _parts(field: Field[Any], text: Any) -> list[Any]:
    """Return the values in a list; patterns and names of operators may hold commas themselves."""
    is_list = field.type in NUMBERS or _is_optional(field) or bool(_choices(field))
    return [part.strip() for part in text.split(SEPARATOR)] if is_list else [text]


def _value(field: Field[Any], text: Any) -> Any:
    """Return the value of a field; a text that is no number is left to `StepConfig` to refuse."""
    if _is_optional(field) and text.lower() == "none":
        return None
    if field.name in FUNCTIONS and IMPORT_PATH.fullmatch(text):
        return imported(text)
    try:
        if field.type in (int, int | None):
            return int(text)
        return float(text) if field.type in (float, float | None) else text
    except ValueError:
        return text


def _is_optional(field: Field[Any]) -> bool:
    return field.type in (float | None, int | None)


def _choices(field: Field[Any]) -> list[str]:
    kinds: Any = get_args(field.type) or (field.type,)
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, StrEnum)]
    return [str(member) for kind in enums for member in kind]


def _names(field: Field[Any]) -> tuple[str, str]:
    option = field.name.replace("_", "-")
    return f"--{option}/--no-{option}" if field.type is bool else f"--{option}", field.name


def _words(field: Field[Any]) -> dict[str, Any]:
    """Return the help of a field, from its documentation, and what it takes."""
    text = _documented(field).rstrip(".").replace("PRESET_POLICIES", ", ".join(PRESET_POLICIES))
    if field.type is bool:
        return {"help": f"{text}  [default: {'on' if field.default else 'off'}]"}
    default = "none" if field.default is None else field.default
    text = f"{text}  [default: {default}]"
    if _is_optional(field):
        number = "INTEGER" if field.type == int | None else "NUMBER"
        return {"help": text, "metavar": f"{number}|none"}
    metavar = "|".join(_choices(field)) or NUMBERS.get(field.type, "TEXT")
    return {"help": text, "metavar": metavar}


def _documented(field: Field[Any]) -> str:
    """Return what the docstring of `StepConfig` says of a field; of a choice, what it chooses."""
    attributes = (StepConfig.__doc__ or "").partition("Attributes:")[2]
    found = search(rf"^ {{8}}{field.name}: (.*?)(?=^ {{0,8}}\w)", attributes, DOTALL | MULTILINE)
    text = " ".join(found[1].split()) if found else ""
    if not text.startswith("see "):
        return text.replace("`", "")
    _, *more = text.split(";", 1)
    kind: Any = (*get_args(field.type), field.type)[0]
    first = (kind.__doc__ or "").partition("\n")[0].rstrip(".")
    return ";".join([first, *more]).replace("`", "")
