"""One of many ranks, recorded in one process without the others.

The idea. PyTorch has a process group whose collectives return at once. In it the code of a sharded
step runs as one rank, whatever the number of ranks, and over fake tensors no value is missing. So
a recording takes as long for 4096 ranks as for two. Three things need help:

- `DistributedDataParallel` has a part in C++ that reads real memory; another does its work here.
- `fully_shard` frees and allocates whole parameters by resizing their storages, which the
  dispatcher does not see: the tracker is told.
- What collectives allocate inside themselves: `cost_model/links.py`.

Ranks that hold the same are recorded once. With `fully_shard` rank 0 holds the most: a dimension is
divided into parts of which only the last may be smaller. With ZeroRedundancyOptimizer ranks have
different shares of the parameters, and `heaviest_ranks` says which may hold the most.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from memlab._util.torch_private.ranks import (
    buckets_of,
    call_after_backward,
    drawn_as_on_a_cpu,
    forget_shardings,
    group_of_none,
    meshes_joined_unseen,
    parameters_divided_by,
    partition_of,
    replicated_by,
    shapes_found_unseen,
    sharded_types,
    storages_resized_by,
)
from memlab._util.units import format_bytes
from memlab.config import Sharding, StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques.sharding.ranks import is_tensor_parallel, local
from memlab.techniques.sharding.replicated import unused
from memlab.tracing import fake_cuda
from memlab.tracing.faking import is_dense
from memlab.tracing.program import Program
from memlab.tracing.tracker import Tracker

# Which ranks of a simulated step hold the same, so that one recording stands for all of them.
#
# With DistributedDataParallel all ranks hold the same. `fully_shard` divides the rows of a
# parameter into parts of one size, of which the last ones may be smaller or empty. Ten rows
# over four ranks:
#
#     rank        0  1  2  3
#     rows        3  3  3  1          ranks 0 to 2 are one class, rank 3 is another
#
# The number of classes depends on how many different numbers of rows the parameters have,
# not on the number of ranks. With ZeroRedundancyOptimizer each rank keeps the state of
# other whole parameters, so that there may be as many classes as ranks. Ranks that divide
# layers hold parts of one size: only what divides by their number is divided.

MOST_RECORDED_RANKS = 4  # that hold different things
MOST_OPERATORS = 20_000  # of a rank for others to be recorded too: some seconds
SHARD = "shard"  # the dimension of a mesh over which `fully_shard` divides parameters
Held = tuple[int, ...]  # of each parameter that a rank has a part or the state of: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SameRanks:
    """Ranks that hold the same.

    Attributes:
        numbers: of these ranks, in order.
        held_bytes: of the parts of parameters that each of them has; with a share of the optimizer
            state, of the parameters in this share.
    """

    numbers: tuple[int, ...]
    held_bytes: int


def same_ranks(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: StepConfig
) -> list[SameRanks]:
    """Return the classes of ranks that hold the same, those that hold most first.

    None are returned where parameters are divided in another way than `fully_shard` does by itself.
    """
    divided = [p for p in model.parameters() if isinstance(p, sharded_types())]
    if not all(map(_is_by_rows, divided)):
        return []

    found: dict[Held, list[int]] = defaultdict(list)
    if hasattr(optimizer, "optim"):
        for rank, share in enumerate(partition_of(optimizer)):
            found[tuple(sorted(local(parameter).nbytes for parameter in share))].append(rank)
    else:
        for first, last, held in _parts(divided):
            found[held] += range(first, last)

    # a group has a rank, or a row of ranks that divide layers, for each number
    size, row = sum(map(len, found.values())), row_of(config)
    starts = range(0, config.world_size, size * row)
    classes = [
        SameRanks(
            numbers=tuple(start + rank * row + one
                          for start in starts for rank in ranks for one in range(row)),
            held_bytes=sum(held),
        )
        for held, ranks in found.items()
    ]  # fmt: skip
    return sorted(classes, key=lambda each: -each.held_bytes)


def row_of(config: StepConfig) -> int:
    """Return how many ranks divide each layer. They are numbered in a row, and hold the same."""
    return config.world_size // config.data_parallel_size


def _is_by_rows(parameter: Any) -> bool:
    """Return whether `fully_shard` has divided a parameter by rows, or has not divided it."""
    if not parameter.device_mesh.mesh_dim_names:  # a mesh of a person's own
        return False
    sharded = parameter.placements[_sharded(parameter)] if _group_size(parameter) > 1 else None
    return sharded is None or getattr(sharded, "dim", None) == 0


def _sharded(parameter: Any) -> int:
    """Return the dimension of its mesh over which `fully_shard` has divided a parameter."""
    number: int = parameter.device_mesh.mesh_dim_names.index(SHARD)
    return number


def _parts(divided: Sequence[torch.Tensor]) -> list[tuple[int, int, Held]]:
    """Return runs of ranks of one group (first, last + 1) and what each of them holds.

    One rank alone stands for all of them if `fully_shard` has divided no parameter.
    """
    count = max(map(_group_size, divided), default=1)
    bounds = {0, count}
    for parameter in divided:
        rows, _ = _rows(parameter)
        most = -(-rows // count)
        whole = rows // most if most else 0  # ranks whose part has the full size
        bounds |= {min(whole, count), min(whole + 1, count)}

    ordered = sorted(bounds)
    return [
        (first, last, tuple(_part_bytes(parameter, first, count) for parameter in divided))
        for first, last in itertools.pairwise(ordered)
    ]


def _group_size(parameter: Any) -> int:
    mesh = parameter.device_mesh
    size: int = mesh.size(_sharded(parameter)) if SHARD in mesh.mesh_dim_names else 1
    return size


def _rows(parameter: Any) -> tuple[int, int]:
    """Return the rows that `fully_shard` divides, and the bytes of a row.

    Of a divided layer these are of the part of one rank of a row; its parts are equal.
    """
    mesh, shape = parameter.device_mesh, list(parameter.shape)
    for number, placement in enumerate(parameter.placements):
        if mesh.mesh_dim_names[number] != SHARD and placement.is_shard():
            shape[placement.dim] //= mesh.size(number)
    rows = shape[0] if shape else 1
    return rows, math.prod(shape[1:]) * parameter.dtype.itemsize


def _part_bytes(parameter: Any, rank: int, count: int) -> int:
    rows, row_bytes = _rows(parameter)
    most = -(-rows // count)
    return max(0, min(most, rows - rank * most)) * row_bytes


def with_other_ranks(
    worst: int,
    of_rank: Callable[[int], Program],
    classes: Sequence[SameRanks],
    *,
    every_rank: bool,
) -> Program:
    """Return the program of a rank with those of ranks that hold something else.

    Recorded are the rank that holds least, then those that most ranks are like. A large model is
    recorded once.

    Args:
        worst: the number of the rank.
        of_rank: records another one.
        classes: of ranks that hold the same; empty if that is not known.
        every_rank: whether to record others than the worst.
    """
    program = of_rank(worst)
    own = next((each for each in classes if worst in each.numbers), None)
    if own is None:
        program.recording.notes += (f"Of all ranks only rank {worst} was recorded.",)
        return replace(program, ranks=(worst,))

    others = [each for each in classes if each is not own]
    wanted = sorted(others, key=lambda each: (each is not others[-1], -len(each.numbers)))
    is_large = len(program.recording.operators) > MOST_OPERATORS
    chosen = [] if is_large or not every_rank else wanted[: MOST_RECORDED_RANKS - 1]
    said = said_of_others(classes, [own, *chosen])
    found = []
    for each in (own, *chosen):
        recorded = of_rank(worst if each is own else each.numbers[0])
        recorded.recording.notes += said
        found.append(replace(recorded, ranks=each.numbers))
    return replace(found[0], other_ranks=tuple(found[1:]))


def said_of_others(classes: Sequence[SameRanks], recorded: Sequence[SameRanks]) -> tuple[str, ...]:
    """Return a sentence about classes that were not recorded; none if all were."""
    left = [each for each in classes if each not in recorded]
    if not left:
        return ()
    count = sum(len(each.numbers) for each in left)
    sizes = [each.held_bytes for each in left]
    least, most = min(sizes), max(sizes)
    spread = format_bytes(least)
    spread += f" to {format_bytes(most)}" if most > least else ""
    one = f"rank {left[0].numbers[0]} was" if count == 1 else f"{count} ranks were"
    return (
        f"{one[0].upper()}{one[1:]} not recorded apart: by arithmetic, {spread} of the parameters "
        f"are theirs, and {format_bytes(classes[0].held_bytes)} of the rank that has most.",
    )


# What DistributedDataParallel does between gradients and ranks, over fake tensors.
#
# Its own `Reducer` is written in C++ and reads the memory of tensors, which fake ones do
# not have. This one runs the same operators in the same order. Source:
# torch/csrc/distributed/c10d/reducer.cpp.
#
# The idea. Gradients are averaged in buckets, which stay allocated from step to step:
#
#     construction           one bucket for all parameters a gradient is ready    it is
# copied into its bucket, divided by the number of ranks a bucket is full       it is
# averaged over the ranks, if all buckets before it have been the end of backward    buckets
# are copied back into the gradients the next forward       once: buckets are made anew, in
# the order in which gradients were ready, of 1 MiB for the first and 25 MiB for the others
#
# The old buckets are freed before new ones are made. In a micro-batch whose gradients are
# not averaged none of it happens. A parameter without a gradient leaves its bucket open,
# and the next forward raises an error, there as here. Left out: sparse parameters, and
# buckets as gradients.


class FakeLogger:
    """Stands for the logger of the reducer: it does nothing."""

    def __init__(self, reducer: FakeReducer) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        """Return a function that does nothing."""
        return lambda *args, **kwargs: None


class FakeReducer:
    """Averages gradients as `torch.distributed.Reducer`, whose arguments it takes."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        bucket_indices: list[list[int]],
        limits: list[int],
        group: Any,
        are_sparse: list[bool],
        bucket_bytes: int,
        find_unused: bool,
        as_views: bool,
        names: dict[int, str],
        first_bucket_bytes: int,
        *others: Any,
    ) -> None:
        self._parameters, self._group, self._names = list(parameters), group, names
        self._limits = (first_bucket_bytes, bucket_bytes)
        self._ready: list[int] = []  # in the order of the gradients of the first backward
        self._is_rebuilt = self._expects = False
        self._without: set[int] = set()  # parameters whose gradients an open backward waits for
        self._make_buckets(bucket_indices)
        this = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_call, this, index))
            for index, parameter in enumerate(self._parameters)
        ]

    def set_logger(self, logger: FakeLogger) -> None:
        """Do nothing."""

    def prepare_for_forward(self) -> None:
        """Do nothing."""

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """Expect a gradient of every parameter in the next backward."""
        self._expects = True
        self._pending = [len(bucket) for bucket in self._buckets]
        self._next = 0
        self._without = set(range(len(self._parameters)))

    def _rebuild_buckets(self) -> bool:
        """Make buckets in the order in which gradients were ready, once.

        Raises:
            UnsupportedError: the backward before gave no gradient to a parameter.
        """
        self._check_finished()
        if self._is_rebuilt or not self._ready:
            return False
        parameters = [self._parameters[index] for index in self._ready]
        buckets = buckets_of(parameters, self._limits, self._ready)
        self._is_rebuilt = True
        self._make_buckets(buckets)
        return True

    def _check_finished(self) -> None:
        """Raise UnsupportedError where DistributedDataParallel raises a RuntimeError."""
        if not 0 < len(self._without) < len(self._parameters):
            return

        raise unused([self._names[index] for index in sorted(self._without)])

    def _make_buckets(self, buckets: list[list[int]]) -> None:
        self._buckets = buckets
        self._flat: list[torch.Tensor] = []  # the old ones are freed first
        self._views: dict[int, torch.Tensor] = {}
        self._bucket_of = {at: n for n, bucket in enumerate(buckets) for at in bucket}
        for bucket in buckets:
            first = self._parameters[bucket[0]]
            count = sum(self._parameters[index].numel() for index in bucket)
            flat = torch.empty(count, dtype=first.dtype, device=first.device)
            self._flat.append(flat)
            offset = 0
            for index in bucket:
                like = self._parameters[index]
                strides = like.stride() if is_dense(like) else like.detach().contiguous().stride()
                self._views[index] = flat.as_strided(like.shape, strides, offset)
                offset += like.numel()

    def ready(self, index: int) -> None:
        """Copy a gradient into its bucket, and average the buckets that are full."""
        if not self._expects:
            return
        if not self._is_rebuilt:
            self._ready.append(index)
        gradient = self._parameters[index].grad
        assert gradient is not None
        with torch.no_grad():
            torch.mul(gradient, 1.0 / self._group.size(), out=self._views[index])
        self._without.discard(index)
        self._pending[self._bucket_of[index]] -= 1
        while self._next < len(self._buckets) and not self._pending[self._next]:
            dist.all_reduce(self._flat[self._next], group=self._group, async_op=True)
            self._next += 1
            if self._next == len(self._buckets):
                call_after_backward(self._finish)

    def _finish(self) -> None:
        self._expects = False
        with torch.no_grad():
            for bucket in self._buckets:
                for index in bucket:
                    gradient = self._parameters[index].grad
                    assert gradient is not None
                    gradient.copy_(self._views[index])


