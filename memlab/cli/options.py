"""Options that several commands share."""

import functools
import importlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import Field, dataclass, fields
from enum import IntEnum, StrEnum
from functools import partial
from inspect import cleandoc
from pathlib import Path
from re import DOTALL, MULTILINE, search
from typing import Any, get_args

import click
import torch
from torch import nn

from memlab import workloads
from memlab._util.libraries import own_line
from memlab._util.units import format_bytes, printable, shown
from memlab.config import PRESET_POLICIES, StepConfig
from memlab.errors import ConfigError, MemlabError, WorkloadError
from memlab.result import Judgement, Outcome, StepResult
from memlab.workload import Workload
from memlab.workloads.finetuned import ADAPTERS, BASE_FORMATS
from memlab.workloads.published import (
    TIMM,
    bases,
    config_named,
    is_allowed,
    is_hub_name,
    is_of_hub,
    known_as,
    unknown,
)

# A workload of a bare module, with a made-up batch and a made-up loss.
#
# It says what a module costs whose data and loss are not at hand. A sample is tokens or an
# image; the loss is a cross entropy over the last dimension of what the module returns, all
# labels 0.

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


# What `package.module:name` means, imported as Python would from the current folder.

NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
IMPORT_PATH = re.compile(f"{NAME}:{NAME}")


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
    try:
        with to_stderr():
            found: Any = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a person's file may raise anything, SystemExit too
        raise MemlabError(f"{module} of {path} cannot be imported: {cause(error)}") from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise MemlabError(f"{path}: {module} has no {name}") from None
    return found


def cause(error: BaseException) -> str:
    """Return an error in a clause, with the line of the person's file that it came from."""
    line = own_line(error)
    said = printable(" ".join(str(error).split()))
    return f"{type(error).__name__}: {said}{f' ({line})' if line else ''}"


# Which workload a word of the command line names.
#
# - `package.module:name`, imported as Python would from the current folder: a `Workload`,
#   or a function without arguments that returns one, a `(module, example_batch, loss_fn)`,
#   or a module.
# - a config of transformers: a JSON file, or a folder with a `config.json`.
# - a name of the zoo: `memlab.workloads.names()`.
# - a name as it is published, such as meta-llama/Llama-3.2-1B, bert-base-uncased or
#   timm/resnet50.
#
# With an adapter, or another option of `memlab.workloads.finetune`, it is a base model that
# this function takes: one of its names, such as llama-1b, or a config of transformers.

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
    if not is_allowed_name and known_as(model, bases()):
        raise WorkloadError(
            f"{model} is a base for fine-tuning; add --adapter lora, or --adapter none to "
            "train all of its weights"
        )
    if not is_allowed_name and is_hub_name(model):
        known = unknown(model, [*workloads.names(), *bases()])
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
        return of_module(path, build, found, tokens=tokens, image_size=image_size)
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


Command = Callable[..., Any]


def model_options(command: Command) -> Command:
    """Add the model, the size of its samples and its fine-tuning: one argument `asked`."""

    @functools.wraps(command)
    def with_model(**given: Any) -> Any:
        asked = {field.name: given.pop(field.name) for field in fields(AskedModel)}
        return command(asked=AskedModel(**asked), **given)

    for name, kind, metavar, text in reversed(MODEL_OPTIONS):
        with_model = click.option(name, type=kind, metavar=metavar, default=None, help=text)(
            with_model
        )
    return click.argument("model")(with_model)


MODEL_OPTIONS: tuple[tuple[str, Any, str | None, str], ...] = (
    ("--tokens", click.IntRange(min=1), "N", "in each sample of a text"),
    ("--image-size", click.IntRange(min=1), "PIXELS", "along each side of an image"),
    ("--adapter", str, "|".join(ADAPTERS), "of peft, which a frozen base is fine-tuned with; none "
     "trains all weights  [default: lora, if another of these is given]"),
    ("--rank", str, "INTEGER", "of a low-rank adapter  [default: 16]"),
    ("--targets", str, "NAMES", "layers with an adapter, with commas between them, or all-linear"),
    ("--base", str, "|".join(BASE_FORMATS), "number format of the base  [default: bf16]"),
    ("--prepare-for-kbit/--no-prepare-for-kbit", bool, None,
     "cast by peft what is not quantized to fp32  [default: off]"),
    ("--from-hub/--no-from-hub", bool, None,
     "read the config of another name from Hugging Face's hub  [default: off]"),
)  # fmt: skip


