"""Rules for the values of settings whose type alone does not say which are allowed."""

import contextlib
import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from memlab.arguments.checks import Rule, count, text
from memlab.arguments.quoting import is_a, shown
from memlab.arguments.units import parse_bytes, parse_share
from memlab.errors import ConfigError, MemlabError

Policy = str | Callable[..., Any]
MakeOptimizer = str | Callable[..., Any]


def fraction(means: str) -> Rule:
    """Return the rule for a share from 0.0 to 1.0; `means` says of what."""

    def rule(name: str, value: Any) -> float:
        return _fraction(name, value, means)

    return rule


def _fraction(name: str, value: Any, means: str) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = parse_share(value) if isinstance(value, str) else float(value)
    except Exception:  # no number, or of a person's own class, which may raise anything
        raise ConfigError(
            f"{name}={shown(value)} is not a number; allowed is 0.0 to 1.0, or a text such as "
            f"'40 %'{_of_a_size(value)}"
        ) from None

    if not 0.0 <= number <= 1.0:
        raise ConfigError(
            f"{name}={shown(value)} is outside 0.0 to 1.0: {means}; for half of them use 0.5"
        )

    return number


def _of_a_size(value: Any) -> str:
    """Return what to do instead of giving a size; "" if none was given."""
    try:
        size = parse_bytes(value)
    except MemlabError:
        return ""
    return (
        f"; for settings that fit a size use memlab.recommend(..., memory_limit={size}), or the "
        "command memlab recommend"
    )


def norm(name: str, value: Any) -> float | None:
    """Return the largest total norm of all gradients; None for no limit."""
    if value is None:
        return None

    try:
        if isinstance(value, bool | str):
            raise TypeError
        number = float(value)
    except Exception:  # no number, or of a person's own class, which may raise anything
        number = math.nan

    if not 0.0 < number < math.inf:
        raise ConfigError(
            f"{name}={shown(value)}; allowed is a number above 0, such as 1.0, or None not to clip"
        )

    return number


def modules(name: str, value: Any) -> str:
    """Return the text that says which modules are meant."""
    found = text(name, value).strip()
    if not found:
        raise ConfigError(
            f"{name}={shown(value)}; allowed is 'auto', 'every 2', the name of a class, or a "
            "pattern of module paths such as 'layers.*'"
        )
    return found


def policy_among(presets: Sequence[str]) -> Rule:
    """Return the rule for a policy: one of these by name, operators by name, or a function."""

    def rule(name: str, value: Any) -> Policy:
        if is_a(value, str) and str.strip(value):
            return text(name, value).strip()

        if not callable(value):
            raise ConfigError(
                f"{name}={shown(value)}; allowed is one of {', '.join(map(repr, presets))}, "
                "operators by name ('aten.mm, aten.addmm'), or a policy function"
            )

        found: Policy = value
        return found

    return rule


def optimizer_among(known: type[StrEnum]) -> Rule:
    """Return the rule for an optimizer: one of these names, an import path, or a function.

    A text with a dot is looked up when the step is built: a stored config may name a function of a
    notebook that is gone.
    """

    def rule(name: str, value: Any) -> Any:
        if is_a(value, str):
            plain = text(name, value)
            if plain in set(known):
                return known(plain)
            if "." in plain.strip("."):
                return plain
        is_function = callable(value)
        if is_function:
            with contextlib.suppress(Exception):  # a person's own class may raise anything
                hash(value)  # a config is kept in dicts
                return value
        said = ", ".join(repr(str(each)) for each in known)
        raise ConfigError(
            f"{name}={shown(value)} is {'not hashable' if is_function else 'unknown'}; allowed is "
            f"one of {said}, or a function of the parameters that returns an optimizer, such as "
            "torch.optim.NAdam"
        )

    return rule


def optional_count(name: str, value: Any) -> int | None:
    """Return a number of at least 1, or None."""
    if value is None:
        return None
    found: int = count(1)(name, value)
    return found
