"""Which workload a word of the command line names.

- `package.module:name`, imported as Python would from the current folder: a `Workload`, or a
  function without arguments that returns one, a `(module, example_batch, loss_fn)`, or a module.
- a config of transformers: a JSON file, or a folder with a `config.json`.
- a name of the zoo: `memlab.workloads.names()`.
"""

import os
from typing import Any

import torch

from memlab import workloads
from memlab.arguments.quoting import shown
from memlab.commands import made_up
from memlab.commands.imports import IMPORT_PATH, cause, imported, to_stderr
from memlab.errors import MemlabError, WorkloadError
from memlab.workload import Workload

UNITS = {"tokens": "--tokens", "pixels": "--image-size"}  # of a `SampleSize`, and its option


def workload_of(model: str, tokens: int | None, image_size: int | None) -> Workload:
    """Return the workload that a person has named.

    Raises:
        WorkloadError: it names nothing, or nothing that can be trained; the message says why.
    """
    if ":" in model and not os.path.exists(model):
        return _imported(model, tokens, image_size)
    is_path = os.sep in model or model.endswith(".json") or os.path.isdir(model)
    if is_path and model not in workloads.names():
        return workloads.from_config(model, tokens=tokens, image_size=image_size)
    try:
        return _in_size(workloads.get(model), tokens, image_size)
    except WorkloadError as error:
        if model in workloads.names():
            raise
        raise WorkloadError(
            f"{error}; or a model of your own as package.module:function, or a config of "
            "transformers as a path"
        ) from None


def _in_size(workload: Workload, tokens: int | None, image_size: int | None) -> Workload:
    """Return a workload with samples of the size that was asked for.

    Raises:
        WorkloadError: its samples have another unit, or cannot have this size.
    """
    own = workload.sample_size
    for unit, size in (("tokens", tokens), ("pixels", image_size)):
        if size is None:
            continue
        if own is None:
            raise WorkloadError(
                f"{UNITS[unit]} {size} does nothing for {workload.name}, whose samples have one "
                "size only"
            )
        if own.unit != unit:
            use = f"; use {UNITS[own.unit]}" if own.unit in UNITS else ""
            raise WorkloadError(
                f"{UNITS[unit]} {size} does nothing for {workload.name}, whose samples are "
                f"measured in {own.unit}{use}"
            )
        workload = workload.resized(size)
    return workload


def _imported(path: str, tokens: int | None, image_size: int | None) -> Workload:
    """Return the workload behind an import path.

    Raises:
        WorkloadError: it cannot be imported, or is no model; the message has the cause.
    """
    file, _, name = path.rpartition(":")
    is_file = file.endswith(".py")
    if is_file or not IMPORT_PATH.fullmatch(path):
        module = file.removesuffix(".py").replace("/", ".").strip(".")
        hint = f"; write {module}:{name}, as in an import" if is_file else ""
        raise WorkloadError(
            f"{shown(path)} is no import path; allowed is package.module:function{hint}"
        )

    found = imported(path)
    build = None
    if callable(found) and not isinstance(found, Workload | torch.nn.Module):
        build, found = found, _called(path, found)
    if isinstance(found, Workload):
        return _in_size(found, tokens, image_size)
    if isinstance(found, tuple) and len(found) == 3:
        try:
            return _in_size(Workload.from_module(*found, name=name), tokens, image_size)
        except MemlabError as error:
            raise WorkloadError(f"{path} returned a tuple that is no workload: {error}") from None
    if isinstance(found, torch.nn.Module) and build is not None:
        return made_up.of_module(path, build, found, tokens=tokens, image_size=image_size)
    raise WorkloadError(
        f"{path} is {shown(found)}; allowed is a memlab.Workload, or a function without arguments "
        "that returns one, a tuple (module, example_batch, loss_fn), or a torch.nn.Module"
    )


def _called(path: str, function: Any) -> Any:
    try:
        with to_stderr():
            return function()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a person's function may raise anything, SystemExit too
        said = cause(error)
        raise WorkloadError(f"{path} cannot be called without arguments: {said}") from error
