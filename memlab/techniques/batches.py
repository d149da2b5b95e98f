"""List what a batch contains: its tensors in order, and the path to each of its leaves.

What follows changes tensors, in pytrees and in objects that hold tensors.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any, cast

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from memlab.errors import WorkloadError
from memlab.techniques.source import ScriptLines, inlined
from memlab.workload import Workload

# Find and change the tensors of a batch, in pytrees and in objects that hold tensors.
#
# An object can be a dataclass, a `BatchEncoding`, a graph of PyTorch Geometric, a
# `PackedSequence`, or anything else that `copy.deepcopy` can copy. No function changes its
# batch; each returns a new one. Left out: NumPy arrays and other data that is not a tensor,
# which stays as it is.
#
# It is plain PyTorch, of which exported scripts contain what they call.

Change = Callable[[torch.Tensor], torch.Tensor]
CONSTANTS = (str, bytes, bool, int, float, complex, NoneType, torch.dtype, torch.device, torch.Size)


def map_tensors(change: Change, batch: Any) -> Any:
    """Return the batch with each tensor replaced by `change(tensor)`.

    Raises:
        WorkloadError: an object of the batch cannot be copied.
    """
    return pytree.tree_map(lambda leaf: _changed(change, leaf), batch, is_leaf=is_packed)


def moved(batch: Any, device: torch.device) -> Any:
    """Return the batch on a device. An object with its own `.to` is moved by that."""

    def move(leaf: Any) -> Any:
        own = not isinstance(leaf, torch.Tensor | PackedSequence) and hasattr(leaf, "to")
        if own:  # call it on a copy, because the .to of some classes changes the object itself
            return _changed(lambda tensor: tensor, leaf).to(device)
        return _changed(lambda tensor: tensor.to(device), leaf)

    return pytree.tree_map(move, batch, is_leaf=is_packed)


def is_object(leaf: Any) -> bool:
    """Return whether a leaf of a pytree is neither a tensor nor a constant."""
    return not isinstance(leaf, (torch.Tensor, *CONSTANTS))


def is_packed(node: Any) -> bool:
    """Return whether a node is a packed sequence, which is not split as a pytree."""
    return isinstance(node, PackedSequence)


@contextlib.contextmanager
def _copied_by(change: Change) -> Iterator[list[torch.Tensor]]:
    """Make `copy.deepcopy` apply `change` to tensors instead of copying; yield the tensors met."""
    usual, met = torch.Tensor.__deepcopy__, list[torch.Tensor]()

    def changed(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        met.append(self)
        memo[id(self)] = change(self)
        return cast("torch.Tensor", memo[id(self)])

    torch.Tensor.__deepcopy__ = changed  # type: ignore[method-assign]
    try:
        yield met
    finally:
        torch.Tensor.__deepcopy__ = usual  # type: ignore[method-assign]


def _changed(change: Change, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return change(leaf)
    if isinstance(leaf, PackedSequence):
        return _repacked(change, leaf)
    if not is_object(leaf) or isinstance(leaf, torch.nn.Module):
        return leaf
    try:
        with _copied_by(change) as met:
            copied = copy.deepcopy(leaf)
    except Exception as error:  # whatever a person's class raises
        raise WorkloadError(
            f"the batch holds a {type(leaf).__name__}, which copy.deepcopy cannot copy "
            f"({type(error).__name__}: {error}); return tensors in lists, tuples and dicts, or "
            "give the class a __deepcopy__"
        ) from error
    return copied if met else leaf


def _repacked(change: Change, packed: PackedSequence) -> PackedSequence:
    """Return a packed sequence with its tensors changed; its `batch_sizes` stay on the CPU."""
    sizes = change(packed.batch_sizes)
    if sizes.device.type != "cpu":
        sizes = packed.batch_sizes
    indices = (packed.sorted_indices, packed.unsorted_indices)
    return PackedSequence(
        change(packed.data), sizes, *(None if index is None else change(index) for index in indices)
    )


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch, in order."""
    found: list[torch.Tensor] = []

    def see(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(see, batch)
    return found


def leaves_of(batch: Any) -> list[tuple[str, Any]]:
    """Return tensors, objects and constants of a batch, with the path to each."""
    leaves = pytree.tree_flatten_with_path(batch, is_packed)[0]
    return [(f"batch{pytree.keystr(path)}", leaf) for path, leaf in leaves]


def is_own_kind(workload: Workload) -> bool:
    """Return whether a workload has its own `split_batch`; its batches may be of any kind."""
    return workload.split_batch is not None


def source() -> ScriptLines:
    """Return the functions with which a script moves and casts the tensors of objects."""
    return inlined(map_tensors, moved)
