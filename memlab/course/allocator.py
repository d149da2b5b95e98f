"""Exercises of chapter 4: what is allocated, what is reserved, and what cannot be given back."""

from typing import Any

from memlab._util.units import GIB, MIB, format_bytes, is_a, parse_bytes, shown
from memlab.course.exercise import Exercise
from memlab.errors import MemlabError
from memlab.memory.allocation_script import replay_allocations

MOST_LINES = 12
LOST = GIB  # that a story has to strand
MOST_LIVE = 64 * MIB
CACHED = ["a = 3 MiB", "b = 30 KiB", "c = 12 MiB", "del c"]
STRANDED = ["a = 1.1 GiB", "del a", "b = 12 MiB"]


def _fragments(asked: Exercise, given: Any) -> str:
    """Return the hint for a story, which a replay of PyTorch's allocator judges."""
    hints = asked.hints
    if not is_a(given, list) or not all(is_a(line, str) for line in given) or not given:
        return hints["no_story"].format(given=shown(given))
    if len(given) > MOST_LINES:
        return hints["too_long"].format(given=len(given))
    try:
        last = replay_allocations(given)[-1]
    except MemlabError as error:
        return str(error)
    if last.allocated_bytes > MOST_LIVE:
        return hints["in_use"].format(given=format_bytes(last.allocated_bytes))
    if last.non_releasable_bytes >= LOST:
        return ""
    if last.reserved_bytes >= LOST:
        return hints["can_be_given_back"]
    return hints["little"].format(given=format_bytes(last.reserved_bytes))


def _last(story: list[str], name: str, *, in_pages: bool = False) -> int:
    moment = replay_allocations(story, expandable_segments=in_pages)[-1]
    found: int = getattr(moment, f"{name}_bytes")
    return found


def _asked_for(story: list[str]) -> int:
    return sum(parse_bytes(line.partition("=")[2]) for line in story if "=" in line)


EXERCISES = [
    Exercise(
        number="4.1",
        reference=lambda: _last(CACHED, "reserved"),
        mistakes={
            "allocated": lambda: _last(CACHED, "allocated"),
            "all_requests": lambda: _asked_for(CACHED),
            "third_segment": lambda: (20 + 2 + 12) * MIB,
            "rounded": lambda: (4 + 2 + 12) * MIB,
        },
    ),
    Exercise(
        number="4.2",
        reference=lambda: STRANDED,
        mistakes={
            "can_be_given_back": lambda: STRANDED[:2],
            "in_use": lambda: STRANDED[:1],
            "little": lambda: ["a = 512 MiB", "del a", "b = 12 MiB"],
            "too_long": lambda: [f"x{number} = 1 MiB" for number in range(MOST_LINES + 1)],
            "no_story": lambda: "a = 1 GiB",
        },
        judge=_fragments,
    ),
    Exercise(
        number="4.3",
        reference=lambda: _last(STRANDED, "releasable", in_pages=True),
        mistakes={
            "all_of_it": lambda: _last(STRANDED, "reserved"),
            "live": lambda: _last(STRANDED, "allocated"),
            "as_asked": lambda: _last(STRANDED, "reserved") - 12 * MIB,
        },
        fraction=0.001,
    ),
]
