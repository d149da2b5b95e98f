"""From events to blocks: when each was allocated and freed, and what was live in between.

The trace may begin late, for PyTorch keeps the last `max_entries` events alone. So the state at the
end is the fixed point, and blocks are reconstructed backwards from it: what is live at the end or
freed in the trace, and not allocated in it, was there before the trace began.

An event has the bytes that were requested. The allocator gives blocks of 512 B, and sometimes more,
so a block has the size that the file lists for it if it is live at the end, and else its request
rounded up to 512 B. An instant is the state after an event; instant 0 is before the first one.
"""

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memlab.integrations.snapshot_file import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    NOT_RECORDED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    CardRecord,
    Frame,
    Stack,
    Table,
)
from memlab.memory.replay import round_block
from memlab.trace import CATEGORIES, Category

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

GROWS = (SEGMENT_ALLOC, SEGMENT_MAP)
SHRINKS = (SEGMENT_FREE, SEGMENT_UNMAP)

BLOCK = np.dtype(
    [
        # the event that allocated it; -1 if it was there before the trace began
        ("birth", np.int64),
        # the event that freed it; the number of events if none did; -1 if it was freed before the
        # trace began and another stream was not done with it
        ("death", np.int64),
        # the event from which on its memory could be used again; later than `death` if another
        # stream was not done with it
        ("released", np.int64),
        ("address", np.int64),
        ("size_bytes", np.int64),
        ("stack", np.int64),  # that allocated it; -1 if it was not recorded
        ("stream", np.int64),  # on which it was allocated; 0 if it was there before
        ("phase", np.int8),  # the `RunPhase` of its stack
        ("column", np.int8),  # its category, as an index into `COLUMNS`
    ]
)


def block_lives(record: CardRecord) -> Table:
    """Return every block of a device, with the columns of `BLOCK` but those of `categorize`."""
    events, final = record.events, record.blocks
    end = len(events)
    # by address, and by time within one address
    order = np.flatnonzero(np.isin(events.action, (ALLOC, FREE_REQUESTED, FREE_COMPLETED)))
    order = order[np.argsort(events.address[order], kind="stable")]
    sorted_events = events[order]
    is_alloc, address = sorted_events.action == ALLOC, sorted_events.address
    # of each event whether the next one is at the same address, and which one that is
    is_followed = np.append(address[1:] == address[:-1], False)[: len(order)]
    following = np.where(is_followed, np.append(order[1:], order[:1]), end)

    # Without events for requests, a block is freed when its free is completed. If that is the very
    # first event, then its request has only been cut off.
    frees = FREE_REQUESTED
    if FREE_REQUESTED not in events.action and FREE_COMPLETED in events.action[1:]:
        frees = FREE_COMPLETED
    is_first = ~np.append(False, is_followed)[: len(order)]
    (born,) = np.nonzero(is_alloc)
    (before,) = np.nonzero(is_first & (sorted_events.action == frees))
    rows = np.append(born, before)
    lives: Table = np.zeros(len(rows), BLOCK).view(np.recarray)
    lives.birth = np.append(order[born], np.full(len(before), -1))
    # after an allocation comes its free, or the next allocation if the free was not recorded
    lives.death = np.append(following[born], order[before])
    lives.address = address[rows]
    lives.stream[: len(born)] = sorted_events.stream[born]
    lives.size_bytes = round_block(sorted_events.size_bytes[rows])
    lives.stack = np.append(sorted_events.stack[born], np.full(len(before), NOT_RECORDED))
    freed = np.append(np.where(is_followed[born], born + 1, born), before)
    lives.released = _released(lives, record, sorted_events.action, is_followed, following, freed)

    # what is live at the end: its size is known, and it may be older than the trace
    kept = np.flatnonzero(final.is_allocated)
    never = np.flatnonzero(lives.death == end)
    _, here, there = np.intersect1d(lives.address[never], final.address[kept], return_indices=True)
    lives.size_bytes[never[here]] = final.size_bytes[kept[there]]
    older = _older(record, np.delete(kept, there), end)
    # what waited before the trace began is not live, but its memory could not be used
    waited = ~final.is_allocated & ~np.isin(final.address, lives.address)
    every = np.concatenate([lives, older, _older(record, np.flatnonzero(waited), -1)])
    return every.view(np.recarray)


