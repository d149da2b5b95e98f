"""The reserved memory of a run of many batches that differ in length, by replay of the allocator.

The caching allocator keeps what is freed for later. A batch whose blocks fit none of the kept ones
gets new segments, so reserved memory creeps up from batch to batch, above what the worst batch
needs alone. Here one allocator serves batch after batch; its cache is never given back, as in a run
that does not call `torch.cuda.empty_cache()`. At a limit it is given back before memory runs out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memlab.allocator.replay import AllocatorSettings, Piece, replay_in_turn
from memlab.errors import UnsupportedError
from memlab.lengths.curve import LengthCurve
from memlab.lengths.distribution import Distribution
from memlab.predicting.forecast import STEP

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReservedRun:
    """What the caching allocator holds in a run of many batches, by prediction.

    Attributes:
        expandable_segments: whether its segments grow by pages.
        longest: int64, (batches,), the longest sample of each batch.
        reserved_bytes: int64, (batches,), reserved after each batch.
    """

    expandable_segments: bool
    longest: npt.NDArray[np.int64]
    reserved_bytes: npt.NDArray[np.int64]

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes reserved: nothing is given back, so it is what the last batch leaves."""
        return int(self.reserved_bytes.max())


def reserved_run(
    curve: LengthCurve,
    data: Distribution,
    num_batches: int,
    *,
    expandable_segments: bool,
    seed: int,
) -> ReservedRun:
    """Return what a run of random batches reserves.

    Raises:
        UnsupportedError: what a step allocates outlives it.
    """
    longest = longest_of_batches(data, curve.batch_size, num_batches, seed)
    settings = AllocatorSettings(expandable_segments=expandable_segments)
    reserved = replay_in_turn(_pieces(curve, longest.tolist()), settings)
    return ReservedRun(
        expandable_segments=expandable_segments,
        longest=longest,
        reserved_bytes=np.array(reserved, np.int64),
    )


def longest_of_batches(
    data: Distribution, batch_size: int, num_batches: int, seed: int
) -> npt.NDArray[np.int64]:
    """Return the longest sample of each batch; an epoch is shuffled and leaves out a rest."""
    generator, each = np.random.default_rng(seed), len(data) // batch_size
    epochs = [
        generator.permutation(data.lengths)[: each * batch_size].reshape(each, batch_size)
        for _ in range(-(-num_batches // each))
    ]
    found: npt.NDArray[np.int64] = np.concatenate(epochs).max(axis=1)[:num_batches]
    return found


def _pieces(curve: LengthCurve, lengths: list[int]) -> Iterator[Piece]:
    """Yield what each batch allocates and frees; the first also what is built before it.

    The first batch is that of the recorded step 0, which makes the optimizer's state. All others
    repeat the next step with blocks of their own sizes.
    """
    known: dict[int, Piece] = {}
    for number, length in enumerate(lengths):
        if number and length in known:
            yield known[length]
            continue
        trace = curve.trace(length)
        step = np.array([interval.step for interval in trace.intervals])[trace.interval]
        begin, end = (int(np.flatnonzero(step == which)[-1]) + 1 for which in (STEP - 1, STEP))
        rows = slice(begin, end) if number else slice(0, begin)
        stream = None if trace.stream is None else trace.stream[rows]
        piece = Piece(trace.address[rows], trace.nbytes[rows], stream)
        if number:
            _check_ends(piece)
            known[length] = piece
        yield piece


def _check_ends(piece: Piece) -> None:
    """Raise if a step leaves a block, or frees one of an earlier step: it could not be repeated."""
    changes = dict[int, int]()
    for address, nbytes in zip(piece.address.tolist(), piece.nbytes.tolist(), strict=True):
        changes[address] = changes.get(address, 0) + nbytes
    if any(changes.values()):
        raise UnsupportedError(
            "what a step of this workload allocates is freed in a later one, so that a run of many "
            "batches cannot be put together from single steps; allowed is a model that keeps "
            "nothing of a batch"
        )
