"""The caching allocator's own statistics: allocated and reserved peaks, and a limit to hold it to.

All of it does nothing on a CPU, where there is no caching allocator and nothing is reserved.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from memlab.torch_private.cuda import clear_cublas_workspaces


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """The most bytes that were allocated and reserved since the last reset."""

    allocated_bytes: int
    reserved_bytes: int


def reset_peaks(device: torch.device) -> None:
    """Give cached segments back and start counting peaks anew, so that a peak is one step's own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def read_peaks(device: torch.device) -> Peaks | None:
    """Return the peaks since the last reset; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return Peaks(
        allocated_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device),
    )


@contextlib.contextmanager
def limited_to(limit_bytes: int | None, device: torch.device) -> Iterator[None]:
    """Let the caching allocator reserve at most this much, or raise torch.OutOfMemoryError."""
    if limit_bytes is None or device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def release(device: torch.device) -> None:
    """Give back what outlives a run: cuBLAS workspaces and cached segments."""
    if device.type == "cuda":
        clear_cublas_workspaces()
        torch.cuda.empty_cache()
