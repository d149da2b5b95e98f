"""Whether the device of a visit is free."""

import torch

from memlab._util.units import GIB, format_bytes
from memlab.cli import device_visit

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
    used = device_visit.used_bytes(torch.device("cuda", 0))
    if used is not None and used > MOST_IN_USE_BYTES:
        return (
            f"device='cuda': the card is in use by others, who hold {format_bytes(used)}; allowed "
            f"is {format_bytes(MOST_IN_USE_BYTES)}: wait until they are done, or choose another "
            "card with CUDA_VISIBLE_DEVICES"
        )
    return ""
