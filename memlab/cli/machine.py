"""What this machine has, in words, and how much of a card a visit may use."""

import dataclasses
import importlib.util
import itertools
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What a visit may use of its device.

    Attributes:
        limit_bytes: that PyTorch's allocator may reserve on a card; None on a CPU.
        why_not: why nothing can be measured there; empty if it can.
    """

    limit_bytes: int | None = None
    why_not: str = ""


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


def room_on(device: torch.device) -> Room:
    """Return how much of a device may be used, so that other programs keep their memory."""
    if device.type == "cpu":
        return Room()
    try:
        free, _ = torch.cuda.mem_get_info(device)
    except (RuntimeError, AssertionError) as error:
        return Room(why_not=f"{device} does not answer ({_first_line(error)})")

    limit = min(int(free * SHARE), MOST_BYTES)
    if limit < LEAST_BYTES:
        return Room(
            why_not=f"{device} has only {format_bytes(free)} free, the rest is in use by other "
            f"programs; a visit uses half of what is free and needs {format_bytes(LEAST_BYTES)}"
        )
    return Room(limit_bytes=limit)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


# The settings that are predicted and measured side by side: about forty, each a second or
# two.
#
# Four small models of torch alone, each in three sizes and with the techniques that change
# what a step holds; a small GPT-2 where transformers is installed; some of them twice,
# since what a device differs from itself no prediction can tell. The models for a card are
# larger: a card takes the time of its launches for those of a CPU.

MIXED = {"precision": "bf16-mixed"}
LIBRARY = "transformers"
Fields = dict[str, Any]

MODELS: dict[str, dict[str, tuple[Fields, tuple[int, int, int]]]] = {
    "cpu": {
        "plain-transformer": ({"sequence_length": 32}, (2, 4, 8)),
        "plain-convnet": ({"hidden_sizes": (16, 32, 64)}, (2, 4, 8)),
        "plain-mlp": ({}, (16, 32, 64)),
        "lstm-text": ({"hidden_size": 64, "sequence_length": 32}, (2, 4, 8)),
    },
    "cuda": {
        "plain-transformer": (
            {"num_layers": 6, "hidden_size": 512, "num_heads": 8, "sequence_length": 256},
            (4, 8, 16),
        ),
        "plain-convnet": ({"image_size": 64, "hidden_sizes": (64, 128, 256)}, (16, 32, 64)),
        "plain-mlp": ({"input_size": 1024, "hidden_size": 4096}, (256, 512, 1024)),
        "lstm-text": ({"hidden_size": 512, "chunk_length": 128}, (16, 32, 64)),
    },
}
GPT: dict[str, tuple[Fields, tuple[int, int, int]]] = {
    "cpu": ({"num_layers": 2, "sequence_length": 32}, (2, 4, 8)),
    "cuda": ({}, (8, 16, 32)),
}
# what only some models have: a head over many tokens, channels, a ReLU
ONLY: dict[str, Fields] = {
    "plain-transformer": {"loss_chunks": 4},
    "plain-convnet": {"channels_last": True},
    "plain-mlp": {"inplace": True},
}
ON_A_CARD: tuple[Fields, ...] = (
    {"precision": "fp16-mixed"},
    {"precision": "tf32"},
    {"offload_activations": True},
)


def settings_for(kind: str) -> list[Case]:
    """Return the settings for a kind of device ("cpu", "cuda"), in order of value."""
    models = [_model(name, options, sizes, kind) for name, (options, sizes) in MODELS[kind].items()]
    # the first of every model before the second of any: what is cut short has a little of each
    longest = max(map(len, models))
    rounds = [[model[i] for model in models if i < len(model)] for i in range(longest)]
    again = [dataclasses.replace(case, group="again") for case in rounds[0]]
    found = [*rounds[0], *rounds[1], *again, *itertools.chain(*rounds[2:])]
    if has_transformers():
        options, sizes = GPT[kind]
        found += _model("gpt-small", options, sizes, kind)[:3]
    return found


def has_transformers() -> bool:
    """Return whether the library of the GPT-2 is installed."""
    return importlib.util.find_spec(LIBRARY) is not None


def _model(name: str, options: Fields, sizes: Sequence[int], kind: str) -> list[Case]:
    low, middle, high = [dict[str, Any](batch_size=size) for size in sizes]
    every: list[Fields] = [
        middle,
        middle | MIXED,
        high,
        middle | {"memory_budget": 0.5},
        middle | {"optimizer": "sgd"},
        high | {"accumulation_steps": 3},
    ]
    if kind == "cuda":
        every += [middle | fields for fields in ON_A_CARD]
    else:
        every += [middle | {"optimizer_in_backward": True}, low]
    if name in ONLY:
        every.append(middle | ONLY[name])
    return [Case(workload=name, options=options, config=StepConfig(**fields)) for fields in every]


# Which techniques work on a device: what memlab refuses there by itself, and a tiny step of
# each.
#
# The step runs in a worker, so that a technique that crashes ends no more than that.
# Compiled steps come last, since they take longer than all others together.

BATCH_SIZE = 4
PLAIN = "the plain step"
TINY_TEXT = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "sequence_length": 16}
TINY_IMAGES = {"image_size": 16, "hidden_sizes": (16, 32)}
FOR_IMAGES = ("channels_last", "inplace")
# formats that need a kind of card, beside the examples of EVERY. Left out: adamw-8bit, since its
# package may look for kernels on the net when it is imported
MORE: dict[str, Mapping[str, Any]] = {
    "tf32": {"precision": "tf32"},
    "fp8-mixed": {"precision": "fp8-mixed"},
}
LIMIT_BYTES = 1000  # less than any model

Measure = Callable[[Workload, StepConfig, int | None], StepResult]
"""Measures one step, given a memory limit in bytes or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Try:
    """A technique that was tried.

    Attributes:
        name: as docs/combinations.md shows it.
        why_not: why it does not work here; empty if it does.
    """

    name: str
    why_not: str = ""


