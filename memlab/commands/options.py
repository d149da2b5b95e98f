"""Options that several commands share."""

from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., Any]


def model_options(command: Command) -> Command:
    """Add the model and the size of its samples."""
    command = click.option(
        "--image-size", type=click.IntRange(min=1), metavar="PIXELS",
        help="along each side of an image",
    )(command)  # fmt: skip
    command = click.option(
        "--tokens", type=click.IntRange(min=1), metavar="N", help="in each sample of a text"
    )(command)
    return click.argument("model")(command)


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
