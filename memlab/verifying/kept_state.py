"""What a function keeps from one call to the next: noted, so that each run begins with the same.

A loss may count its calls or hold a teacher in its closure. Two runs of one step would then differ,
for a reason that has nothing to do with the config that is checked.
"""

from collections.abc import Callable
from typing import Any

from memlab.techniques.recompute.places import is_same
from memlab.techniques.recompute.reachable import Reachable
from memlab.techniques.recompute.watched import put


class KeptState:
    """The state that a function can reach, as it is now.

    Args:
        function: a walk begins there; iterators, which cannot be put back, are left as they are.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        found = Reachable([(getattr(function, "__name__", "it"), function)])
        self._places = [(place, place.read()) for place in found.places if not place.fixed]
        self._tensors = [
            (tensor, tensor.detach().to("cpu", copy=True)) for _, tensor in found.tensors
        ]

    def put_back(self) -> None:
        """Go back to it."""
        for place, contents in self._places:
            if not is_same(contents, place.read()):
                place.write(contents)
        for tensor, values in self._tensors:
            put(tensor, values)
