"""trl's Triton kernels where Triton is not installed: as a card runs them.

trl computes log-probabilities tile by tile. On a card a Triton kernel folds each tile into tensors
that are there already, and only the positions that have a label are computed; elsewhere operators
of PyTorch make several tensors as large as a tile. PyTorch brings Triton with its builds for CUDA.
So the machine that predicts may lack it, while the card that it predicts for has it.

trl can be imported without Triton, and then notes that there is none. Inside this context it is
told that there is, and its kernels do nothing. Where Triton is installed, there is nothing to do:
`triton_launches.py` leaves out the launches of any package.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

MODULE = "trl.kernels.chunked_logprob"


class _Kernel:
    """A kernel that does nothing: `kernel[grid](*arguments)`."""

    def __init__(self, name: str, launched: Callable[[str, str], None]) -> None:
        self.name, self.launched = name, launched

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launched(MODULE, self.name)


def without_kernels() -> ModuleType | None:
    """Return the file of trl that has found no Triton; None if there is none."""
    module = sys.modules.get(MODULE)
    return None if getattr(module, "_TRITON_AVAILABLE", True) else module


@contextlib.contextmanager
def given_kernels(module: ModuleType, launched: Callable[[str, str], None]) -> Iterator[None]:
    """Give this file kernels that do nothing but call `launched` with their file and name."""
    stand_ins = {
        "_forward_kernel": _Kernel("_forward_kernel", launched),
        "_backward_kernel": _Kernel("_backward_kernel", launched),
        "_TRITON_AVAILABLE": True,
        "triton": SimpleNamespace(cdiv=lambda one, other: -(-one // other)),
    }
    names = vars(module)
    usual = {name: names[name] for name in stand_ins if name in names}
    names.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del names[name]
        names.update(usual)
