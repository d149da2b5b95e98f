"""`Definitions`: functions, classes and values of a person, as the top level of one file.

What a function needs comes along: values of its closure and of its module, other functions,
classes, and imports. A name that two different things have is given to the first of them; the
second is renamed where it is used. Python's own compiler says which words of a text are names of
the module, so that no local variable, attribute or text is taken for one.
"""

import ast
import builtins
import dis
import inspect
import re
import sys
from collections.abc import Mapping
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from memlab._util.functions import is_library
from memlab.integrations.own_source import (
    PLAIN,
    NoSource,
    class_source,
    expression,
    function_source,
    import_line,
    is_name,
    local_imports,
    may_import,
    place_of,
    submodules,
)

# What is left out of the zoo's source in a script: checks of sizes, late imports, `Workload`.

IN_THE_ZOO = "memlab.workloads."
LEFT_OUT = ("workload", "__post_init__")
LATE = "zoo_import"
TYPE_ONLY = re.compile(r" -> [^\n]*\bnpt\.[^\n]*(?=:\n)")  # of a module imported for types only


def is_of_zoo(module: str) -> bool:
    """Return whether a module is part of the zoo."""
    return module.startswith(IN_THE_ZOO)


def imported_at_the_top(text: str) -> tuple[str, list[str]]:
    """Return a text that uses the modules of a library, and the imports that it needs.

    The zoo imports a library where a model is built; a script imports at its top.

    >>> imported_at_the_top('sizes = zoo_import("math").floor(1.5)')
    ('sizes = math.floor(1.5)', ['import math'])
    """
    calls = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == LATE
    ]
    text = TYPE_ONLY.sub("", text)
    imports = []
    for node in calls:
        module: Any = ast.literal_eval(node.args[0])
        written = ast.get_source_segment(text, node) or ""
        lines = [x for x in text.split("\n") if x.strip() != f"{module} = {written}"]
        text = "\n".join(lines).replace(written, module)
        imports.append(f"import {module}")
    return text, imports


READS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL")
OF_A_MODULE = frozenset({"__name__", "__doc__", "__package__", "__spec__", "__builtins__"})
OWN_NAMES = frozenset(dir(builtins)) | OF_A_MODULE
SPAN = attrgetter("lineno", "col_offset", "end_lineno", "end_col_offset")  # of a node
FUTURE_ANNOTATIONS = 0x1000000  # the flag of `from __future__ import annotations`


class _Use(NamedTuple):
    """Where a text uses a name of the module: line and column, in bytes."""

    name: str
    line: int
    start: int
    end: int