def _released(
    lives: Table,
    record: CardRecord,
    action: npt.NDArray[np.int8],
    is_followed: Bools,
    following: Ints,
    freed: Ints,
) -> Ints:
    """Return when frees were completed, or were known to be; the end for those that still wait.

    Args:
        lives: the blocks so far.
        record: of the device.
        action: of each event by address, and of each whether and by which one it is followed.
        is_followed: likewise.
        following: likewise.
        freed: which of these events freed each block.
    """
    end, final = len(record.events), record.blocks
    is_request = (lives.death < end) & (action[freed] == FREE_REQUESTED)
    is_completed = is_followed[freed] & (np.append(action[1:], action[:1])[freed] == FREE_COMPLETED)
    awaits = ~is_followed[freed] & np.isin(lives.address, final.address[~final.is_allocated])
    done = np.where(is_completed, following[freed], np.where(awaits, end, lives.death))
    return np.where(is_request, done, lives.death)


def _older(record: CardRecord, chosen: Ints, death: int) -> Table:
    """Return blocks of the end that are older than the trace."""
    final = record.blocks[chosen]
    found: Table = np.zeros(len(chosen), BLOCK).view(np.recarray)
    found.birth, found.death, found.released = -1, death, len(record.events)
    for name in ("address", "size_bytes", "stack"):
        found[name] = final[name]
    return found


def live_at(lives: Table, instant: int) -> Ints:
    """Return the blocks that are live after so many events."""
    return np.flatnonzero((lives.birth < instant) & (lives.death >= instant))


def live_bytes(lives: Table, num_events: int) -> Ints:
    """Return the bytes of blocks at each instant."""
    change = np.zeros(num_events + 2, np.int64)
    np.add.at(change, lives.birth + 1, lives.size_bytes)
    np.subtract.at(change, lives.death + 1, lives.size_bytes)
    return np.cumsum(change[: num_events + 1])


def reserved_bytes(record: CardRecord) -> Ints | None:
    """Return the bytes of all segments at each instant; None if the state at the end is unknown."""
    if record.segments is None:
        return None
    action, size = record.events.action, record.events.size_bytes
    change = size * (np.isin(action, GROWS).astype(np.int64) - np.isin(action, SHRINKS))
    after = np.append(0, np.cumsum(change))
    at_end = sum(segment.size for segment in record.segments)
    found: Ints = after + (at_end - after[-1])
    return found


# The phase in which a line ran, by its stack, and the category of a block, by its lifetime.
#
# PyTorch records where a block was allocated, not what for. The names of files and
# functions in its stack show the phase; `snapshot_phases.toml` lists them all. Then the rule
# of `memory/lifetimes.py` applies:
#
#     allocated in   freed in the same phase   freed later
#     building       temporary                 parameter (buffers are among them)
#     forward        temporary                 activation
#     backward       temporary                 gradient
#     optimizer      temporary                 optimizer state
#
# Blocks without a stack are "unknown", and so are blocks of lines that no rule names
# (unless backward frees them: then they are activations), and what a forward left behind
# for longer than a step.

UNKNOWN = "unknown"
BACKWARD_PASSES = "backward passes"  # mark steps where nothing else does
COLUMNS: tuple[str, ...] = (*map(str, CATEGORIES), UNKNOWN)
COLUMN = {name: column for column, name in enumerate(COLUMNS)}


class RunPhase(IntEnum):
    """The phase of a line; OTHER for a stack that no rule names, NONE where none was recorded."""

    NONE = 0
    OTHER = 1
    BUILD = 2
    DATA = 3
    FORWARD = 4
    BACKWARD = 5
    OPTIMIZER = 6


