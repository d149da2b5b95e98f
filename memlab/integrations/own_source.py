"""Find the source of a function or a class, and make sure that it is what runs.

The file, or the cell of a notebook, is compiled again. Only where this gives the very code that a
function has is its text taken. So a file that was edited after its import is noticed.
"""

import ast
import dataclasses
import functools
import inspect
import keyword
import linecache
import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FunctionType, GenericAlias, MethodType, ModuleType, UnionType
from typing import Any

import numpy as np
import torch

from memlab._util.functions import is_library
from memlab._util.units import is_a, quoted
from memlab.errors import UnsupportedError
from memlab.techniques.source import LONGEST_LINE

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
PLAIN = (type(None), bool, int, float, complex, str, bytes)
NOWHERE = "its source is nowhere to be found"
STALE = "its source is not what runs: it was changed after it was imported, or a tool rewrote it"


class NoSource(UnsupportedError):
    """An object cannot be written into a script. The message is a clause that says why."""


def function_source(function: FunctionType, name: str, *, decorated: bool = False) -> str:
    """Return a function as the `def` of a module, under another name.

    Args:
        function: the function; a lambda becomes a `def` that returns its body.
        name: what it is called in the text.
        decorated: whether its decorators are included.

    Raises:
        NoSource: there is no source, or it is not what runs.
    """
    text, node = _found(function)
    if isinstance(node, ast.Lambda):
        return _def_of_lambda(text, node, name)

    own = _dedented(text, node, decorated=decorated)
    before, keyword, after = own.partition(f"def {node.name}")
    return f"{before}def {name}{after}" if keyword else own


def class_source(kind: type, left_out: tuple[str, ...] = ()) -> str:
    """Return a class as the text of a module, with its decorators.

    Args:
        kind: the class.
        left_out: methods that are not needed.

    Raises:
        NoSource: there is no source, or it is not what runs.
    """
    codes = [method.__code__ for method in _methods(kind)]
    for code in codes:
        text = _text(code.co_filename)
        if nodes := [n for n in _classes(text, kind) if _holds(n, code.co_firstlineno)]:
            break
    else:
        try:
            text = _text(inspect.getsourcefile(kind) or "")
        except TypeError:
            raise NoSource(NOWHERE) from None
        nodes = _classes(text, kind)
        if len(nodes) != 1:
            raise NoSource(NOWHERE)
        codes = []
    if not set(_codes(_compiled(text))).issuperset(codes):
        raise NoSource(STALE)

    node = min(nodes, key=lambda n: (n.end_lineno or 0) - n.lineno)
    if not _is_as_written(kind, node):
        raise NoSource(STALE)
    return _dedented(text, node, decorated=True, left_out=left_out)


def plain_values(body: Sequence[ast.stmt]) -> dict[str, Any]:
    """Return the names that a text sets once, at its top level, to a literal, and these values."""
    found: dict[str, Any] = {}
    bound: list[str] = []
    for node in body:
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                bound.append(part.id)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        try:
            value = ast.literal_eval(node.value)
        except (ValueError, TypeError, SyntaxError):
            continue
        found |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    return {name: value for name, value in found.items() if bound.count(name) == 1}


