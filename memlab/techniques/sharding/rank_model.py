"""A model as one of several ranks runs it, and this rank's part of the batch."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from memlab.config import StepConfig
from memlab.errors import WorkloadError
from memlab.techniques.sharding.ranks import seed_of

if TYPE_CHECKING:  # the engine is imported where it is started
    from memlab.techniques.sharding.deepspeed_engine import Engine

MOST_SIMULATED_PARTS = 16  # of a batch; all parts of a batch are made alike


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharded:
    """A model as one of several ranks runs it.

    Attributes:
        run_model: what runs instead of the model: it communicates with the other ranks.
        part: which part of the batch this rank computes, from 0.
        num_parts: into how many equal parts a batch is divided.
        in_micro_batch: returns the context of the forward and backward of a micro-batch, given
            whether the ranks average their gradients after it.
        layers: those that are divided, as in `Divided`.
        notes: what a reader must know about how the model is divided.
        engine: computes gradients and updates in place of autograd and the optimizer; None
            without DeepSpeed.
        group: the process group of the ranks that hold copies of the same; None if all do.
    """

    run_model: torch.nn.Module
    part: int
    num_parts: int
    in_micro_batch: Callable[[bool], contextlib.AbstractContextManager[None]]
    layers: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    engine: "Engine | None" = None
    group: Any = None

    def seed_of(self, seed: int) -> int:
        """Return the seed of a step in this rank."""
        return seed_of(seed, self.part)

    @property
    def num_made(self) -> int:
        """How many parts of a batch this rank makes, to know what they weigh: all, if it is real.

        The batch of thousands of simulated ranks would take longer to make than to train on.
        """
        is_simulated = dist.is_initialized() and dist.get_backend() == "fake"
        return min(self.num_parts, MOST_SIMULATED_PARTS) if is_simulated else self.num_parts


def part_sizes(config: StepConfig, sharded: Sharded) -> list[int]:
    """Return the samples of every part of a batch that a rank makes."""
    return [config.rank_batch_size] * sharded.num_made


def own_weights(weights: Sequence[float], sharded: Sharded) -> list[float]:
    """Return the weights of this rank's micro-batches, given those of all ranks in order.

    The ranks' gradients are averaged, so that each weight is multiplied by their number: the sum
    over all micro-batches, which one process would compute, is the average of the ranks' sums.

    Raises:
        WorkloadError: a micro-batch has no loss terms. One process would skip it, but all ranks
            must run the same collectives.
    """
    if not min(weights) > 0.0:
        raise WorkloadError(
            "num_loss_terms counts no terms in one of the micro-batches, which the ranks of a "
            "sharded step cannot skip; use larger micro-batches, or samples that all have terms"
        )
    count = len(weights) // sharded.num_made
    first = sharded.part % sharded.num_made * count
    return [weight * sharded.num_made for weight in weights[first : first + count]]
