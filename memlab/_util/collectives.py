"""What the ranks of a sharded step send one another: the collectives, and their bytes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from memlab._util.units import format_bytes


class Collective(StrEnum):
    """What ranks do together. The payload is the whole tensor, before or after it is divided.

    - all-gather: each rank has a part, and gets those of all others.
    - reduce-scatter: each rank has a whole tensor, and gets its part of the sum.
    - all-reduce: each rank has a whole tensor, and gets the whole sum.
    - broadcast: one rank has a tensor, and all others get it.
    - all-to-all: each rank has a part for every other.
    """

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all-to-all"

    def rounds(self, num_ranks: int) -> int:
        """Return in how many rounds a ring of ranks does it, each passing on a part of the whole.

        A ring passes a broadcast on as a whole, in pieces that follow one another.

        >>> Collective.ALL_REDUCE.rounds(4)  # a reduce-scatter and an all-gather
        6
        """
        return (2 if self is Collective.ALL_REDUCE else 1) * (num_ranks - 1)

    def sent_bytes(self, payload_bytes: int, num_ranks: int) -> int:
        """Return what a rank sends for it in a ring, rounded down to a byte.

        These are the factors by which nccl-tests computes its "busbw" (doc/PERFORMANCE.md).

        >>> Collective.ALL_GATHER.sent_bytes(4096, 4), Collective.ALL_REDUCE.sent_bytes(4096, 4)
        (3072, 6144)
        """
        if num_ranks == 1:
            return 0
        if self is Collective.BROADCAST:
            return payload_bytes
        return payload_bytes * self.rounds(num_ranks) // num_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """What a rank does together with others in one step, by one collective in groups of one size.

    Attributes:
        collective: of all these calls.
        num_ranks: that take part in each call.
        num_calls: in the step.
        payload_bytes: of the whole tensors, over all calls.
        sent_bytes: that this rank sends for them if they go round a ring.
    """

    collective: Collective
    num_ranks: int
    num_calls: int
    payload_bytes: int
    sent_bytes: int

    def __str__(self) -> str:
        """Return it in words, such as "all-gather 1.5 MiB in 9 calls among 4 ranks"."""
        sent = format_bytes(self.sent_bytes)
        calls = f"{self.num_calls} call{'s' * (self.num_calls > 1)}"
        return f"{self.collective} {sent} in {calls} among {self.num_ranks} ranks"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON types."""
        return asdict(self) | {"collective": str(self.collective)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Communication":
        """Return what `to_dict` wrote."""
        return cls(**{**data, "collective": Collective(data["collective"])})


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a collective: how many ranks take part, and the bytes of the whole tensor."""

    collective: Collective
    num_ranks: int
    payload_bytes: int


def communication_of(calls: Iterable[Call]) -> tuple[Communication, ...]:
    """Return calls added up: by collective, and by the size of the groups.

    >>> call = Call(Collective.ALL_GATHER, 4, 400)
    >>> [(each.num_calls, each.sent_bytes) for each in communication_of([call, call])]
    [(2, 600)]
    """
    payloads: dict[tuple[Collective, int], list[int]] = defaultdict(list)
    for call in calls:
        payloads[call.collective, call.num_ranks].append(call.payload_bytes)
    order = list(Collective)
    return tuple(
        Communication(
            collective=kind,
            num_ranks=ranks,
            num_calls=len(sizes),
            payload_bytes=sum(sizes),
            sent_bytes=sum(kind.sent_bytes(size, ranks) for size in sizes),
        )
        for (kind, ranks), sizes in sorted(
            payloads.items(), key=lambda item: (order.index(item[0][0]), item[0][1])
        )
    )


def named_ranks(numbers: Sequence[int]) -> str:
    """Return the numbers of ranks with neighbours as a range, and steps of one size in short.

    >>> named_ranks([0, 1, 2, 5]), named_ranks([0, 8, 16, 24])
    ('0-2, 5', '0, 8 ... 24')
    """
    ordered = sorted(numbers)
    steps = {after - before for before, after in pairwise(ordered)}
    if len(ordered) > 3 and len(steps) == 1 and steps != {1}:
        return f"{ordered[0]}, {ordered[1]} ... {ordered[-1]}"
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
