"""`memlab predict`, `measure`, `verify` and `export`: one step under one setting."""

import json
from pathlib import Path
from typing import Any

import click

from memlab.api import measure, predict, verify
from memlab.commands.answers import ExitCode, end, show, show_result, tell
from memlab.commands.models import AskedModel
from memlab.commands.options import (
    device_option,
    json_option,
    limit_option,
    model_options,
    repeat_options,
    run_options,
)
from memlab.commands.settings import config_of, setting_options
from memlab.errors import ConfigError
from memlab.exporting.export import Flavor, export_script
from memlab.result import Outcome

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


COMMANDS = (predict_command, measure_command, verify_command, export_command)
