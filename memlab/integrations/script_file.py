"""Put a script together: docstring, imports, settings, the workload, the loop, `main`."""

import ast
import dataclasses
import functools
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from string import Template
from types import FunctionType, MethodType
from typing import Any

from memlab._util.units import in_docstring, quoted, shown
from memlab.config import StepConfig
from memlab.errors import UnsupportedError
from memlab.integrations.definitions import Definitions
from memlab.integrations.own_source import NoSource, call, given, is_name, method_name
from memlab.integrations.own_source import given as argument
from memlab.techniques.optimizers.own import looked_up
from memlab.techniques.source import merged
from memlab.workload import Workload
from memlab.workloads.finetuned import CAUSAL, Finetuned, finetune_import, made_of

# The text of a script, in files beside this one. `#: name` begins a part of a file; lines between
# `#if name`, `#elif name`, `#else` and `#end` are kept by what is given.

TEMPLATES = Path(__file__).parent / "templates"


@functools.cache
def _parts_of(file: str) -> dict[str, list[str]]:
    """Return the lines of each part of a template, by its name."""
    text = (TEMPLATES / f"{file}.py.txt").read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}
    for part in text.removeprefix("#: ").split("\n#: "):
        name, _, lines = part.partition("\n")
        found[name] = lines.rstrip("\n").split("\n")
    return found


def _chosen(lines: Sequence[str], given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a template whose conditions hold."""
    branches: list[tuple[bool, bool]] = []  # of each `#if` around a line: this one, one before it
    for line in lines:
        word, _, condition = line.strip().partition(" ")
        name = condition.removeprefix("not ")
        if word in ("#if", "#elif", "#else"):
            is_true = word == "#else" or bool(given[name]) == (name == condition)
            before = word != "#if" and any(branches.pop())
            branches.append((is_true and not before, before))
        elif word == "#end":
            branches.pop()
        elif all(is_this for is_this, _ in branches):
            yield line


def filled(part: str, file: str = "shared", /, **given: Any) -> str:
    """Return a part of a template, of a file or else of the shared one, with values for its names.

    A line that is `$name` alone becomes the lines of the value, indented as it is; an empty value
    leaves no line.

    >>> filled("make_model", model=["model.train()"]).splitlines()[3:]
    ['    model.train()', '    return model']
    """
    found: list[str] = []
    for line in _chosen(_parts_of(file).get(part) or _parts_of("shared")[part], given):
        indent, _, name = line.partition("$")
        if indent.strip() or name not in given:
            found.append(Template(line).substitute(given))
        elif value := given[name]:
            lines = value if isinstance(value, str) else "\n".join(value)
            found += [f"{indent}{each}" if each else "" for each in lines.split("\n")]
    return "\n".join(found)


# A fine-tuning as a person writes it, with transformers, peft, bitsandbytes and torchao.
#
# A quantized base is loaded by `from_pretrained`, as people do it, but from random weights.
# A comment says which lines load those of a checkpoint instead.

PEFT = "peft"


def has_quantized_base(workload: Workload) -> bool:
    """Return whether a workload fine-tunes a base that is loaded quantized."""
    made = made_of(workload)
    return made is not None and made.is_quantized


def texts(workload: Workload, definitions: Definitions) -> dict[str, str]:
    """Return functions of a workload as text, and add what they need to the script.

    They are those that `finetune` made, of its model and batch; {} for any other workload.

    Raises:
        WorkloadError: a library is missing; the message has the command that installs it.
        UnsupportedError: transformers does not quantize this base as memlab does.
    """
    made = made_of(workload)
    if made is None:
        return {}
    lines = [
        f'"""Return {in_docstring(made.label)} with random weights.',
        "",
        f"Fine-tuning: {in_docstring(made.words)}.",
        '"""',
        *_base(made, definitions),
        "model.config.use_cache = False  # it is for generating",
        *_adapter(made, definitions),
    ]
    body = textwrap.indent("\n".join(lines), "    ")
    found = {"build_model": f"def build_model():\n{body}"}
    if workload.make_batch == made.model.batch:
        words = made.model.config().get_text_config().vocab_size
        found["make_batch"] = filled("make_batch of tokens", words=words, size=made.model.size)
    return found


def _base(made: Finetuned, definitions: Definitions) -> list[str]:
    """Return the lines that make `model`, in the number format of the base."""
    values = made.built.values
    lines = [f"config = {_call(definitions, 'AutoConfig', values, method='.for_model')}"]
    if (loading := made.loading()) is not None:
        lines.append(f"quantization = {_call(definitions, *loading)}")
    auto = _bound(definitions, CAUSAL)
    given = {"auto": auto, "dtype": values["dtype"], "quantized": loading is not None}
    return [*lines, filled("model of transformers", **given)]


