"""A part of a step: one phase of one micro-batch, to be drawn by itself.

Forward and backward run once for each micro-batch. Of these the one that reaches highest is taken,
since that is where the memory of the step is decided.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from memlab.arguments.checks import choice
from memlab.result import StepResult
from memlab.trace import PHASES, Phase, Timeline

PARTS = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def phase_or_none(name: str, value: Any) -> Phase | None:
    """Return the phase that an argument names; None stays None.

    Raises:
        ConfigError: it names none of `PARTS`.
    """
    phase: Phase | None = None if value is None else choice(*PARTS)(name, value)
    return phase


def part_name(timeline: Timeline, phase: Phase) -> str:
    """Return the words for a phase of its highest micro-batch: "backward of micro-batch 2 of 4"."""
    count = int(timeline.micro_batch.max(initial=0)) + 1
    if count == 1 or phase is Phase.OPTIMIZER:
        return str(phase)
    return f"{phase} of micro-batch {highest_micro_batch(timeline, phase) + 1} of {count}"


def highest_micro_batch(timeline: Timeline, phase: Phase) -> int:
    """Return the micro-batch in which a phase reaches highest; 0 if there is no such phase."""
    rows = np.flatnonzero(timeline.phase == PHASES.index(phase))
    if not len(rows):
        return 0
    return int(timeline.micro_batch[rows[timeline.total_bytes[rows].argmax()]])


def part_of(timeline: Timeline, phase: Phase) -> Timeline:
    """Return one phase of its highest micro-batch, from its first instant to its last.

    It is empty if the step has no such phase. Where the optimizer runs in backward, each of the two
    also holds what lies between its own instants of the other.
    """
    is_in = timeline.phase == PHASES.index(phase)
    if phase is not Phase.OPTIMIZER:
        is_in &= timeline.micro_batch == highest_micro_batch(timeline, phase)
    rows = np.flatnonzero(is_in)
    begin, end = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)

    return Timeline(
        bytes_by_category=timeline.bytes_by_category[begin:end],
        phase=timeline.phase[begin:end],
        micro_batch=np.zeros(end - begin, np.int32),  # there is but one in a part
        operator=timeline.operator[begin:end],
    )


def cut(result: StepResult, phase: Phase) -> StepResult:
    """Return the result with one part of its timeline, and the place of its peak if that is there.

    It has no timeline if the step has no such phase, and its message says so.
    """
    if result.timeline is None:
        return result
    part, place = part_of(result.timeline, phase), result.peak_place
    if not len(part):
        return replace(result, timeline=None, message=f"This step has no {phase} phase.")

    is_there = place is not None and place.phase is phase
    if place is not None and phase is not Phase.OPTIMIZER:
        is_there &= place.micro_batch == highest_micro_batch(result.timeline, phase)
    return replace(result, timeline=part, peak_place=place if is_there else None)
