"""Put a script together: docstring, imports, settings, the workload, the loop, `main`."""

import ast
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from memlab.arguments.quoting import in_docstring, quoted
from memlab.config import StepConfig
from memlab.exporting import own_workload
from memlab.exporting.definitions import Definitions
from memlab.techniques.optimizers.own import looked_up
from memlab.techniques.source import merged
from memlab.workload import Workload

NUM_STEPS = 10
WIDTH = 88  # characters of a line of the docstring
SHOWN_NAME = 60  # characters of a workload's name in the docstring
FUTURE = "from __future__ import annotations"

SET_SEED = '''
def set_seed(seed):
    """Make random numbers the same in every run."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
'''.strip()
SEED_IMPORTS = ("import random", "import numpy as np", "import torch")

BATCHES = '''
def make_batches():
    """Yield one batch again and again, as memlab measures a step; put your own loader here."""
    set_seed(SEED)
    batch = make_batch(BATCH_SIZE)
    for _ in range(NUM_STEPS):
        yield batch
'''.strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """The part of a script that trains.

    Attributes:
        title: what it is written for, in words: "plain PyTorch".
        imports: one import a line.
        functions: definitions, each with all of its lines; `main` is the last.
        calls: the functions of the workload that it calls.
        settings: more constants of the script, a line each.
        needs: what to install besides PyTorch and what the workload needs.
        launch: the command that starts it in several processes.
        remark: what a reader has to know about the loss; empty if there is nothing.
    """

    title: str
    imports: Sequence[str]
    functions: Sequence[str]
    calls: tuple[str, ...]
    settings: tuple[str, ...] = ()
    needs: str = ""
    launch: str = ""
    remark: str = ""


def written(workload: Workload, config: StepConfig, device: str, loop: Loop) -> str:
    """Return the whole script.

    Raises:
        UnsupportedError: a function of the workload cannot be written.
    """
    settings = [
        f"BATCH_SIZE = {config.batch_size}  # samples per update",
        *loop.settings,
        f"NUM_STEPS = {NUM_STEPS}  # updates",
        "SEED = 0",
        f"DEVICE = {quoted(device)}",
    ]
    imports = [*SEED_IMPORTS, *loop.imports]
    own = [*loop.functions, SET_SEED]
    taken = _taken(imports, [*settings, *own], loop.calls)
    definitions = Definitions(taken)
    if config.has_own_optimizer and workload.make_optimizer is None:
        workload = replace(workload, make_optimizer=looked_up(config.optimizer))
    own_workload.write(workload, definitions, loop.calls)

    future = [FUTURE] if definitions.postponed else []
    lines = merged([*future, *imports, *definitions.imports])
    head = [_docstring(workload, config, loop), "", *lines, "", *settings]
    constants = [text for text in definitions.texts if not _is_definition(text)]
    parts = ["\n".join(head)]
    parts += _with_constants(definitions.texts) if constants else definitions.texts
    ending = 'if __name__ == "__main__":\n    main()'
    return "\n\n\n".join([*parts, *own[:-2], SET_SEED, own[-2], ending]) + "\n"


def _docstring(workload: Workload, config: StepConfig, loop: Loop) -> str:
    name = in_docstring(workload.name[:SHOWN_NAME])
    settings = in_docstring(str(config)).replace(", ", "\n    ")
    needs = f"\nIt needs {loop.needs}.\n" if loop.needs else ""
    launch = f"\nStart its ranks with\n\n    {loop.launch}\n" if loop.launch else ""
    remark = f"\n{textwrap.fill(in_docstring(loop.remark), WIDTH)}\n" if loop.remark else ""
    return (
        f'"""Train {name} with {loop.title}.\n\n'
        "Written by memlab, which is not needed here, for:\n\n"
        f"    {settings}\n{needs}{launch}{remark}"
        f'"""'
    )


def _is_definition(text: str) -> bool:
    return isinstance(
        ast.parse(text).body[0], ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    )


def _with_constants(texts: list[str]) -> list[str]:
    """Return texts in which values that follow one another stand in lines next to each other."""
    found: list[str] = []
    before = False
    for text in texts:
        is_value = not _is_definition(text)
        if is_value and before:
            found[-1] += f"\n{text}"
        else:
            found.append(text)
        before = is_value
    return found


def _taken(imports: list[str], texts: list[str], calls: tuple[str, ...]) -> dict[str, Any]:
    """Return the names that mean something in the script, and what each of the imported ones is."""
    taken: dict[str, Any] = {}
    for line in imports:
        [statement] = ast.parse(line).body
        assert isinstance(statement, ast.Import | ast.ImportFrom)
        for alias in statement.names:
            name = alias.asname or alias.name.split(".")[0]
            taken[name] = _imported(statement, alias)
    for text in texts:
        for node in ast.parse(text).body:
            for target in getattr(node, "targets", [node]):
                defined = getattr(target, "id", None) or getattr(target, "name", None)
                if defined:
                    taken[defined] = object()
    return taken


def _imported(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> Any:
    """Return the object that an import binds; a new one if its module is not imported here.

    Then no function of a person can hold it, and nothing needs to be imported to write a text.
    """
    if isinstance(statement, ast.ImportFrom):
        return getattr(sys.modules.get(statement.module or ""), alias.name, object())
    name = alias.name if alias.asname else alias.name.split(".")[0]
    return sys.modules.get(name, object())
