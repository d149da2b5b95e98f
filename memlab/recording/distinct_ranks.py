"""Which ranks of a simulated step hold the same, so that one recording stands for all of them.

With DistributedDataParallel all ranks hold the same. `fully_shard` divides the rows of a parameter
into parts of one size, of which the last ones may be smaller or empty. Ten rows over four ranks:

    rank        0  1  2  3
    rows        3  3  3  1          ranks 0 to 2 are one class, rank 3 is another

The number of classes depends on how many different numbers of rows the parameters have, not on the
number of ranks. With ZeroRedundancyOptimizer each rank keeps the state of other whole parameters,
so that there may be as many classes as ranks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memlab.arguments.units import format_bytes
from memlab.config import StepConfig
from memlab.recording.program import Program
from memlab.torch_private.ranks import partition_of, sharded_types

MOST_RECORDED_RANKS = 4  # that hold different things
MOST_OPERATORS = 20_000  # of a rank for others to be recorded too: some seconds
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
            found[tuple(sorted(parameter.nbytes for parameter in share))].append(rank)
    else:
        for first, last, held in _parts(divided):
            found[held] += range(first, last)

    size = sum(map(len, found.values()))  # of a group; each copy of the model has one
    starts = range(0, config.world_size, size)
    classes = [
        SameRanks(
            numbers=tuple(start + rank for start in starts for rank in ranks), held_bytes=sum(held)
        )
        for held, ranks in found.items()
    ]
    return sorted(classes, key=lambda each: -each.held_bytes)


def _is_by_rows(parameter: Any) -> bool:
    """Return whether a parameter is divided by rows over the last dimension of its mesh alone."""
    from torch.distributed.tensor import Shard  # 0.3 s that few need

    *others, last = parameter.placements
    return type(last) is Shard and last.dim == 0 and all(each.is_replicate() for each in others)


def _parts(divided: Sequence[torch.Tensor]) -> list[tuple[int, int, Held]]:
    """Return runs of ranks of one group (first, last + 1) and what each of them holds.

    One rank alone stands for all of them if no parameter is divided.
    """
    if not divided:
        return [(0, 1, ())]

    count = _group_size(divided[0])
    bounds = {0, count}
    for parameter in divided:
        rows = parameter.shape[0] if parameter.ndim else 1
        most = -(-rows // count)
        whole = rows // most if most else 0  # ranks whose part has the full size
        bounds |= {min(whole, count), min(whole + 1, count)}

    ordered = sorted(bounds)
    return [
        (first, last, tuple(_part_bytes(parameter, first, count) for parameter in divided))
        for first, last in itertools.pairwise(ordered)
    ]


def _group_size(parameter: torch.Tensor) -> int:
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    size: int = mesh.size(mesh.ndim - 1)
    return size


def _part_bytes(parameter: torch.Tensor, rank: int, count: int) -> int:
    rows = parameter.shape[0] if parameter.ndim else 1
    most = -(-rows // count)
    own = max(0, min(most, rows - rank * most))
    return own * (parameter.numel() // rows if rows else 0) * parameter.dtype.itemsize


def with_other_ranks(
    worst: int, of_rank: Callable[[int], Program], classes: Sequence[SameRanks]
) -> Program:
    """Return the program of a rank with those of ranks that hold something else.

    Recorded are the rank that holds least, then those that most ranks are like. A large model is
    recorded once.

    Args:
        worst: the number of the rank.
        of_rank: records another one.
        classes: of ranks that hold the same; empty if that is not known.
    """
    program = of_rank(worst)
    own = next((each for each in classes if worst in each.numbers), None)
    if own is None:
        program.recording.notes += (f"Of all ranks only rank {worst} was recorded.",)
        return replace(program, ranks=(worst,))

    others = [each for each in classes if each is not own]
    wanted = sorted(others, key=lambda each: (each is not others[-1], -len(each.numbers)))
    is_large = len(program.recording.operators) > MOST_OPERATORS
    chosen = [] if is_large else wanted[: MOST_RECORDED_RANKS - 1]
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
