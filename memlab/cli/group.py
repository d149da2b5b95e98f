"""`memlab`: the commands together. A person's mistake is a sentence on stderr and exit code 2."""

import json
import runpy
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click

from memlab._util.units import shown
from memlab._version import __version__
from memlab.cli import commands
from memlab.cli.options import ExitCode, end, json_option, plain
from memlab.errors import ConfigError, MemlabError

# `memlab notebooks` and `doctor`: what ships with memlab.

RUNNER = "run.py"
SHARED = Path(sysconfig.get_path("data"), "share", "memlab", "notebooks")  # where pip puts them
PLACES = (Path(__file__).resolve().parents[2] / "notebooks", SHARED)  # in a clone, or installed


@click.command("notebooks")
@click.argument("names", nargs=-1)
@click.option("--copy", type=Path, metavar="FOLDER", help="copy them there, to open and change")
@click.option("--run", "is_run", is_flag=True, help="run them without a browser, a line for each")
@click.option("--device", help="with --run: where their steps run")
@click.option("--quick", is_flag=True, help="with --run: the short form, where there is one")
@click.option("--out", type=Path, default=Path("build/notebooks"), show_default=True,
              metavar="FOLDER", help="with --run: of the executed copies")  # fmt: skip
@json_option
def notebooks_command(
    names: tuple[str, ...], copy: Path | None, is_run: bool, device: str | None, quick: bool,
    out: Path, as_json: bool,
) -> None:  # fmt: skip
    """List memlab's notebooks, copy them, or run them. NAMES are such as 00_quickstart or 05."""
    home = _home()
    chosen = _chosen(home, names)
    if copy is not None:
        chosen = _copied(chosen, copy)
    code = 0
    if is_run:
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
    end(ExitCode.NO if code else ExitCode.YES)


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


def _chosen(home: Path, names: Sequence[str]) -> list[Path]:
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy(file, folder)) for file in files]
    except OSError as error:
        raise ConfigError(f"--copy {folder} cannot be written ({error.strerror})") from None


def _title(file: Path) -> str:
    """Return the first heading of a notebook."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    lines = (line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"])
    return next((line.strip("# \n") for line in lines if line.startswith("#")), "")


@click.command(
    "doctor",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def doctor_command(arguments: tuple[str, ...]) -> None:
    """Say what this machine has, and how good predictions are on it; `doctor --help` says more."""
    from memlab.cli import doctor  # late: it imports what only doctor needs

    status: Any = doctor.main(arguments)
    click.get_current_context().exit(status)


COMMANDS = (notebooks_command, doctor_command)


EPILOG = """MODEL is package.module:function, a config of transformers (a JSON file or a folder), or
a name of the zoo such as gpt-small.

Exit codes: 0 yes, 1 no (does not fit, differs, got worse), 2 wrong use, 3 no answer (failed,
unsupported, nothing compared)."""


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


for command in (*commands.ONE_STEP, *commands.MANY_STEPS, *COMMANDS):
    memlab.add_command(command)
