"""The device of a visit: whether it is free, what it is, and what its driver says of memory.

The driver is asked through NVML (`pip install nvidia-ml-py`); without it nothing is known of other
processes but what `torch.cuda.mem_get_info` tells. Nothing is ever set.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from memlab.arguments.units import GIB, format_bytes
from memlab.devices.here import available_memory_bytes, describe
from memlab.records.recorded import device_name

MOST_IN_USE_BYTES = GIB  # an idle driver holds some hundred MiB of a large card


def refusal(device: str) -> str:
    """Return why nothing can be recorded here, a sentence with a remedy; empty if it can."""
    if device == "cpu":
        return ""
    if not torch.cuda.is_available():
        return (
            "device='cuda': this machine has no CUDA card that PyTorch can use "
            f"(torch {torch.__version__}); run the suite where there is one, or try it out here "
            "with --device cpu --small"
        )
    used = used_bytes()
    if used is not None and used > MOST_IN_USE_BYTES:
        return (
            f"device='cuda': the card is in use by others, who hold {format_bytes(used)}; allowed "
            f"is {format_bytes(MOST_IN_USE_BYTES)}: wait until they are done, or choose another "
            "card with CUDA_VISIBLE_DEVICES"
        )
    return ""


def facts(device: torch.device) -> dict[str, Any]:
    """Return what a record says of its device."""
    title = describe(device)
    found: dict[str, Any] = {
        "device": device_name(device, title),
        "title": title,
        "type": device.type,
        "memory_bytes": available_memory_bytes(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "memory_bytes": properties.total_memory,
            "compute_capability": [properties.major, properties.minor],
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _ask("nvmlSystemGetDriverVersion"),
            "process_bytes_by": "NVML" if nvml() is not None else "torch.cuda.mem_get_info",
        }
    return found


def nvml() -> Any:
    """Return the driver's library, None where it is not installed or does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # of its own kinds, which cannot be named without it
        return None
    return pynvml


def used_bytes() -> int | None:
    """Return what all processes hold on the card, the driver included; None where nobody says."""
    library = nvml()
    if library is not None:
        with contextlib.suppress(library.NVMLError):
            return int(library.nvmlDeviceGetMemoryInfo(_handle(library)).used)
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free - _own_bytes()


def _own_bytes() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0


def _handle(library: Any) -> Any:
    """Return the driver's handle of the card that PyTorch calls the first."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return library.nvmlDeviceGetHandleByUUID(first)
    return library.nvmlDeviceGetHandleByIndex(int(first) if first.isdigit() else 0)


def _ask(function: str) -> str | None:
    library = nvml()
    if library is None:
        return None
    with contextlib.suppress(library.NVMLError):
        return str(getattr(library, function)())
    return None


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Let processes that are started meanwhile see no card: they work as on a machine without."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def is_broken(device: torch.device) -> bool:
    """Return whether an error has left the device unusable for this process."""
    if device.type == "cpu":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, device=device).item()
    except Exception:  # of many kinds: what matters is that nothing works any more
        return True
    return False
