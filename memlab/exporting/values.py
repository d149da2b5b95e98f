"""Write a value as Python that makes an equal one, from names that `bind` puts into the script."""

import dataclasses
import functools
import inspect
import keyword
import math
import textwrap
from collections.abc import Callable
from enum import Enum
from types import GenericAlias, MethodType, UnionType
from typing import Any

import numpy as np
import torch

from memlab.arguments.quoting import is_a, quoted
from memlab.exporting.own_source import NoSource
from memlab.techniques.source import LONGEST_LINE

Bind = Callable[[str, Any], str]
"""(wanted name, object) -> the name under which a script has this object."""
MOST_NUMBERS = 1000  # of a list or a tensor: a longer one is data, which belongs in a file
DEEPEST = 20


def expression(value: Any, bind: Bind, depth: int = 0) -> str:
    """Return Python that makes a value equal to this one.

    Raises:
        NoSource: this is not known; the message is a clause that says why.

    >>> print(expression({"sizes": (1, 2.5), "name": "it's"}, bind=lambda name, _: name))
    {"sizes": (1, 2.5), "name": "it's"}
    """
    if depth > DEEPEST:
        raise NoSource("it is nested too deeply, or holds itself")
    writer = _writer_of(value)
    if writer is None:  # a function or a class, or else refused
        return bind(_name_of(value), value)
    return writer(value, lambda each: expression(each, bind, depth + 1), bind)


def call(name: str, given: list[str]) -> str:
    """Return a call; one that is too long for a line has an argument on each.

    >>> call("dict", ["size=1", "text=" + 80 * "a"]).splitlines()[:2]
    ['dict(', '    size=1,']
    """
    line = f"{name}({', '.join(given)})"
    if not given or (len(line.split("\n")[-1]) <= LONGEST_LINE - 12 and "\n" not in "".join(given)):
        return line
    inner = [textwrap.indent(f"{each},", "    ") for each in given]
    return "\n".join([f"{name}(", *inner, ")"])


def given(name: str, written: str) -> str:
    """Return an argument by its name, which in a dict of arguments may be any text."""
    return f"{name}={written}" if is_name(name) else f"**{{{quoted(name)}: {written}}}"


def method_name(method: Any) -> str:
    """Return the name under which an object has a method; `__name__` may be any text."""
    name = method.__name__
    if not is_name(name) or getattr(method.__self__, name, None) != method:
        raise NoSource("it is a method whose name is not that under which its object has it")
    return str(name)


def is_name(text: Any) -> bool:
    """Return whether a text is a name in Python."""
    return isinstance(text, str) and text.isidentifier() and not keyword.iskeyword(text)


Write = Callable[[Any], str]
Writer = Callable[[Any, Write, Bind], str]


def _name_of(value: Any) -> str:
    name = getattr(value, "__name__", None) or type(value).__name__
    return name if is_name(name) else "value"


