"""`memlab predict`, `measure`, `verify` and `export`: one step under one setting."""

import json
from pathlib import Path
from typing import Any

import click

from memlab.api import measure, predict, verify
from memlab.cli.options import (
    AskedModel,
    ExitCode,
    config_of,
    device_option,
    end,
    json_option,
    limit_option,
    listed_setting_options,
    lists_of,
    model_options,
    repeat_options,
    run_options,
    setting_options,
    show,
    show_result,
    tell,
)
from memlab.config import StepConfig
from memlab.errors import ConfigError
from memlab.integrations.export import Flavor, export_script
from memlab.result import Outcome, StepResult
from memlab.search.recommend import recommend
from memlab.search.sweep import sweep
from memlab.store.compare import MEMORY_TOLERANCE, TIME_TOLERANCE, compare

HERE = "cpu, cuda or cuda:1; by default the accelerator if there is one"


@click.command("predict")
@model_options
@device_option("cpu, cuda, a card such as rtx-4060, or a size such as 24GiB; it need not be here")
@limit_option
@run_options
@setting_options
def predict_command(
    asked: AskedModel, as_json: bool, device: str | None,
    memory_limit: str | None, seed: int, timeout_seconds: float, **settings: Any,
) -> None:  # fmt: skip
    """Predict what a training step costs, without running it."""
    config = config_of(settings)
    result = predict(
        asked.workload(), config, device,
        seed=seed, memory_limit=memory_limit, timeout_seconds=timeout_seconds,
    )  # fmt: skip
    show_result(result, as_json=as_json)


@click.command("measure")
@model_options
@device_option(HERE)
@limit_option
@repeat_options
@run_options
@setting_options
def measure_command(
    asked: AskedModel, as_json: bool, device: str | None,
    memory_limit: str | None, seed: int, timeout_seconds: float, repeats: int, warmup: int,
    **settings: Any,
) -> None:  # fmt: skip
    """Measure what a training step costs on a device of this machine."""
    config = config_of(settings)
    result = measure(
        asked.workload(), config, device,
        repeats=repeats, warmup=warmup, seed=seed, memory_limit=memory_limit,
        timeout_seconds=timeout_seconds,
    )  # fmt: skip
    show_result(result, as_json=as_json)


@click.command("verify")
@model_options
@device_option(HERE)
@run_options
@setting_options
def verify_command(
    asked: AskedModel, as_json: bool, device: str | None,
    seed: int, timeout_seconds: float, **settings: Any,
) -> None:  # fmt: skip
    """Check that a setting trains like the plain step."""
    config = config_of(settings)
    report = verify(
        asked.workload(), config, device,
        seed=seed, timeout_seconds=timeout_seconds,
    )  # fmt: skip
    show(report, as_json=as_json)
    is_no = report.outcome in (Outcome.OK, Outcome.OUT_OF_MEMORY)
    end(ExitCode.YES if report.ok else ExitCode.NO if is_no else ExitCode.NO_ANSWER)


