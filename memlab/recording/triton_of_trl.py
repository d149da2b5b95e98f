"""trl's Triton kernels, as a card runs them, on the device that stands in for it.

trl computes log-probabilities tile by tile. On a card a Triton kernel folds each tile into tensors
that are there already, and only the positions that have a label are computed; elsewhere operators
of PyTorch make several tensors as large as a tile. trl chooses by the name of the device, and
Triton cannot launch a kernel on fake tensors. So inside this context trl is told that the device
has Triton, and its kernels do nothing: they allocate nothing, and no value is known anyway.

Left out: the time of these kernels, which is small beside that of the products between them.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

MODULE = "trl.kernels.chunked_logprob"
HALF = (torch.bfloat16, torch.float16)


class _Kernel:
    """A kernel that does nothing: `kernel[grid](*arguments)`."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _with_triton(device: torch.device) -> bool:
    return True


def _add_product(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a product to a matrix of fp32, as on CUDA: narrow factors are not cast for it."""
    if a.dtype in HALF:
        torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)
    else:
        acc.addmm_(a, b)


@contextlib.contextmanager
def as_on_card() -> Iterator[None]:
    """Have trl, if it is there, compute log-probabilities as on a card with Triton."""
    module: Any = sys.modules.get(MODULE)
    own = getattr(module, "_use_triton", None)
    if own is None:
        yield
        return

    stand_ins = {
        "_forward_kernel": _Kernel(),
        "_backward_kernel": _Kernel(),
        "_addmm_fp32": _add_product,
        "triton": SimpleNamespace(cdiv=lambda one, other: -(-one // other)),
    }
    usual, code = vars(module).copy(), own.__code__
    vars(module).update(stand_ins)
    own.__code__ = _with_triton.__code__  # other modules of trl have imported the function itself
    try:
        yield
    finally:
        own.__code__ = code
        for name in stand_ins:
            if name in usual:
                setattr(module, name, usual[name])
            else:
                delattr(module, name)
