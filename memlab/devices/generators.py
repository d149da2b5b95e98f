"""Set, save, compare and restore the random states of torch, NumPy and `random`, and autocast."""

import contextlib
import ctypes
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

Autocast = tuple[str, torch.dtype, bool, bool]  # arguments of torch.autocast
MT19937_BYTES = 4 * 624 + 4  # its key and its position, numpy/random/src/mt19937/mt19937.h


def set_seed(seed: int) -> None:
    """Seed torch on every device, NumPy and `random`."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def states_of_random(devices: Iterable[torch.device]) -> dict[torch.device, bytes]:
    """Return the states of torch's generators as bytes, so that no tensor is held."""
    return {device: bytes_of(_of_device(device).get_rng_state()) for device in devices}


def _of_device(device: torch.device) -> Any:
    return torch.random if device.type == "cpu" else torch.get_device_module(device)


def bytes_of(state: torch.Tensor) -> bytes:
    """Return the state of a generator of torch as bytes."""
    # read by address, since operators on a real tensor fail while tensors are fake
    return ctypes.string_at(state.data_ptr(), state.numel())


def states_in_python() -> tuple[Any, Any]:
    """Return the states of the generators of Python and NumPy."""
    return random.getstate(), np.random.get_state(legacy=False)


def marks_of_draws() -> tuple[Any, ...]:
    """Return a value that changes with every draw of NumPy's or Python's generator; fast.

    But for the second of two normal numbers of NumPy, which were drawn together.
    """
    _, words, gauss = random.getstate()
    source = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if isinstance(source, np.random.MT19937):
        numpy: Any = ctypes.string_at(source.ctypes.state_address, MT19937_BYTES)
    else:
        numpy = repr(source.state)

    return words[0], words[-1], gauss, numpy


def set_random(states: dict[torch.device, bytes], in_python: Any) -> None:
    """Set the generators of torch, and those of Python and NumPy if they are given."""
    for device, state in states.items():
        _of_device(device).set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    if in_python is not None:
        random.setstate(in_python[0])
        np.random.set_state(in_python[1])


def autocast_of(devices: Iterable[torch.device]) -> list[Autocast]:
    """Return for each type of device its format of autocast, and whether that is on."""
    has_cache = torch.is_autocast_cache_enabled()
    return [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), has_cache)
        for kind in sorted({device.type for device in devices})
        if torch.amp.is_autocast_available(kind)
    ]


@contextlib.contextmanager
def same_autocast(noted: list[Autocast]) -> Iterator[None]:
    """Run with autocast as it was saved."""
    with contextlib.ExitStack() as stack:
        for kind, dtype, enabled, has_cache in noted:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype, enabled, has_cache))
        yield


@contextlib.contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Restore the caller's generators afterwards, since a run in this process seeds them."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        # of this device only: asking another card would start CUDA on it
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
