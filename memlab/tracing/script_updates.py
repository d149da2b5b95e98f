"""Updates that a script makes without an optimizer of PyTorch's, found by what it does to weights.

A weight is a leaf that an operator has read for a graph. After gradients were computed it is
written (`weight -= rate * weight.grad`) or gets other memory (`weight.data = ...`). Not found: a
new tensor in the place of the weight, as in functional code. In a script that has made an optimizer
nothing is looked for: there such writes are of inputs that are attacked, or of weights that are
clipped, averaged or put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from memlab._util.torch_private.tensors import storage_key
from memlab.tracing.tracker import Tracker, written_by
from memlab.tracing.values import tensors_in

DETACH = torch.ops.aten.detach.default  # `weight.data` reads a weight for no graph
OWN_WEIGHT = "a weight that the script updates itself"


class OwnUpdates:
    """The weights of a script, and whether it is updating them.

    Attributes:
        is_expected: gradients were computed since the last update.
        is_pending: weights were written since then; the update may not be over.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # each with its storage
        self.is_expected = self.is_pending = False

    def end(self) -> None:
        """Note that the update is over."""
        self.is_expected = self.is_pending = False

    def reads(self, func: Any, args: Sequence[Any]) -> bool:
        """Return whether an operator reads a tensor for a graph; remember the weights among them.

        One that has other memory than before was replaced, which is an update.
        """
        if func is DETACH or not torch.is_grad_enabled():
            return False
        read = [each for each in tensors_in(args) if each.requires_grad]
        for weight in read:
            if weight.is_leaf:
                storage = storage_key(weight.untyped_storage())
                if self.is_expected and self._weights.get(weight, storage) != storage:
                    self._updated(weight)
                self._weights[weight] = storage
        return bool(read)

    def writes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operator writes a weight after gradients were computed."""
        if not self.is_expected or not written_by(func):
            return False
        storages = {storage_key(weight.untyped_storage()) for weight in self._weights}
        written = [each for each in _written(func, args, kwargs)
                   if storage_key(each.untyped_storage()) in storages]  # fmt: skip
        for each in written:
            self._updated(each)
        return bool(written)

    def _updated(self, weight: torch.Tensor) -> None:
        self.is_pending = True
        if (block := self._tracker.blocks.block_of(weight)) is not None:
            self._tracker.recording.parameters.setdefault(block, OWN_WEIGHT)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for position in written_by(func):
        if position < len(args):
            yield from tensors_in(args[position])
    yield from tensors_in(kwargs.get("out"))
