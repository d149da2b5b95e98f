"""A model as one of several ranks runs it, and this rank's part of the batch."""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from memlab.config import StepConfig
from memlab.errors import UnsupportedError, WorkloadError
from memlab.techniques.sharding.ranks import seed_of

if TYPE_CHECKING:
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


# Check in the first micro-batch that all ranks run the same modules in the same order.
#
# FSDP2 gathers a block when it runs, and reduces the gradients that a rank has. A rank that
# runs another block than the others, such as the expert to which its tokens are routed,
# would get weights or gradients of the wrong one, without an error. Left out: later micro-
# batches, compiled models.

Context = Callable[[bool], contextlib.AbstractContextManager[None]]


def checked_once(model: nn.Module, context: Context, device: torch.device) -> Context:
    """Return `context`, which also checks the calls of the first micro-batch.

    Args:
        model: fully sharded.
        context: of a micro-batch, by whether the ranks average their gradients after it.
        device: of this rank.

    Raises:
        UnsupportedError: in the micro-batch, in all ranks, before weights or gradients are mixed.
    """
    calls: Calls | None = Calls(model, device)

    @contextlib.contextmanager
    def checked(is_synced: bool) -> Iterator[None]:
        nonlocal calls
        first, calls = calls, None
        with context(is_synced), first or contextlib.nullcontext():
            yield

    return checked


class Calls:
    """The modules with parameters that this rank has run since the ranks last compared them."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.paths: list[str] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        """Compare before a block is gathered, and after forward."""
        for path, module in self.model.named_modules():
            is_unit = isinstance(module, FSDPModule)
            if is_unit:
                compare = self._comparing(path)
                self._hooks.append(module.register_forward_pre_hook(compare, prepend=True))
            elif any(True for _ in module.parameters(recurse=False)):
                self._hooks.append(module.register_forward_pre_hook(self._noting(path)))
        self._hooks.append(self.model.register_forward_hook(self._comparing("the end of forward")))

    def __exit__(self, *_: object) -> None:
        """Watch no more calls."""
        for hook in self._hooks:
            hook.remove()

    def _noting(self, path: str) -> Callable[..., None]:
        def note(*_: object) -> None:
            self.paths.append(path)

        return note

    def _comparing(self, path: str) -> Callable[..., None]:
        def compare(*_: object) -> None:
            self.paths.append(path)
            self._compare()
            self.paths.clear()

        return compare

    def _compare(self) -> None:
        """Raise an error in all ranks if they have run different modules."""
        digest = zlib.crc32("\n".join(self.paths).encode())
        ends = torch.tensor([digest, -digest], device=self.device)
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        most, least = ends.tolist()
        if most == -least:
            return
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.paths)
        other = next(rank for rank, paths in enumerate(found) if paths != found[0])
        place = next(
            index
            for index in range(len(found[0]) + len(found[other]))
            if found[0][index : index + 1] != found[other][index : index + 1]
        )
        first, second = (
            (paths[place] or "the model") if place < len(paths) else "nothing"
            for paths in (found[0], found[other])
        )
        raise UnsupportedError(
            f"rank 0 runs {first} where rank {other} runs {second}: FSDP2 gathers parameters and "
            "reduces gradients in the order in which modules run, so the ranks would train with "
            "one another's; let every rank run every module (an expert that gets no tokens, with "
            "none of them), or train in one process"
        )
