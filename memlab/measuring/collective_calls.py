"""The collectives that a real step calls, seen where PyTorch dispatches its operators.

DistributedDataParallel calls them in C++ and `fully_shard` in Python; all of them are dispatched.
The step runs slower meanwhile, and Python holds its tensors a little longer, so it is neither timed
nor metered.
"""

from typing import Any

from memlab.arguments.collectives import Call
from memlab.operators.collectives import NAMESPACES, call_of_collective
from memlab.operators.signatures import signature_of
from memlab.torch_private.dispatch import TorchDispatchMode
from memlab.torch_private.ranks import group_in, sharded_types


class CollectiveCalls(TorchDispatchMode):
    """Notes the collectives of this rank while it is entered.

    Attributes:
        found: in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Call] = []
        self._passed_on = sharded_types()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note it if it is a collective."""
        if any(issubclass(kind, self._passed_on) for kind in types):
            return NotImplemented  # the operators on the parts of these tensors come here
        if func.namespace in NAMESPACES:
            self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        signature = signature_of(func, args, kwargs)
        if call_of_collective(signature, 1) is None:
            return
        found = call_of_collective(signature, len(group_in(args)[1]))
        assert found is not None
        self.found.append(found)
