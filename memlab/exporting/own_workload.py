"""Write the functions of a workload, under the names that a script calls them by."""

import dataclasses
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from memlab.arguments.quoting import shown
from memlab.errors import UnsupportedError
from memlab.exporting import finetuned_text
from memlab.exporting.definitions import Definitions
from memlab.exporting.own_source import NoSource
from memlab.exporting.values import call, is_name, method_name
from memlab.exporting.values import given as argument
from memlab.workload import Workload

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
    for field, text in finetuned_text.texts(workload, definitions).items():
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