BORN_AS = {
    RunPhase.BUILD: Category.PARAMETERS,
    RunPhase.DATA: Category.INPUTS,
    RunPhase.FORWARD: Category.ACTIVATIONS,
    RunPhase.BACKWARD: Category.GRADIENTS,
    RunPhase.OPTIMIZER: Category.OPTIMIZER_STATE,
}
# The bottom of a stack on a thread of autograd's engine, which begins in PyTorch, not in a script
_ENGINE_BOTTOM = re.compile(r"/torch/(autograd|utils|_functorch|_dynamo|_inductor|distributed)/")
_STEP = re.compile(r"^(step|_optimizer_step)$|^_(single|multi)_tensor_|^_init_group$")


@functools.cache
def _rules() -> list[tuple[RunPhase, re.Pattern[str], re.Pattern[str]]]:
    """Return phase, file and function of each rule."""
    text = Path(__file__).with_name("snapshot_phases.toml").read_text(encoding="utf-8")
    found = []
    for name, rules in tomllib.loads(text).items():
        for rule in rules:
            patterns = re.compile(rule["file"]), re.compile(rule["function"])
            found.append((RunPhase[name.upper()], *patterns))
    return found


def phase_of(stack: Stack) -> RunPhase:
    """Return the phase of a stack that has frames.

    The innermost frame that a rule names decides, but a forward within a backward is a recompute,
    so backward.

    >>> from memlab.integrations.snapshot_file import Frame
    >>> phase_of((Frame("/site/torch/optim/adamw.py", 120, "_init_group"),)).name
    'OPTIMIZER'
    """
    named = [phase for phase in map(_phase_of_frame, stack) if phase is not RunPhase.OTHER]
    innermost = named[0] if named else RunPhase.OTHER
    bottom = stack[-1]
    if _ENGINE_BOTTOM.search(_path(bottom)) and bottom.name != "<module>":
        return innermost if innermost is RunPhase.OPTIMIZER else RunPhase.BACKWARD
    if innermost is RunPhase.FORWARD and RunPhase.BACKWARD in named:
        return RunPhase.BACKWARD
    return innermost


def is_update(stack: Stack) -> bool:
    """Return whether a stack of the optimizer phase is of its step, and not of `zero_grad`."""
    return any(_STEP.search(frame.name) for frame in stack)


@functools.lru_cache(2**16)
def _phase_of_frame(frame: Frame) -> RunPhase:
    path = _path(frame)
    for phase, file_rule, function_rule in _rules():
        if file_rule.search(path) and function_rule.search(frame.name):
            return phase
    return RunPhase.OTHER


def _path(frame: Frame) -> str:
    return frame.filename.replace("\\", "/")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Phases:
    """The phases of a trace.

    Attributes:
        of_stack: int8, (stacks + 1,); the last is that of `NOT_RECORDED`.
        of_event: int8, (events,); an event that no rule names has the phase of the one before.
        step_ends: the instants at which steps end, ascending.
        steps_by: what marks the end of a step, in words; empty if nothing does.
        num_inferred: allocations without any Python frame, taken for backward.
    """

    of_stack: npt.NDArray[np.int8]
    of_event: npt.NDArray[np.int8]
    step_ends: Ints
    steps_by: str
    num_inferred: int


def phases(record: CardRecord) -> Phases:
    """Return the phase of each stack and event, and where steps end."""
    stacks = record.stacks
    found = [phase_of(stack) if stack else RunPhase.NONE for stack in stacks]
    of_stack = np.array([*found, RunPhase.NONE], np.int8)
    # Backward runs on the engine's own threads, which have no Python frames. So if other stacks
    # have some, and they are of a training, an empty stack is one of backward.
    infers = bool({RunPhase.FORWARD, RunPhase.OPTIMIZER} & set(found))
    is_empty = np.array([not stack for stack in stacks] + [False])
    if infers:
        of_stack[is_empty] = RunPhase.BACKWARD

    events = record.events
    of_event = _carried(of_stack[events.stack], of_stack[events.stack] > RunPhase.OTHER)
    step_ends, by = _step_ends(record, of_stack, of_event)
    return Phases(
        of_stack=of_stack,
        of_event=of_event,
        step_ends=step_ends,
        steps_by=by,
        num_inferred=int(infers * (is_empty[events.stack] & (events.action == ALLOC)).sum()),
    )


