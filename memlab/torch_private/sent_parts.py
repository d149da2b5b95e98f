"""What a `ZeroRedundancyOptimizer` sends after an update.

This file imports nothing from memlab, because an exported script contains a copy of it.
"""

import weakref
from typing import Any

import torch


def partition_of(optimizer: Any) -> list[list[torch.Tensor]]:
    """Return the parameters of every rank's share in a `ZeroRedundancyOptimizer`."""
    return [
        [parameter for group in groups for parameter in group["params"]]
        for groups in optimizer._partition_parameters()
    ]


def parts_sent_by(optimizer: Any) -> None:
    """Let a `ZeroRedundancyOptimizer` send parts of parameters: its broadcasts take no DTensors.

    Args:
        optimizer: sends the parameters of each rank's share to the other ranks after an update.
    """
    import torch.distributed as dist

    this = weakref.ref(optimizer)

    def send(rank: int) -> list[Any]:
        own: Any = this()
        group = own.process_group
        source = dist.get_global_rank(group, rank)
        found = []
        for parameter in partition_of(own)[rank]:
            data: Any = parameter.data
            part = data.to_local() if hasattr(data, "to_local") else data
            found.append(dist.broadcast(part, source, group=group, async_op=True))
        return found

    optimizer._broadcast_params_from_rank = send