def device_option(help_text: str) -> Callable[[Command], Command]:
    """Return what adds --device."""
    return click.option("--device", help=help_text)


def limit_option(command: Command) -> Command:
    """Add --memory-limit."""
    return click.option(
        "--memory-limit", metavar="SIZE", help="bytes, or a size such as 8GiB, that it may hold"
    )(command)


def run_options(command: Command) -> Command:
    """Add the seed, the time limit and --json."""
    command = json_option(command)
    command = click.option(
        "--timeout", "timeout_seconds", type=float, default=600.0, show_default=True,
        metavar="SECONDS", help="after which a step is given up",
    )(command)  # fmt: skip
    return click.option("--seed", type=int, default=0, show_default=True)(command)


def repeat_options(command: Command) -> Command:
    """Add the numbers of timed and untimed steps."""
    command = click.option(
        "--warmup", type=int, default=1, show_default=True, help="untimed steps"
    )(command)
    return click.option("--repeats", type=int, default=5, show_default=True, help="timed steps")(
        command
    )


def json_option(command: Command) -> Command:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="print one JSON object on stdout")(
        command
    )


# An option for each field of `StepConfig`, derived from its dataclass.
#
# `memory_budget` is `--memory-budget`; a switch is `--compile` or `--no-compile`. What a
# value may be is checked by `StepConfig`, whose sentence names the field.

FIELDS = {field.name: field for field in fields(StepConfig)}
NUMBERS: dict[Any, str] = {int: "INTEGER", float: "NUMBER"}
FUNCTIONS = ("checkpoint_policy", "optimizer")  # may be functions, named by import path


def setting_options(command: Command) -> Command:
    """Add an option for each field of `StepConfig`; one that is not given is None."""
    for field in reversed(FIELDS.values()):
        command = click.option(*_names(field), **_words(field), default=None)(command)
    return command


def listed_setting_options(command: Command) -> Command:
    """Add options that may have several values: "8,16", or an option that is given twice."""
    for field in reversed(FIELDS.values()):
        command = click.option(*_names(field), **_words(field), multiple=True)(command)
    return command


def config_of(given: Mapping[str, Any]) -> StepConfig:
    """Return the config of the options that were given.

    Raises:
        ConfigError: a value is not allowed.
    """
    return StepConfig(**{name: _value(FIELDS[name], text) for name, text in _chosen(given)})