def _step_ends(
    record: CardRecord,
    of_stack: npt.NDArray[np.int8],
    of_event: npt.NDArray[np.int8],
) -> tuple[Ints, str]:
    """Return the instants at which steps end, and what marks them."""
    own = of_stack[record.events.stack]
    updates = np.array([of_stack[number] == RunPhase.OPTIMIZER and is_update(stack)
                        for number, stack in enumerate(record.stacks)] + [False])  # fmt: skip
    # what a script allocates parts two updates, also where no rule names its forward
    parts = (own > RunPhase.OTHER) | ((own == RunPhase.OTHER) & (record.events.action == ALLOC))
    ends = _ends(_carried(own, parts), own, RunPhase.OPTIMIZER, updates[record.events.stack])
    backwards = _ends(of_event, own, RunPhase.BACKWARD, own == RunPhase.BACKWARD)
    if len(ends):
        # SGD with momentum allocates in its first updates alone: then more backward passes follow
        # the last one than lie before or between any of them
        before = np.searchsorted(backwards, ends)
        if len(backwards) - before[-1] <= max(1, np.diff(before, prepend=0).max()):
            return ends, "updates of the optimizer"
    for name in ("Optimizer.step", "ProfilerStep"):
        times = [a.time_us for a in record.annotations
                 if a.name.startswith(name) and a.stage.upper() == "END"]  # fmt: skip
        if times and record.events.time_us.any():
            found = np.searchsorted(record.events.time_us, times, side="right")
            return np.unique(found).astype(np.int64), f"annotations {name}"
    return backwards, BACKWARD_PASSES if len(backwards) else ""


def _carried(own: npt.NDArray[np.int8], is_named: Bools) -> npt.NDArray[np.int8]:
    """Return the phase of each event, that of the last named one before where it is not named."""
    last = np.maximum.accumulate(np.where(is_named, np.arange(len(own)), -1))
    return np.where(last >= 0, own[last], np.int8(RunPhase.NONE))


def _ends(
    of_event: npt.NDArray[np.int8], own: npt.NDArray[np.int8], phase: RunPhase, marks: Bools
) -> Ints:
    """Return the instant after the last event of each stretch of a phase that has a mark."""
    within = (of_event == phase).astype(np.int8)
    begins = np.flatnonzero(np.diff(within, prepend=0) == 1)
    finishes = np.flatnonzero(np.diff(within, append=0) == -1) + 1
    counts = np.append(0, np.cumsum(marks))
    has_mark = counts[finishes] > counts[begins]
    last = np.maximum.accumulate(np.where(own == phase, np.arange(len(own)), -1))
    found: Ints = last[finishes[has_mark] - 1] + 1
    return found


def categorize(lives: Table, phased: Phases) -> None:
    """Fill in the phase and the category of each block."""
    own = lives.phase = phased.of_stack[lives.stack]
    of_event = np.append(phased.of_event, np.int8(RunPhase.NONE))
    stretch = np.append(np.cumsum(np.diff(of_event, prepend=of_event[0]) != 0), -1)
    freed = lives.death < len(phased.of_event)
    in_one_phase = freed & (lives.birth >= 0) & (stretch[lives.birth] == stretch[lives.death])
    # the loss of a step may live until the next one replaces it
    steps = np.searchsorted(phased.step_ends, (lives.birth, lives.death), side="right")
    lingers = steps[1] > steps[0] + 1
    is_other = (own == RunPhase.OTHER) & freed & (of_event[lives.death] == RunPhase.BACKWARD)
    has_place = np.isin(own, [phase for phase in BORN_AS if phase is not RunPhase.DATA])

    born_as = np.array([COLUMN[BORN_AS.get(phase, UNKNOWN)] for phase in RunPhase], np.int8)
    lives.column = born_as[own]
    lives.column[(own == RunPhase.FORWARD) & lingers] = COLUMN[UNKNOWN]
    lives.column[is_other & ~lingers] = COLUMN[Category.ACTIVATIONS]
    lives.column[in_one_phase & (has_place | is_other)] = COLUMN[Category.TEMPORARIES]


