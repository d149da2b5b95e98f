"""`OperatorCost`: what one operator costs, and under what conditions that was found."""

from collections.abc import Mapping
from dataclasses import dataclass

from memlab.operators.signatures import Signature
from memlab.trace import Phase

STEADY = 1.5  # times the least: more than an idle machine spreads
BUSY_SHARE = 0.15  # of all processors


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCost:
    """What one operator costs, run alone on real memory.

    Attributes:
        output_bytes: of each output tensor, in flattening order: bytes of the storage that the
            operator brought into being; 0 where it is an argument's or an earlier output's.
        peak_bytes: most bytes allocated inside the operator and alive at once, outputs included.
        kept_bytes: allocated inside, alive afterwards and in no output, such as a library's cache.
        seconds: median time of one call, without autograd and Python around it; None if not timed.
        extrapolated: from the same operator at smaller sizes.
        num_repeats: calls that were timed.
        median_seconds: of these calls.
        least_seconds: of these calls.
        others_share: of all processors, what other programs used meanwhile; None if not known.
        taken_at: when it was timed, in seconds since 1970.
    """

    output_bytes: tuple[int, ...]
    peak_bytes: int
    kept_bytes: int = 0
    seconds: float | None = None
    extrapolated: bool = False
    num_repeats: int | None = None
    median_seconds: float | None = None
    least_seconds: float | None = None
    others_share: float | None = None
    taken_at: float | None = None

    @property
    def spread(self) -> float:
        """How many times the fastest call the median took; 1 where that is not known."""
        if not self.median_seconds or not self.least_seconds:
            return 1.0
        return self.median_seconds / self.least_seconds

    @property
    def is_noisy(self) -> bool:
        """Whether its time was taken while others used the processor, as far as that is known."""
        if self.seconds is None:
            return False
        return self.spread > STEADY or (self.others_share or 0.0) > BUSY_SHARE


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnownCosts:
    """What operators cost on a machine that need not be here, as it was recorded there.

    Attributes:
        operators: by signature. On a card only their seconds count: its memory follows rules.
        overheads: seconds that an operator of a phase takes besides its kernel; empty on a card.
    """

    operators: Mapping[Signature, OperatorCost]
    overheads: Mapping[Phase, float]
