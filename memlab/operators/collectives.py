"""Which operators are collectives, and how large the whole tensor of a call is.

Two namespaces have them: `c10d` changes tensors that it is given, `_c10d_functional` returns new
ones. Left out: barriers, and what no step of memlab does (send and receive, gather and scatter).
"""

from typing import Any

from memlab.arguments.collectives import Call, Collective
from memlab.operators.signatures import Signature, TensorSpec, tensors_of

NAMESPACES = ("c10d", "_c10d_functional")
# the collective of each operator of c10d, and the argument that holds the whole tensor
_WHOLE = {
    "_allgather_base_": (Collective.ALL_GATHER, 0),
    "allgather_": (Collective.ALL_GATHER, 0),
    "allgather_coalesced_": (Collective.ALL_GATHER, 0),
    "allgather_into_tensor_coalesced_": (Collective.ALL_GATHER, 0),
    "_reduce_scatter_base_": (Collective.REDUCE_SCATTER, 1),
    "reduce_scatter_": (Collective.REDUCE_SCATTER, 1),
    "reduce_scatter_tensor_coalesced_": (Collective.REDUCE_SCATTER, 1),
    "allreduce_": (Collective.ALL_REDUCE, 0),
    "allreduce_coalesced_": (Collective.ALL_REDUCE, 0),
    "broadcast_": (Collective.BROADCAST, 0),
    "alltoall_base_": (Collective.ALL_TO_ALL, 1),
    "alltoall_": (Collective.ALL_TO_ALL, 1),
}
_FUNCTIONAL = {
    "all_gather_into_tensor": Collective.ALL_GATHER,
    "reduce_scatter_tensor": Collective.REDUCE_SCATTER,
    "all_reduce": Collective.ALL_REDUCE,
    "broadcast": Collective.BROADCAST,
    "all_to_all_single": Collective.ALL_TO_ALL,
}


def call_of_collective(signature: Signature, num_ranks: int) -> Call | None:
    """Return what a call of an operator sends; None if it is no collective that is counted.

    Args:
        signature: of the call.
        num_ranks: of its group.
    """
    namespace, name, _ = signature[0].split(".")
    if namespace == "c10d" and name in _WHOLE:
        kind, position = _WHOLE[name]
        return Call(kind, num_ranks, _bytes_of(signature[1][position]))

    if namespace == "_c10d_functional":
        # the functional forms are also there in place, with an underscore, and for several tensors
        found = _FUNCTIONAL.get(name.removesuffix("_").removesuffix("_coalesced"))
        if found is not None:
            parts = num_ranks if found is Collective.ALL_GATHER else 1
            return Call(found, num_ranks, parts * _bytes_of(signature[1][0]))
    return None


def _bytes_of(argument: Any) -> int:
    """Return the bytes of the tensors in one argument."""
    specs = [argument] if isinstance(argument, TensorSpec) else tensors_of(("", argument, ()))
    return sum(spec.nbytes for spec in specs)
