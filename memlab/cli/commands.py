"""`memlab`: the commands, their options, what they print, and their exit codes.

A command is a function in the words of one public function of memlab. What it takes besides the
model and the settings has the names of that function's own parameters, and is passed on. It returns
an exit code. A person's mistake is a sentence on stderr and exit code 2.
"""

import functools
import importlib
import inspect
import itertools
import json
import os
import re
import runpy
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import Field, fields
from enum import IntEnum, StrEnum
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from typing import Any, get_args

import click

from memlab._util.units import format_bytes, printable, shown
from memlab._version import __version__
from memlab.api import measure, predict, verify
from memlab.cli.models import IMPORT_PATH, SEPARATOR, AskedModel, imported
from memlab.config import PRESET_POLICIES, StepConfig
from memlab.errors import ConfigError, MemlabError
from memlab.integrations.export import Flavor, export_script
from memlab.integrations.person_script import run_script
from memlab.result import FitStatus, Outcome, StepResult
from memlab.search.recommend import recommend
from memlab.search.sweep import sweep
from memlab.store.compare import MEMORY_TOLERANCE, TIME_TOLERANCE, compare
from memlab.workloads.finetuned import ADAPTERS, BASE_FORMATS

EPILOG = """MODEL is package.module:function, a config of transformers (a JSON file or a folder), or
a name of the zoo such as gpt-small.

Exit codes: 0 yes, 1 no (does not fit, differs, got worse), 2 wrong use, 3 no answer (failed,
unsupported, nothing compared)."""


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    YES = 0  # done: it fits, the gradients are the same, nothing got worse
    NO = 1  # it does not fit or is too close to say, memory ran out, gradients differ, got worse
    WRONG_USE = 2  # an option, a model, a device or a file that is not allowed
    NO_ANSWER = 3  # unsupported, failed, crashed, took too long, or nothing was compared
    INTERRUPTED = 130  # by Ctrl-C, as shells have it


class Mistake(click.ClickException):
    """A person's mistake, which click prints."""

    exit_code = int(ExitCode.WRONG_USE)


class Memlab(click.Group):
    """Commands whose mistakes are said in a sentence."""

    def invoke(self, context: click.Context) -> Any:
        """Run a command.

        Raises:
            Mistake: something is not allowed; the message says what is.
        """
        try:
            return super().invoke(context)
        except MemlabError as error:
            raise Mistake(plain(str(error))) from error
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            context.exit(int(ExitCode.INTERRUPTED))


@click.group(cls=Memlab, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="memlab")
def memlab() -> None:
    """What a training step costs in memory and time, and what it could cost instead."""


def command(
    *options: click.Parameter, **more: Any
) -> Callable[[Callable[..., ExitCode]], Callable[..., ExitCode]]:
    """Return what makes a function `name_command` the command `name`, with these options.

    The options of the model reach it as one argument `asked`, those of `StepConfig` as `settings`.
    """

    def added(function: Callable[..., ExitCode]) -> Callable[..., ExitCode]:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            if "model" in given:
                of_model = {field.name: given.pop(field.name) for field in fields(AskedModel)}
                given["asked"] = AskedModel(**of_model)
            if not FIELDS.keys() - given.keys():
                given["settings"] = {name: given.pop(name) for name in FIELDS}
            click.get_current_context().exit(int(function(**given)))

        name = function.__name__.removesuffix("_command")
        about = inspect.getdoc(function)
        memlab.add_command(click.Command(name, params=[*options], callback=run, help=about, **more))
        return function

    return added


# The options.

FIELDS = {field.name: field for field in fields(StepConfig)}
NUMBERS: dict[Any, str] = {int: "INTEGER", float: "NUMBER"}
FUNCTIONS = ("checkpoint_policy", "optimizer")  # may be functions, named by import path

