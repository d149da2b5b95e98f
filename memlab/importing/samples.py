"""Batches from the first samples of a data set, put together as the trainer's loader would.

The samples are read once, while a trainer is imported, so that a batch is the same each time and a
worker does not need the data set. A batch of more samples repeats them in order.
"""

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memlab.arguments.quoting import printable
from memlab.errors import WorkloadError

MOST_KEPT = 64  # samples, if one update has no more
TOKENS = "input_ids"
COUNTED = {"labels": -100, "completion_mask": 0, "assistant_masks": 0}
"""Columns that say which tokens count in the loss, with the value of those that do not."""
WHICH = "memlab_samples"  # in a batch of joined samples: the number of the first, and how many


@dataclass(frozen=True, slots=True)
class KeptSamples:
    """`make_batch` of a workload: n samples, collated.

    Attributes:
        samples: the first of the data set.
        collate: the trainer's own.
        length: to which each sample is cut or repeated; None leaves them as they are.
    """

    samples: list[Any]
    collate: Callable[[list[Any]], Any]
    length: int | None = None

    def __call__(self, n: int) -> Any:
        """Return a batch of n samples; a mapping becomes a dict."""
        return self.of(0, n)

    def of(self, first: int, n: int) -> Any:
        """Return a batch of the n samples from number `first` on."""
        chosen = [self.samples[i % len(self.samples)] for i in range(first, first + n)]
        if self.length is not None:
            chosen = [resized(each, self.length) for each in chosen]
        # some collators write into the samples
        batch = self.collate([copy.copy(each) for each in chosen])
        return dict(batch) if isinstance(batch, Mapping) else batch

    def __repr__(self) -> str:
        """Return how many samples there are, not the samples."""
        return f"KeptSamples({len(self.samples)} samples)"


@dataclass(frozen=True, slots=True)
class JoinedSamples:
    """`make_batch` and more of a workload whose collator joins samples into rows of its own.

    Examples are sequences that are laid end to end in one row, and pairs of which the first halves
    come before all second halves. Such a batch is divided by collating its samples again, so that
    it says which they are.

    Attributes:
        kept: the samples, and what collates them.
    """

    kept: KeptSamples

    def __call__(self, n: int) -> Any:
        """Return a batch of n samples."""
        return self._of(0, n)

    def count(self, batch: Any) -> int:
        """Return the number of samples in a batch: `count_samples` of the workload."""
        number: int = batch[WHICH][1]
        return number

    def split(self, batch: Any, sizes: list[int]) -> list[Any]:
        """Return batches of these numbers of samples: `split_batch` of the workload."""
        firsts = itertools.accumulate(sizes, initial=batch[WHICH][0])
        return [self._of(first, size) for first, size in zip(firsts, sizes, strict=False)]

    def _of(self, first: int, n: int) -> Any:
        return {**self.kept.of(first, n), WHICH: (first, n)}


@dataclass(frozen=True, slots=True)
class KeptColumns:
    """A collator that first drops what the model does not take.

    Attributes:
        collate: the trainer's own.
        columns: the names that stay.
    """

    collate: Callable[[list[Any]], Any]
    columns: frozenset[str]

    def __call__(self, samples: list[Any]) -> Any:
        """Return the samples without the other columns, collated."""
        return self.collate([
            {name: value for name, value in each.items() if name in self.columns}
            if isinstance(each, Mapping)
            else each
            for each in samples
        ])  # fmt: skip


def length_of(sample: Any) -> int:
    """Return how many tokens a sample has; 0 if it has no column of tokens."""
    tokens: Any = sample.get(TOKENS) if isinstance(sample, Mapping) else None
    return len(tokens) if _is_column(tokens) else 0


def resized(sample: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return a sample of this many tokens: its own, cut or repeated, in all columns of its length.

    If no token of the first ones counts in the loss, which then would be a mean over none, it is
    the last ones that stay.

    >>> resized({"input_ids": [1, 2, 3], "labels": [-100, 5, 6], "id": 7}, 4)
    {'input_ids': [1, 2, 3, 1], 'labels': [-100, 5, 6, -100], 'id': 7}
    >>> resized({"input_ids": [1, 2, 3], "labels": [-100, -100, 6]}, 2)
    {'input_ids': [2, 3], 'labels': [-100, 6]}
    """
    own = length_of(sample)
    columns = {k: v for k, v in sample.items() if _is_column(v) and len(v) == own}
    first = 0
    for name, ignored in COUNTED.items():
        if name in columns and all(int(each) == ignored for each in columns[name][:length]):
            first = max(0, own - length)
    made = {name: _taken(column, first, length) for name, column in columns.items()}
    return {**sample, **made, **({"length": length} if "length" in sample else {})}


def _is_column(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim == 1
    return isinstance(value, list | tuple)


def _taken(column: Any, first: int, length: int) -> Any:
    """Return so many values of a column, which is repeated if it has fewer."""
    own = len(column)
    if length <= own:
        return column[first : first + length]
    times = -(-length // own)
    if isinstance(column, torch.Tensor):
        return column.repeat(times)[:length]
    if isinstance(column, np.ndarray):
        return np.tile(column, times)[:length]
    return (column * times)[:length]


def first_samples(dataset: Any, batch_size: int) -> list[Any]:
    """Return the first samples of a data set: as many as an update needs, and at least 64.

    Raises:
        WorkloadError: it has none, or cannot be read; the message says what it raised.
    """
    most = max(batch_size, MOST_KEPT)
    try:
        is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if is_indexed:
            found = [dataset[i] for i in range(min(most, len(dataset)))]
        else:
            found = list(itertools.islice(iter(dataset), most))
    except Exception as error:  # a person's own data set may raise anything
        raise WorkloadError(
            f"the data set ({type(dataset).__name__}) cannot be read: {type(error).__name__}: "
            f"{printable(str(error))}; pass a trainer whose data can be read here"
        ) from error

    if not found:
        raise WorkloadError(
            f"the data set ({type(dataset).__name__}) has no samples; pass a trainer with at least "
            "one"
        )
    return found
