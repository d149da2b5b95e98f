"""Show what a program's habits do to reserved memory, by replaying a story of allocations.

A story is a list of lines such as "a = 12 MiB", "del a" and "empty_cache()". The result is a
prediction for any CUDA card with PyTorch's caching allocator; no card is needed. Left out: the same
as in `replay.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memlab._util.checks import checked
from memlab._util.units import parse_bytes
from memlab.errors import ConfigError
from memlab.memory.replay import AllocatorSettings, Reserved, replay

EMPTY_CACHE = "empty_cache()"


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The caching allocator after one line of a story; names as in `torch.cuda.memory_summary`.

    Attributes:
        line: of the story.
        allocated_bytes: bytes of blocks in use.
        reserved_bytes: bytes of all segments.
        releasable_bytes: reserved bytes that `empty_cache()` would release now.
        non_releasable_bytes: free bytes in segments that also have a block in use. They cannot
            serve a request larger than their hole, and `empty_cache()` cannot release them.
    """

    line: str
    allocated_bytes: int
    reserved_bytes: int
    releasable_bytes: int
    non_releasable_bytes: int


@checked()
def replay_allocations(story: Sequence[str], *, expandable_segments: bool = False) -> list[Moment]:
    """Return what PyTorch's caching allocator would hold on a card after each line of a story.

    Args:
        story: "name = size" (such as "a = 12 MiB"), "del name", or "empty_cache()".
        expandable_segments: whether segments grow by pages, as
            `PYTORCH_ALLOC_CONF=expandable_segments:True` makes them.

    Returns:
        One `Moment` a line, with its `allocated_bytes`, `reserved_bytes`, `releasable_bytes` and
        `non_releasable_bytes`.

    Raises:
        MemlabError: a line is none of these, or a name is allocated twice or freed while it is not.

    >>> moments = replay_allocations(["a = 30 MiB", "del a", "empty_cache()"])
    >>> [moment.reserved_bytes // 2**20 for moment in moments]
    [30, 30, 0]
    """
    settings = AllocatorSettings(expandable_segments=expandable_segments)
    numbers: dict[str, int] = {}
    events = [_event(line, numbers) for line in story]
    held = _replayed(story, events, settings)
    moments = []
    for last, line in enumerate(story):
        # the cache is emptied in a replay of its own, so that the story goes on unchanged
        lines = [*story[: last + 1], EMPTY_CACHE]
        emptied = _replayed(lines, [*events[: last + 1], (0, 0)], settings)
        allocated, reserved = int(held.allocated_bytes[last]), int(held.reserved_bytes[last])
        left = int(emptied.reserved_bytes[-1])
        moments.append(
            Moment(
                line=line,
                allocated_bytes=allocated,
                reserved_bytes=reserved,
                releasable_bytes=reserved - left,
                non_releasable_bytes=left - allocated,
            )
        )

    return moments


def _event(line: str, numbers: dict[str, int]) -> tuple[int, int]:
    """Return address and bytes of a line, as `replay` takes them."""
    if line == EMPTY_CACHE:
        return 0, 0

    name, is_taken, size = (part.strip() for part in line.partition("="))
    if is_taken and name:
        return numbers.setdefault(name, len(numbers) + 1), parse_bytes(size)

    freed = line.removeprefix("del ").strip()
    if not line.startswith("del ") or freed not in numbers:
        raise ConfigError(
            f"{line!r} is not a line of a story; allowed are 'a = 12 MiB', then 'del a', and "
            f"{EMPTY_CACHE!r}"
        )

    return numbers[freed], -1


def _replayed(
    story: Sequence[str], events: Sequence[tuple[int, int]], settings: AllocatorSettings
) -> Reserved:
    address, nbytes = np.array(events, np.int64).reshape(-1, 2).T
    flushes = [index for index, line in enumerate(story) if line == EMPTY_CACHE]
    return replay(address, nbytes, settings, flush_before=flushes)
