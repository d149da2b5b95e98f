"""Batches from the first samples of a data set, put together as the trainer's loader would.

The samples are read once, while a trainer is imported, so that a batch is the same each time and a
worker does not need the data set. A batch of more samples repeats them in order.
"""

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memlab.arguments.quoting import printable
from memlab.errors import WorkloadError

MOST_KEPT = 64  # samples, if one update has no more


@dataclass(frozen=True, slots=True)
class KeptSamples:
    """`make_batch` of a workload: n samples, collated.

    Attributes:
        samples: the first of the data set.
        collate: the trainer's own.
    """

    samples: list[Any]
    collate: Callable[[list[Any]], Any]

    def __call__(self, n: int) -> Any:
        """Return a batch of n samples; a mapping becomes a dict."""
        chosen = [self.samples[i % len(self.samples)] for i in range(n)]
        # some collators write into the samples
        batch = self.collate([copy.copy(each) for each in chosen])
        return dict(batch) if isinstance(batch, Mapping) else batch

    def __repr__(self) -> str:
        """Return how many samples there are, not the samples."""
        return f"KeptSamples({len(self.samples)} samples)"


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


@dataclass(frozen=True, slots=True)
class CopiedModel:
    """`build_model` of a workload: a copy on the CPU, without gradients.

    Attributes:
        model: as the trainer has it; never changed.
    """

    model: torch.nn.Module

    def __call__(self) -> torch.nn.Module:
        """Return a new copy."""
        made = copy.deepcopy(self.model).to("cpu")
        made.zero_grad(set_to_none=True)
        return made

    def __repr__(self) -> str:
        """Return the class of the model, which may print itself over pages."""
        return f"CopiedModel({type(self.model).__name__})"


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