def _number(value: Any, *_: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def _several(value: Any, write: Write, _: Bind) -> str:
    if len(value) > MOST_NUMBERS:
        raise NoSource(f"it has {len(value)} entries, and more than {MOST_NUMBERS} are not copied")
    inside = ", ".join(map(write, value))
    if type(value) is tuple:
        return f"({inside}{',' * (len(value) == 1)})"
    if type(value) is list:
        return f"[{inside}]"
    if type(value) is set and value:
        return f"{{{inside}}}"
    return f"{type(value).__name__}([{inside}])"


def _dict(value: Any, write: Write, _: Bind) -> str:
    if len(value) > MOST_NUMBERS:
        raise NoSource(f"it has {len(value)} entries, and more than {MOST_NUMBERS} are not copied")
    return f"{{{', '.join(f'{write(key)}: {write(each)}' for key, each in value.items())}}}"


def _slice(value: Any, write: Write, _: Bind) -> str:
    return f"slice({write(value.start)}, {write(value.stop)}, {write(value.step)})"


def _partial(value: Any, write: Write, bind: Bind) -> str:
    named = [given(name, write(each)) for name, each in value.keywords.items()]
    made = bind("functools", functools)
    return call(f"{made}.partial", [write(value.func), *map(write, value.args), *named])


def _method(value: Any, write: Write, _: Bind) -> str:
    return f"{write(value.__self__)}.{method_name(value)}"


def _dataclass(value: Any, write: Write, bind: Bind) -> str:
    given: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        own = getattr(value, field.name)
        if field.init and field.default is not own and not _is_equal(own, field.default):
            given[field.name] = own
    made = type(value)(**given)
    for name in (field.name for field in dataclasses.fields(value)):
        own, again = getattr(value, name), getattr(made, name)
        if own is not again and not _is_equal(own, again):
            raise NoSource(f"its field {name} is not what {type(value).__name__} makes of it")
    written = [f"{name}={write(own)}" for name, own in given.items()]
    return call(bind(type(value).__name__, type(value)), written)


def _named_tuple(value: Any, write: Write, bind: Bind) -> str:
    given = [f"{name}={write(getattr(value, name))}" for name in value._fields]
    return call(bind(type(value).__name__, type(value)), given)


def _enum(value: Any, _: Write, bind: Bind) -> str:
    held = bind(type(value).__name__, type(value))
    return f"{held}.{value.name}" if is_name(value.name) else f"{held}[{quoted(value.name)}]"


def _of_torch(value: Any, write: Write, bind: Bind) -> str:
    held = bind("torch", torch)
    if isinstance(value, torch.device):
        return f"{held}.device({quoted(str(value))})"
    if isinstance(value, torch.Size):
        return f"{held}.Size({write(tuple(value))})"
    return f"{held}.{str(value).removeprefix('torch.')}"


def _tensor(value: Any, write: Write, bind: Bind) -> str:
    is_plain = value.device.type == "cpu" and value.layout is torch.strided
    if value.numel() > MOST_NUMBERS or value.requires_grad or not is_plain or value.is_quantized:
        raise NoSource(
            f"it is a tensor of shape {tuple(value.shape)}, and only plain ones of at most "
            f"{MOST_NUMBERS} numbers are copied"
        )
    kind = _of_torch(value.dtype, write, bind)
    if not value.numel():  # a list of nothing has no shape
        return f"{bind('torch', torch)}.empty({write(tuple(value.shape))}, dtype={kind})"
    return f"{bind('torch', torch)}.tensor({write(value.tolist())}, dtype={kind})"


def _array(value: Any, write: Write, bind: Bind) -> str:
    if value.size > MOST_NUMBERS or value.dtype.kind not in "bifu":
        raise NoSource(
            f"it is an array of shape {value.shape}, and only those of at most {MOST_NUMBERS} "
            "plain numbers are copied"
        )
    name = bind("np", np)
    if isinstance(value, np.generic):
        return f"{name}.{value.dtype.name}({write(value.item())})"
    return f"{name}.array({write(value.tolist())}, dtype={name}.{value.dtype.name})"


def _module(value: Any, write: Write, bind: Bind) -> str:
    """Return the call that makes a module of torch.nn which has no weights, such as a loss."""
    kind = type(value)
    is_known = kind.__module__.startswith("torch.nn.modules.")
    if not is_known or [*value.parameters(), *value.buffers(), *value.children()]:
        raise NoSource(f"it is a {kind.__name__}, a torch.nn.Module whose weights have no source")

    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        own = getattr(value, name, parameter.default)
        if own is not parameter.default and not _is_equal(own, parameter.default):
            given[name] = own
    made = kind(**given)
    different = [n for n, own in vars(value).items() if not _is_equal(own, vars(made).get(n))]
    if different and different != ["training"]:
        raise NoSource(f"it is a {kind.__name__} that was changed after it was made")
    written = [f"{n}={write(own)}" for n, own in given.items()]
    return call(bind(kind.__name__, kind), written) + ("" if value.training else ".eval()")


def _alias(value: Any, write: Write, _: Bind) -> str:
    inside = value.__args__
    return f"{write(value.__origin__)}[{', '.join(map(write, inside))}]"


def _union(value: Any, write: Write, _: Bind) -> str:
    return " | ".join("None" if kind is type(None) else write(kind) for kind in value.__args__)


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # tensors of several numbers are neither true nor false
        return False


def _writer_of(value: Any) -> Writer | None:
    if type(value) in _WRITERS:
        return _WRITERS[type(value)]
    if is_a(value, type):
        return None
    if is_a(value, tuple) and hasattr(value, "_fields"):
        return _named_tuple
    if dataclasses.is_dataclass(value):
        return _dataclass
    return next((write for kind, write in _KINDS if is_a(value, kind)), None)


# by the type itself: a subclass may have any repr, and behave in any way
_WRITERS: dict[type, Writer] = {
    **dict.fromkeys((type(None), bool, int, float, complex, bytes, type(...), range), _number),
    **dict.fromkeys((tuple, list, set, frozenset), _several),
    **dict.fromkeys((torch.dtype, torch.device, torch.Size, torch.memory_format), _of_torch),
    str: lambda value, *_: quoted(value),
    dict: _dict,
    slice: _slice,
    torch.Tensor: _tensor,
    np.ndarray: _array,
    functools.partial: _partial,
    MethodType: _method,
    GenericAlias: _alias,
    UnionType: _union,
}
_KINDS: tuple[tuple[type, Writer], ...] = (
    (Enum, _enum), (torch.nn.Module, _module), (np.generic, _array),
)  # fmt: skip