class Definitions:
    """What is put at the top level of a script.

    Attributes:
        imports: import statements, one a line.
        texts: definitions, each after those that it needs to be defined.
        postponed: whether annotations must not be evaluated, as where they come from.
    """

    def __init__(self, taken: Mapping[str, Any]) -> None:
        """Begin with names that mean something else in the script, or these very objects."""
        self.imports: list[str] = []
        self.texts: list[str] = []
        self.postponed = False
        self._held: dict[str, Any] = dict(taken)  # also keeps each object alive, for its id
        self._names: dict[int, str] = {}

    def reserve(self, name: str, function: FunctionType) -> None:
        """Call a function by this name, once it is needed."""
        self._names.setdefault(id(function), name)

    def bind(self, wanted: str, value: Any) -> str:
        """Return the name under which the script has this object.

        Raises:
            NoSource: it cannot be written into a script; the message is a clause.
        """
        wanted = wanted if is_name(wanted) else "value"
        if wanted in OWN_NAMES and getattr(builtins, wanted, None) is value:
            return wanted
        for name in (self._names.get(id(value)), wanted):
            if name is not None and name in self._held and _is_same(self._held[name], value):
                return name

        name = self._names.get(id(value)) or self._free(wanted)
        if line := import_line(value, name):
            self.imports.append(line)
            self._hold(name, value)
            return name
        if isinstance(value, ModuleType):
            raise NoSource(f"it uses {wanted}, a module that a script cannot import")

        inner = _wrapped(value)
        if isinstance(value, FunctionType) or inner is not None or isinstance(value, type):
            self._hold(name, value)  # before its text, which may use it
            self._define(name, value, inner)
        else:
            text = self._value(wanted, value)
            self._hold(name, value)
            self.texts.append(f"{name} = {text}")
        return name

    def add(self, name: str, text: str) -> None:
        """Add a definition that is written already."""
        self._held[name] = object()
        self.texts.append(text)

    def expression(self, value: Any) -> str:
        """Return Python that makes a value."""
        return expression(value, self.bind)

    def _value(self, wanted: str, value: Any) -> str:
        def bind(name: str, part: Any) -> str:
            if part is value:  # neither a literal nor a function
                raise NoSource(
                    f"it uses `{wanted}`, an object of class {type(value).__qualname__}, which "
                    "cannot be written as Python"
                )
            return self.bind(name, part)

        try:
            return expression(value, bind)
        except NoSource as error:
            if f"`{wanted}`" in str(error):
                raise
            raise NoSource(f"it uses `{wanted}`, of which {error}") from None

    def _hold(self, name: str, value: Any) -> None:
        self._held[name] = value
        if not isinstance(value, PLAIN):  # two names may well have one number
            self._names[id(value)] = name

    def _free(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self._held or name in OWN_NAMES or name in self._names.values():
            number += 1
            name = f"{wanted}_{number}"
        return name

    def _define(self, name: str, value: Any, inner: FunctionType | None) -> None:
        """Add the text of a function or a class, after what it needs."""
        if isinstance(value, type):
            place = value.__module__
            left_out = LEFT_OUT if is_of_zoo(place) else ()
            if name != value.__name__:
                raise NoSource(f"its class {value.__name__} has the name of something else here")
            text = class_source(value, left_out)
            names = _names_of_class(value)
        else:
            function = inner or value
            place = function.__module__
            text = function_source(function, name, decorated=inner is not None)
            names = _names_of(function)
            text = self._with_defaults(text, function)
            if not is_of_zoo(place):
                self.postponed |= bool(function.__code__.co_flags & FUTURE_ANNOTATIONS)

        if place.split(".")[0] == "memlab" and not is_of_zoo(place):
            own = place_of(value) is not None
            if own:
                raise NoSource(f"it uses {name} of {place}, which is memlab itself")
        if is_of_zoo(place):
            text, imports = imported_at_the_top(text)
            self.imports += imports
        self._check_imports(text, place)
        self.texts.append(self._resolved(text, names))

    def _check_imports(self, text: str, place: str) -> None:
        for module, dots in local_imports(text):
            if dots:
                raise NoSource(f"it imports from `{'.' * dots}{module}`, relative to {place}")
            if module in sys.modules and not may_import(module):
                raise NoSource(f"it imports {module}, which needs memlab")

    def _resolved(self, text: str, names: Mapping[str, Any]) -> str:
        """Return a text whose names mean in the script what they mean where it comes from."""
        renamed: list[tuple[_Use, str]] = []
        chains = _attribute_chains(text)
        bound: dict[str, str] = {}
        for use, is_written in _uses(text):
            if use.name == "__file__":
                raise NoSource("it reads __file__, which is another file in a script")
            if use.name not in bound:
                if use.name not in names or use.name in OF_A_MODULE:
                    continue  # of Python itself, or not defined where it comes from either
                held = names[use.name]
                bound[use.name] = self.bind(use.name, held)
                if isinstance(held, ModuleType):
                    for attributes in chains.get(use.name, []):
                        if bound[use.name] == held.__name__.split(".")[0]:
                            self.imports += submodules(held, attributes)
            if bound[use.name] != use.name:
                if is_written:
                    raise NoSource(f"it sets the global `{use.name}`, a name used twice here")
                renamed.append((use, bound[use.name]))
        return _with_renamed(text, renamed)

    def _with_defaults(self, text: str, function: FunctionType) -> str:
        """Return a text with the values that arguments got when the function was defined.

        `lambda n, size=size: ...` in a loop has another `size` each time.
        """
        arguments = ast.parse(text).body[0].args  # type: ignore[attr-defined]
        plain, named = function.__defaults__ or (), function.__kwdefaults__ or {}
        pairs = list(zip(arguments.defaults, plain, strict=True)) if plain else []
        pairs += [(default, named[argument.arg])
                  for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults,
                                               strict=True) if default is not None]  # fmt: skip
        edits = [(*SPAN(default), self.expression(value)) for default, value in pairs
                 if not isinstance(default, ast.Constant)]  # fmt: skip
        return _edited(text, edits)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and type(one) in PLAIN and repr(one) == repr(other)


