"""What a device of this machine is, and what its driver says of its memory. Nothing is ever set.

The driver is asked through NVML (`pip install nvidia-ml-py`); without it nothing is known of other
processes but what `torch.cuda.mem_get_info` tells.
"""

import contextlib
import os
from typing import Any

import torch

from memlab.devices.here import available_memory_bytes, describe
from memlab.records.recorded import device_name


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
            "driver": version(),
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


def version() -> str | None:
    """Return the version of the driver; None where nobody says."""
    library = nvml()
    if library is None:
        return None
    with contextlib.suppress(library.NVMLError):
        found = library.nvmlSystemGetDriverVersion()
        return found.decode() if isinstance(found, bytes) else str(found)  # bytes until NVML 11.5
    return None


def used_bytes(device: torch.device) -> int | None:
    """Return what all processes hold on a card, the driver included; None where nobody says."""
    library = nvml()
    if library is not None:
        with contextlib.suppress(library.NVMLError):
            return int(library.nvmlDeviceGetMemoryInfo(_handle(library, device.index or 0)).used)
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free - _own_bytes(device)


def _own_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if torch.cuda.is_initialized() else 0


def _handle(library: Any, index: int) -> Any:
    """Return the driver's handle of the card that PyTorch counts as this one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index].strip() if index < len(visible) else ""
    if name.startswith(("GPU-", "MIG-")):
        return library.nvmlDeviceGetHandleByUUID(name)
    return library.nvmlDeviceGetHandleByIndex(int(name) if name.isdigit() else index)


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