MODEL: tuple[click.Parameter, ...] = (
    click.Argument(["model"]),
    click.Option(["--tokens"], type=click.IntRange(min=1), metavar="N",
                 help="in each sample of a text"),
    click.Option(["--image-size"], type=click.IntRange(min=1), metavar="PIXELS",
                 help="along each side of an image"),
    click.Option(["--adapter"], metavar="|".join(ADAPTERS), help="of peft, which a frozen base is "
                 "fine-tuned with; none trains all weights  [default: lora, if another of these is "
                 "given]"),
    click.Option(["--rank"], metavar="INTEGER", help="of a low-rank adapter  [default: 16]"),
    click.Option(["--targets"], metavar="NAMES",
                 help="layers with an adapter, with commas between them, or all-linear"),
    click.Option(["--base"], metavar="|".join(BASE_FORMATS),
                 help="number format of the base  [default: bf16]"),
    click.Option(["--prepare-for-kbit/--no-prepare-for-kbit"], default=None,
                 help="cast by peft what is not quantized to fp32  [default: off]"),
    click.Option(["--from-hub/--no-from-hub"], default=None, help="read the config of another name "
                 "from Hugging Face's hub  [default: off]"),
)  # fmt: skip
LIMIT = click.Option(
    ["--memory-limit"], metavar="SIZE", help="bytes, or a size such as 8GiB, that it may hold"
)
JSON = click.Option(["--json", "as_json"], is_flag=True, help="print one JSON object on stdout")
RUN = (
    click.Option(["--seed"], type=int, default=0, show_default=True),
    click.Option(["--timeout", "timeout_seconds"], type=float, default=600.0, show_default=True,
                 metavar="SECONDS", help="after which a step is given up"),
    JSON,
)  # fmt: skip
REPEATS = (
    click.Option(["--repeats"], type=int, default=5, show_default=True, help="timed steps"),
    click.Option(["--warmup"], type=int, default=1, show_default=True, help="untimed steps"),
)


def device_option(text: str) -> click.Option:
    """Return --device with this help."""
    return click.Option(["--device"], help=text)


def number_option(name: str, default: float, metavar: str | None, text: str) -> click.Option:
    """Return an option for a number, whose type is that of the default."""
    return click.Option(
        [f"--{name}"], type=type(default), default=default, show_default=True, metavar=metavar,
        help=text,
    )  # fmt: skip


def setting_option(field: Field[Any], **more: Any) -> click.Option:
    """Return the option of a field of `StepConfig`: `--memory-budget`, or `--compile/--no-compile`.

    Its help is what the field's documentation says, and what it takes. What a value may be is
    checked by `StepConfig` alone, whose sentence names the field.
    """
    option, default = f"--{field.name.replace('_', '-')}", field.default
    if field.type is bool:
        option, default = f"{option}/--no-{option[2:]}", "on" if default else "off"
        metavar = None
    elif _is_optional(field):
        metavar = f"{'INTEGER' if field.type == int | None else 'NUMBER'}|none"
    else:
        metavar = "|".join(_choices(field)) or NUMBERS.get(field.type, "TEXT")
    about = _documented(field).rstrip(".").replace("PRESET_POLICIES", ", ".join(PRESET_POLICIES))
    about += f"  [default: {'none' if default is None else default}]"
    return click.Option([option, field.name], metavar=metavar, help=about, **more)


def _is_optional(field: Field[Any]) -> bool:
    return field.type in (float | None, int | None)


def _choices(field: Field[Any]) -> list[str]:
    kinds: Any = get_args(field.type) or (field.type,)
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, StrEnum)]
    return [str(member) for kind in enums for member in kind]


def _documented(field: Field[Any]) -> str:
    """Return what the docstring of `StepConfig` says of a field; of a choice, what it chooses."""
    # Python 3.13 strips the margin of a docstring, and the versions before it do not
    attributes = cleandoc(StepConfig.__doc__ or "").partition("Attributes:")[2]
    pattern = rf"^ {{4}}{field.name}: (.*?)(?=^ {{0,4}}\w|\Z)"
    found = re.search(pattern, attributes, re.DOTALL | re.MULTILINE)
    text = " ".join(found[1].split()) if found else ""
    if text.startswith("see "):
        kind: Any = (*get_args(field.type), field.type)[0]
        first = (kind.__doc__ or "").partition("\n")[0].rstrip(".")
        text = ";".join([first, *text.split(";", 1)[1:]])
    return text.replace("`", "")


SETTINGS = tuple(setting_option(field, default=None) for field in FIELDS.values())
LISTED_SETTINGS = tuple(setting_option(field, multiple=True) for field in FIELDS.values())