def _wrapped(value: Any) -> FunctionType | None:
    """Return the function inside of what a library's decorator made; None for anything else."""
    if isinstance(value, FunctionType) and not is_library(value.__code__.co_filename):
        return None
    if isinstance(value, type):
        return None
    inner = inspect.unwrap(value)
    return inner if inner is not value and isinstance(inner, FunctionType) else None


def _names_of(function: FunctionType) -> dict[str, Any]:
    """Return what the names mean that a function takes from its closure and its module."""
    if "__class__" in function.__code__.co_freevars:
        raise NoSource("it is a method taken out of its class, which it needs")
    if others := [name for name in vars(function) if name != "__wrapped__"]:
        raise NoSource(f"it has an attribute {others[0]!r}, which its source does not set")
    names = dict(function.__globals__)
    return names | _closure_of(function)


def _closure_of(function: FunctionType) -> dict[str, Any]:
    names: dict[str, Any] = {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            names[name] = cell.cell_contents
        except ValueError:
            raise NoSource(f"it uses `{name}`, which has no value yet") from None
    return names


def _names_of_class(kind: type) -> dict[str, Any]:
    names = dict(vars(sys.modules[kind.__module__])) if kind.__module__ in sys.modules else {}
    for base in kind.__mro__[1:]:
        names.setdefault(base.__name__, base)
    for method in vars(kind).values():
        if isinstance(method, FunctionType) and not method.__code__.co_filename.startswith("<str"):
            names |= method.__globals__ | _closure_of(method)
    return names


def _uses(text: str) -> list[tuple[_Use, bool]]:
    """Return the names of the module that a text uses, in order, and whether it sets each."""
    found: list[tuple[_Use, bool]] = []
    try:
        todo = [compile(text, "<script>", "exec", dont_inherit=True)]
    except SyntaxError:
        raise NoSource("it sets a variable of the function around it (nonlocal)") from None
    while todo:
        code = todo.pop()
        todo += [part for part in code.co_consts if isinstance(part, CodeType)]
        own = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_NAME"}
        for each in dis.get_instructions(code):
            at = each.positions
            is_name = each.opname in READS and each.argval not in own
            if (is_name or each.opname in WRITES) and at and None not in at:
                use = _Use(each.argval, at.lineno, at.col_offset, at.end_col_offset)  # type: ignore[arg-type]
                found.append((use, each.opname in WRITES))
    return sorted(found, key=lambda pair: pair[0][1:])


def _attribute_chains(text: str) -> dict[str, list[list[str]]]:
    """Return the attributes that follow each name: `a.b.c` gives ["b", "c"] for "a"."""
    found: dict[str, list[list[str]]] = {}
    for node in ast.walk(ast.parse(text)):
        attributes: list[str] = []
        inner: Any = node
        while isinstance(inner, ast.Attribute):
            attributes.insert(0, inner.attr)
            inner = inner.value
        if attributes and isinstance(inner, ast.Name):
            found.setdefault(inner.id, []).append(attributes)
    return found


def _with_renamed(text: str, renamed: list[tuple[_Use, str]]) -> str:
    lines = text.encode().split(b"\n")
    for use, _ in renamed:
        if lines[use.line - 1][use.start : use.end].decode() != use.name:
            raise NoSource(f"`{use.name}` is the name of two different things; rename one of them")
    return _edited(text, [(use.line, use.start, use.line, use.end, name) for use, name in renamed])


def _edited(text: str, edits: list[tuple[int, int, int, int, str]]) -> str:
    """Return a text with new parts, each from a line and byte to another line and byte."""
    lines = text.encode().split(b"\n")
    # Python compiles a `finally` twice, so that a name may be there twice
    for line, start, end_line, end, new in sorted(set(edits), reverse=True):
        tail = lines[end_line - 1][end:]
        lines[line - 1 : end_line] = [lines[line - 1][:start] + new.encode() + tail]
    return b"\n".join(lines).decode()
