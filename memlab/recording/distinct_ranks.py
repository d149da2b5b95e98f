"""Which ranks of a simulated step hold the same, so that one recording stands for all of them.

With DistributedDataParallel all ranks hold the same. `fully_shard` divides the rows of a parameter
into parts of one size, of which the last ones may be smaller or empty. Ten rows over four ranks:

    rank        0  1  2  3
    rows        3  3  3  1          ranks 0 to 2 are one class, rank 3 is another

The number of classes depends on how many different numbers of rows the parameters have, not on the
number of ranks. With ZeroRedundancyOptimizer each rank keeps the state of other whole parameters,
so that there may be as many classes as ranks. Ranks that divide layers hold parts of one size:
only what divides by their number is divided.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memlab.arguments.units import format_bytes
from memlab.config import StepConfig
from memlab.recording.program import Program
from memlab.techniques.sharding.ranks import local
from memlab.torch_private.ranks import sharded_types
from memlab.torch_private.sent_parts import partition_of

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
