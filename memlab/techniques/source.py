"""`ScriptLines`: what a technique adds to a plain PyTorch training script, by place.

`memlab.script` puts the sources of all techniques together. In their lines these names exist:
`device`, `model`, `parameters` (the trainable ones), `batch`, `micro_batch`, `loss`, `weight`,
`optimizer`. Left out: memlab itself, which no script needs.
"""

import ast
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from types import ModuleType

PLACE = "model.to(device)"
BACKWARD = "(loss * weight).backward()"
UPDATE = "optimizer.step()"
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


def whole(*files: ModuleType) -> ScriptLines:
    """Return whole source files of memlab, for a script to contain.

    Such a file is plain PyTorch, and memlab runs it too. From memlab it imports only errors, which
    the script defines itself, and names from other files among these.

    >>> from memlab.techniques.offload import weight_reads
    >>> whole(weight_reads).imports[:2]
    ('import itertools', 'from collections.abc import Callable')
    """
    held = {file.__name__ for file in files}
    imports: list[str] = []
    errors: list[str] = []
    definitions: list[str] = []
    for file in files:
        text = inspect.getsource(file)
        statements = _imports_of(text)
        for statement in statements:
            if isinstance(statement, ast.Import):
                imports.append(ast.unparse(statement))
            elif statement.module == "memlab.errors":
                errors += [f"class {e.name}(ValueError):\n    pass" for e in statement.names]
            elif statement.module not in held:
                imports += _one_name_a_line(statement)

        rest = text.splitlines()[statements[-1].end_lineno :]
        definitions.append("\n".join(rest).strip())

    needs_memlab = [line for line in imports if "memlab" in line]
    assert not needs_memlab, f"a script cannot hold {needs_memlab}"
    return ScriptLines(imports=tuple(imports), functions=(*dict.fromkeys(errors), *definitions))


def _imports_of(text: str) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports at the beginning of a file, after its docstring."""
    found: list[ast.Import | ast.ImportFrom] = []
    for statement in ast.parse(text).body[1:]:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            break
        found.append(statement)
    return found


def _one_name_a_line(statement: ast.ImportFrom) -> list[str]:
    return [
        ast.unparse(ast.ImportFrom(statement.module, [name], statement.level))
        for name in statement.names
    ]


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
