"""Say where attention on a card runs another kernel than flash attention, and what that holds.

Told is what holds memory of the size tokens x tokens, and what a person may not expect. Not told is
memory-efficient attention in fp32 or on an old card: it holds no more than flash attention.
"""

from __future__ import annotations

from collections.abc import Sequence

from memlab.arguments.units import format_bytes
from memlab.recording.recording import OUTSIDE, Recording
from memlab.recording.stand_in_attention import AttentionCall, AttentionKernel
from memlab.techniques.attention import MATH_KERNEL
from memlab.trace import Phase


def attention_notes(recording: Recording) -> tuple[str, ...]:
    """Return a note for each kind of call in the last forward of a recording."""
    forwards = list(_forwards(recording).values())
    return tuple(_notes(forwards[-1])) if forwards else ()


def attention_notes_of_stages(recording: Recording, names: Sequence[str]) -> tuple[str, ...]:
    """Return the notes of a run of several stages, each with the stages that it is about.

    Of a stage the first and the last forward count: the first of a generation is its prompt.

    Args:
        recording: of the run, whose steps are its stages.
        names: of the stages, by number.
    """
    of_stages: dict[str, list[list[AttentionCall]]] = {}
    for interval, calls in _forwards(recording).items():
        of_stages.setdefault(names[recording.intervals[interval].step], []).append(calls)

    found: dict[str, list[str]] = {}
    for name, forwards in of_stages.items():
        for note in dict.fromkeys((*_notes(forwards[0]), *_notes(forwards[-1]))):
            found.setdefault(note, []).append(name)
    return tuple(f"{note} This is in: {', '.join(stages)}." for note, stages in found.items())


def _forwards(recording: Recording) -> dict[int, list[AttentionCall]]:
    """Return the calls of each forward of a step, by the interval."""
    found: dict[int, list[AttentionCall]] = {}
    for call, interval in recording.attention:
        phase, step = recording.intervals[interval].phase, recording.intervals[interval].step
        if phase is Phase.FORWARD and step != OUTSIDE.step:
            found.setdefault(interval, []).append(call)
    return found


def _notes(forward: list[AttentionCall]) -> list[str]:
    """Return a note for each kind of call in one forward."""
    groups: dict[tuple[object, ...], list[AttentionCall]] = {}
    for call in forward:
        groups.setdefault((call.kernel, call.without_flash, call.without_efficient), []).append(
            call
        )
    return [note for calls in groups.values() if (note := _note(calls))]


def _note(calls: list[AttentionCall]) -> str:
    """Return the note for calls of one kind; "" if there is nothing to tell."""
    call, count = calls[0], len(calls)
    flash, efficient = call.without_flash, call.without_efficient
    if flash is None:
        return ""
    times = f"{count} call{'s' * (count != 1)} of each forward"
    size = format_bytes(max(each.held_bytes for each in calls))
    size += " a call and sample" if call.is_by_sample else " a call"
    remedies = [lack.remedy for lack in (flash, efficient) if lack is not None and lack.remedy]
    end = f": {remedies[0]}." if remedies else "."

    if call.kernel is AttentionKernel.MATH and efficient is not None:
        return (
            f"Attention runs in {MATH_KERNEL} in {times}, and holds the whole matrix of attention "
            f"weights, {size}. There is no flash kernel for {flash.what}, and no memory-efficient "
            f"one for {efficient.what}{end}"
        )
    if flash.is_usual and not call.held_bytes:
        return ""
    held = f", and holds the mask in numbers, {size}" if call.held_bytes else ""
    return (
        f"Attention runs in PyTorch's memory-efficient kernel in {times}{held}. There is no flash "
        f"kernel for {flash.what}{end}"
    )
