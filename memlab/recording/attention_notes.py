"""Say where attention on a card runs another kernel than flash attention, and what that holds.

Told is what holds memory of the size tokens x tokens, and what a person may not expect. Not told is
memory-efficient attention in fp32 or on an old card: it holds no more than flash attention.
"""

from __future__ import annotations

from memlab.arguments.units import format_bytes
from memlab.recording.recording import OUTSIDE, Recording
from memlab.recording.stand_in_attention import AttentionCall, AttentionKernel
from memlab.techniques.attention import MATH_KERNEL
from memlab.trace import Phase


def attention_notes(recording: Recording) -> tuple[str, ...]:
    """Return a note for each kind of call in the last forward of a recording."""
    groups: dict[tuple[object, ...], list[AttentionCall]] = {}
    for call in _of_last_forward(recording):
        groups.setdefault((call.kernel, call.without_flash, call.without_efficient), []).append(
            call
        )
    return tuple(note for calls in groups.values() if (note := _note(calls)))


def _of_last_forward(recording: Recording) -> list[AttentionCall]:
    forwards = [
        (call, interval)
        for call, interval in recording.attention
        if recording.intervals[interval].phase is Phase.FORWARD
        and recording.intervals[interval].step != OUTSIDE.step
    ]
    last = forwards[-1][1] if forwards else -1
    return [call for call, interval in forwards if interval == last]


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