def lists_of(given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values of each option that was given, as `memlab.sweep` takes them."""
    found = {}
    for name, texts in _chosen(given):
        field = FIELDS[name]
        parts = [each for text in texts for each in _parts_settings(field, text)]
        found[name] = [_value(field, part) for part in parts]
    return found


def _chosen(given: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, given[name]) for name in FIELDS if given[name] not in (None, ())]


def _parts_settings(field: Field[Any], text: Any) -> list[Any]:
    """Return the values in a list; patterns and names of operators may hold commas themselves."""
    is_list = field.type in NUMBERS or _is_optional(field) or bool(_choices(field))
    return [part.strip() for part in text.split(SEPARATOR)] if is_list else [text]


def _value(field: Field[Any], text: Any) -> Any:
    """Return the value of a field; a text that is no number is left to `StepConfig` to refuse."""
    if _is_optional(field) and text.lower() == "none":
        return None
    if field.name in FUNCTIONS and IMPORT_PATH.fullmatch(text):
        return imported(text)
    try:
        if field.type in (int, int | None):
            return int(text)
        return float(text) if field.type in (float, float | None) else text
    except ValueError:
        return text


def _is_optional(field: Field[Any]) -> bool:
    return field.type in (float | None, int | None)


def _choices(field: Field[Any]) -> list[str]:
    kinds: Any = get_args(field.type) or (field.type,)
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, StrEnum)]
    return [str(member) for kind in enums for member in kind]


def _names(field: Field[Any]) -> tuple[str, str]:
    option = field.name.replace("_", "-")
    return f"--{option}/--no-{option}" if field.type is bool else f"--{option}", field.name


def _words(field: Field[Any]) -> dict[str, Any]:
    """Return the help of a field, from its documentation, and what it takes."""
    text = _documented(field).rstrip(".").replace("PRESET_POLICIES", ", ".join(PRESET_POLICIES))
    if field.type is bool:
        return {"help": f"{text}  [default: {'on' if field.default else 'off'}]"}
    default = "none" if field.default is None else field.default
    text = f"{text}  [default: {default}]"
    if _is_optional(field):
        number = "INTEGER" if field.type == int | None else "NUMBER"
        return {"help": text, "metavar": f"{number}|none"}
    metavar = "|".join(_choices(field)) or NUMBERS.get(field.type, "TEXT")
    return {"help": text, "metavar": metavar}


def _documented(field: Field[Any]) -> str:
    """Return what the docstring of `StepConfig` says of a field; of a choice, what it chooses."""
    # Python 3.13 strips the margin of a docstring, and the versions before it do not
    attributes = cleandoc(StepConfig.__doc__ or "").partition("Attributes:")[2]
    found = search(rf"^ {{4}}{field.name}: (.*?)(?=^ {{0,4}}\w|\Z)", attributes, DOTALL | MULTILINE)
    text = " ".join(found[1].split()) if found else ""
    if not text.startswith("see "):
        return text.replace("`", "")
    _, *more = text.split(";", 1)
    kind: Any = (*get_args(field.type), field.type)[0]
    first = (kind.__doc__ or "").partition("\n")[0].rstrip(".")
    return ";".join([first, *more]).replace("`", "")


# What a command prints, and its exit code.
#
# - 0: done, and the answer is yes: it fits, the gradients are the same, nothing got worse.
# - 1: the answer is no: it does not fit or is too close to say, memory ran out, the
#   gradients differ, nothing can be recommended, something got worse.
# - 2: wrong use: an option, a model, a device or a file that is not allowed.
# - 3: no answer: a step is unsupported, failed, crashed or took too long, or nothing was
#   compared.


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    YES = 0
    NO = 1
    WRONG_USE = 2
    NO_ANSWER = 3
    INTERRUPTED = 130  # by Ctrl-C, as shells have it


def show(answer: Any, *, as_json: bool) -> None:
    """Print an answer: its `to_dict` as one JSON object, or its text."""
    click.echo(json.dumps(answer.to_dict(), allow_nan=False) if as_json else plain(str(answer)))


def plain(text: str) -> str:
    """Return lines that every terminal can show: names in a file may hold anything."""
    return "\n".join(map(printable, text.split("\n")))


def end(code: ExitCode) -> None:
    """End the command with this exit code."""
    click.get_current_context().exit(int(code))


def code_of(result: StepResult) -> ExitCode:
    """Return the exit code of one result."""
    if result.outcome is Outcome.OUT_OF_MEMORY:
        return ExitCode.NO
    if result.outcome is not Outcome.OK:
        return ExitCode.NO_ANSWER
    return ExitCode.YES if result.fit in (None, Judgement.FITS) else ExitCode.NO


def show_result(result: StepResult, *, as_json: bool) -> None:
    """Print one result with its notes, and end with its exit code."""
    show(result, as_json=as_json)
    if not as_json:
        if result.outcome is Outcome.OK and (said := _fit_in_words(result)):
            click.echo(said)
        for note in result.notes:
            click.echo(plain(f"note: {note}"))
    end(code_of(result))


def _fit_in_words(result: StepResult) -> str:
    """Return whether a step fits, and into what; "" if that is not known."""
    limit, of_device = result.memory_limit_bytes, result.usable_memory_bytes
    room = limit or of_device
    if result.fit is None or room is None:
        return ""
    what = "the memory limit" if limit else f"what PyTorch can reserve on {result.device}"
    if result.fit is Judgement.TOO_CLOSE:
        return f"too close to {format_bytes(room)}, {what}, to say whether it fits"
    return f"{result.fit} {format_bytes(room)}, {what}"


def tell(text: str) -> None:
    """Say on stderr what is going on, so that stdout holds the answer alone."""
    click.echo(text, file=sys.stderr)
