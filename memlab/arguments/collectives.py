"""What the ranks of a sharded step send one another: the collectives, and their bytes."""

from enum import StrEnum


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