def config_of(given: Mapping[str, Any]) -> StepConfig:
    """Return the config of the options that were given.

    Raises:
        ConfigError: a value is not allowed.
    """
    return StepConfig(**{name: _value(FIELDS[name], text) for name, text in _chosen(given)})


def lists_of(given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values of each option that was given, as `memlab.sweep` takes them.

    A number or a choice may be a list; patterns and names of operators may hold commas themselves.
    """
    found = {}
    for name, texts in _chosen(given):
        field = FIELDS[name]
        if field.type in NUMBERS or _is_optional(field) or _choices(field):
            texts = [part.strip() for text in texts for part in text.split(SEPARATOR)]
        found[name] = [_value(field, text) for text in texts]
    return found


def _chosen(given: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, given[name]) for name in FIELDS if given[name] not in (None, ())]


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


# What a command prints.


def show(answer: Any, *, as_json: bool) -> None:
    """Print an answer: its `to_dict` as one JSON object, or its text."""
    click.echo(json.dumps(answer.to_dict(), allow_nan=False) if as_json else plain(str(answer)))


def show_result(result: StepResult, *, as_json: bool) -> ExitCode:
    """Print one result, into what it fits, and its notes."""
    show(result, as_json=as_json)
    if not as_json:
        if result.outcome is Outcome.OK and (said := _fit_in_words(result)):
            click.echo(said)
        for note in result.notes:
            click.echo(plain(f"note: {note}"))
    return code_of(result)


def plain(text: str) -> str:
    """Return lines that every terminal can show: names in a file may hold anything."""
    return "\n".join(map(printable, text.split("\n")))


def tell(text: str) -> None:
    """Say on stderr what is going on, so that stdout holds the answer alone."""
    click.echo(text, file=sys.stderr)


def code_of(result: StepResult) -> ExitCode:
    """Return the exit code of one result."""
    if result.outcome is Outcome.OUT_OF_MEMORY:
        return ExitCode.NO
    if result.outcome is not Outcome.OK:
        return ExitCode.NO_ANSWER
    return ExitCode.YES if result.fit in (None, FitStatus.FITS) else ExitCode.NO


def _fit_in_words(result: StepResult) -> str:
    """Return whether a step fits, and into what; "" if that is not known."""
    limit, of_device = result.memory_limit_bytes, result.usable_memory_bytes
    room = limit or of_device
    if result.fit is None or room is None:
        return ""
    what = "the memory limit" if limit else f"what PyTorch can reserve on {result.device}"
    if result.fit is FitStatus.TOO_CLOSE:
        return f"too close to {format_bytes(room)}, {what}, to say whether it fits"
    return f"{result.fit} {format_bytes(room)}, {what}"


PICTURES = (".png", ".svg")


def picture_option(what: str) -> click.Option:
    """Return the option of a file that shows something as a picture."""
    said = f"{what}, PNG or SVG"
    return click.Option(["--picture"], type=Path, metavar="FILE.png", help=said)


def _check_picture(picture: Path | None) -> None:
    if picture is not None and picture.suffix.lower() not in PICTURES:
        raise ConfigError(f"--picture {picture} ends in none of {', '.join(PICTURES)}")
    _check_file("picture", picture)


def _check_file(option: str, path: Path | None) -> None:
    """Check that a file can be written, before a person waits for what it is to hold.

    Raises:
        ConfigError: it cannot; the message says why.
    """
    if path is None:
        return
    why = "it cannot be written"
    if path.is_dir():
        why = "it is a folder"
    elif not path.parent.is_dir():
        why = f"there is no folder {path.parent}"
    elif os.access(path if path.exists() else path.parent, os.W_OK):
        return
    raise ConfigError(f"--{option} {path}: {why}; name a file in a folder that can be written")


@contextmanager
def _writing(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        said = error.strerror or error
        raise ConfigError(f"{what} cannot be written ({said})") from None


# One step under one setting.

HERE = device_option("cpu, cuda or cuda:1; by default the accelerator if there is one")
EVERYWHERE = device_option("as for predict; measured where it is in this machine, else predicted")
Settings = Mapping[str, Any]


@command(
    *MODEL,
    device_option("cpu, cuda, a card such as rtx-4060, or a size such as 24GiB; it need not be "
                  "here"),
    LIMIT, *RUN, *SETTINGS,
)  # fmt: skip
def predict_command(
    asked: AskedModel, settings: Settings, device: str | None, as_json: bool, **options: Any
) -> ExitCode:
    """Predict what a training step costs, without running it."""
    config = config_of(settings)
    result = predict(asked.workload(), config, device, **options)
    return show_result(result, as_json=as_json)


@command(
    device_option("as for predict"),
    click.Option(["--steps"], type=int, default=3, show_default=True,
                 help="updates after which a training loop has shown what it does"),
    click.Option(["--nproc-per-node"], type=int, default=0, metavar="N",
                 help="run it as the first of N ranks, as torchrun would start it"),
    LIMIT,
    click.Option(["--write", "writes"], is_flag=True, help="let the script write its files"),
    click.Option(["-m", "is_module"], is_flag=True, help="SCRIPT is the name of a module"),
    click.Option(["--timeout", "timeout_seconds"], type=float, default=600.0, show_default=True,
                 metavar="SECONDS", help="after which the run is given up"),
    picture_option("draw what is live as it goes on"),
    click.Option(["--html", "page"], type=Path, metavar="FILE.html", help="write the answer as a "
                 "page, with its timeline"),
    JSON,
    click.Argument(["script"]),
    click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED),
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)  # fmt: skip
def run_command(
    script: str, arguments: Sequence[str], device: str | None, as_json: bool,
    picture: Path | None, page: Path | None, **options: Any,
) -> ExitCode:  # fmt: skip
    """Run a person's own script, unchanged, without its card, and say what it would hold.

    What follows SCRIPT is for the script. It writes no files, starts no processes and asks no other
    host.
    """
    _check_picture(picture)
    _check_file("html", page)
    found = run_script(script, arguments, device, **options)
    show(found, as_json=as_json)
    if picture is not None:
        from memlab.plots import run_timeline  # late: matplotlib takes a second

        with _writing(f"--picture {picture}"):
            run_timeline(found).savefig(picture, transparent=False)
    if page is not None:
        from memlab._panel.run_page import run_page  # late: it draws too

        with _writing(f"--html {page}"):
            page.write_text(run_page(found), encoding="utf-8")
    if not as_json:
        for line in found.table():
            click.echo(plain(line))
        for note in found.notes:
            click.echo(plain(f"note: {note}"))
    if found.outcome is Outcome.OK:
        return ExitCode.NO if found.fits is False else ExitCode.YES
    return ExitCode.NO if found.outcome is Outcome.OUT_OF_MEMORY else ExitCode.NO_ANSWER


@command(*MODEL, HERE, LIMIT, *REPEATS, *RUN, *SETTINGS)
def measure_command(
    asked: AskedModel, settings: Settings, device: str | None, as_json: bool, **options: Any
) -> ExitCode:
    """Measure what a training step costs on a device of this machine."""
    config = config_of(settings)
    result = measure(asked.workload(), config, device, **options)
    return show_result(result, as_json=as_json)


@command(*MODEL, HERE, *RUN, *SETTINGS)
def verify_command(
    asked: AskedModel, settings: Settings, device: str | None, as_json: bool, **options: Any
) -> ExitCode:
    """Check that a setting trains like the plain step."""
    config = config_of(settings)
    report = verify(asked.workload(), config, device, **options)
    show(report, as_json=as_json)
    if report.ok:
        return ExitCode.YES
    is_no = report.outcome in (Outcome.OK, Outcome.OUT_OF_MEMORY)
    return ExitCode.NO if is_no else ExitCode.NO_ANSWER


@command(
    *MODEL,
    device_option("cpu, cuda or a card; the file is written for this kind of device"),
    click.Option(["--flavor"], default=str(Flavor.PYTORCH), show_default=True,
                 metavar="|".join(map(str, Flavor)), help="the library whose loop it uses"),
    click.Option(["--out"], type=Path, metavar="FILE", help="write it there instead of on stdout"),
    JSON, *SETTINGS,
)  # fmt: skip
def export_command(
    asked: AskedModel, settings: Settings, device: str | None, as_json: bool,
    flavor: Any, out: Path | None,
) -> ExitCode:  # fmt: skip
    """Write a step as a Python file that needs no memlab."""
    config = config_of(settings)
    source = export_script(asked.workload(), config, device, flavor=flavor)
    if out is not None:
        with _writing(f"--out {out}"):
            out.write_text(source, encoding="utf-8")
        tell(f"written to {out}")
    if as_json:
        click.echo(json.dumps({"flavor": flavor, "config": config.to_dict(), "source": source}))
    elif out is None:
        click.echo(source, nl=False)
    return ExitCode.YES


# Several settings.

ANSWERED = (Outcome.OK, Outcome.OUT_OF_MEMORY)


@command(
    *MODEL, EVERYWHERE, LIMIT, *REPEATS, *RUN,
    click.Option(["--store", "path"], metavar="FILE",
                 help="of the results; by default that of memlab.results"),
    *LISTED_SETTINGS,
)  # fmt: skip
def sweep_command(
    asked: AskedModel, settings: Settings, device: str | None, as_json: bool, **options: Any
) -> ExitCode:
    """Run all combinations of settings, such as --batch-size 4,8,16 --compile --no-compile.

    Each result is written to the store; the same command goes on where one was interrupted.
    """
    lists = lists_of(settings) or {"batch_size": [StepConfig().batch_size]}
    table = sweep(asked.workload(), lists, device, on_result=_tell_result, **options)
    if not as_json:
        for result in table:
            click.echo(result)
        for setting in table.settings:
            if setting.config is None:
                click.echo(f"refused: {setting.refusal}")
    show(table, as_json=as_json)
    is_answered = all(result.outcome in ANSWERED for result in table)
    return ExitCode.YES if is_answered else ExitCode.NO_ANSWER


def _tell_result(result: StepResult) -> None:
    tell(f"{result.config}: {result.outcome}")


@command(
    *MODEL, EVERYWHERE, LIMIT,
    click.Option(["--allow"], multiple=True, metavar="FIELD", help="a setting that may be changed; "
                 "by default all that leave the training as it is"),
    click.Option(["--exact"], is_flag=True, help="try only what changes no bit of the gradient"),
    number_option("headroom", 0.0, "SHARE", "of the limit that stays free"),
    number_option("top", 5, None, "most settings to print"),
    number_option("confirm", 3, None, "most of them that are measured, if the device is here"),
    number_option("patience", 60.0, "SECONDS", "after which the best so far is printed"),
    *RUN, *SETTINGS,
)  # fmt: skip
def recommend_command(
    asked: AskedModel, settings: Settings, device: str | None, as_json: bool,
    memory_limit: str | None, allow: Sequence[str], **options: Any,
) -> ExitCode:  # fmt: skip
    """Find the fastest settings that fit; settings that are given stay as they are.

    --adapter, --rank and --base take several values with commas between them, to choose among.
    """
    config = config_of(settings)
    allowed = [name.replace("-", "_") for name in allow] or None
    found = recommend(
        asked.first_workload(), memory_limit, None, device,
        config=config, allow=allowed, choices=asked.choices() or None, **options,
    )  # fmt: skip
    show(found, as_json=as_json)
    return ExitCode.YES if found else ExitCode.NO


@command(
    click.Argument(["old"]),
    click.Argument(["new"]),
    number_option("memory-tolerance", MEMORY_TOLERANCE, "SHARE",
                  "change of a peak that counts as none"),
    number_option("time-tolerance", TIME_TOLERANCE, "SHARE", "the same of a time; noise is added"),
    picture_option("draw the changes"),
    JSON,
)  # fmt: skip
def compare_command(
    old: str, new: str, as_json: bool, picture: Path | None, **tolerances: float
) -> ExitCode:
    """Say what changed in bytes and time between two files of results, or two runs of a script.

    OLD and NEW are what --json printed, tables of memlab.results() as JSON or CSV, or stores. The
    exit code is 1 if memory or time of a setting or a stage rose, or if something new is wrong in a
    script; 3 if no setting is in both.
    """
    _check_picture(picture)
    found = compare(old, new, **tolerances)
    show(found, as_json=as_json)
    if picture is not None:
        from memlab.plots import cost_changes  # late: matplotlib takes a second

        with _writing(f"--picture {picture}"):
            cost_changes(found).savefig(picture, transparent=False)
    if found.ok:
        return ExitCode.YES
    return ExitCode.NO if found.compared else ExitCode.NO_ANSWER


# An out-of-memory error.

MOST_TEXT = 10**7  # bytes of a file that are read as a terminal's text


@command(
    click.Argument(["text"], required=False),
    click.Option(["--snapshot"], metavar="FILE", help="a memory snapshot of the same run"),
    JSON,
)
def explain_command(text: str | None, snapshot: str | None, as_json: bool) -> ExitCode:
    """Say which causes an out-of-memory error can have.

    TEXT is the message, a file that holds it, or - for stdin; a file that ends in .pickle is a
    snapshot. The exit code is 0 if a cause is likely, else 3.
    """
    from memlab.integrations.out_of_memory import explain_error  # late: it reads snapshots too

    if text is not None and text.endswith(".pickle"):
        if snapshot is not None:
            raise ConfigError(f"TEXT={shown(text)} and --snapshot {snapshot}; allowed is one")
        text, snapshot = "", text
    elif text is None and snapshot is not None and sys.stdin.isatty():
        text = ""
    found = explain_error(_terminal_text(text), snapshot=snapshot)
    show(found, as_json=as_json)
    return ExitCode.YES if found.of_verdict("likely") else ExitCode.NO_ANSWER


def _terminal_text(given: str | None) -> str:
    """Return a text that was given itself, as a file or on stdin.

    Raises:
        ConfigError: a file that is too large or no text, or nothing is given.
    """
    if given is None and sys.stdin.isatty():
        raise ConfigError("no text; allowed is the message, a file that holds it, or - for stdin")
    if given is None or given == "-":
        read, name = sys.stdin.buffer.read(MOST_TEXT + 1), "stdin"
    elif _is_file(given):
        with Path(given).open("rb") as file:
            read, name = file.read(MOST_TEXT + 1), given
    elif re.fullmatch(r"\S+\.(?:txt|log|out|err)", given):
        raise ConfigError(f"TEXT={shown(given)} is no file; allowed is one, or a text")
    else:
        return given
    if len(read) > MOST_TEXT:
        raise ConfigError(f"{name} is larger than {format_bytes(MOST_TEXT)}; pass its last part")
    if b"\0" in read:
        raise ConfigError(f"{name} is not text; allowed is what a terminal showed")
    return read.decode("utf-8", errors="replace")


def _is_file(given: str) -> bool:
    """Return whether a text names a file; a message is no path, and longer than one may be."""
    try:
        return Path(given).is_file()
    except (OSError, ValueError):
        return False


# What ships with memlab: notebooks, and doctor.

RUNNER = "run.py"
DEMO = Path("memlab-demo")  # below the folder in which the command runs
SHARED = Path(sysconfig.get_path("data"), "share", "memlab", "notebooks")  # where pip puts them
PLACES = (Path(__file__).resolve().parents[2] / "notebooks", SHARED)  # in a clone, or installed


@command(
    click.Argument(["names"], nargs=-1),
    click.Option(["--copy"], type=Path, metavar="FOLDER",
                 help="copy them there, to open and change"),
    click.Option(["--clean"], is_flag=True,
                 help="with --copy: without their prose, but for headings and exercises"),
    click.Option(["--run", "is_run"], is_flag=True,
                 help="run them without a browser, a line for each"),
    click.Option(["--device"], help="with --run: where their steps run"),
    click.Option(["--quick"], is_flag=True, help="with --run: the short form, where there is one"),
    click.Option(["--out"], type=Path, default=Path("build/notebooks"), show_default=True,
                 metavar="FOLDER", help="with --run: of the executed copies"),
    JSON,
)  # fmt: skip
def notebooks_command(
    names: Sequence[str], copy: Path | None, clean: bool, is_run: bool, device: str | None,
    quick: bool, out: Path, as_json: bool,
) -> ExitCode:  # fmt: skip
    """List memlab's notebooks, copy them, or run them. NAMES are such as 00_quickstart or 05."""
    home = _home()
    chosen = _named(home, names)
    if clean and copy is None:
        raise ConfigError("--clean removes the prose of copies; add --copy FOLDER")
    if is_run and find_spec("papermill") is None:
        raise ConfigError(
            "--run needs papermill, which is not installed; pip install 'memlab[course]'"
        )
    if copy is not None:
        chosen = _copied(chosen, copy)
        if clean:
            for file in chosen:
                _remove_prose(file)
    code = 0
    if is_run:
        with _writing(f"--out {out}"):
            out.mkdir(parents=True, exist_ok=True)
        options = [*map(str, chosen), "--out", str(out), *(["--quick"] if quick else [])]
        options += ["--device", device] if device else []
        with redirect_stdout(sys.stderr if as_json else sys.stdout):
            code = runpy.run_path(str(home / RUNNER))["main"](options)
    if as_json:
        listed = [{"name": f.stem, "title": _title(f), "path": str(f)} for f in chosen]
        ran = {"ok": not code, "out": str(out)} if is_run else {}
        click.echo(json.dumps({"notebooks": listed, **ran}))
    elif not is_run:
        for file in chosen:
            click.echo(f"{file if copy else file.stem}: {_title(file)}")
    return ExitCode.NO if code else ExitCode.YES


@command(
    click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED),
    context_settings={"ignore_unknown_options": True},
)
def demo_command(arguments: Sequence[str]) -> ExitCode:
    """Open the quickstart in JupyterLab, from a copy in memlab-demo; ARGUMENTS are JupyterLab's."""
    try:
        lab = importlib.import_module("jupyterlab.labapp")
    except ImportError:
        raise ConfigError(
            "demo needs JupyterLab, which is not installed; pip install 'memlab[lab]', or "
            "open what `memlab notebooks 00 --copy FOLDER` copies in another editor"
        ) from None
    (quickstart,) = _named(_home(), ["00"])
    mine = DEMO / quickstart.name
    if not mine.exists():
        _copied([quickstart], DEMO)
    click.echo(f"{mine} is yours to change; Ctrl-C ends JupyterLab")
    lab.main([str(mine), *arguments])
    return ExitCode.YES