def _call(reducer: weakref.ref[FakeReducer], index: int, parameter: torch.Tensor) -> None:
    found = reducer()
    if found is not None:
        found.ready(index)


STEP_BYTES = 4


@contextlib.contextmanager
def as_rank(config: StepConfig, rank: int, tracker: Tracker) -> Iterator[None]:
    """Let this process be one of the ranks of a config, as far as a recording can tell.

    Raises:
        UnsupportedError: the sharding is DeepSpeed's, or as for `alone_among`.
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

    try:
        with alone_among(config.world_size, rank, tracker):
            yield
    finally:
        if is_tensor_parallel(config):
            forget_shardings()


@contextlib.contextmanager
def alone_among(world_size: int, rank: int, tracker: Tracker) -> Iterator[None]:
    """Let this process be one of so many ranks, as far as a recording can tell.

    Raises:
        UnsupportedError: this process is one of several real ranks, or PyTorch has none.
    """
    if not dist.is_available():
        raise UnsupportedError("this build of PyTorch has no torch.distributed")
    if dist.is_initialized():
        raise UnsupportedError(
            "a process group is open in this process, so a sharded step cannot be predicted here; "
            "call memlab.predict from a process that is no rank"
        )

    with (
        group_of_none(rank, world_size),
        replicated_by(FakeReducer, FakeLogger),
        shapes_found_unseen(),
        drawn_as_on_a_cpu(),
        meshes_joined_unseen(),
        parameters_divided_by(PartsOnDemand),
        storages_resized_by(tracker.blocks.resize),
        fake_cuda.issued_on(tracker.streams),
    ):
        yield


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