def _adapter(made: Finetuned, definitions: Definitions) -> list[str]:
    """Return the lines that put the adapter on `model`, and return it."""
    if made.adapter == "none":
        return ["return model"]
    lines = []
    if made.prepare_for_kbit:
        prepare = _bound(definitions, "prepare_model_for_kbit_training", PEFT)
        lines.append(f"model = {prepare}(model, use_gradient_checkpointing=False)")
    name, values = made.peft_arguments
    lines.append(f"adapter = {_call(definitions, name, values, PEFT)}")
    return [*lines, f"return {_bound(definitions, 'get_peft_model', PEFT)}(model, adapter)"]


def _bound(definitions: Definitions, name: str, library: str = "transformers") -> str:
    """Return the name under which the script has something of a library."""
    return definitions.bind(name, getattr(finetune_import(library), name))


def _call(
    definitions: Definitions,
    name: str,
    values: Mapping[str, Any],
    library: str = "transformers",
    method: str = "",
) -> str:
    """Return the call of something of a library, with values by their names."""
    named = [given(key, definitions.expression(value)) for key, value in values.items()]
    return call(f"{_bound(definitions, name, library)}{method}", named)


# Write the functions of a workload, under the names that a script calls them by.

PARAMETERS = {
    "build_model": (),
    "make_batch": ("n",),
    "compute_loss": ("model", "batch"),
    "num_loss_terms": ("batch",),
    "split_batch": ("batch", "sizes"),
    "make_optimizer": ("parameters",),  # or the model
}
"""The functions that a script calls, and what it gives to each."""


def write(workload: Workload, definitions: Definitions, fields: tuple[str, ...]) -> None:
    """Add these functions of a workload to a script, with all that they need.

    Raises:
        UnsupportedError: one of them cannot be written; the message names it and the remedy.
        WorkloadError: a library is missing that builds the model.
    """
    for field in fields:
        function = getattr(workload, field)
        if isinstance(function, FunctionType):
            definitions.reserve(field, function)
    for field, text in texts(workload, definitions).items():
        definitions.add(field, text)
        fields = tuple(other for other in fields if other != field)
    for field in fields:
        try:
            _write(field, getattr(workload, field), definitions)
        except Exception as error:  # a person's object may raise anything when it is looked at
            is_known = isinstance(error, NoSource)
            why = error if is_known else f"looking at it raised {type(error).__name__}"
            raise UnsupportedError(
                f"{field} of {shown(workload.name)} cannot be written into a script: {why}; "
                f"define {field} with def in a file, so that it makes all it needs by itself"
            ) from error


def _write(field: str, function: Any, definitions: Definitions) -> None:
    if isinstance(function, FunctionType) and definitions.bind(field, function) == field:
        return

    parameters = PARAMETERS[field]
    given = list(parameters)
    if type(function) is partial:
        given = [*map(definitions.expression, function.args), *given]
        named = function.keywords.items()
        given += [argument(name, definitions.expression(value)) for name, value in named]
        function = function.func
    made = call(_callee(function, definitions), given).replace("\n", "\n    ")
    definitions.add(field, f"def {field}({', '.join(parameters)}):\n    return {made}")


def _callee(function: Any, definitions: Definitions) -> str:
    """Return the expression that is called."""
    if isinstance(function, MethodType):
        owner = function.__self__
        is_frozen = dataclasses.is_dataclass(owner) and type(owner).__hash__ is not None
        if is_frozen or isinstance(owner, type):  # a new one each time is the same one
            return f"{definitions.expression(owner)}.{method_name(function)}"
        return f"{definitions.bind(type(owner).__name__.lower(), owner)}.{method_name(function)}"
    name = getattr(function, "__name__", None) or type(function).__name__.lower()
    return definitions.bind(name if is_name(name) else "function", function)


NUM_STEPS = 10
WIDTH = 88  # characters of a line of the docstring
SHOWN_NAME = 60  # characters of a workload's name in the docstring
FUTURE = "from __future__ import annotations"

SEED_IMPORTS = ("import random", "import numpy as np", "import torch")


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
    own = [*loop.functions, filled("set_seed")]
    taken = _taken(imports, [*settings, *own], loop.calls)
    definitions = Definitions(taken)
    if config.has_own_optimizer and workload.make_optimizer is None:
        workload = replace(workload, make_optimizer=looked_up(config.optimizer))
    write(workload, definitions, loop.calls)

    future = [FUTURE] if definitions.postponed else []
    lines = merged([*future, *imports, *definitions.imports])
    head = [_docstring(workload, config, loop), "", *lines, "", *settings]
    parts = ["\n".join(head), *_with_constants(definitions.texts)]
    ending = 'if __name__ == "__main__":\n    main()'
    return "\n\n\n".join([*parts, *own[:-2], own[-1], own[-2], ending]) + "\n"


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