# Who holds memory at an instant: blocks by category and by the stack that allocated them.

BELOW = " > "  # between a person's line and the line of a library that it called
# Folders of libraries: the first frame outside of them is a person's own line.
LIBRARIES = ("/site-packages/", "/dist-packages/", "/torch/", "/lib/python3")


@dataclass(frozen=True, kw_only=True, slots=True)
class StackHolding:
    """Blocks that are live at one instant and were allocated by one stack.

    Attributes:
        category: one of the categories of a timeline, or "unknown".
        stack: the frames, the innermost first; empty if there are none, as on the threads of
            autograd. None if no stack was recorded.
        num_blocks: number of blocks.
        nbytes: their bytes together.
    """

    category: str
    stack: Stack | None
    num_blocks: int
    nbytes: int

    @property
    def place(self) -> str:
        """The person's own line and the line of a library that it called, in short."""
        return place_of(self.stack)


def place_of(stack: Stack | None) -> str:
    """Return the innermost line outside of libraries and the function that allocated under it.

    >>> place_of((Frame("/site-packages/torch/nn/functional.py", 9, "gelu"),
    ...           Frame("/home/me/model.py", 42, "forward")))
    'model.py:42 forward > functional.py:9 gelu'
    """
    if not stack:
        return "stack not recorded" if stack is None else "no Python frame"
    python = [frame for frame in stack if frame.filename.endswith(".py")
              or frame.filename.startswith("<")] or list(stack)  # fmt: skip
    own = next((frame for frame in python if not _is_library(frame)), python[-1])
    inner = python[0]
    return str(own) if own == inner else f"{own}{BELOW}{inner}"


