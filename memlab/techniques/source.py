"""`ScriptLines`: what a technique adds to a plain PyTorch training script, by place.

`script.py` puts the sources of all techniques together. In their lines these names exist:
`device`, `model`, `parameters` (the trainable ones), `batch`, `micro_batch`, `loss`, `weight`,
`optimizer`. Left out: memlab itself, which no script needs.
"""

import ast
import functools
import inspect
import itertools
import symtable
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from graphlib import TopologicalSorter
from typing import Any

PLACE = "model.to(device)"
BACKWARD = "(loss * weight).backward()"
UPDATE = "optimizer.step()"
ERRORS = "memlab.errors"
PLAIN = ("memlab.techniques.", "memlab._util.torch_private.")  # where scripts take code from
LONGEST_LINE = 100  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptLines:
    """What a technique adds to a plain PyTorch training script, by place; lines of Python.

    Attributes:
        imports: at the top, one import a line.
        functions: definitions of the module, each with all of its lines.
        before: before the model is built: switches.
        built: of `model` where it was built: formats and layouts of its weights.
        place: in place of the line `PLACE`.
        model: once `model` is on `device`.
        batch: of each `batch`, whole and where the loader left it.
        optimizer: defines `optimizer` (and `scheduler`, `scaler`).
        contexts: expressions, entered around the forward of a micro-batch.
        backward: in place of the line `BACKWARD`.
        backward_contexts: expressions, entered around all that.
        around: expressions, entered around forward and backward of a micro-batch.
        update: in place of the line `UPDATE`.
        after: once all batches have been trained on.
    """

    imports: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    built: tuple[str, ...] = ()
    place: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    contexts: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    backward_contexts: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    update: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def together(sources: list[ScriptLines]) -> ScriptLines:
    """Return one source of several, each place in their order.

    If one source replaces a line and another adds lines around it, the order of the two does not
    matter.

    >>> schedule = ScriptLines(update=(UPDATE, "scheduler.step()"))
    >>> scaler = ScriptLines(update=("scaler.step(optimizer)", "scaler.update()"))
    >>> together([schedule, scaler]).update
    ('scaler.step(optimizer)', 'scaler.update()', 'scheduler.step()')
    """
    found: dict[str, tuple[str, ...]] = {}
    for field in fields(ScriptLines):
        replaced = {"place": PLACE, "backward": BACKWARD, "update": UPDATE}.get(field.name)
        lines = (replaced,) if replaced else ()
        for source in sources:
            given = getattr(source, field.name)
            if not replaced:
                lines += given
            elif given:
                outer, inner = (lines, given) if replaced in lines else (given, lines)
                at = outer.index(replaced)
                lines = (*outer[:at], *inner, *outer[at + 1 :])
        found[field.name] = lines
    return ScriptLines(**found)


def inlined(*definitions: Any) -> ScriptLines:
    """Return functions and classes of memlab with all that they use of it, for a script to hold.

    They are plain PyTorch, and memlab runs them too. The script imports what they import from
    elsewhere, and defines the errors of memlab that they raise.

    >>> from memlab.techniques.checkpointing.blocks import is_inside
    >>> inlined(is_inside).imports
    ('from collections.abc import Iterable',)
    """
    held: dict[str, dict[int, ast.stmt]] = defaultdict(dict)  # statements by line, of each file
    needs: dict[str, set[str]] = defaultdict(set)  # files of each file
    imports: dict[str, None] = {}
    errors: dict[str, None] = {}

    def use(module: str, name: str) -> None:
        file = _file(module)
        for statement in file.defined.get(name, ()):
            if statement.lineno not in held[module]:
                held[module][statement.lineno] = statement
                for used in _names(statement):
                    use(module, used)
        source, line = file.imported.get(name, ("", ""))
        if source == ERRORS:
            errors[f"class {name}(ValueError):\n    pass"] = None
        elif source.partition(".")[0] == "memlab":
            is_plain = source.startswith(PLAIN) and f"{source}.{name}" not in sys.modules
            assert is_plain, f"a script cannot hold `{line}`"
            needs[module].add(source)
            use(source, name)
        elif line:
            imports[line] = None

    for definition in definitions:
        use(definition.__module__, definition.__name__)
    files = TopologicalSorter({module: needs[module] - {module} for module in held}).static_order()
    texts = [text for module in files for text in _file(module).texts(held[module])]
    return ScriptLines(imports=tuple(imports), functions=(*errors, *texts))


