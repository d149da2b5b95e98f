"""Which workload a word of the command line names, and how it is fine-tuned.

- `package.module:name`, imported as Python would from the current folder: a `Workload`, or a
  function without arguments that returns one, a `(module, example_batch, loss_fn)`, or a module.
- a config of transformers: a JSON file, or a folder with a `config.json`.
- a name of the zoo: `memlab.workloads.names()`.
- a name as it is published, such as meta-llama/Llama-3.2-1B, bert-base-uncased or timm/resnet50.

With an adapter, or another option of `memlab.workloads.finetune`, it is a base model that this
function takes: one of its names, such as llama-1b, or a config of transformers.
"""

import importlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memlab import workloads
from memlab._util.functions import own_line
from memlab._util.units import printable, shown
from memlab.errors import ConfigError, MemlabError, WorkloadError
from memlab.workload import Workload
from memlab.workloads import published

UNITS = {"tokens": "--tokens", "pixels": "--image-size"}  # of a `SampleSize`, and its option
SEPARATOR = ","
LISTED = ("adapter", "rank", "base")  # of which `memlab recommend` takes several
ALL_LINEAR = "all-linear"
NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
IMPORT_PATH = re.compile(f"{NAME}:{NAME}")


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
            try:
                return self._finetuned(dict(zip(listed, values, strict=True)) | fixed)
            except WorkloadError as error:
                refused = error
        assert refused is not None
        raise refused

    def choices(self) -> dict[str, list[Any]]:
        """Return the options that have several values, as `memlab.recommend` takes them."""
        return {name: values for name, values in self._listed().items() if len(values) > 1}

    def _listed(self) -> dict[str, list[Any]]:
        """Return the values of the options that may have several."""
        found = {}
        for name in LISTED:
            if (text := getattr(self, name)) is not None:
                parts = _parts(f"--{name}", text)
                found[name] = [int(part) if _is_whole(part) else part for part in parts]
        return found

    def _fixed(self) -> dict[str, Any]:
        """Return the values of the others."""
        found: dict[str, Any] = {}
        if self.targets is not None:
            parts = _parts("--targets", self.targets)
            if ALL_LINEAR in parts and len(parts) > 1:
                raise ConfigError(
                    f"--targets {self.targets!r}: {ALL_LINEAR} stands alone; leave the other names "
                    "out"
                )
            found["targets"] = ALL_LINEAR if parts == (ALL_LINEAR,) else parts
        if self.prepare_for_kbit is not None:
            found["prepare_for_kbit"] = self.prepare_for_kbit
        return found

    def _finetuned(self, given: dict[str, Any]) -> Workload:
        """Return a workload that fine-tunes a base model.

        Raises:
            WorkloadError: there is no such base model.
        """
        if _is_import(self.model):
            first = next(iter(given)).replace("_", "-")
            raise WorkloadError(
                f"--{first} is for a base model of transformers, and {self.model} is a function of "
                "your own; put the adapter on in it (a PeftModel is a model as any other), or name "
                "a config of transformers, or a base such as llama-1b"
            )
        if self.from_hub:
            given = given | {"from_hub": True}
        return workloads.finetune(self.model, tokens=self.tokens, **given)


def _parts(option: str, text: str) -> tuple[str, ...]:
    """Return what stands between commas.

    Raises:
        ConfigError: nothing stands there.
    """
    parts = tuple(part.strip() for part in text.split(SEPARATOR))
    if "" in parts:
        raise ConfigError(f"{option} {text!r} has an empty value; give one between all commas")
    return parts


def _is_whole(text: str) -> bool:
    # Python reads no number of more than 4,300 digits
    return re.fullmatch(r"[+-]?\d{1,99}", text) is not None


def _is_import(model: str) -> bool:
    return ":" in model and not os.path.exists(model)


def workload_of(
    model: str, tokens: int | None, image_size: int | None, from_hub: bool = False
) -> Workload:
    """Return the workload that a person has named.

    Raises:
        WorkloadError: it names nothing, or nothing that can be trained; the message says why.
    """
    if _is_import(model):
        return _imported_workload(model, tokens, image_size)
    names = workloads.names()
    is_file = os.path.exists(model) and model not in names
    is_found = is_file or model.startswith(published.TIMM)
    is_of_zoo = published.known_as(model, names) and not published.is_of_hub(model, from_hub)
    if is_of_zoo and not is_found:
        return _in_size(workloads.get(model), tokens, image_size)
    may_be_config = published.is_allowed(from_hub) or published.config_named(model)
    if not is_found and not may_be_config:
        if published.known_as(model, published.BASES):
            raise WorkloadError(
                f"{model} is a base for fine-tuning; add --adapter lora, or --adapter none to "
                "train all of its weights"
            )
        if published.is_hub_name(model):
            known = published.unknown(model, [*names, *published.BASES])
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
        if own is None or own.unit != unit:
            said = "have one size only" if own is None else f"are measured in {own.unit}"
            if own is not None and own.unit in UNITS:
                said += f"; use {UNITS[own.unit]}"
            raise WorkloadError(
                f"{UNITS[unit]} {size} does nothing for {workload.name}, whose samples {said}"
            )
        workload = workload.resized(size)
    return workload


# What `package.module:name` means, imported as Python would from the current folder.


