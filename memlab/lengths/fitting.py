"""Up to which length a step fits a limit, and what cutting samples there would lose."""

from collections.abc import Sequence
from dataclasses import dataclass

from memlab.lengths.curve import LengthCurve
from memlab.lengths.distribution import Distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """Samples that are cut at a length, so that each batch fits.

    Attributes:
        max_length: the longest sample that certainly fits: at the upper end of the uncertainty.
        num_samples_cut: samples that are longer.
        samples_cut_fraction: of all samples, 0..1.
        tokens_cut_fraction: of all tokens, 0..1.
    """

    max_length: int
    num_samples_cut: int
    samples_cut_fraction: float
    tokens_cut_fraction: float


def longest_within(curve: LengthCurve, peaks: Sequence[tuple[int, int]], limit_bytes: int) -> int:
    """Return the longest length whose step fits a limit; 0 if none does.

    A longer batch is taken to hold more, so it is found by halving.

    Args:
        curve: of the step.
        peaks: some lengths with the peaks of their steps, ascending; none beyond is asked for.
        limit_bytes: that the step may hold.
    """
    longest = peaks[-1][0]
    if curve.fits(longest, limit_bytes):
        return longest
    low, high = max((length for length, peak in peaks if peak <= limit_bytes), default=0), longest
    while high - low > 1:
        middle = (low + high) // 2
        if curve.fits(middle, limit_bytes):
            low = middle
        else:
            high = middle
    return low


def truncation(data: Distribution, max_length: int) -> Truncation:
    """Return what cutting samples at a length loses."""
    cut = int((data.lengths > max_length).sum())
    return Truncation(
        max_length=max_length,
        num_samples_cut=cut,
        samples_cut_fraction=cut / len(data),
        tokens_cut_fraction=1.0 - data.cut_to(max_length).total / data.total,
    )
