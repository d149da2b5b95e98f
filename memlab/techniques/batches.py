"""List what a batch contains: its tensors in order, and the path to each of its leaves.

`batch_tensors.py` changes tensors, in pytrees and in objects that hold tensors.
"""

from typing import Any

import torch

from memlab.techniques import batch_tensors
from memlab.techniques.batch_tensors import is_packed, map_tensors
from memlab.techniques.source import ScriptLines, whole
from memlab.torch_private import pytree
from memlab.workload import Workload


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
    return whole(batch_tensors)
