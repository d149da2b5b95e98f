"""Where a step can run, and what it can hold there."""

import torch

from memlab.devices import cards
from memlab.devices.here import machine_memory_bytes, resolve_device
from memlab.errors import DeviceError
from memlab.records.recorded import is_recorded, record_of
from memlab.records.targets import target_of


def is_here(device: str | torch.device | None) -> bool:
    """Return whether this machine has a device, so that it can measure on it."""
    try:
        resolve_device(device)
    except DeviceError:
        return False
    return True


def capacity(device: str | torch.device | None) -> int | None:
    """Return the bytes that a step can hold there at most; None if that is not known.

    Of a card it is what PyTorch can reserve, the card's memory without the CUDA context; of the
    CPU it is this machine's memory.

    Raises:
        DeviceError: the name is unknown.
    """
    if isinstance(device, str) and is_recorded(device):
        card = target_of(record_of(device), tf32=False).card
        return card.usable_bytes if card else None

    target = cards.resolve(device)
    if target.kind == "cpu":
        return machine_memory_bytes()
    return target.card.usable_bytes if target.card else None
