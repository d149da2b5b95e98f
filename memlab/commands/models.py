"""Which workload a word of the command line names.

- `package.module:name`, imported as Python would from the current folder: a `Workload`, or a
  function without arguments that returns one, a `(module, example_batch, loss_fn)`, or a module.
- a config of transformers: a JSON file, or a folder with a `config.json`.
- a name of the zoo: `memlab.workloads.names()`.
- a name as it is published, such as meta-llama/Llama-3.2-1B, bert-base-uncased or timm/resnet50.

With an adapter, or another option of `memlab.workloads.finetune`, it is a base model that this
function takes: one of its names, such as llama-1b, or a config of transformers.
"""

import itertools
import os
from dataclasses import dataclass
from typing import Any

import torch

from memlab import workloads
from memlab.arguments.quoting import shown
from memlab.commands import made_up
from memlab.commands.imports import IMPORT_PATH, cause, imported, to_stderr
from memlab.errors import ConfigError, MemlabError, WorkloadError
from memlab.workload import Workload
from memlab.workloads.bases import BASES
from memlab.workloads.published import (
    TIMM,
    config_named,
    is_allowed,
    is_hub_name,
    is_of_hub,
    known_as,
    unknown,
)

UNITS = {"tokens": "--tokens", "pixels": "--image-size"}  # of a `SampleSize`, and its option

SEPARATOR = ","
LISTED = ("adapter", "rank", "base")  # of which `memlab recommend` takes several


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedModel:
    """The model that a person has named, and how it is fine-tuned; None is what was not given.

    Attributes:
        model: an import path, a config, or a name.
        tokens: of a sample.
        image_size: of a sample, in pixels.
        adapter: as `memlab.workloads.finetune` has it, or several with commas between them.
        rank: of it, or several.
        targets: names of layers with commas between them, or "all-linear".
        base: number format of the frozen weights, or several.
        prepare_for_kbit: whether peft prepares the base.
        from_hub: whether the config of another name is read from Hugging Face's hub.
    """

    model: str
    tokens: int | None = None
    image_size: int | None = None
    adapter: str | None = None
    rank: str | None = None
    targets: str | None = None
    base: str | None = None
    prepare_for_kbit: bool | None = None
    from_hub: bool | None = None

    def workload(self) -> Workload:
        """Return the workload of single values.

        Raises:
            ConfigError: an option has several values.
            WorkloadError: the model cannot be trained so.
        """
        for name, values in self.choices().items():
            raise ConfigError(
                f"--{name} {SEPARATOR.join(map(str, values))} has several values, which only "
                "memlab recommend takes; give one"
            )
        return self.first_workload()

    def first_workload(self) -> Workload:
        """Return the workload of the first values that go together.

        Raises:
            ConfigError: a value is empty.
            WorkloadError: the model cannot be trained with any of them; the message is on the last.
        """
        listed, fixed = self._listed(), self._fixed()
        if not listed and not fixed:
            return workload_of(self.model, self.tokens, self.image_size, bool(self.from_hub))
        if self.image_size is not None:
            raise WorkloadError(
                f"--image-size {self.image_size} does nothing for a language model; use --tokens"
            )
        refused = None
        for values in itertools.product(*listed.values()):
            given = dict(zip(listed, values, strict=True)) | fixed
            given |= {"from_hub": True} if self.from_hub else {}
            try:
                return _finetuned(self.model, self.tokens, given)
            except WorkloadError as error:
                refused = error
        assert refused is not None
        raise refused

    def choices(self) -> dict[str, list[Any]]:
        """Return the options that have several values, as `memlab.recommend` takes them."""
        return {name: values for name, values in self._listed().items() if len(values) > 1}

    def _listed(self) -> dict[str, list[Any]]:
        """Return the values of the options that may have several."""
        given = {name: getattr(self, name) for name in LISTED}
        return {
            name: [_number_or_text(part) for part in _parts(f"--{name}", text)]
            for name, text in given.items()
            if text is not None
        }

    def _fixed(self) -> dict[str, Any]:
        """Return the values of the others."""
        found: dict[str, Any] = {}
        if self.targets is not None:
            is_all = self.targets == "all-linear"
            found["targets"] = self.targets if is_all else _parts("--targets", self.targets)
        if self.prepare_for_kbit is not None:
            found["prepare_for_kbit"] = self.prepare_for_kbit
        return found


def _parts(option: str, text: str) -> tuple[str, ...]:
    """Return what stands between commas.

    Raises:
        ConfigError: nothing stands there, or "all-linear" among names.
    """
    parts = tuple(part.strip() for part in text.split(SEPARATOR))
    if "" in parts:
        raise ConfigError(f"{option} {text!r} has an empty value; give one between all commas")
    if option == "--targets" and "all-linear" in parts:
        raise ConfigError(f"{option} {text!r}: all-linear stands alone; leave the other names out")
    return parts


def _number_or_text(part: str) -> int | str:
    try:
        return int(part)
    except ValueError:
        return part


def _finetuned(model: str, tokens: int | None, given: dict[str, Any]) -> Workload:
    """Return a workload that fine-tunes a base model.

    Raises:
        WorkloadError: there is no such base model.
    """
    if ":" in model and not os.path.exists(model):
        first = next(iter(given)).replace("_", "-")
        raise WorkloadError(
            f"--{first} is for a base model of transformers, and {model} is a function of your "
            "own; put the adapter on in it (a PeftModel is a model as any other), or name a config "
            "of transformers, or a base such as llama-1b"
        )
    return workloads.finetune(model, tokens=tokens, **given)


def workload_of(
    model: str, tokens: int | None, image_size: int | None, from_hub: bool = False
) -> Workload:
    """Return the workload that a person has named.

    Raises:
        WorkloadError: it names nothing, or nothing that can be trained; the message says why.
    """
    if ":" in model and not os.path.exists(model):
        return _imported(model, tokens, image_size)
    is_file = os.path.exists(model) and model not in workloads.names()
    is_timm = model.startswith(TIMM)
    is_elsewhere = is_file or is_timm or is_of_hub(model, from_hub)
    if not is_elsewhere and known_as(model, workloads.names()):
        return _in_size(workloads.get(model), tokens, image_size)
    is_allowed_name = is_file or is_timm or is_allowed(from_hub) or config_named(model)
    if not is_allowed_name and known_as(model, BASES):
        raise WorkloadError(
            f"{model} is a base for fine-tuning; add --adapter lora, or --adapter none to "
            "train all of its weights"
        )
    if not is_allowed_name and is_hub_name(model):
        known = unknown(model, [*workloads.names(), *BASES])
        raise WorkloadError(f"{known}, or a model of your own as package.module:function")
    return workloads.from_config(model, tokens=tokens, image_size=image_size, from_hub=from_hub)


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