@click.command("export")
@model_options
@device_option("cpu, cuda or a card; the file is written for this kind of device")
@click.option(
    "--flavor", default=str(Flavor.PYTORCH), show_default=True,
    metavar="|".join(map(str, Flavor)), help="the library whose loop it uses",
)  # fmt: skip
@click.option("--out", type=Path, metavar="FILE", help="write it there instead of on stdout")
@json_option
@setting_options
def export_command(
    asked: AskedModel, as_json: bool, device: str | None,
    flavor: str, out: Path | None, **settings: Any,
) -> None:  # fmt: skip
    """Write a step as a Python file that needs no memlab."""
    config = config_of(settings)
    chosen: Any = flavor
    source = export_script(asked.workload(), config, device, flavor=chosen)
    if out is not None:
        try:
            out.write_text(source, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {out} cannot be written ({error.strerror})") from None
        tell(f"written to {out}")
    if as_json:
        click.echo(json.dumps({"flavor": flavor, "config": config.to_dict(), "source": source}))
    elif out is None:
        click.echo(source, nl=False)


ONE_STEP = (predict_command, measure_command, verify_command, export_command)


# `memlab sweep`, `recommend` and `compare`: several settings.

ANSWERED = (Outcome.OK, Outcome.OUT_OF_MEMORY)
EVERYWHERE = "as for predict; measured where it is in this machine, else predicted"
PICTURES = (".png", ".svg")


@click.command("sweep")
@model_options
@device_option(EVERYWHERE)
@limit_option
@repeat_options
@run_options
@click.option("--store", metavar="FILE", help="of the results; by default that of memlab.results")
@listed_setting_options
def sweep_command(
    asked: AskedModel, as_json: bool, device: str | None,
    memory_limit: str | None, seed: int, timeout_seconds: float, repeats: int, warmup: int,
    store: str | None, **settings: Any,
) -> None:  # fmt: skip
    """Run all combinations of settings, such as --batch-size 4,8,16 --compile --no-compile.

    Each result is written to the store; the same command goes on where one was interrupted.
    """
    lists = lists_of(settings) or {"batch_size": [StepConfig().batch_size]}
    table = sweep(
        asked.workload(), lists, device,
        repeats=repeats, warmup=warmup, seed=seed, memory_limit=memory_limit,
        timeout_seconds=timeout_seconds, path=store, on_result=_tell_result,
    )  # fmt: skip
    if not as_json:
        for result in table:
            click.echo(result)
        for setting in table.settings:
            if setting.config is None:
                click.echo(f"refused: {setting.refusal}")
    show(table, as_json=as_json)
    is_answered = all(result.outcome in ANSWERED for result in table)
    end(ExitCode.YES if is_answered else ExitCode.NO_ANSWER)


def _tell_result(result: StepResult) -> None:
    tell(f"{result.config}: {result.outcome}")


@click.command("recommend")
@model_options
@device_option(EVERYWHERE)
@limit_option
@click.option(
    "--allow", multiple=True, metavar="FIELD",
    help="a setting that may be changed; by default all that leave the training as it is",
)  # fmt: skip
@click.option("--exact", is_flag=True, help="try only what changes no bit of the gradient")
@click.option("--headroom", type=float, default=0.0, show_default=True, metavar="SHARE",
              help="of the limit that stays free")  # fmt: skip
@click.option("--top", type=int, default=5, show_default=True, help="most settings to print")
@click.option("--confirm", type=int, default=3, show_default=True,
              help="most of them that are measured, if the device is here")  # fmt: skip
@click.option("--patience", type=float, default=60.0, show_default=True, metavar="SECONDS",
              help="after which the best so far is printed")  # fmt: skip
@run_options
@setting_options
def recommend_command(
    asked: AskedModel, as_json: bool, device: str | None,
    memory_limit: str | None, seed: int, timeout_seconds: float, allow: tuple[str, ...],
    exact: bool, headroom: float, top: int, confirm: int, patience: float,
    **settings: Any,
) -> None:  # fmt: skip
    """Find the fastest settings that fit; settings that are given stay as they are.

    --adapter, --rank and --base take several values with commas between them, to choose among.
    """
    config = config_of(settings)
    found = recommend(
        asked.first_workload(), memory_limit, None, device,
        config=config, allow=[name.replace("-", "_") for name in allow] or None,
        choices=asked.choices() or None, exact=exact, headroom=headroom, top=top, confirm=confirm,
        patience=patience, seed=seed, timeout_seconds=timeout_seconds,
    )  # fmt: skip
    show(found, as_json=as_json)
    end(ExitCode.YES if found else ExitCode.NO)


@click.command("compare")
@click.argument("old")
@click.argument("new")
@click.option("--memory-tolerance", type=float, default=MEMORY_TOLERANCE, show_default=True,
              metavar="SHARE", help="change of a peak that counts as none")  # fmt: skip
@click.option("--time-tolerance", type=float, default=TIME_TOLERANCE, show_default=True,
              metavar="SHARE", help="the same of a time; noise is added")  # fmt: skip
@click.option("--picture", type=Path, metavar="FILE.png", help="draw the changes, PNG or SVG")
@json_option
def compare_command(
    old: str, new: str, memory_tolerance: float, time_tolerance: float, picture: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Say what changed in bytes and time between two files of results.

    OLD and NEW are what --json printed, tables of memlab.results() as JSON or CSV, or stores. The
    exit code is 1 if memory or time of a setting rose, 3 if no setting is in both.
    """
    if picture is not None and picture.suffix.lower() not in PICTURES:
        raise ConfigError(f"--picture {picture} ends in none of {', '.join(PICTURES)}")
    found = compare(old, new, memory_tolerance=memory_tolerance, time_tolerance=time_tolerance)
    show(found, as_json=as_json)
    if picture is not None:
        from memlab.figures.searches import cost_changes  # late: matplotlib takes a second

        try:
            cost_changes(found).savefig(picture, transparent=False)
        except OSError as error:
            raise ConfigError(f"--picture {picture} cannot be written ({error})") from None
    end(ExitCode.YES if found.ok else ExitCode.NO if found.compared else ExitCode.NO_ANSWER)


MANY_STEPS = (sweep_command, recommend_command, compare_command)