@contextmanager
def to_stderr() -> Iterator[None]:
    """Send what a person's code prints to stderr, also by a library in C or a child process.

    Stdout holds the answer alone.
    """
    with redirect_stdout(sys.stderr):
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def imported(path: str) -> Any:
    """Return what an import path names.

    Raises:
        MemlabError: it cannot be imported; the message has the cause.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:  # a console script has its own folder first
        sys.path.insert(0, folder)
    module, _, name = path.partition(":")
    found: Any = _answer(f"{module} of {path} cannot be imported", importlib.import_module, module)
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise MemlabError(f"{path}: {module} has no {name}") from None
    return found


def _answer(failed: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a person's code returns.

    Raises:
        MemlabError: it raised; the message has the cause, with the line of the person's file.
    """
    try:
        with to_stderr():
            return function(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a person's file may raise anything, SystemExit too
        line = own_line(error)
        said = printable(" ".join(str(error).split()))
        where = f" ({line})" if line else ""
        raise MemlabError(f"{failed}: {type(error).__name__}: {said}{where}") from error


def _imported_workload(path: str, tokens: int | None, image_size: int | None) -> Workload:
    """Return the workload behind an import path.

    Raises:
        MemlabError: it cannot be imported, or is no model; the message has the cause.
    """
    file, _, name = path.rpartition(":")
    is_file = file.endswith(".py")
    if is_file or not IMPORT_PATH.fullmatch(path):
        module = file.removesuffix(".py").replace("/", ".").strip(".")
        hint = f"; write {module}:{name}, as in an import" if is_file else ""
        raise WorkloadError(
            f"{shown(path)} is no import path; allowed is package.module:function{hint}"
        )

    found = build = imported(path)
    is_function = callable(build) and not isinstance(build, Workload | nn.Module)
    if is_function:
        found = _answer(f"{path} cannot be called without arguments", build)
    if isinstance(found, tuple) and len(found) == 3:
        try:
            found = Workload.from_module(*found, name=name)
        except MemlabError as error:
            raise WorkloadError(f"{path} returned a tuple that is no workload: {error}") from None
    if isinstance(found, Workload):
        return _in_size(found, tokens, image_size)
    if isinstance(found, nn.Module) and is_function:
        return of_module(path, build, found, tokens=tokens, image_size=image_size)
    raise WorkloadError(
        f"{path} is {shown(found)}; allowed is a memlab.Workload, or a function without arguments "
        "that returns one, a tuple (module, example_batch, loss_fn), or a torch.nn.Module"
    )


# A workload of a bare module, with a made-up batch and a made-up loss.
#
# It says what a module costs whose data and loss are not at hand. A sample is tokens or an image;
# the loss is a cross entropy over the last dimension of what the module returns, all labels 0.

USUAL_CHANNELS = 3


def of_module(
    name: str,
    build_model: Callable[[], nn.Module],
    module: nn.Module,
    *,
    tokens: int | None,
    image_size: int | None,
) -> Workload:
    """Return a workload of a module that takes tokens or images.

    Args:
        name: that results show.
        build_model: returns a new module.
        module: one of them: its first embedding says how many tokens there are, its first
            convolution how many channels.
        tokens: of a sample.
        image_size: pixels along each side of an image.

    Raises:
        WorkloadError: neither or both sizes are given.
    """
    make_batch: Callable[[int], torch.Tensor]
    if tokens is not None and image_size is None:
        embeddings = (each for each in module.modules() if isinstance(each, nn.Embedding))
        vocabulary = next((each.num_embeddings for each in embeddings), 2)
        make_batch = partial(tokens_batch, tokens=tokens, vocab_size=vocabulary)
        said = f"{tokens} tokens"
    elif image_size is not None and tokens is None:
        layers = (each for each in module.modules() if isinstance(each, nn.Conv2d))
        channels = next((each.in_channels for each in layers), USUAL_CHANNELS)
        make_batch = partial(images_batch, image_size=image_size, num_channels=channels)
        said = f"{image_size} pixels"
    else:
        raise WorkloadError(
            f"{name} returned a {type(module).__name__}, a module whose samples are not known; "
            "give either tokens (--tokens 128) or an image size (--image-size 224), or return a "
            "memlab.Workload, or a tuple (module, example_batch, loss_fn)"
        )
    return Workload(
        name=f"{name}, {said}",
        build_model=build_model,
        make_batch=make_batch,
        compute_loss=made_up_loss,
    )


def tokens_batch(n: int, tokens: int, vocab_size: int) -> torch.Tensor:
    """Return n samples of random tokens, (n, tokens) int64."""
    return torch.randint(vocab_size, (n, tokens))


def images_batch(n: int, image_size: int, num_channels: int) -> torch.Tensor:
    """Return n random images, (n, channels, size, size) float32."""
    return torch.rand(n, num_channels, image_size, image_size)


def made_up_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy over the last dimension of what the model returns."""
    outputs: Any = model(batch)
    outputs = getattr(outputs, "logits", outputs)
    outputs = outputs[0] if isinstance(outputs, tuple | list) else outputs
    logits = outputs.flatten(0, -2)
    labels = logits.new_zeros(logits.shape[0], dtype=torch.int64)
    return nn.functional.cross_entropy(logits, labels)