def holders(lives: Table, stacks: Sequence[Stack]) -> tuple[StackHolding, ...]:
    """Return what these blocks hold by category and stack, the largest first."""
    keys = lives.stack * len(COLUMNS) + lives.column
    found, group, counts = np.unique(keys, return_inverse=True, return_counts=True)
    sizes = np.zeros(len(found), np.int64)
    np.add.at(sizes, group, lives.size_bytes)
    made = [
        StackHolding(
            category=COLUMNS[key % len(COLUMNS)],
            stack=stack_of(stacks, key // len(COLUMNS)),
            num_blocks=count,
            nbytes=size,
        )
        for key, count, size in zip(found.tolist(), counts.tolist(), sizes.tolist(), strict=True)
    ]
    return tuple(sorted(made, key=lambda holding: -holding.nbytes))


def stack_of(stacks: Sequence[Stack], number: int) -> Stack | None:
    """Return the stack of this number; None if none was recorded."""
    return None if number == NOT_RECORDED else stacks[number]


def _is_library(frame: Frame) -> bool:
    path = _path(frame)
    return any(folder in path for folder in LIBRARIES) or path.startswith("<frozen")


# What grows from step to step: a leak, named by the stack that allocates it.
#
# At the end of each step the live bytes of each stack are summed. The first step is left
# out, since the optimizer makes its state in it. A stack leaks if its bytes never shrink
# from one step to the next and grow in at least three steps. Left out: what grows and
# shrinks, such as a cache or batches of different lengths; and a leak in blocks whose stack
# was not recorded is one row of its own.

LEAST_GROWTHS = 3  # steps in which a leak grows; one or two may be a cache that fills
SKIPPED_STEPS = 1  # the first, in which the optimizer makes its state


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """Memory of one stack that grows from step to step and never shrinks.

    Attributes:
        stack: that allocates it, the innermost frame first; None if it was not recorded.
        bytes_at_step_ends: its live bytes at the end of each step after the first.
        num_blocks: blocks that the growth consists of.
    """

    stack: Stack | None
    bytes_at_step_ends: tuple[int, ...]
    num_blocks: int

    @property
    def growth_bytes(self) -> int:
        """By how much it has grown from the end of the second step to that of the last."""
        return self.bytes_at_step_ends[-1] - self.bytes_at_step_ends[0]

    @property
    def bytes_per_step(self) -> float:
        """Its growth in a step, on average."""
        return self.growth_bytes / (len(self.bytes_at_step_ends) - 1)

    @property
    def place(self) -> str:
        """The line that allocates it, in short."""
        return place_of(self.stack)


def leaks(lives: Table, step_ends: Ints, stacks: Sequence[Stack]) -> tuple[Leak, ...]:
    """Return what grows from step to step, the largest growth first."""
    ends = step_ends[SKIPPED_STEPS:]
    if len(ends) <= LEAST_GROWTHS:
        return ()
    # the step ends at which a block is live are those from `first` to before `after`
    first, after = np.searchsorted(ends, (lives.birth, lives.death), side="right")
    spans = np.flatnonzero(after > first)
    spans = spans[np.argsort(lives.stack[spans], kind="stable")]
    numbers, begins = np.unique(lives.stack[spans], return_index=True)
    found = []
    for number, rows in zip(numbers.tolist(), np.split(spans, begins)[1:], strict=True):
        sizes, change = lives.size_bytes[rows], np.zeros(len(ends) + 1, np.int64)
        np.add.at(change, first[rows], sizes)
        np.subtract.at(change, after[rows], sizes)
        held = np.cumsum(change)[:-1]
        growth = np.diff(held)
        if (growth >= 0).all() and (growth > 0).sum() >= LEAST_GROWTHS:
            num_more = int((after[rows] == len(ends)).sum() - (first[rows] == 0).sum())
            found.append(
                Leak(
                    stack=stack_of(stacks, number),
                    bytes_at_step_ends=tuple(held.tolist()),
                    num_blocks=num_more,
                )
            )
    return tuple(sorted(found, key=lambda leak: -leak.growth_bytes))


# The newest part of a trace, block by block: what a comparison with a prediction begins with.
#
# A whole trace may have tens of millions of blocks, and a comparison needs those of one
# step. So an opened snapshot keeps the blocks of its last `MOST_EVENTS` events, and those
# that were there before.

MOST_EVENTS = 2**18  # some 80,000 blocks; a step of a large language model has a tenth of them


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecentBlocks:
    """The blocks of the newest events of a trace, in the order in which they were allocated.

    Attributes:
        blocks: with the columns of `BLOCK`; instants count events from the first of these, and
            sizes are requests, rounded up to 512 B.
        stacks: those of these blocks, by number; None for one that was not recorded.
        num_events: how many there are.
        step_ends: the instants among them at which steps end, ascending.
        steps_by: what marks the end of a step, in words; empty if nothing does.
        is_whole: whether these are all events, and nothing was there before them.
    """

    blocks: Table
    stacks: Mapping[int, Stack | None]
    num_events: int
    step_ends: Ints
    steps_by: str
    is_whole: bool


def recent_blocks(record: CardRecord, lives: Table, phased: Phases) -> RecentBlocks:
    """Return the blocks that were live during the newest events."""
    first = max(0, len(record.events) - MOST_EVENTS)
    blocks = lives[(lives.death >= first) & (lives.size_bytes > 0)]
    blocks = blocks[np.argsort(blocks.birth, kind="stable")]
    # of a live block the file lists the request
    live, final = np.flatnonzero(blocks.death == len(record.events)), record.blocks
    _, here, there = np.intersect1d(blocks.address[live], final.address, return_indices=True)
    request = round_block(final.requested[there])
    is_known = (request > 0) & (request <= final.size_bytes[there])
    blocks.size_bytes[live[here[is_known]]] = request[is_known]
    blocks.birth = np.maximum(blocks.birth - first, -1)
    blocks.death -= first
    return RecentBlocks(
        blocks=blocks,
        stacks={n: stack_of(record.stacks, n) for n in np.unique(blocks.stack).tolist()},
        num_events=len(record.events) - first,
        step_ends=phased.step_ends[phased.step_ends > first] - first,
        steps_by=phased.steps_by,
        is_whole=first == 0 and not (lives.birth < 0).any(),
    )
