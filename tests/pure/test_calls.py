"""Tests and benchmarks call functions with arguments that these take, also where few runs see it.

Of slow tests a commit runs a sample: one that calls a changed function in the old way would fail
many commits later. mypy looks at memlab alone.
"""

import ast
import functools
import inspect
from collections.abc import Iterator
from inspect import Parameter
from pathlib import Path
from typing import Any

from tests import ROOT

FILES = [
    path
    for folder in ("tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "wild_models" not in path.parts
]
SAME_ARGUMENTS = {"contextlib.contextmanager", "functools.cache"}  # decorators that keep them


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def defined_in(module: str) -> dict[str, Any]:
    """Return the functions that other files can import from a module of this repository."""
    path = ROOT / module.replace(".", "/")
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return defined(parsed(files[0])) if files else {}


def defined(tree: ast.Module) -> dict[str, Any]:
    """Return the signature of each function of a module, and the place of what it imports."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            others = {ast.unparse(each) for each in node.decorator_list} - SAME_ARGUMENTS
            found[node.name] = None if others else signature(node.args)
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                found[each.asname or each.name] = node.module, each.name
        elif isinstance(node, ast.Assign):
            found |= {name.id: None for name in ast.walk(node) if isinstance(name, ast.Name)}
    return found


def taken_by(name: str, known: dict[str, Any]) -> inspect.Signature | None:
    """Return what a function takes; None if that is not known."""
    found = known.get(name)
    seen = set()
    while isinstance(found, tuple) and found not in seen:
        seen.add(found)
        module, name = found
        found = defined_in(module).get(name)
    return found if isinstance(found, inspect.Signature) else None


def signature(args: ast.arguments) -> inspect.Signature:
    """Return the signature of a function as its source says it."""
    by_place = [(each.arg, Parameter.POSITIONAL_ONLY) for each in args.posonlyargs]
    by_place += [(each.arg, Parameter.POSITIONAL_OR_KEYWORD) for each in args.args]
    first_default = len(by_place) - len(args.defaults)
    parameters = [
        Parameter(name, kind, default=None if i >= first_default else Parameter.empty)
        for i, (name, kind) in enumerate(by_place)
    ]
    if args.vararg:
        parameters.append(Parameter(args.vararg.arg, Parameter.VAR_POSITIONAL))
    for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        value = Parameter.empty if default is None else None
        parameters.append(Parameter(each.arg, Parameter.KEYWORD_ONLY, default=value))
    if args.kwarg:
        parameters.append(Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def calls(node: ast.AST, hidden: frozenset[str] = frozenset()) -> Iterator[ast.Call]:
    """Yield the calls of global names; those that are to raise an error are left out."""
    if isinstance(node, ast.With) and "raises" in ast.unparse(node.items[0].context_expr):
        return
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        hidden |= _own_names(node)
    is_by_name = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    if is_by_name and node.func.id not in hidden:
        yield node
    for child in ast.iter_child_nodes(node):
        yield from calls(child, hidden)


def _own_names(function: ast.FunctionDef | ast.Lambda) -> set[str]:
    """Return the names that are others inside a function than outside of it."""
    names = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef) and node is not function:
            names.add(node.name)
    return names


def wrong(tree: ast.Module) -> Iterator[str]:
    """Yield a sentence for each call that its function would not take."""
    known = defined(tree)
    for call in calls(tree):
        takes = taken_by(call.func.id, known)
        if takes is None:
            continue
        given = [each for each in call.args if not isinstance(each, ast.Starred)]
        named = {each.arg: each for each in call.keywords if each.arg}
        # what a star stands for is not known, and may be all that is missing
        has_star = len(given) < len(call.args) or len(named) < len(call.keywords)
        try:
            (takes.bind_partial if has_star else takes.bind)(*given, **named)
        except TypeError as error:
            yield f"line {call.lineno}, {call.func.id}: {error}"


def test_functions_are_called_with_what_they_take():
    found = {str(path.relative_to(ROOT)): list(wrong(parsed(path))) for path in FILES}
    assert len(found) > 250
    assert {path: sentences for path, sentences in found.items() if sentences} == {}


def test_a_call_without_an_argument_is_found():
    tree = ast.parse(
        "from tests.rank_training import batches as made\n"
        "def f(tokens): return f(2), made(*tokens), tokens(), f()\n"
        "def g(): return made(2, odd=1), f(tokens=2)\n"
    )
    assert list(wrong(tree)) == [
        "line 2, f: missing a required argument: 'tokens'",
        "line 3, made: got an unexpected keyword argument 'odd'",
    ]