def _home() -> Path:
    """Return the folder of the notebooks.

    Raises:
        ConfigError: this installation has none.
    """
    for folder in PLACES:
        if (folder / RUNNER).is_file():
            return folder
    raise ConfigError(
        f"this installation of memlab has no notebooks ({SHARED} is not there); install it again"
    )


def _named(home: Path, names: Sequence[str]) -> list[Path]:
    every = sorted(home.glob("*.ipynb"))
    found = []
    for name in names:
        fitting = [each for each in every if each.stem == name or each.stem.startswith(f"{name}_")]
        if not fitting:
            known = ", ".join(each.stem for each in every)
            raise ConfigError(f"notebook {shown(name)} is unknown; allowed is one of {known}")
        found += fitting
    return found or every


def _copied(files: Sequence[Path], folder: Path) -> list[Path]:
    """Copy files into a folder, over no file that is there.

    Raises:
        ConfigError: a file is there already, or the folder cannot be written.
    """
    there = [file.name for file in files if (folder / file.name).exists()]
    if there:
        raise ConfigError(f"--copy {folder} has a {there[0]} already; take another folder")
    with _writing(f"folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy(file, folder)) for file in files]


def _remove_prose(file: Path) -> None:
    """Leave of a notebook its code, its headings, and the exercises of a chapter."""
    notebook = json.loads(file.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            parts = "".join(cell["source"]).split("\n\n")
            kept = [part for part in parts if part.startswith(("#", "**Exercise"))]
            cell["source"] = "\n\n".join(kept).splitlines(keepends=True)
    is_left = [bool(cell["source"]) for cell in notebook["cells"]]
    notebook["cells"] = list(itertools.compress(notebook["cells"], is_left))
    file.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")


def _title(file: Path) -> str:
    """Return the first heading of a notebook."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    lines = (line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"])
    return next((line.strip("# \n") for line in lines if line.startswith("#")), "")


@command(
    click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED),
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def doctor_command(arguments: Sequence[str]) -> ExitCode:
    """Say what this machine has, and how good predictions are on it; `doctor --help` says more."""
    from memlab.cli import doctor  # late: it imports what only doctor needs

    return ExitCode(doctor.main(arguments))


@command(
    click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED),
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def watch_command(arguments: Sequence[str]) -> ExitCode:
    """Run a training script and write down why memory runs out; `watch --help` says more."""
    from memlab.cli import watch  # late: `memlab.__main__` starts it without this file

    return ExitCode(watch.main(arguments))
