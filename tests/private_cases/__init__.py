"""What memlab uses each private name of PyTorch for, and what must be true of it.

Nothing of memlab is imported, so that this runs where a new PyTorch has moved what memlab imports.
"""

from tests.private_cases import (
    compiler,
    dispatch,
    fakes,
    modules,
    python_device,
    ranks,
    tensors,
)
from tests.private_cases.parts import CASES, MAY_BE_MISSING, at

__all__ = [
    "CASES", "MAY_BE_MISSING", "at", "compiler", "dispatch", "fakes", "modules", "python_device",
    "ranks", "tensors",
]  # fmt: skip
