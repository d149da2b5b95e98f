"""Say where attention on a card runs another kernel than flash attention, and what that holds.

Told is what holds memory of the size tokens x tokens, and what a person may not expect. Not told is
memory-efficient attention in fp32 or on an old card: it holds no more than flash attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memlab.arguments.units import format_bytes
from memlab.recording.recording import OUTSIDE, Recording
from memlab.recording.stand_in_attention import AttentionCall, AttentionKernel
from memlab.techniques.attention import MATH_KERNEL
from memlab.trace import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class _Note:
    """A note in three parts, of which the middle one is how much the largest call holds."""

    before: str
    size: str
    after: str
    held_bytes: int

    @property
    def text(self) -> str:
        """The note itself."""
        return f"{self.before}{self.size}{self.after}"


def attention_notes(recording: Recording) -> tuple[str, ...]:
    """Return a note for each kind of call in the last forward of a recording."""
    forwards = list(_forwards(recording).values())
    return tuple(note.text for note in _notes(forwards[-1])) if forwards else ()


def attention_notes_of_stages(recording: Recording, names: Sequence[str]) -> tuple[str, ...]:
    """Return the notes of a run of several stages, each with the stages that it is about.

    Of a stage the first and the last forward count: the first of a generation is its prompt. What
    differs between stages in its size alone is one note.

    Args:
        recording: of the run, whose steps are its stages.
        names: of the stages, by number.
    """
    of_stages: dict[str, list[list[AttentionCall]]] = {}
    for interval, calls in _forwards(recording).items():
        of_stages.setdefault(names[recording.intervals[interval].step], []).append(calls)

    found: dict[tuple[str, str], dict[str, _Note]] = {}
    for name, forwards in of_stages.items():
        for note in (*_notes(forwards[0]), *_notes(forwards[-1])):
            stages = found.setdefault((note.before, note.after), {})
            stages[name] = max(stages.get(name, note), note, key=lambda each: each.held_bytes)
    return tuple(_of_stages(stages) for stages in found.values())


def _of_stages(stages: Mapping[str, _Note]) -> str:
    """Return a note with its stages, and the sizes of those that hold less than the largest."""
    largest = max(stages.values(), key=lambda note: note.held_bytes)
    of_sizes: dict[str, list[str]] = {largest.size: []}
    for name, note in stages.items():
        of_sizes.setdefault(note.size, []).append(name)
    told = [
        ", ".join(names) if size == largest.size else f"with {size}: {', '.join(names)}"
        for size, names in of_sizes.items()
    ]
    return f"{largest.text} This is in: {'; '.join(told)}."


def _forwards(recording: Recording) -> dict[int, list[AttentionCall]]:
    """Return the calls of each forward of a step, by the interval."""
    found: dict[int, list[AttentionCall]] = {}
    for call, interval in recording.attention:
        phase, step = recording.intervals[interval].phase, recording.intervals[interval].step
        if phase is Phase.FORWARD and step != OUTSIDE.step:
            found.setdefault(interval, []).append(call)
    return found


def _notes(forward: list[AttentionCall]) -> list[_Note]:
    """Return a note for each kind of call in one forward."""
    groups: dict[tuple[object, ...], list[AttentionCall]] = {}
    for call in forward:
        groups.setdefault((call.kernel, call.without_flash, call.without_efficient), []).append(
            call
        )
    return [note for calls in groups.values() if (note := _note(calls))]


def _note(calls: list[AttentionCall]) -> _Note | None:
    """Return the note for calls of one kind; None if there is nothing to tell."""
    call, count = calls[0], len(calls)
    flash, efficient = call.without_flash, call.without_efficient
    if flash is None:
        return None
    times = f"{count} call{'s' * (count != 1)} of each forward"
    held_bytes = max(each.held_bytes for each in calls)
    size = format_bytes(held_bytes)
    size += " a call and sample" if call.is_by_sample else " a call"
    remedies = [lack.remedy for lack in (flash, efficient) if lack is not None and lack.remedy]
    end = f": {remedies[0]}." if remedies else "."

    if call.kernel is AttentionKernel.MATH and efficient is not None:
        return _Note(
            before=f"Attention runs in {MATH_KERNEL} in {times}, and holds the whole matrix of "
            "attention weights, ",
            size=size,
            after=f". There is no flash kernel for {flash.what}, and no memory-efficient one for "
            f"{efficient.what}{end}",
            held_bytes=held_bytes,
        )
    if flash.is_usual and not call.held_bytes:
        return None
    return _Note(
        before=f"Attention runs in PyTorch's memory-efficient kernel in {times}"
        + (", and holds the mask in numbers, " if call.held_bytes else ""),
        size=size if call.held_bytes else "",
        after=f". There is no flash kernel for {flash.what}{end}",
        held_bytes=held_bytes,
    )
