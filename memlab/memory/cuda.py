"""The statistics of CUDA's caching allocator (allocated and reserved peaks) and its limit.

On a CPU, which has no caching allocator, all of this does nothing.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from memlab._util.torch_private.tensors import clear_cublas_workspaces


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """The most bytes that were allocated and reserved since the last reset."""

    allocated_bytes: int
    reserved_bytes: int


def reset_peaks(device: torch.device) -> None:
    """Release cached segments and reset the peaks, so that the next peak belongs to one step."""
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
    """Limit what the caching allocator reserves; beyond it raises torch.OutOfMemoryError."""
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
    """Release what outlives a run: cuBLAS workspaces and cached segments."""
    if device.type == "cuda":
        clear_cublas_workspaces()
        torch.cuda.empty_cache()
