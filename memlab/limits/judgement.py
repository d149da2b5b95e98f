"""Whether a step fits a memory limit: the peak that counts, and the one judgement of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from memlab.arguments.units import format_bytes

RunsWithin = Callable[[int], bool]
"""Whether a step whose peak is above a limit runs within it all the same."""


class Judgement(StrEnum):
    """Whether a step fits, as far as the uncertainty of its peak allows to say.

    >>> Judgement.TOO_CLOSE == "too close"
    True
    """

    FITS = "fits"
    TOO_CLOSE = "too close"
    DOES_NOT_FIT = "does not fit"

    @classmethod
    def of(cls, fits: bool | None, *, is_close: bool | None) -> "Judgement | None":
        """Return the judgement whose halves are `StepResult.fits` and `close_to_limit`."""
        if fits is None:
            return None
        if is_close:
            return cls.TOO_CLOSE
        return cls.FITS if fits else cls.DOES_NOT_FIT


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedPeak:
    """The peak that counts against a memory limit, and the judgement of whether it fits.

    On CUDA the caching allocator may not reserve more than the limit, so reserved bytes count. On a
    CPU there is no such allocator: allocated bytes count.

    >>> peak = CountedPeak(kind="allocated", nbytes=1000, uncertainty=0.05)
    >>> peak.upper_bytes, peak.fits(1020), peak.is_close_to(1020)
    (1050, True, True)

    Attributes:
        kind: "reserved" or "allocated".
        nbytes: measured or predicted.
        uncertainty: relative half-width of what was predicted, 0.01 for +-1 %; 0 if measured.
        needed_bytes: the least limit within which the step runs, if that is known. It is below the
            peak if the step takes less where there is less room.
        needed_uncertainty: relative half-width of that.
    """

    kind: str
    nbytes: int
    uncertainty: float = 0.0
    needed_bytes: int | None = None
    needed_uncertainty: float = 0.0

    @property
    def upper_bytes(self) -> int:
        """The peak at the upper end of its uncertainty."""
        return math.ceil(self.nbytes * (1 + self.uncertainty))

    @property
    def judged_uncertainty(self) -> float:
        """The uncertainty of what a limit is compared with: what is needed, where it is known."""
        is_known = self.needed_bytes is not None and self.needed_uncertainty
        return self.needed_uncertainty if is_known else self.uncertainty

    def fits(self, limit_bytes: int, runs_within: RunsWithin | None = None) -> bool:
        """Return whether a step with this peak runs within a limit.

        Args:
            limit_bytes: that it may hold.
            runs_within: asked if the peak is above the limit. The peak was reached without one; at
                a limit the caching allocator first gives back what it holds unused. None if that
                is not known: then what is needed decides, or else the peak.
        """
        if self.nbytes <= limit_bytes:
            return True
        if runs_within is not None:
            return runs_within(limit_bytes)
        return self.needed_bytes is not None and self.needed_bytes <= limit_bytes

    def is_close_to(self, limit_bytes: int, runs_within: RunsWithin | None = None) -> bool:
        """Return whether `fits` is another at one end of the uncertainty.

        A step that takes 5 % more fits a limit if this one fits a limit that is 1.05 times smaller.
        """
        width = self.judged_uncertainty
        if runs_within is not None and self.needed_uncertainty:
            width = self.needed_uncertainty
        if not width:
            return False

        if self.fits(limit_bytes, runs_within):
            return not self.fits(int(limit_bytes / (1 + width)), runs_within)
        return width >= 1 or self.fits(int(limit_bytes / (1 - width)), runs_within)

    def beside(self, limit_bytes: int, *, fits: bool | None) -> str:
        """Return how far the peak is from a limit, such as "1.00 GiB over the limit of 8.00 GiB".

        Args:
            limit_bytes: the limit.
            fits: whether the step runs within it, which one with less cache may.
        """
        is_over, limit = self.nbytes > limit_bytes, format_bytes(limit_bytes)
        distance = format_bytes(abs(limit_bytes - self.nbytes))
        text = f"{distance} {'over' if is_over else 'below'} the limit of {limit}"
        if is_over and fits:
            text = f"which fits the limit of {limit} with less cache"
        is_reserved = self.kind == "reserved"  # the text around it speaks of allocated bytes
        return f"{format_bytes(self.nbytes)} reserved, {text}" if is_reserved else text
