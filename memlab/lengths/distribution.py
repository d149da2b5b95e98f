"""`Distribution`: the lengths of all samples, and the longest one of a random batch.

A batch of b samples is padded to its longest one, so that decides what the batch costs. A shuffled
data set gives each set of b samples the same chance. Of N samples, c are at most as long as v, so
the longest of a batch is at most v with the chance that all b come from those c:

    c (c - 1) ... (c - b + 1)  /  N (N - 1) ... (N - b + 1)

This is exact; no batch is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt  # it costs 5 ms at import


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Distribution:
    """The lengths of all samples.

    Attributes:
        lengths: int64, (samples,), ascending.
        values: int64, (values,), each length once, ascending.
        num_up_to: int64, (values,), how many samples are at most as long.

    >>> Distribution.of([1, 1, 3]).expected_longest(2)  # 1 in one of three pairs, else 3
    2.3333333333333335
    """

    lengths: npt.NDArray[np.int64]
    values: npt.NDArray[np.int64] = field(init=False)
    num_up_to: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        values, counts = np.unique(self.lengths, return_counts=True)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "num_up_to", np.cumsum(counts))

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Distribution:
        """Return the distribution of lengths in any order."""
        return cls(lengths=np.sort(np.array(lengths, np.int64)))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def shortest(self) -> int:
        """The shortest sample."""
        return int(self.values[0])

    @property
    def longest(self) -> int:
        """The longest sample."""
        return int(self.values[-1])

    @property
    def total(self) -> int:
        """All samples together."""
        return int(self.lengths.sum())

    def words(self, unit: str) -> str:
        """Return how many samples there are, and of which lengths.

        >>> Distribution.of([1, 1, 3]).words("tokens"), Distribution.of([2]).words("tokens")
        ('3 samples of 1 to 3 tokens', '1 sample of 2 tokens')
        """
        several = f"{self.shortest:,} to " if self.shortest < self.longest else ""
        samples = "sample" if len(self) == 1 else "samples"
        return f"{len(self):,} {samples} of {several}{self.longest:,} {unit}"

    def cut_to(self, length: int) -> Distribution:
        """Return the distribution of samples of which the longer ones are cut to a length."""
        return Distribution(lengths=np.minimum(self.lengths, length))

    def chances_up_to(self, num_samples: int) -> npt.NDArray[np.float64]:
        """Return for each value the chance that no sample of a random batch is longer."""
        chances = np.ones(len(self.values))
        for drawn in range(num_samples):
            chances *= np.maximum(self.num_up_to - drawn, 0) / (len(self) - drawn)
        return chances

    def chance_above(self, length: int, num_samples: int) -> float:
        """Return the chance that a random batch has a sample that is longer than this."""
        at = int(np.searchsorted(self.values, length, "right")) - 1
        return 1.0 if at < 0 else 1.0 - float(self.chances_up_to(num_samples)[at])

    def expected_longest(self, num_samples: int) -> float:
        """Return the mean, over random batches, of their longest sample."""
        chances = np.diff(self.chances_up_to(num_samples), prepend=0.0)
        return float(chances @ self.values)

    def median_longest(self, num_samples: int) -> int:
        """Return the longest sample of the batch in the middle: half of all are no longer."""
        at = int(np.searchsorted(self.chances_up_to(num_samples), 0.5))
        return int(self.values[min(at, len(self.values) - 1)])
