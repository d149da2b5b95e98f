"""What this machine has, in words, and how much of a card a visit may use."""

import os
import platform
import re
from dataclasses import dataclass

import torch

from memlab._version import __version__
from memlab.arguments.units import GIB, MIB, format_bytes
from memlab.devices import cards
from memlab.devices.cards import of_device
from memlab.devices.here import (
    available_memory_bytes,
    describe,
    machine_memory_bytes,
    resolve_device,
)
from memlab.errors import DeviceError
from memlab.visits import driver

CPU = torch.device("cpu")
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
        f"processor: {describe(CPU)}, {os.cpu_count()} cores, of which PyTorch uses "
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
    version = driver.version()
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
