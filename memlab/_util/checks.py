"""Check the arguments of public functions against their annotations, before anything runs.

The decorator `checked` checks every argument, so an argument that is added later is checked too. A
condition that an annotation cannot express (a smallest number, a choice) is given as a rule.

Left out: problems that only show while a step runs. They become the outcome of a result.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar, Union

from memlab._util.units import MIB, is_a, parse_bytes, parse_share, shown, with_unit
from memlab.errors import ArgumentError, ConfigError, DeviceError, MemlabError, WorkloadError

# Match the arguments of a call with the parameters of a function, or say what it takes
# instead.


def bound_arguments(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return the arguments by the names of parameters.

    Raises:
        ArgumentError: they do not go with the parameters; a name that is none is said first.
    """
    known = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    wrong = next((given for given in kwargs if given not in known and not takes_any), None)
    if wrong is not None:
        near = difflib.get_close_matches(wrong, list(known), n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ArgumentError(
            f"{name} has no argument {wrong}={shown(kwargs[wrong])}{hint}; allowed are "
            f"{', '.join(known)}"
        )
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(f"{name}: {error}; allowed are {', '.join(known)}") from None


P = ParamSpec("P")
R = TypeVar("R")
Rule = Callable[[str, Any], Any]
"""Takes the name and the value of an argument; returns the value to use or raises ConfigError."""

MOST = 2**63 - 1  # the largest integer of PyTorch and NumPy
LONGEST_SECONDS = 1e9
MOST_THINGS = 10**6  # in a list; an iterator may have no end
SEVERAL = (Sequence, Collection, Iterable, list)
CALLABLE = typing.get_origin(Callable[..., Any])

# for a value of the wrong type: which error to raise, and what to pass instead
ERRORS: dict[str, type[MemlabError]] = {"Workload": WorkloadError, "device": DeviceError}
REMEDIES = {
    "Workload": "pass memlab.workloads.get('gpt-small'), or Workload.from_module(module, "
    "example_batch, loss_fn)",
    "StepConfig": "pass StepConfig(batch_size=8)",
    "LoadingConfig": "pass LoadingConfig()",
    "StepResult": "pass what memlab.measure or memlab.predict returned",
    "Snapshot": "pass what memlab.open_snapshot returned",
    "CostChanges": "pass what memlab.compare returned",
    "SnapshotComparison": "pass what Snapshot.compare returned",
    "VerifyReport": "pass what memlab.verify returned",
    "Figure": "pass what a function of memlab.plots returned",
    "Event": "pass a threading.Event()",
    "Executor": "pass one of concurrent.futures, or client.get_executor() of dask.distributed",
    "Module": "pass the torch.nn.Module itself",
}


def checked(**rules: Rule) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that checks every argument of a function.

    Args:
        **rules: for parameters whose annotation does not express every condition. A rule gets
            the value as it was passed. All other parameters are checked by `of_type`.

    >>> @checked(share=number(0.0, 1.0))
    ... def keep(share: float, repeats: int = 1) -> float:
    ...     return share * repeats
    >>> keep(0.5, repeats="two")
    Traceback (most recent call last):
    memlab.errors.ConfigError: repeats='two' is not a whole number; allowed is an int of at least 0
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        every = {name: rules.get(name) or _by_annotation(p) for name, p in
                 signature.parameters.items() if p.kind is not p.VAR_KEYWORD}  # fmt: skip
        assert set(rules) <= set(every), "a rule names no parameter"

        @functools.wraps(function)
        def check_and_call(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = bound_arguments(function.__name__, signature, args, kwargs)
            for name, value in bound.arguments.items():
                if name in every:
                    bound.arguments[name] = every[name](name, value)
            return function(*bound.args, **bound.kwargs)

        return check_and_call

    return decorate


def _by_annotation(parameter: inspect.Parameter) -> Rule:
    # as with `from __future__ import annotations`: a text names no type that a value could have
    assert not isinstance(parameter.annotation, str), f"the annotation of {parameter} is a text"
    return rule_for(parameter.annotation)


def of_type(name: str, value: Any, annotation: Any) -> Any:
    """Return a value converted to its annotation.

    An int must be at least 0 and a float above 0. The text of a `StrEnum` becomes its member, and a
    list becomes a tuple. A bool does not count as a number, and a text not as a sequence.

    Raises:
        MemlabError: the value does not fit; the message names the argument and what is allowed.
    """
    return rule_for(annotation)(name, value)


def rule_for(annotation: Any) -> Rule:
    """Return `of_type` for one annotation, which is looked into once."""
    return _rule_for(annotation, str(annotation))


@functools.cache
def _rule_for(annotation: Any, written: str) -> Rule:
    """Return the rule; how it is written tells unions apart that differ only in their order."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (Any, inspect.Parameter.empty, object):
        return anything
    if origin in (Union, types.UnionType):
        return functools.partial(_one_of_types, kinds=inside)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is CALLABLE or annotation is Callable:
        return function
    if origin in SEVERAL:
        return functools.partial(_several, kind=inside[0])
    if origin is tuple:
        return functools.partial(_fixed, kinds=inside)
    if annotation is Mapping or origin in (Mapping, dict):
        return functools.partial(_instance, kind=Mapping)
    if _is_choice(annotation):
        return choice(*annotation)

    return functools.partial(_instance, kind=origin or annotation)


def check_fields(record: Any) -> None:
    """Raise MemlabError if a field of a dataclass does not match its annotation.

    Unlike an argument, a number may have any size and sign, NaN included. The text of a choice is
    replaced by the member of its `StrEnum`.
    """
    kind: Any = type(record)
    for name, rule in _rules_of_fields(kind):
        value = getattr(record, name)
        found = rule(name, value)
        if found is not value:
            object.__setattr__(record, name, found)


@functools.cache
def _rules_of_fields(kind: type) -> tuple[tuple[str, Rule], ...]:
    """Return the name of each field and its rule."""
    types_of: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(kind)}
    return tuple(
        (name, rule_for(a) if _is_choice(a) else _rule_of_field(a)) for name, a in types_of.items()
    )


def _is_choice(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, StrEnum)


@functools.cache
def _rule_of_field(annotation: Any) -> Rule:
    """Return the rule for a field that is no choice: of one of these types, and not converted."""
    is_union = typing.get_origin(annotation) in (Union, types.UnionType)
    kinds = typing.get_args(annotation) if is_union else (annotation,)
    names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    allowed = names.replace("NoneType", "None")
    known = [_known_kind(kind) for kind in kinds]

    def rule(name: str, value: Any) -> Any:
        for number_kind, plain, inside in known:
            if number_kind is not None:
                if is_a(value, number_kind) and not is_a(value, bool):
                    return value
            elif is_a(value, plain):
                if inside is not None:
                    for each in value:
                        inside(f"{name} holds", each)
                return value
        raise ConfigError(f"{name}={shown(value)}; allowed is {allowed}")

    return rule


def _known_kind(kind: Any) -> tuple[type | None, Any, Rule | None]:
    """Return the abstract type of a number, else the class, and the rule for what a tuple holds.

    What is annotated by a name, the class of the record itself, is not looked into.
    """
    plain = typing.get_origin(kind) or kind
    held = typing.get_args(kind)[0] if plain is tuple else None
    inside = None if held is None or isinstance(held, str) else _rule_of_field(held)
    return {int: Integral, float: Real}.get(kind), plain, inside


def flag(name: str, value: Any) -> bool:
    """Return the value if it is True or False; any other value is an error."""
    if value is True or value is False:
        return bool(value)
    raise ConfigError(f"{name}={shown(value)} is not a bool; allowed is True or False")


def text(name: str, value: Any) -> str:
    """Return a text that can be shown and stored, which excludes lone surrogates."""
    if not is_a(value, str):
        raise ConfigError(f"{name}={shown(value)} is not text; allowed is a str")

    plain = str.__str__(value)  # a subclass of str may print itself as anything
    try:
        plain.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{name}={shown(plain)} cannot be encoded as UTF-8; allowed is text without lone "
            "surrogates"
        ) from None

    return plain


def function(name: str, value: Any) -> Any:
    """Return the value if it can be called."""
    if not callable(value):
        raise ConfigError(
            f"{name}={shown(value)} cannot be called; pass a function, or leave it out"
        )
    return value


def count(least: int = 0, most: int = MOST) -> Callable[[str, Any], int]:
    """Return the rule for a whole number from `least` to `most`, NumPy's included, bools not."""
    limit = "" if most == MOST else f" and at most {most}"
    allowed = f"allowed is an int of at least {least}{limit}"

    def rule(name: str, value: Any) -> int:
        found = _whole(value)
        if found is None:
            raise ConfigError(f"{name}={shown(value)} is not a whole number; {allowed}")
        if not least <= found <= most:
            beyond = f"below {least}" if found < least else f"above {most}"
            raise ConfigError(f"{name}={shown(value)} is {beyond}; {allowed}")
        return found

    return rule


def number(least: float, most: float) -> Rule:
    """Return the rule for a number from `least` to `most`, both included."""

    def rule(name: str, value: Any) -> float:
        found = _real(value)
        if found is None or not least <= found <= most:
            raise ConfigError(f"{name}={shown(value)}; allowed is a number from {least} to {most}")
        return found

    return rule


def seconds(name: str, value: Any) -> float:
    """Return a time above 0, capped at 30 years, so that adding to it cannot overflow."""
    found = _real(value)
    if found is None or not found > 0:
        raise ConfigError(f"{name}={shown(value)}; allowed is a number above 0")
    return min(found, LONGEST_SECONDS)


def size(name: str, value: Any) -> int | None:
    """Return a size in bytes from an int or a text such as "24GiB"; None stays None.

    A text without a unit that is less than any step takes is asked about.
    """
    if value is None:
        return None
    found = parse_bytes(value, name)
    if is_a(value, str) and found < MIB and re.fullmatch(r"[0-9.\s]+", str.__str__(value)):
        raise ConfigError(
            f"{name}={shown(value)} has no unit and means {found} bytes; did you mean "
            f"{with_unit(str.__str__(value))!r}?"
        )
    return found


def choice(*allowed: Any) -> Rule:
    """Return the rule for a choice between texts, or between members of a `StrEnum`."""
    members = {str(each): each for each in allowed}
    said = ", ".join(map(repr, members))

    def rule(name: str, value: Any) -> Any:
        if not is_a(value, str) or str.__str__(value) not in members:
            raise ConfigError(f"{name}={shown(value)} is unknown; allowed is one of {said}")
        return members[str.__str__(value)]

    return rule


def anything(name: str, value: Any) -> Any:
    """Return the value unchecked, for a function that checks it itself."""
    return value


def _whole(value: Any) -> int | None:
    """Return a whole number as a plain int; None for any other value."""
    if not is_a(value, Integral) or is_a(value, bool):
        return None
    try:
        return operator.index(value)
    except Exception:  # a person's own class may raise anything
        return None


def _real(value: Any) -> float | None:
    """Return a number as a float; None if it is not a number or too large for a float."""
    if not is_a(value, Real) or is_a(value, bool):
        return None
    try:
        found = float(value)
    except Exception:  # too large, or of a person's own class, which may raise anything
        return None

    return None if math.isnan(found) else found


def _positive(name: str, value: Any) -> float:
    found = _real(value)
    if found is None or not 0 < found < math.inf:
        raise ConfigError(f"{name}={shown(value)}; allowed is a finite number above 0")
    return found


def _nothing(name: str, value: Any) -> None:
    if value is not None:
        raise ConfigError(f"{name}={shown(value)}; allowed is None")


def _instance(name: str, value: Any, kind: type) -> Any:
    if is_a(value, kind):
        return value
    said = kind.__name__
    error = ERRORS.get(said, ConfigError)
    article = "an" if said[0] in "AEIOU" else "a"
    remedy = REMEDIES.get(said, f"allowed is {article} {said}")
    raise error(f"{name}={shown(value)} is not {article} {said}; {remedy}")


def _one_of_types(name: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    if value is None and type(None) in kinds:
        return None

    said = []
    for kind in kinds:
        if kind is type(None):
            continue
        try:
            return of_type(name, value, kind)
        except MemlabError as error:
            said.append(error)

    if len(said) == 1:
        raise said[0]

    names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds
                        if kind is not type(None))  # fmt: skip
    kind_of_error = next((type(e) for e in said if type(e) is not ConfigError), ConfigError)
    raise kind_of_error(f"{name}={shown(value)}; allowed is {names}") from None


def _several(name: str, value: Any, kind: Any) -> tuple[Any, ...]:
    allowed = "allowed is a list"
    if is_a(value, str | bytes | Mapping) or not is_a(value, Iterable):
        raise ConfigError(f"{name}={shown(value)} is not a list; {allowed}")

    found: list[Any] = []
    try:
        for each in value:
            if len(found) == MOST_THINGS:
                raise ConfigError(
                    f"{name} has more than {MOST_THINGS} items; allowed is a shorter list"
                )
            found.append(of_type(f"{name}[{len(found)}]", each, kind))
    except MemlabError:
        raise
    except Exception as error:  # a person's own iterator may raise anything
        raise ConfigError(
            f"{name}={shown(value)} cannot be read: {type(error).__name__}; {allowed}"
        ) from error

    return tuple(found)


def _fixed(name: str, value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if kinds[-1] is Ellipsis:
        return _several(name, value, kinds[0])
    found = _several(name, value, Any)
    if len(found) != len(kinds):
        raise ConfigError(f"{name}={shown(value)}; allowed is a tuple of {len(kinds)}")
    each = zip(found, kinds, strict=True)
    return tuple(of_type(f"{name}[{i}]", one, kind) for i, (one, kind) in enumerate(each))


_PLAIN: dict[Any, Rule] = {
    bool: flag,
    int: count(),
    float: _positive,
    str: text,
    None: _nothing,
    type(None): _nothing,
}


# Rules for the values of settings whose type alone does not say which are allowed.

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


# Lengths of samples, as a person gives them: an array, a list or the column of a data set.

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
