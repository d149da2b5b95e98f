"""`SavedNumbers`: the small tensors that autograd saves for numbers in products and quotients.

PyTorch turns `2.0` in `x * 2.0` into a CPU tensor before autograd saves it for backward. No mode
sees this tensor, because the operator that a mode sees has the plain number again. Source: the
formulas of `mul` and `div` in tools/autograd/derivatives.yaml, which save `other`.
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
    """The saved numbers that exist now.

    Args:
        begin: records a new block of this many bytes, made by the last operator, and returns it.
        end: records that a block is freed.
    """

    def __init__(self, begin: Callable[[int], int], end: Callable[[int], None]) -> None:
        self._begin, self._end = begin, end
        self._blocks: dict[int, int] = {}  # by the number of the forward operator
        self._at = -1
        self._last: tuple[int, int] | None = None  # of the last operator, which still holds it

    def note(self, number: int, func: Any, args: Sequence[Any]) -> None:
        """Record an operator, and what autograd keeps of the one before."""
        if self._last is not None:
            forward, nbytes = self._last
            self._blocks[forward] = self._begin(nbytes)
            self._last = None

        if func not in SAVING or isinstance(args[1], torch.Tensor):
            return

        is_saved = torch.is_grad_enabled() and args[0].requires_grad
        # hooks on saved tensors, such as those of a recompute, keep the number in their own way
        if is_saved and innermost_saved_tensors_hooks(True) is None:
            self._last = number, _nbytes(args[1])

    def move_on(self, forward: int) -> None:
        """Free what the last backward operator has used, once another one runs (-1: none)."""
        if forward != self._at and self._at in self._blocks:
            self._end(self._blocks.pop(self._at))
        self._at = forward

    def end_step(self) -> None:
        """Free the numbers that no backward has used."""
        for block in self._blocks.values():
            self._end(block)
        self._blocks.clear()
        self._last = None


def _nbytes(number: float) -> int:
    """Return the bytes of the tensor that PyTorch makes of a Python number."""
    if isinstance(number, bool):
        return 1
    return 16 if isinstance(number, complex) else 8