def settings() -> dict[str, StepConfig]:
    """Return the settings to try, by name: the plain step first, compiled ones last."""
    found = {PLAIN: StepConfig(batch_size=BATCH_SIZE)}
    examples = {name: fields for t in EVERY for name, fields in t.examples.items()}
    for name, fields in (examples | MORE).items():
        found[name] = StepConfig(**{"batch_size": BATCH_SIZE, **fields})
    return dict(sorted(found.items(), key=lambda item: is_compiled(item[1])))


def tried(
    configs: Mapping[str, StepConfig], device: torch.device, card: Card | None, measure: Measure
) -> Iterator[Try]:
    """Yield whether out of memory ends well on a device, then what each of these settings does.

    Args:
        configs: as of `settings`.
        device: of this machine.
        card: the card that it is, if it is one.
        measure: runs a step.
    """
    yield _out_of_memory(measure)
    for name, config in configs.items():
        asked = Setup(config=config, device=device, card=card)
        refused = next(iter(refusals(asked)), None)
        if refused is not None:
            yield Try(name=name, why_not=str(refused))
            continue

        result = measure(_workload(config), config, None)
        is_ok = result.outcome is Outcome.OK
        yield Try(name=name, why_not="" if is_ok else f"{result.outcome}: {result.message}")


def _workload(config: StepConfig) -> Workload:
    default = StepConfig()
    if any(getattr(config, name) != getattr(default, name) for name in FOR_IMAGES):
        return workloads.get("plain-convnet", **TINY_IMAGES)
    return workloads.get("plain-transformer", **TINY_TEXT)


def _out_of_memory(measure: Measure) -> Try:
    """Return whether a step that has too little memory ends as such, and the next one runs."""
    name, config = "an out-of-memory and the step after it", settings()[PLAIN]
    over = measure(_workload(config), config, LIMIT_BYTES)
    if over.outcome is not Outcome.OUT_OF_MEMORY:
        return Try(name=name, why_not=f"{over.outcome} under a limit of {LIMIT_BYTES} bytes")
    after = measure(_workload(config), config, None)
    if after.outcome is not Outcome.OK:
        return Try(name=name, why_not=f"{after.outcome}: {after.message}")
    return Try(name=name)
