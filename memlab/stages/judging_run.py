"""Which stages of a run fit a limit: on a card by replay of the caching allocator at that limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from memlab.allocator.replay import AllocatorSettings, replay
from memlab.limits.judgement import CountedPeak
from memlab.stages.course import StageName
from memlab.stages.run_result import StageCost
from memlab.stages.stage_costs import rows_of_stages
from memlab.trace import Trace


def judged(
    stages: Sequence[StageCost],
    counted: Sequence[CountedPeak],
    limit_bytes: int | None,
    replayed: ReplayedRun | None = None,
) -> tuple[StageCost, ...]:
    """Return the stages with whether each fits.

    Args:
        stages: of a run.
        counted: the peak of each that counts against the limit.
        limit_bytes: None for no limit.
        replayed: the run at any limit; None if no allocator is replayed.
    """
    if limit_bytes is None:
        return tuple(stages)
    found = []
    for stage, peak in zip(stages, counted, strict=True):
        within = None if replayed is None else partial(replayed.fits, stage.name)
        found.append(
            replace(
                stage,
                fits=peak.fits(limit_bytes, within),
                close_to_limit=peak.is_close_to(limit_bytes, within),
            )
        )
    return tuple(found)


class ReplayedRun:
    """A run as the caching allocator serves it within a limit.

    Where a stage does not fit, it is left out and the run goes on, so that later stages are judged
    by themselves. The stages that leave something behind cannot be left out: then nothing after
    them fits.

    Attributes:
        trace: the run, with the sizes that it asks for.
        names: of its stages after the build, by number.
        settings: of the allocator.
    """

    def __init__(
        self, trace: Trace, names: Sequence[StageName], settings: AllocatorSettings
    ) -> None:
        self.trace, self.names, self.settings = trace, names, settings
        self._known: dict[int, frozenset[str]] = {}

    def fits(self, name: str, limit_bytes: int) -> bool:
        """Return whether a stage runs within a limit."""
        if limit_bytes not in self._known:
            self._known[limit_bytes] = self._over(limit_bytes)
        return name not in self._known[limit_bytes]

    def _over(self, limit_bytes: int) -> frozenset[str]:
        """Return the stages that do not run within a limit."""
        trace, settings = self.trace, replace(self.settings, limit_bytes=limit_bytes)
        stages = rows_of_stages(trace, self.names)
        left = np.ones(len(trace.nbytes), bool)
        over: set[str] = set()
        while True:
            kept = np.flatnonzero(left)
            stream = None if trace.stream is None else trace.stream[kept]
            held = replay(trace.address[kept], trace.nbytes[kept], settings, stream=stream)
            if held.out_of_memory_at is None:
                return frozenset(over)
            event = int(kept[held.out_of_memory_at])
            at = max(number for number, (_, rows) in enumerate(stages) if rows.start <= event)
            name, rows = stages[at]
            over.add(name)
            if not _leaves_nothing(trace, rows):
                return frozenset(over | {later for later, _ in stages[at:]})
            left[rows] = False


def _leaves_nothing(trace: Trace, rows: slice) -> bool:
    """Return whether a stage frees all that it allocates, and nothing else."""
    address, nbytes = trace.address[rows], np.sign(trace.nbytes[rows])
    _, place = np.unique(address, return_inverse=True)
    return not np.bincount(place, weights=nbytes).any()
