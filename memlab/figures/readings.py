"""The readings of a timeline that a person can point at, each with the words that a page shows.

A page lays one strip over each column of the picture. The reading of a column is its highest
instant, so the peak is among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memlab.figures.parts import highest_micro_batch, part_of
from memlab.figures.timeline import positions
from memlab.trace import CATEGORIES, PHASES, Category, Phase, Timeline

MOST_READINGS = 90
PARTS_OF_A_PHASE = ("early in", "in the middle of", "late in")

Ran = Sequence[tuple[str, str]]
"""The operators of a step in order, each as the path of its module and its own name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One reading of a step.

    Attributes:
        start: left edge of its column, 0..1.
        end: right edge of its column, 0..1.
        nbytes: allocated.
        is_peak: whether it is the highest of the step.
        when: the phase, in words: "early in backward of micro-batch 2".
        where: the module and operator that ran last, in words; "" if they are not known.
        by_category: what is allocated, the largest first, without empty categories.
    """

    start: float
    end: float
    nbytes: int
    is_peak: bool
    when: str
    where: str
    by_category: tuple[tuple[Category, int], ...]


def readings(
    timeline: Timeline,
    ran: Ran = (),
    blocks: Sequence[str] = (),
    *,
    only: Phase | None = None,
) -> list[Reading]:
    """Return the readings of a timeline from left to right.

    Args:
        timeline: of the step.
        ran: its operators; empty if they are not known.
        blocks: paths of the model's repeated blocks, which are named by their number.
        only: the phase that is drawn alone, as `plots.timeline` draws it.
    """
    count, highest = (
        int(timeline.micro_batch.max(initial=0)) + 1,
        timeline.total_bytes.max(initial=0),
    )
    number = highest_micro_batch(timeline, only) if only else 0  # a part counts from 0 again
    timeline = part_of(timeline, only) if only else timeline
    if not len(timeline):
        return []

    x, total = positions(timeline), timeline.total_bytes
    column = np.minimum((x * MOST_READINGS).astype(int), MOST_READINGS - 1)
    firsts = np.flatnonzero(np.diff(column, prepend=-1))
    edges = [0.0, *(column[firsts[1:]] / MOST_READINGS).tolist(), 1.0]
    spans = pairwise([*firsts.tolist(), len(total)])
    thirds = _thirds(timeline)
    peak = timeline.peak_index if total.max() == highest else -1

    found = []
    for (first, end), (left, right) in zip(spans, pairwise(edges), strict=True):
        at = first + int(total[first:end].argmax())
        sizes = zip(CATEGORIES, timeline.bytes_by_category[at].tolist(), strict=True)
        held = sorted((pair for pair in sizes if pair[1]), key=lambda pair: -pair[1])
        batch = number + int(timeline.micro_batch[at])
        found.append(
            Reading(
                start=left,
                end=right,
                nbytes=int(total[at]),
                is_peak=first <= peak < end,
                when=_when(PHASES[timeline.phase[at]], int(thirds[at]), batch, count),
                where=_where(ran, int(timeline.operator[at]), blocks),
                by_category=tuple(held),
            )
        )
    return found


def _thirds(timeline: Timeline) -> npt.NDArray[np.intp]:
    """Return for each instant in which third of its phase of its micro-batch it lies, 0..2."""
    step = np.diff(timeline.phase.astype(np.int64)) | np.diff(timeline.micro_batch)
    begins = np.r_[0, np.flatnonzero(step) + 1]
    lengths = np.diff(np.r_[begins, len(timeline)])
    places = np.arange(len(timeline)) - np.repeat(begins, lengths)
    thirds: npt.NDArray[np.intp] = 3 * places // np.repeat(lengths, lengths)
    return thirds


def _when(phase: Phase, third: int, batch: int, count: int) -> str:
    when = f"{PARTS_OF_A_PHASE[third]} {phase}"
    if count == 1 or phase is Phase.OPTIMIZER:
        return when
    return f"{when} of micro-batch {batch + 1} of {count}"


def _where(ran: Ran, count: int, blocks: Sequence[str]) -> str:
    """Return the module and operator that were the last of `count`."""
    if not 0 < count <= len(ran):
        return ""
    path, operator = ran[count - 1]
    name = operator.removeprefix("aten::").removeprefix("aten.").split(".")[0].strip("_")
    return ", ".join(part for part in (_module(path, blocks), name) if part)


def _module(path: str, blocks: Sequence[str]) -> str:
    """Return a path in words: "block 4, mlp.act" for "transformer.h.4.mlp.act"."""
    for number, block in enumerate(blocks):
        if path == block or path.startswith(f"{block}."):
            inside = path[len(block) + 1 :]
            return f"block {number}, {inside}" if inside else f"block {number}"
    return path
