"""`OperatorCost`: the memory and time of one operator, and the conditions of the measurement."""

from collections.abc import Mapping
from dataclasses import dataclass

from memlab.operators.signatures import Signature
from memlab.trace import Phase

STEADY = 1.5  # median over minimum; on an idle machine it is less
BUSY_SHARE = 0.15  # of all processors


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCost:
    """The memory and time of one operator, run alone on real memory.

    Attributes:
        output_bytes: for each output tensor, in flattening order, the bytes of the storage that
            the operator allocated; 0 if the storage belongs to an argument or an earlier output.
        peak_bytes: most bytes that the operator holds at once, outputs included.
        kept_bytes: bytes that stay allocated afterwards but are in no output, such as a cache.
        seconds: time of one call without autograd and Python around it; None if not timed.
        extrapolated: whether it was computed from the same operator at smaller sizes.
        num_repeats: number of timed calls.
        median_seconds: median of these calls.
        least_seconds: minimum of these calls.
        others_share: the share of all processors that other programs used; None if not known.
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
        """The median divided by the minimum; 1 if they are not known."""
        if not self.median_seconds or not self.least_seconds:
            return 1.0
        return self.median_seconds / self.least_seconds

    @property
    def is_noisy(self) -> bool:
        """Whether its time was taken while the machine was busy, as far as that is known."""
        if self.seconds is None:
            return False
        return self.spread > STEADY or (self.others_share or 0.0) > BUSY_SHARE


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnownCosts:
    """Recorded costs of operators on another machine.

    Attributes:
        operators: costs by signature. For a card only their seconds are used, since its memory
            follows rules.
        overheads: by phase, seconds that an operator takes besides its kernel; empty for a card.
        origin: a clause on where they were found, if a prediction has to say that.
    """

    operators: Mapping[Signature, OperatorCost]
    overheads: Mapping[Phase, float]
    origin: str = ""
