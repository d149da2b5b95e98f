"""What this machine has, in words, and how much of a card a visit may use."""

import dataclasses
import functools
import importlib.util
import itertools
import os
import platform
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from typing import Any

import torch

from memlab import workloads
from memlab._util.units import GIB, MIB, format_bytes
from memlab._version import __version__
from memlab.cli import device_visit
from memlab.cli.device_visit import Case
from memlab.config import StepConfig
from memlab.devices import cards
from memlab.devices.cards import Card, of_device
from memlab.devices.here import (
    available_memory_bytes,
    describe,
    machine_memory_bytes,
    resolve_device,
)
from memlab.errors import DeviceError
from memlab.result import Outcome, StepResult
from memlab.techniques.compilation import is_compiled
from memlab.techniques.every import EVERY, refusals
from memlab.techniques.technique import Setup
from memlab.workload import Workload

PROCESSOR = torch.device("cpu")
SHARE = 0.5  # of what is free on a card: the other half is left to other programs
MOST_BYTES = 4 * GIB  # more than any setting needs
LEAST_BYTES = 256 * MIB  # with less, no setting would run


def device_here(name: str | None) -> torch.device:
    """Return the device of this machine that a person means.

    Args:
        name: "cpu", "cuda", "cuda:1", or the name of a card that is in this machine; None is the
            accelerator if there is one, else the CPU.

    Raises:
        DeviceError: it is not in this machine; the message says what is, and which cards are
            spelled most like it.
    """
    try:
        return resolve_device(name)
    except DeviceError as error:
        wanted = cards.find(str(name))
        for device in _cards_here():
            if wanted is not None and of_device(device).name == wanted.name:
                return device
        said = str(error)

    if wanted is not None:
        raise DeviceError(f"{said}. memlab.predict(..., {wanted.name!r}) needs no such card.")
    is_name = re.fullmatch(r"(cpu|cuda)(:\d+)?", str(name)) is None
    near = ", ".join(map(repr, cards.nearest(name))) if is_name else ""
    raise DeviceError(f"{said}.{f' The nearest cards that memlab knows: {near}.' if near else ''}")


def _cards_here() -> list[torch.device]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", index) for index in range(count)]


def about() -> list[str]:
    """Return lines on what this machine has."""
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    free, all_bytes = available_memory_bytes(), machine_memory_bytes()
    memory = "memory not known on this system"
    if free is not None and all_bytes is not None:
        memory = f"{format_bytes(free)} of {format_bytes(all_bytes)} of memory available"
    return [
        f"memlab {__version__}, PyTorch {torch.__version__} (built {build}), "
        f"Python {platform.python_version()} on {platform.system()}",
        f"processor: {describe(PROCESSOR)}, {os.cpu_count()} cores, of which PyTorch uses "
        f"{torch.get_num_threads()}; {memory}",
        *(_about_card(device) for device in _cards_here()),
        *([] if _cards_here() else [why_no_card()]),
    ]


def why_no_card() -> str:
    """Return why PyTorch finds no CUDA card here, and what that means."""
    if torch.version.cuda is None:
        why = f"PyTorch {torch.__version__} is built without CUDA"
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            why += f", and memlab does not measure on {accelerator.type!r}"
    else:
        why = "PyTorch finds no NVIDIA driver, or no card that the driver shows to this process"
    return (
        f"card: none ({why}). Everything below is about the processor; predictions for a card need "
        "none"
    )


def _about_card(device: torch.device) -> str:
    try:
        card, (free, total) = of_device(device), torch.cuda.mem_get_info(device)
    except (RuntimeError, AssertionError) as error:  # the driver's own words, of one line or many
        return f"card {device}: it does not answer ({_first_line(error)})"

    known = f"memlab knows it as {card.name!r}"
    if cards.find(card.name) is None:
        known = "memlab does not know it, so that it predicts bytes for it and no times"
    version = device_visit.version()
    said = f"driver {version}" if version else "driver not known (nvidia-ml-py is missing)"
    return (
        f"card {device}: {card.title}, {known}; {format_bytes(free)} of {format_bytes(total)} "
        f"free; {said}"
    )


def room_on(device: torch.device) -> int | None:
    """Return the bytes that PyTorch may reserve on a card, half of what is free; None on a CPU.

    Raises:
        DeviceError: nothing can be measured there; says why.
    """
    if device.type == "cpu":
        return None
    try:
        free, _ = torch.cuda.mem_get_info(device)
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"{device} does not answer ({_first_line(error)})") from None

    limit = min(int(free * SHARE), MOST_BYTES)
    if limit < LEAST_BYTES:
        raise DeviceError(
            f"{device} has only {format_bytes(free)} free, the rest is in use by other programs; a "
            f"visit uses half of what is free and needs {format_bytes(LEAST_BYTES)}"
        )
    return limit


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


