"""`SavedNumbers`: the numbers of a product or a quotient that autograd keeps, as tensors.

PyTorch turns `2.0` in `x * 2.0` into a tensor of its own, on the CPU, before autograd saves it for
backward. No mode sees that tensor: an operator that is dispatched to one has the number again.
Source: the formulas of `mul` and `div` in tools/autograd/derivatives.yaml, which save `other`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memlab.torch_private.autograd import innermost_saved_tensors_hooks

aten = torch.ops.aten
SAVING = frozenset(
    (
        aten.mul.Tensor, aten.mul_.Tensor, aten.div.Tensor, aten.div_.Tensor,
        aten.div.Tensor_mode, aten.div_.Tensor_mode,
    )
)  # fmt: skip


class SavedNumbers:
    """Those that are kept now.

    Args:
        begin: brings a block of so many bytes into being, by the last operator, and returns it.
        end: frees a block.
    """

    def __init__(self, begin: Callable[[int], int], end: Callable[[int], None]) -> None:
        self._begin, self._end = begin, end
        self._blocks: dict[int, int] = {}  # by the number of the forward operator
        self._at = -1
        self._last: tuple[int, int] | None = None  # of the last operator, which holds it itself

    def note(self, number: int, func: Any, args: Sequence[Any]) -> None:
        """Note an operator, and what autograd keeps of the one before."""
        if self._last is not None:
            forward, nbytes = self._last
            self._blocks[forward] = self._begin(nbytes)
            self._last = None
        if func not in SAVING or isinstance(args[1], torch.Tensor):
            return
        is_saved = torch.is_grad_enabled() and args[0].requires_grad
        # whoever looks at what is saved, such as a recompute, keeps it in its own way
        if is_saved and innermost_saved_tensors_hooks(True) is None:
            self._last = number, _nbytes(args[1])

    def move_on(self, forward: int) -> None:
        """Free what the backward of another forward operator has used; -1: of none."""
        if forward != self._at and self._at in self._blocks:
            self._end(self._blocks.pop(self._at))
        self._at = forward

    def end_step(self) -> None:
        """Free what no backward has asked for."""
        for block in self._blocks.values():
            self._end(block)
        self._blocks.clear()
        self._last = None


def _nbytes(number: float) -> int:
    """Return the bytes of the tensor that PyTorch makes of a Python number."""
    if isinstance(number, bool):
        return 1
    return 16 if isinstance(number, complex) else 8
