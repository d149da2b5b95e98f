"""Options that several commands share."""

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click

from memlab.commands.models import AskedModel
from memlab.workloads.finetuned import ADAPTERS, BASE_FORMATS

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
