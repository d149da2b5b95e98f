"""One of many ranks, recorded in one process without the others.

The idea. PyTorch has a process group whose collectives return at once. In it the code of a sharded
step runs as one rank, whatever the number of ranks, and over fake tensors no value is missing. So
a recording takes as long for 4096 ranks as for two. Three things need help:

- `DistributedDataParallel` has a part in C++ that reads real memory: `fake_reducer.py`.
- `fully_shard` frees and allocates whole parameters by resizing their storages, which the
  dispatcher does not see: the tracker is told.
- What collectives allocate inside themselves: `costs/collectives.py`.

Ranks that hold the same are recorded once. With `fully_shard` rank 0 holds the most: a dimension is
divided into parts of which only the last may be smaller. With ZeroRedundancyOptimizer ranks have
different shares of the parameters, and `heaviest_ranks` says which may hold the most.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from memlab.config import Sharding, StepConfig
from memlab.errors import UnsupportedError
from memlab.recording import stand_in
from memlab.recording.distinct_ranks import row_of
from memlab.recording.fake_reducer import FakeLogger, FakeReducer
from memlab.recording.tracker import Tracker
from memlab.techniques.sharding.ranks import is_tensor_parallel, local
from memlab.torch_private.ranks import (
    drawn_as_on_a_cpu,
    forget_shardings,
    group_of_none,
    meshes_joined_unseen,
    parameters_divided_by,
    replicated_by,
    shapes_found_unseen,
    storages_resized_by,
)
from memlab.torch_private.sent_parts import partition_of

STEP_BYTES = 4


@contextlib.contextmanager
def as_rank(config: StepConfig, rank: int, tracker: Tracker) -> Iterator[None]:
    """Let this process be one of the ranks of a config, as far as a recording can tell.

    Raises:
        UnsupportedError: this process is one of several real ranks, or PyTorch has none.
    """
    if config.sharding is Sharding.NONE:
        yield
        return

    if config.is_deepspeed:
        plain = str(config.sharding).removeprefix("deepspeed-")
        raise UnsupportedError(
            f"sharding={str(config.sharding)!r} is run, verified and measured, but not predicted: "
            "DeepSpeed's engine does not run over fake tensors; use memlab.measure, or predict "
            f"sharding={plain!r}"
        )

    if not dist.is_available():
        raise UnsupportedError("this build of PyTorch has no torch.distributed")
    if dist.is_initialized():
        raise UnsupportedError(
            "a process group is open in this process, so a sharded step cannot be predicted here; "
            "call memlab.predict from a process that is no rank"
        )

    try:
        with (
            group_of_none(rank, config.world_size),
            replicated_by(FakeReducer, FakeLogger),
            shapes_found_unseen(),
            drawn_as_on_a_cpu(),
            meshes_joined_unseen(),
            parameters_divided_by(PartsOnDemand),
            storages_resized_by(tracker.blocks.resize),
            stand_in.issued_on(tracker.streams),
        ):
            yield
    finally:
        if is_tensor_parallel(config):
            forget_shardings()


class PartsOnDemand(Sequence[torch.Tensor]):
    """The parts of a tensor, as many as ranks, of which only those that are asked for are made.

    As `torch.chunk` divides it; where a dimension has fewer rows than there are ranks, the last
    parts are empty.
    """

    def __init__(self, tensor: torch.Tensor, num_parts: int, dim: int) -> None:
        self._tensor, self._num_parts, self._dim = tensor, num_parts, dim

    def __len__(self) -> int:
        """Return the number of parts."""
        return self._num_parts

    def __getitem__(self, index: Any) -> Any:
        """Return one part."""
        count = self._tensor.shape[self._dim]
        most = -(-count // self._num_parts)
        if index * most >= count:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, index * most, min(most, count - index * most))


def heaviest_ranks(optimizer: torch.optim.Optimizer, config: StepConfig) -> tuple[int, ...]:
    """Return the ranks one of which holds the most: one, unless shares of parameters differ.

    Judged by Adam: two numbers for each weight and one for each parameter, which counts the steps.
    Its update also holds temporaries as large as the largest parameter of the share, twice.
    """
    if not hasattr(optimizer, "optim"):  # all ranks have the same share, or rank 0 the largest
        return (0,)

    shares = partition_of(optimizer)
    parts = [[local(parameter).nbytes for parameter in share] for share in shares]
    held = [sum(2 * nbytes + STEP_BYTES for nbytes in share) for share in parts]
    with_largest = [
        size + 2 * max(share, default=0) for size, share in zip(held, parts, strict=True)
    ]
    most = [held.index(max(held)), with_largest.index(max(with_largest))]
    return tuple(number * row_of(config) for number in dict.fromkeys(most))
