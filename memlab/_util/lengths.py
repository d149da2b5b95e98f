"""Lengths of samples, as a person gives them: an array, a list or the column of a data set."""

from collections.abc import Iterable, Mapping
from typing import Any

from memlab._util.checks import MOST_THINGS, count
from memlab._util.units import is_a, shown
from memlab.errors import ConfigError

REMEDY = "pass one int for each sample, such as memlab.workloads.lengths_of(texts, tokenizer)"


def sample_lengths(name: str, value: Any) -> tuple[int, ...]:
    """Return the length of each sample as plain ints of at least 1.

    Raises:
        ConfigError: it is no list, is empty, or holds something else.

    >>> sample_lengths("lengths", [3, 1, 2])
    (3, 1, 2)
    """
    if is_a(value, str | bytes | Mapping) or not is_a(value, Iterable):
        raise ConfigError(f"{name}={shown(value)} is no list of lengths; {REMEDY}")
    rule = count(1)
    found: list[int] = []
    try:
        # an array or a tensor has a list of plain numbers, which is read much faster
        for each in value.tolist() if hasattr(value, "tolist") else value:
            if len(found) == MOST_THINGS:
                raise ConfigError(
                    f"{name} has more than {MOST_THINGS} lengths; pass a random part of them"
                )
            if type(each) is not int and getattr(each, "shape", None) == ():
                each = each.item()  # as a data set in the format of torch gives them
            is_plain = type(each) is int and each > 0
            found.append(each if is_plain else rule(f"{name}[{len(found)}]", each))
    except ConfigError:
        raise
    except Exception as error:  # a person's own iterator may raise anything
        raise ConfigError(
            f"{name}={shown(value)} cannot be read: {type(error).__name__}; {REMEDY}"
        ) from error
    if not found:
        raise ConfigError(f"{name} is empty; {REMEDY}")
    return tuple(found)


def optional_lengths(name: str, value: Any) -> tuple[int, ...] | None:
    """Return what `sample_lengths` does; None stays None."""
    return None if value is None else sample_lengths(name, value)