# The settings that are predicted and measured side by side: about forty, each a second or two.
#
# Each model is there in three sizes and with the techniques that change what a step holds; some of
# them twice, since what a device differs from itself no prediction can tell.

LIBRARY = "transformers"  # of the GPT-2
Fields = dict[str, Any]


@functools.cache
def data() -> Fields:
    """Return what `doctor.toml` holds."""
    text = resources.files(__package__).joinpath("doctor.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def settings_for(kind: str) -> list[Case]:
    """Return the settings for a kind of device ("cpu", "cuda"), in order of value."""
    models = [_of_model(name, kind, given) for name, given in data()["models"][kind].items()]
    # the first of every model before the second of any: what is cut short has a little of each
    longest = max(map(len, models))
    rounds = [[model[i] for model in models if i < len(model)] for i in range(longest)]
    again = [dataclasses.replace(case, group="again") for case in rounds[0]]
    found = [*rounds[0], *rounds[1], *again, *itertools.chain(*rounds[2:])]
    if has_transformers():
        for name, given in data()["gpt"][kind].items():
            found += _of_model(name, kind, given)[:3]
    return found


def has_transformers() -> bool:
    """Return whether the library of the GPT-2 is installed."""
    return importlib.util.find_spec(LIBRARY) is not None


def _of_model(name: str, kind: str, given: Fields) -> list[Case]:
    settings, options = data()["settings"], _options(given)
    sizes = options.pop("sizes")
    cases = []
    for fields in (*settings["all"], *settings[kind], *settings.get(name, ())):
        rest = {field: value for field, value in fields.items() if field != "size"}
        config = StepConfig(batch_size=sizes[fields["size"]], **rest)
        cases.append(Case(workload=name, options=options, config=config))
    return cases


def _options(given: Fields) -> Fields:
    """Return options with tuples for lists, as the zoo and the keys of records have them."""
    return {n: tuple(value) if isinstance(value, list) else value for n, value in given.items()}


# Which techniques work on a device: what memlab refuses there by itself, and a tiny step of each.
#
# The step runs in a worker, so that a technique that crashes ends no more than that. Compiled steps
# come last, since they take longer than all others together.

BATCH_SIZE = 4
PLAIN, RECOVERY = "the plain step", "an out-of-memory and the step after it"
FOR_IMAGES = ("channels_last", "inplace")
LIMIT_BYTES = 1000  # less than any model

Measure = Callable[[Workload, StepConfig, int | None], StepResult]
"""Measures one step, given a memory limit in bytes or None."""


def settings() -> dict[str, StepConfig]:
    """Return the settings to try, by name: the plain step first, compiled ones last."""
    found = {PLAIN: StepConfig(batch_size=BATCH_SIZE)}
    examples = {name: fields for t in EVERY for name, fields in t.examples.items()}
    for name, fields in (examples | data()["formats"]).items():
        found[name] = StepConfig(**{"batch_size": BATCH_SIZE, **fields})
    return dict(sorted(found.items(), key=lambda item: is_compiled(item[1])))


def tried(
    configs: Mapping[str, StepConfig], device: torch.device, card: Card | None, measure: Measure
) -> Iterator[tuple[str, str]]:
    """Yield each setting by name, with why it does not work on a device; "" if it does.

    The first is whether running out of memory ends well.

    Args:
        configs: as of `settings`.
        device: of this machine.
        card: the card that it is, if it is one.
        measure: runs a step.
    """
    yield RECOVERY, _out_of_memory(measure)
    for name, config in configs.items():
        refused = next(iter(refusals(Setup(config=config, device=device, card=card))), None)
        yield name, _why_not(config, measure) if refused is None else str(refused)


def _why_not(config: StepConfig, measure: Measure) -> str:
    result = measure(_workload(config), config, None)
    return "" if result.outcome is Outcome.OK else f"{result.outcome}: {result.message}"


def _workload(config: StepConfig) -> Workload:
    default = StepConfig()
    is_of_images = any(getattr(config, name) != getattr(default, name) for name in FOR_IMAGES)
    name = "plain-convnet" if is_of_images else "plain-transformer"
    return workloads.get(name, **_options(data()["tiny"][name]))


def _out_of_memory(measure: Measure) -> str:
    """Return why a step that has too little memory does not end as such, or the next not run."""
    config = settings()[PLAIN]
    over = measure(_workload(config), config, LIMIT_BYTES)
    if over.outcome is not Outcome.OUT_OF_MEMORY:
        return f"{over.outcome} under a limit of {LIMIT_BYTES} bytes"
    return _why_not(config, measure)
