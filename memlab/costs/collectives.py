"""What collectives allocate inside themselves on a CPU, by rules: they cannot run alone.

The rules are read in torch/csrc/distributed/c10d/ProcessGroupGloo.cpp and hold for all sizes and
numbers of ranks:

    all-gather        one tensor as large as all outputs, into which the ranks' parts arrive
    reduce-scatter    a copy of the whole input, which is averaged; a part of it is then copied
    all-reduce        nothing: it works on the tensor itself
    broadcast         nothing

What Gloo itself takes for messages is not PyTorch's allocator's, and is not counted. Times of
collectives are not known: they depend on what connects the ranks. A rank that is alone in its group
returns from an all-reduce and a broadcast at once, whatever their size.
"""

from __future__ import annotations

from memlab.operators.collectives import NAMESPACES
from memlab.operators.cost import OperatorCost
from memlab.operators.signatures import Signature, TensorSpec, tensors_of
from memlab.recording.recording import Operator

OF_OUTPUTS = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_")
OF_INPUTS = ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_")
IN_PLACE = ("allreduce_", "allreduce_coalesced_", "broadcast_")  # a single rank has nothing to do
GATHERS = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")  # return what they gather


def is_collective(signature: Signature) -> bool:
    """Return whether an operator communicates with other ranks."""
    return signature[0].partition(".")[0] in NAMESPACES


def cost_of(operator: Operator) -> OperatorCost:
    """Return the memory of a collective, and its time where a single rank has nothing to do."""
    assert operator.signature is not None
    namespace, name, _ = operator.signature[0].split(".")
    inside = 0
    if namespace == "c10d":
        if name in OF_OUTPUTS:
            inside = _bytes_of(operator.signature, 0)
        elif name in OF_INPUTS:
            inside = _bytes_of(operator.signature, 1)
        return OperatorCost(
            output_bytes=(0,) * len(operator.outputs),
            peak_bytes=inside,
            seconds=0.0 if len(operator.ranks) == 1 and name in IN_PLACE else None,
        )

    given = tensors_of(operator.signature)
    made = () if name == "wait_tensor" or name.endswith("_") else operator.outputs
    sizes = tuple(output.nbytes for output in made) or (0,) * len(operator.outputs)
    if name in GATHERS:
        inside = sum(sizes)
    elif name.startswith("reduce_scatter"):
        inside = sum(spec.nbytes for spec in given)
    return OperatorCost(output_bytes=sizes, peak_bytes=sum(sizes) + inside)


def _bytes_of(signature: Signature, position: int) -> int:
    """Return the bytes of the tensors in one argument."""
    argument = signature[1][position]
    specs = [argument] if isinstance(argument, TensorSpec) else tensors_of(("", argument, ()))
    return sum(spec.nbytes for spec in specs)