class _File:
    """What a file of memlab defines and imports at its top level.

    Attributes:
        defined: the statements that bind each name.
        imported: of each name the module that it comes from, and the import of it alone.
    """

    def __init__(self, module: str) -> None:
        text = inspect.getsource(sys.modules[module])
        self._lines = text.splitlines()
        self._body = ast.parse(text).body
        self.defined: dict[str, list[ast.stmt]] = defaultdict(list)
        self.imported: dict[str, tuple[str, str]] = {}
        for statement in self._body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self._note_import(statement)
                continue
            is_definition = isinstance(statement, ast.FunctionDef | ast.ClassDef)
            inside = [statement] if is_definition else ast.walk(statement)
            for node in inside:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    self.defined[node.name].append(statement)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    self.defined[node.id].append(statement)

    def _note_import(self, statement: ast.Import | ast.ImportFrom) -> None:
        for name in statement.names:
            local = name.asname or name.name.partition(".")[0]
            if isinstance(statement, ast.ImportFrom):
                line = ast.unparse(ast.ImportFrom(statement.module, [name], statement.level))
                self.imported[local] = (statement.module or "", line)
            else:
                self.imported[local] = (name.name, ast.unparse(ast.Import([name])))

    def texts(self, held: Mapping[int, ast.stmt]) -> list[str]:
        """Return statements as text, with their comments; constants in a row are one text."""
        found: list[str] = []
        follows_constant = False
        for statement, after in itertools.zip_longest(self._body, self._body[1:]):
            if statement.lineno not in held:
                continue
            decorators = getattr(statement, "decorator_list", [])
            first = min([statement.lineno, *(each.lineno for each in decorators)]) - 1
            while self._lines[first - 1].startswith("#"):
                first -= 1
            last = statement.end_lineno
            is_definition = isinstance(statement, ast.FunctionDef | ast.ClassDef)
            if not is_definition and _is_text(after):
                last = after.end_lineno
            text = "\n".join(self._lines[first:last])
            if follows_constant and not is_definition:
                found[-1] += f"\n{text}"
            else:
                found.append(text)
            follows_constant = not is_definition
        return found


def _names(statement: ast.stmt) -> list[str]:
    """Return the names that a statement looks up at the top level of its file."""
    found: set[str] = set()
    scopes = [symtable.symtable(ast.unparse(statement), "a statement", "exec")]
    for scope in scopes:
        is_top = scope.get_type() == "module"
        found |= {
            symbol.get_name()
            for symbol in scope.get_symbols()
            if (symbol.is_referenced() if is_top else symbol.is_global())
        }
        scopes += scope.get_children()
    return sorted(found)


def _is_text(statement: ast.stmt | None) -> bool:
    """Return whether a statement is a text alone, as it documents the constant before it."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


_file = functools.cache(_File)


def merged(imports: Iterable[str]) -> list[str]:
    """Return imports in order; those from one module are one line, unless it would be too long.

    Those of Python come first, and an empty line after them.

    >>> merged(["import torch", "from math import pi", "from math import e", "import torch"])
    ['from math import e, pi', '', 'import torch']
    """
    from_module: dict[str, set[str]] = defaultdict(set)
    lines: set[str] = set()
    for line in imports:
        [statement] = ast.parse(line).body
        if isinstance(statement, ast.ImportFrom) and statement.module is not None:
            from_module[statement.module] |= {ast.unparse(name) for name in statement.names}
        else:
            lines.add(line)

    for module, names in from_module.items():
        joined = f"from {module} import {', '.join(sorted(names))}"
        each = [f"from {module} import {name}" for name in names]
        lines.update([joined] if len(joined) <= LONGEST_LINE else each)

    ordered = sorted(lines, key=lambda line: (line.startswith("from "), line))
    future = [line for line in ordered if _module(line) == "__future__"]
    of_python = [line for line in ordered if _module(line) in sys.stdlib_module_names]
    others = [line for line in ordered if line not in of_python]
    groups = [future, [line for line in of_python if line not in future], others]
    return "\n\n".join("\n".join(group) for group in groups if group).split("\n")


def _module(line: str) -> str:
    """Return the package that a line imports."""
    return line.split()[1].split(".")[0]
