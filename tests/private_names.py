"""Finds the private names of PyTorch that a file uses, by reading it; nothing is imported.

A name is private if a component of it begins with an underscore: `torch._C._foo`, `tensor._bar`.
Left out: operators (`torch.ops.aten._to_copy`), which are named as the dispatcher reports them, and
what the file, or another library, has defined under such a name.
"""

import ast
import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

ASKS = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}
OF_TUPLES = {"_asdict", "_fields", "_make", "_replace"}  # public, of every named tuple
PATH = re.compile(r"torch(\.\w+)*\.?")


class Use(NamedTuple):
    """A private name, as a path ("torch._C._foo") or of some object ("._bar"), and its line."""

    line: int
    name: str


def uses(source: str, attributes: frozenset[str] = frozenset()) -> list[Use]:
    """Return the private names of PyTorch in a source.

    Args:
        source: text of a Python file.
        attributes: known ones (`_bar`), which are found in any string too.
    """
    tree = ast.parse(source)
    known, own = _names(tree), _defined(tree)
    found = [*_imports(tree), *_strings(tree, attributes)]
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in inner:
            parts, root = _chain(node)
            inner |= set(_attributes(node))
            found += [Use(node.lineno, name) for name in _private(parts, root, known, own)]
        elif isinstance(node, ast.Call) and _called(node) in ASKS:
            texts = [arg.value for arg in node.args if _is_text(arg)]
            owner = node.args[0] if not _is_text(node.args[0]) else None
            parts, root = _chain(owner) if owner is not None else ([], None)
            for text in texts:
                named = _private([*parts, *text.split(".")], root, known, own)
                found += [Use(node.lineno, name) for name in named]
    return sorted(set(found))


def attributes(source: str) -> frozenset[str]:
    """Return the private attributes (`_bar`) that a source reads, or names in a string."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    asked = {id(arg) for call in calls if _called(call) in ASKS for arg in call.args}
    texts = [node for node in ast.walk(tree) if _is_text(node) and id(node) not in asked]
    named = {node.value for node in texts if re.fullmatch(r"_[a-z]\w+", node.value)}
    return frozenset(named | {use.name[1:] for use in uses(source) if use.name[0] == "."})


def constants(source: str) -> dict[str, Any]:
    """Return the tuples of strings that a module holds, by name."""
    found: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        if all(map(_is_text, node.value.elts)) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _attributes(node: ast.expr) -> Iterator[ast.Attribute]:
    while isinstance(node, ast.Attribute):
        yield node
        node = node.value


def _chain(node: ast.expr) -> tuple[list[str], str | None]:
    """Return the attributes of `root.a.b` in their order, and the root if it is a name."""
    parts = [each.attr for each in _attributes(node)][::-1]
    while isinstance(node, ast.Attribute):
        node = node.value
    return parts, node.id if isinstance(node, ast.Name) else None


def _names(tree: ast.AST) -> dict[str, str]:
    """Return what the names of a file stand for: modules, what is imported of them, aliases."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                known[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
            parts, root = _chain(node.value)
            if root in known and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                known.setdefault(node.targets[0].id, ".".join([known[root], *parts]))
    return known


def _defined(tree: ast.AST) -> set[str]:
    """Return the private names that a file gives to functions, classes and attributes itself."""
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.Assign) and any(
                    isinstance(each, ast.Name) and each.id == "__slots__" for each in part.targets
                ):
                    own |= set(ast.literal_eval(part.value))
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    own.add(part.target.id)
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            own.add(node.attr)
    return own


def _private(
    parts: list[str], root: str | None, known: dict[str, str], own: set[str]
) -> Iterator[str]:
    """Yield the private names of PyTorch in attributes of a name, or of some expression."""
    whole = known.get(root or "", "").split(".")
    if whole[0] == "torch":
        path = [*whole, *itertools.takewhile(lambda part: not part.startswith("__"), parts)]
        if path[:2] != ["torch", "ops"] and any(map(_is_private, path)):
            yield ".".join(path)
        return
    if whole[0] and whole[0] != "memlab":  # of another library
        return
    for part in parts:
        if _is_private(part) and part not in own | OF_TUPLES and whole[0] != "memlab":
            yield f".{part}"


def _imports(tree: ast.AST) -> Iterator[Use]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            path = name.split(".")
            if path[0] == "torch" and any(map(_is_private, path)):
                yield Use(node.lineno, name)


def _strings(tree: ast.AST, attributes: frozenset[str]) -> Iterator[Use]:
    """Yield paths in strings ("torch._dynamo") and known attributes ("_parameters")."""
    text: set[int] = set()  # docstrings, and what is put together for people or for a script
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text |= {id(part) for part in ast.walk(node)}
        elif isinstance(node, ast.Expr):
            text.add(id(node.value))
    for node in ast.walk(tree):
        if not _is_text(node) or id(node) in text:
            continue
        if node.value in attributes:
            yield Use(node.lineno, f".{node.value}")
        elif PATH.fullmatch(node.value) and any(
            re.match("_[a-zA-Z]", part) for part in node.value.split(".")
        ):
            yield Use(node.lineno, node.value)
