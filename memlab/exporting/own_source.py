"""Find the source of a function or a class, and make sure that it is what runs.

The file, or the cell of a notebook, is compiled again. Only where this gives the very code that a
function has is its text taken. So a file that was edited after its import is noticed.
"""

import ast
import functools
import inspect
import linecache
import textwrap
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

from memlab.arguments.libraries import is_library
from memlab.errors import UnsupportedError

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
PLAIN = (type(None), bool, int, float, complex, str, bytes)
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

    header = node.decorator_list[0].lineno if decorated and node.decorator_list else node.lineno
    start = "@" if header != node.lineno else ""
    own = _dedented(text, header, node, start)
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
    text, nodes, known = "", list[ast.ClassDef](), set[CodeType]()
    for code in codes:
        text = _text(code.co_filename)
        known = set(_codes(_compiled(text)))
        nodes = [n for n in ast.walk(_parsed(text)) if isinstance(n, ast.ClassDef)]
        nodes = [n for n in nodes if n.name == kind.__name__ and _holds(n, code.co_firstlineno)]
        if nodes:
            break
    if not nodes:
        text, nodes = _of_class_without_methods(kind)
        known = set(codes)
    if not known.issuperset(codes):
        raise NoSource(STALE)

    node = min(nodes, key=lambda n: (n.end_lineno or 0) - n.lineno)
    if not _is_as_written(kind, node):
        raise NoSource(STALE)
    header = node.decorator_list[0].lineno if node.decorator_list else node.lineno
    without = [part for part in node.body if getattr(part, "name", None) in left_out]
    return _dedented(text, header, node, "@" if node.decorator_list else "", without)


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
    except Exception:  # a value of a person's own class may raise anything
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


def _of_class_without_methods(kind: type) -> tuple[str, list[ast.ClassDef]]:
    try:
        text = _text(inspect.getsourcefile(kind) or "")
    except TypeError:
        raise NoSource("its source is nowhere to be found") from None
    nodes = [n for n in ast.walk(_parsed(text)) if isinstance(n, ast.ClassDef)]
    nodes = [n for n in nodes if n.name == kind.__name__]
    if len(nodes) != 1:
        raise NoSource("its source is nowhere to be found")
    return text, nodes


def _def_of_lambda(text: str, node: ast.Lambda, name: str) -> str:
    """Return a lambda as a `def`."""
    arguments = ast.unparse(node.args)
    body = ast.get_source_segment(text, node.body) or ""
    if "\n" in body:
        body = ast.unparse(node.body)
    elif isinstance(node.body, ast.Tuple) and not body.startswith("("):
        body = f"({body})"
    return f"def {name}({arguments}):\n    return {body}"


def _dedented(
    text: str, header: int, node: Any, start: str = "", without: list[Any] | None = None
) -> str:
    """Return the lines of a definition, moved to the left margin, without some of its parts."""
    lines = text.splitlines()
    gone = {
        line
        for part in without or ()
        for line in range(_first_line(part) - 1, part.end_lineno + 1)  # and the line before it
    }
    kept = [lines[n - 1] for n in range(header, node.end_lineno + 1) if n not in gone]
    found = textwrap.dedent("\n".join(kept)).strip()
    if not start:  # `x = 1; def` cannot be, but a semicolon may follow
        found = found.rstrip(";")

    # to dedent changes a text of several lines that begins further left
    plain = ast.parse(ast.unparse(node)).body[0]
    if not start and not isinstance(plain, ast.ClassDef):
        plain.decorator_list = []  # type: ignore[attr-defined]
    if without:
        names = {part.name for part in without}
        plain.body = [p for p in plain.body if getattr(p, "name", None) not in names]  # type: ignore[attr-defined]
    try:
        same = ast.dump(ast.parse(found).body[0]) == ast.dump(plain)
    except (SyntaxError, IndexError):
        same = False
    return found if same else ast.unparse(plain)


def _text(file: str) -> str:
    linecache.checkcache(file)
    text = "".join(linecache.getlines(file))
    if not text:
        raise NoSource("its source is nowhere to be found")
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