def values_equal(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal and of one type."""
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # tensors are neither true nor false; a person's class may raise anything
        return False


def _is_as_written(kind: type, node: ast.ClassDef) -> bool:
    """Return whether nothing of a class was set after its body had run."""
    methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | methods
    for name, value in vars(kind).items():
        if name.startswith("__") and name.endswith("__") and name not in methods:
            continue
        plain = inspect.unwrap(value) if callable(value) else value
        if isinstance(plain, FunctionType) and not _is_generated(plain):
            if name not in names:
                return False
            if name in methods and not _holds(node, plain.__code__.co_firstlineno):
                return False
        elif isinstance(value, PLAIN) and name not in names:
            return False
    return all(
        name not in vars(kind) or not isinstance(value, PLAIN)
        or not isinstance(vars(kind)[name], PLAIN) or values_equal(vars(kind)[name], value)
        for name, value in plain_values(node.body).items()
    )  # fmt: skip


def local_imports(text: str) -> Iterator[tuple[str, int]]:
    """Yield the modules that a text imports, with the number of dots before each."""
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.level


def _found(function: FunctionType) -> tuple[str, Definition]:
    """Return the text of a file, and where in it a function is defined."""
    code = function.__code__
    text = _text(code.co_filename)
    if code not in _codes(_compiled(text)):
        raise NoSource(STALE)

    nodes = [node for node in ast.walk(_parsed(text)) if isinstance(node, Definition)]
    if code.co_name == "<lambda>":
        # instructions that stand for nothing in the text have no place, or an empty one
        places = [at for at in code.co_positions() if None not in at and at[::2] != at[1::2]]
        found: list[Any] = [n for n in nodes if isinstance(n, ast.Lambda)]
        found = [n for n in found if all(_is_in(at, n.body) for at in places)]
        found = [n for n in found if n.lineno == code.co_firstlineno]
        # a lambda inside of a lambda lies in the bodies of both
        return text, max(found, key=lambda n: (n.body.lineno, n.body.col_offset))

    named = [n for n in nodes if not isinstance(n, ast.Lambda) and n.name == code.co_name]
    first = [n for n in named if _first_line(n) == code.co_firstlineno]
    return text, first[0]


def _is_in(place: tuple[int | None, ...], node: Any) -> bool:
    line, end_line, column, end_column = place
    starts = (node.lineno, node.col_offset) <= (line, column)
    return starts and (end_line, end_column) <= (node.end_lineno, node.end_col_offset)


def _first_line(node: Any) -> int:
    """Return the line at which Python says that a function begins: that of its decorators."""
    return int(node.decorator_list[0].lineno if node.decorator_list else node.lineno)


def _holds(node: ast.ClassDef, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)


def _methods(kind: type) -> list[FunctionType]:
    """Return the functions in the body of a class, but not those that `dataclass` adds."""
    found = []
    for value in vars(kind).values():
        for part in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset"))):
            plain = inspect.unwrap(part) if callable(part) else part
            if isinstance(plain, FunctionType) and not _is_generated(plain):
                found.append(plain)
    return found


def _is_generated(function: FunctionType) -> bool:
    file = function.__code__.co_filename
    return file.startswith("<string") or is_library(file)


def _classes(text: str, kind: type) -> list[ast.ClassDef]:
    """Return the classes of a text that have the name of this one."""
    nodes = ast.walk(_parsed(text))
    return [n for n in nodes if isinstance(n, ast.ClassDef) and n.name == kind.__name__]


def _def_of_lambda(text: str, node: ast.Lambda, name: str) -> str:
    """Return a lambda as a `def`."""
    arguments = ast.unparse(node.args)
    body = ast.get_source_segment(text, node.body) or ""
    if "\n" in body:
        body = ast.unparse(node.body)
    elif isinstance(node.body, ast.Tuple) and not body.startswith("("):
        body = f"({body})"
    return f"def {name}({arguments}):\n    return {body}"


def _dedented(text: str, node: Any, *, decorated: bool, left_out: tuple[str, ...] = ()) -> str:
    """Return the lines of a definition, moved to the left margin, without some of its parts."""
    first = _first_line(node) if decorated else node.lineno
    gone = {
        line
        for part in node.body
        if getattr(part, "name", None) in left_out
        for line in range(_first_line(part) - 1, part.end_lineno + 1)  # and the line before it
    }
    lines = text.splitlines()
    kept = [lines[n - 1] for n in range(first, node.end_lineno + 1) if n not in gone]
    found = textwrap.dedent("\n".join(kept)).strip()
    if first == node.lineno:  # `x = 1; def` cannot be, but a semicolon may follow
        found = found.rstrip(";")

    # to dedent changes a text of several lines that begins further left
    plain: Any = ast.parse(ast.unparse(node)).body[0]
    if not decorated:
        plain.decorator_list = []
    plain.body = [part for part in plain.body if getattr(part, "name", None) not in left_out]
    try:
        same = ast.dump(ast.parse(found).body[0]) == ast.dump(plain)
    except (SyntaxError, IndexError):
        same = False
    return found if same else ast.unparse(plain)


def _text(file: str) -> str:
    linecache.checkcache(file)
    text = "".join(linecache.getlines(file))
    if not text:
        raise NoSource(NOWHERE)
    return text


@functools.lru_cache(maxsize=32)
def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        raise NoSource(STALE) from None


@functools.lru_cache(maxsize=32)
def _compiled(text: str) -> CodeType:
    try:
        return compile(text, "<script>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        raise NoSource(STALE) from None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


# Write a value as Python that makes an equal one, from names that `bind` puts into the
# script.

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
    if type(value) is dict:
        return f"{{{', '.join(f'{write(key)}: {write(each)}' for key, each in value.items())}}}"
    inside = ", ".join(map(write, value))
    if type(value) is tuple:
        return f"({inside}{',' * (len(value) == 1)})"
    if type(value) is list:
        return f"[{inside}]"
    if type(value) is set and value:
        return f"{{{inside}}}"
    return f"{type(value).__name__}([{inside}])"


def _slice(value: Any, write: Write, _: Bind) -> str:
    return f"slice({write(value.start)}, {write(value.stop)}, {write(value.step)})"


def _partial(value: Any, write: Write, bind: Bind) -> str:
    named = [given(name, write(each)) for name, each in value.keywords.items()]
    made = bind("functools", functools)
    return call(f"{made}.partial", [write(value.func), *map(write, value.args), *named])


def _method(value: Any, write: Write, _: Bind) -> str:
    return f"{write(value.__self__)}.{method_name(value)}"


def _call_of_class(value: Any, arguments: Mapping[str, Any], write: Write, bind: Bind) -> str:
    """Return the call of an object's class with these arguments by name."""
    written = [f"{name}={write(own)}" for name, own in arguments.items()]
    return call(bind(type(value).__name__, type(value)), written)


def _other_than(defaults: Mapping[str, Any], value: Any) -> dict[str, Any]:
    """Return the attributes of an object that are not these defaults."""
    own = {name: getattr(value, name, default) for name, default in defaults.items()}
    return {name: held for name, held in own.items()
            if held is not defaults[name] and not values_equal(held, defaults[name])}  # fmt: skip


def _dataclass(value: Any, write: Write, bind: Bind) -> str:
    fields = dataclasses.fields(value)
    given = _other_than({field.name: field.default for field in fields if field.init}, value)
    made = type(value)(**given)
    if different := _other_than({field.name: getattr(made, field.name) for field in fields}, value):
        name = next(iter(different))
        raise NoSource(f"its field {name} is not what {type(value).__name__} makes of it")
    return _call_of_class(value, given, write, bind)


def _named_tuple(value: Any, write: Write, bind: Bind) -> str:
    named = {name: getattr(value, name) for name in value._fields}
    return _call_of_class(value, named, write, bind)


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

    parameters = inspect.signature(kind).parameters
    given = _other_than({name: each.default for name, each in parameters.items()}, value)
    made = kind(**given)
    different = [n for n, own in vars(value).items() if not values_equal(own, vars(made).get(n))]
    if different and different != ["training"]:
        raise NoSource(f"it is a {kind.__name__} that was changed after it was made")
    return _call_of_class(value, given, write, bind) + ("" if value.training else ".eval()")


def _alias(value: Any, write: Write, _: Bind) -> str:
    inside = value.__args__
    return f"{write(value.__origin__)}[{', '.join(map(write, inside))}]"


def _union(value: Any, write: Write, _: Bind) -> str:
    return " | ".join("None" if kind is type(None) else write(kind) for kind in value.__args__)


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
    **dict.fromkeys((tuple, list, set, frozenset, dict), _several),
    **dict.fromkeys((torch.dtype, torch.device, torch.Size, torch.memory_format), _of_torch),
    str: lambda value, *_: quoted(value),
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


# Find how a script imports an object, if it lies in a library or in a person's own module.

ZOO = "memlab.workloads"
SHORT = ("torch", "torch.nn", "torch.nn.functional", "typing")  # where builtin functions are found
WITHOUT_FILES = ("torch", "numpy")  # some of their compiled modules: `torch._C._nn`
MISSING = object()


def import_line(value: Any, wanted: str) -> str | None:
    """Return the import that binds an object to a name; None if no import gives it.

    >>> import torch
    >>> import_line(torch.nn, "nn"), import_line(torch.nn.functional, "F")
    ('from torch import nn', 'import torch.nn.functional as F')
    >>> import_line(torch.nn.Linear, "Linear"), import_line(torch.relu, "act")
    ('from torch.nn import Linear', 'from torch import relu as act')
    """
    if isinstance(value, ModuleType):
        return _import_of_module(value, wanted)

    found = place_of(value, wanted)
    if found is None or not may_import(found[0]):
        return None
    module, name = found
    return f"from {module} import {name}" + (f" as {wanted}" if name != wanted else "")


def place_of(value: Any, wanted: str = "") -> tuple[str, str] | None:
    """Return the module and the name by which an object can be imported, the shortest there is."""
    home = getattr(value, "__module__", None)
    homes = _above(home) if isinstance(home, str) and home != "builtins" else []
    for module in [*homes, *SHORT]:
        held = sys.modules.get(module)
        for name in (getattr(value, "__name__", None), wanted):
            if isinstance(name, str) and name.isidentifier() and _get(held, name) is value:
                return module, name
    return None


def may_import(module: str) -> bool:
    """Return whether a script can import a module: one of a library, or a person's own.

    Not `__main__`, not memlab, and no module that itself needs memlab, such as the file in which
    the workload is made. Nor one whose values were changed after it was imported.
    """
    return not _needs_memlab_or_this_process(module, set())


def submodules(value: ModuleType, attributes: list[str]) -> list[str]:
    """Return the imports that `module.a.b` needs besides that of the module.

    >>> import torch.utils.checkpoint
    >>> submodules(torch, ["utils", "checkpoint", "checkpoint"])
    ['import torch.utils.checkpoint']
    """
    longest, path = "", value.__name__
    for name in attributes:
        path = f"{path}.{name}"
        if path not in sys.modules:
            break
        longest = path
    return [f"import {longest}"] if longest else []


def _import_of_module(value: ModuleType, wanted: str) -> str | None:
    name = value.__name__
    if not _is_imported(name, value) or not may_import(name):
        return None
    if name == wanted:
        return f"import {name}"
    parent, _, last = name.rpartition(".")
    if last == wanted and parent:
        return f"from {parent} import {last}"
    return f"import {name} as {wanted}"


def _is_imported(name: str, value: ModuleType) -> bool:
    """Return whether an import of this name gives this module.

    A library that imports late may replace itself once it is used, as transformers does.
    """
    held = sys.modules.get(name)
    file = getattr(value, "__file__", None)
    is_of_same_file = file is not None and getattr(held, "__file__", None) == file
    return held is value or (is_of_same_file and _is_of_library(value))


def _above(module: str) -> list[str]:
    """Return the packages above a module and itself, the outermost first; private ones last."""
    parts = module.split(".")
    every = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return sorted(every, key=lambda name: any(part.startswith("_") for part in name.split(".")))


def _get(held: Any, name: str) -> Any:
    """Return what an object has by a name; `MISSING` if it has nothing, as None may be wanted."""
    try:
        return getattr(held, name, MISSING)
    except Exception:  # a module that imports late, or a person's own object, may raise anything
        return MISSING


def _needs_memlab_or_this_process(module: str, seen: set[str]) -> bool:
    held = sys.modules.get(module)
    if module in ("__main__", "__mp_main__") or module.split(".")[0] == "memlab":
        return True
    if held is None or module in seen or _is_of_library(held):
        return held is None
    seen.add(module)
    if not _is_as_in_its_file(held):
        return True
    for value in list(vars(held).values()):
        home = value.__name__ if isinstance(value, ModuleType) else _get(value, "__module__")
        is_other = isinstance(home, str) and home in sys.modules and home not in seen
        if is_other and _needs_memlab_or_this_process(home, seen):
            return True
    return False


def _is_as_in_its_file(module: ModuleType) -> bool:
    """Return whether importing a person's module again gives the same plain values."""
    file = getattr(module, "__file__", None)
    names = module.__name__.split(".")
    if not isinstance(file, str) or not all(map(is_name, names)):
        return False
    if PathFinder.find_spec(names[0], sys.path) is None:
        return False  # it was loaded from a file that no import finds
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return all(
        values_equal(vars(module).get(name, module), value)
        for name, value in plain_values(tree.body).items()
    )


def _is_of_library(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return module.__name__.split(".")[0] in (*sys.stdlib_module_names, *WITHOUT_FILES)
    return is_library(file) and module.__name__.split(".")[0] != "memlab"
