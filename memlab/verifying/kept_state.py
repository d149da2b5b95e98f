"""Record what a function keeps from one call to the next, so that each run starts from the same.

A loss may count its calls or hold a teacher model in its closure. Two runs of one step would then
differ for a reason that has nothing to do with the checked config.
"""

from collections.abc import Callable
from typing import Any

from memlab.techniques.recompute.places import is_same
from memlab.techniques.recompute.reachable import Reachable
from memlab.techniques.recompute.watched import put


class KeptState:
    """The state that a function can reach, as it is now.

    Args:
        function: the walk starts there. Iterators cannot be restored and are left as they are.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        found = Reachable([(getattr(function, "__name__", "it"), function)])
        self._places = [(place, place.read()) for place in found.places if not place.fixed]
        self._tensors = [
            (tensor, tensor.detach().to("cpu", copy=True)) for _, tensor in found.tensors
        ]

    def put_back(self) -> None:
        """Restore this state."""
        for place, contents in self._places:
            if not is_same(contents, place.read()):
                place.write(contents)
        for tensor, values in self._tensors:
            put(tensor, values)
