"""From events to blocks: when each was allocated and freed, and what was live in between.

The trace may begin late, for PyTorch keeps the last `max_entries` events alone. So the state at the
end is the fixed point, and blocks are reconstructed backwards from it: what is live at the end or
freed in the trace, and not allocated in it, was there before the trace began.

An event has the bytes that were requested. The allocator gives blocks of 512 B, and sometimes more,
so a block has the size that the file lists for it if it is live at the end, and else its request
rounded up to 512 B. An instant is the state after an event; instant 0 is before the first one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

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
    Events,
    Frame,
    Stack,
)
from memlab.memory.replay import round_block
from memlab.trace import CATEGORIES, Category

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockLives:
    """Every block of a device, as columns (blocks,).

    Attributes:
        birth: the event that allocated it; -1 if it was there before the trace began.
        death: the event that freed it; the number of events if none did; -1 if it was freed
            before the trace began and another stream was not done with it.
        released: the event from which on its memory could be used again; later than `death` if
            another stream was not done with it.
        address: of its first byte.
        size: bytes that it takes.
        stack: that allocated it; -1 if it was not recorded.
        num_before: blocks that were there before the trace began.
        num_contradicting: blocks that the trace leaves live and the state at the end does not have.
    """

    birth: Ints
    death: Ints
    released: Ints
    address: Ints
    size: Ints
    stack: Ints
    num_before: int
    num_contradicting: int

    def __len__(self) -> int:
        return len(self.birth)

    def live_at(self, instant: int) -> Ints:
        """Return the blocks that are live after so many events."""
        return np.flatnonzero((self.birth < instant) & (self.death >= instant))

    def live_bytes(self, num_events: int, chosen: Ints | None = None) -> Ints:
        """Return the bytes of the chosen blocks, by default of all, at each instant."""
        which = slice(None) if chosen is None else chosen
        change = np.zeros(num_events + 2, np.int64)
        np.add.at(change, self.birth[which] + 1, self.size[which])
        np.subtract.at(change, self.death[which] + 1, self.size[which])
        return np.cumsum(change[: num_events + 1])


def block_lives(record: CardRecord) -> BlockLives:
    """Return every block of a device with its first and last event."""
    events, final = record.events, record.blocks
    end = len(events)
    order = _by_address(events, np.array([ALLOC, FREE_REQUESTED, FREE_COMPLETED]))
    action, address = events.action[order], events.address[order]
    is_alloc = action == ALLOC
    same = np.r_[address[1:] == address[:-1], False] if len(order) else np.zeros(0, bool)
    first_of_address = np.r_[True, ~same[:-1]] if len(order) else np.zeros(0, bool)
    # Without events for requests, a block is freed when its free is completed. If that is the very
    # first event, then its request has only been cut off.
    is_free = action == FREE_REQUESTED
    if not is_free.any() and (events.action[1:] == FREE_COMPLETED).any():
        is_free = action == FREE_COMPLETED

    (born,) = np.nonzero(is_alloc)
    (before,) = np.nonzero(first_of_address & is_free)
    freed_at = _next(born, same, order, end)
    awaiting = final.address[~final.is_allocated]
    freed_now = np.r_[born + 1, before]
    done = _completed(freed_now, np.r_[freed_at, order[before]], action, order, address, awaiting,
                      end)  # fmt: skip
    never = np.flatnonzero(np.r_[freed_at, order[before]] == end)

    birth = np.r_[order[born], np.full(len(before), -1)]
    death = np.r_[freed_at, order[before]]
    at = np.r_[address[born], address[before]]
    size = rounded(np.r_[events.size[order[born]], events.size[order[before]]])
    stack = np.r_[events.stack[order[born]], np.full(len(before), NOT_RECORDED)]

    # what is live at the end: its size is known, and it may be older than the trace
    kept = np.flatnonzero(final.is_allocated)
    _, here, there = np.intersect1d(at[never], final.address[kept], return_indices=True)
    size[never[here]] = final.size[kept[there]]
    older = np.delete(kept, there)
    # what waited before the trace began is not live, but its memory could not be used
    waited = np.flatnonzero(~final.is_allocated & ~np.isin(final.address, at))
    contradicting = len(never) - len(here) if record.segments is not None else 0

    return BlockLives(
        birth=np.r_[birth, np.full(len(older) + len(waited), -1)].astype(np.int64),
        death=np.r_[death, np.full(len(older), end), np.full(len(waited), -1)].astype(np.int64),
        released=np.r_[done, np.full(len(older) + len(waited), end)].astype(np.int64),
        address=np.r_[at, final.address[older], final.address[waited]],
        size=np.r_[size, final.size[older], final.size[waited]],
        stack=np.r_[stack, final.stack[older], final.stack[waited]].astype(np.int64),
        num_before=len(before) + len(older),
        num_contradicting=contradicting,
    )


def reserved_bytes(record: CardRecord) -> Ints | None:
    """Return the bytes of all segments at each instant; None if the state at the end is unknown."""
    if record.segments is None:
        return None
    action, size = record.events.action, record.events.size
    change = np.where(np.isin(action, (SEGMENT_ALLOC, SEGMENT_MAP)), size, 0)
    change -= np.where(np.isin(action, (SEGMENT_FREE, SEGMENT_UNMAP)), size, 0)
    after = np.r_[0, np.cumsum(change)]
    at_end = sum(segment.size for segment in record.segments)
    found: Ints = after + (at_end - after[-1])
    return found


def _by_address(events: Events, actions: npt.NDArray[np.int64]) -> Ints:
    """Return the events of these actions by address, and by time within one address."""
    chosen = np.flatnonzero(np.isin(events.action, actions))
    return chosen[np.argsort(events.address[chosen], kind="stable")]


def _next(at: Ints, same: npt.NDArray[np.bool_], order: Ints, end: int) -> Ints:
    """Return the next event at the same address; `end` if there is none.

    After an allocation that is its free, or the next allocation if the free was not recorded.
    """
    following = np.minimum(at + 1, max(len(order) - 1, 0))
    return np.where(same[at], order[following], end) if len(at) else at


def _completed(
    at: Ints,
    freed: Ints,
    action: npt.NDArray[np.int8],
    order: Ints,
    address: Ints,
    awaiting: Ints,
    end: int,
) -> Ints:
    """Return when frees were completed, or were known to be; `end` for those that still wait."""
    if not len(at):
        return freed
    at = np.minimum(at, len(order) - 1)
    following = np.minimum(at + 1, len(order) - 1)
    is_request = (freed < end) & (action[at] == FREE_REQUESTED)
    is_next = (address[following] == address[at]) & (following > at)
    is_completed = is_next & (action[following] == FREE_COMPLETED)
    waits = ~is_next & np.isin(address[at], awaiting)
    done = np.where(is_completed, order[following], np.where(waits, end, freed))
    return np.where(is_request, done, freed)


def rounded(size: Ints) -> Ints:
    """Return requests in bytes, rounded up to whole blocks of the allocator."""
    found: Ints = round_block(size)
    return found


# The phase in which a line ran, by its stack, and the category of a block, by its lifetime.
#
# PyTorch records where a block was allocated, not what for. The names of files and
# functions in its stack show the phase; `RULES` lists them all. Then the rule of
# `memory/lifetimes.py` applies:
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


class PhaseRule(NamedTuple):
    """Frames whose file and function match belong to a phase."""

    phase: RunPhase
    file: str
    function: str


# Names of PyTorch 2.0 to 2.13 and of the libraries that train with it. In a stack the innermost
# frame that a rule names decides, but a forward within a backward is a recompute, so backward.
RULES = (
    PhaseRule(RunPhase.OPTIMIZER, r"/torch/optim/|/bitsandbytes/optim/|/torchao/optim/"
         r"|/apex/optimizers/|/transformers/optimization\.py$", r""),
    PhaseRule(RunPhase.BACKWARD, r"/torch/autograd/(__init__|graph)\.py$",
         r"^(backward|grad|_engine_run_backward)$"),
    PhaseRule(RunPhase.BACKWARD, r"/torch/_tensor\.py$", r"^backward$"),
    PhaseRule(RunPhase.BACKWARD, r"/torch/utils/checkpoint\.py$",
         r"^(backward|recompute_fn|unpack_hook)$"),
    PhaseRule(RunPhase.BACKWARD, r"", r"torch::autograd::Engine::"),  # a frame of C++
    PhaseRule(RunPhase.DATA, r"/torch/utils/data/|/accelerate/utils/operations\.py$", r""),
    PhaseRule(RunPhase.DATA, r"/transformers/trainer\.py$", r"^_prepare_inputs?$"),
    PhaseRule(RunPhase.DATA, r"/(pytorch_lightning|lightning)/.*", r"transfer_batch_to_device"),
    PhaseRule(RunPhase.BUILD, r"/torch/nn/parameter\.py$|/torch/nn/init\.py$", r""),
    PhaseRule(RunPhase.BUILD, r"/torch/nn/modules/", r"^(__init__|reset_parameters)$"),
    PhaseRule(RunPhase.BUILD, r"/torch/nn/modules/module\.py$",
         r"^(_apply|to|cuda|half|float|double|bfloat16|to_empty|convert|load_state_dict"
         r"|_load_from_state_dict|register_buffer)$"),
    PhaseRule(RunPhase.BUILD, r"/torch/serialization\.py$|/safetensors/", r""),
    PhaseRule(RunPhase.BUILD, r"/transformers/modeling_utils\.py$", r"from_pretrained|^_load"),
    PhaseRule(RunPhase.FORWARD, r"/torch/nn/functional\.py$", r""),
    PhaseRule(RunPhase.FORWARD, r"/torch/nn/modules/module\.py$",
         r"^(_call_impl|_wrapped_call_impl|__call__)$"),
    PhaseRule(RunPhase.FORWARD, r"", r"^forward$"),
)  # fmt: skip
_RULES = [(rule.phase, re.compile(rule.file), re.compile(rule.function)) for rule in RULES]
# The bottom of a stack on a thread of autograd's engine, which begins in PyTorch, not in a script
_ENGINE_BOTTOM = re.compile(r"/torch/(autograd|utils|_functorch|_dynamo|_inductor|distributed)/")
_STEP = re.compile(r"^(step|_optimizer_step)$|^_(single|multi)_tensor_|^_init_group$")


def phase_of(stack: Stack) -> RunPhase:
    """Return the phase of a stack that has frames.

    >>> from memlab.integrations.snapshot_file import (Frame,)
    >>> phase_of((Frame("/site/torch/optim/adamw.py", 120, "_init_group"),)).name
    'OPTIMIZER'
    """
    bottom = stack[-1]
    if _ENGINE_BOTTOM.search(_path(bottom.filename)) and bottom.name != "<module>":
        within = _innermost(stack)
        return within if within is RunPhase.OPTIMIZER else RunPhase.BACKWARD
    return _innermost(stack)


def is_update(stack: Stack) -> bool:
    """Return whether a stack of the optimizer phase is of its step, and not of `zero_grad`."""
    return any(_STEP.search(frame.name) for frame in stack)


def _innermost(stack: Stack) -> RunPhase:
    found = RunPhase.OTHER
    for frame in stack:
        phase = _phase_of_frame(_path(frame.filename), frame.name)
        if found is RunPhase.OTHER:
            found = phase
        elif found is RunPhase.FORWARD and phase is RunPhase.BACKWARD:
            return phase
        if found not in (RunPhase.OTHER, RunPhase.FORWARD):
            return found
    return found


def _phase_of_frame(path: str, function: str) -> RunPhase:
    for phase, file_rule, function_rule in _RULES:
        if file_rule.search(path) and function_rule.search(function):
            return phase
    return RunPhase.OTHER


def _path(filename: str) -> str:
    return filename.replace("\\", "/")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Phases:
    """The phases of a trace.

    Attributes:
        of_stack: int8, (stacks,).
        of_event: int8, (events,); an event that no rule names has the phase of the one before.
        stretch: (events,), the number of the stretch of events of one phase.
        step_ends: the instants at which steps end, ascending.
        steps_by: what marks the end of a step, in words; empty if nothing does.
        num_inferred: allocations without any Python frame, taken for backward.
    """

    of_stack: npt.NDArray[np.int8]
    of_event: npt.NDArray[np.int8]
    stretch: Ints
    step_ends: Ints
    steps_by: str
    num_inferred: int


def phases(record: CardRecord, stacks: Sequence[Stack]) -> Phases:
    """Return the phase of each stack and event, and where steps end."""
    found = [phase_of(stack) if stack else RunPhase.NONE for stack in stacks]
    # Backward runs on the engine's own threads, which have no Python frames. So if other stacks
    # have some, and they are of a training, an empty stack is one of backward.
    infers = bool({RunPhase.FORWARD, RunPhase.OPTIMIZER} & set(found))
    if infers:
        found = [phase if stack else RunPhase.BACKWARD
                 for phase, stack in zip(found, stacks, strict=True)]  # fmt: skip
    of_stack = np.array([*found, RunPhase.NONE], np.int8)  # the last is that of NOT_RECORDED

    events = record.events
    own = of_stack[events.stack]
    of_event = _carried(own, own > RunPhase.OTHER)
    stretch = np.r_[0, np.cumsum(of_event[1:] != of_event[:-1])] if len(own) else np.zeros(0, int)
    is_empty = np.array([not stack for stack in stacks] + [False])
    step_ends, by = _step_ends(record, stacks, of_stack, of_event)
    return Phases(
        of_stack=of_stack,
        of_event=of_event,
        stretch=stretch.astype(np.int64),
        step_ends=step_ends,
        steps_by=by,
        num_inferred=int(infers * (is_empty[events.stack] & (events.action == ALLOC)).sum()),
    )


def _step_ends(
    record: CardRecord,
    stacks: Sequence[Stack],
    of_stack: npt.NDArray[np.int8],
    of_event: npt.NDArray[np.int8],
) -> tuple[Ints, str]:
    """Return the instants at which steps end, and what marks them."""
    own = of_stack[record.events.stack]
    updates = np.array([of_stack[number] == RunPhase.OPTIMIZER and is_update(stack)
                        for number, stack in enumerate(stacks)] + [False])  # fmt: skip
    # what a script allocates parts two updates, also where no rule names its forward
    parts = (own > RunPhase.OTHER) | ((own == RunPhase.OTHER) & (record.events.action == ALLOC))
    ends = _ends(_carried(own, parts), own, RunPhase.OPTIMIZER, updates[record.events.stack])
    backwards = _ends(of_event, own, RunPhase.BACKWARD, own == RunPhase.BACKWARD)
    if len(ends) and not _stop(ends, backwards):
        return ends, "updates of the optimizer"
    for name in ("Optimizer.step", "ProfilerStep"):
        times = [a.time_us for a in record.annotations
                 if a.name.startswith(name) and a.stage.upper() == "END"]  # fmt: skip
        if times and record.events.time_us.any():
            found = np.searchsorted(record.events.time_us, np.array(times), side="right")
            return np.unique(found).astype(np.int64), f"annotations {name}"
    return backwards, BACKWARD_PASSES if len(backwards) else ""


def _stop(updates: Ints, backwards: Ints) -> bool:
    """Return whether updates allocate in the first steps alone, as SGD with momentum does.

    Then more backward passes follow the last one than lie before or between any of them.
    """
    before = np.searchsorted(backwards, updates)
    return len(backwards) - int(before[-1]) > max(1, int(np.diff(before, prepend=0).max()))


def _carried(own: npt.NDArray[np.int8], is_named: npt.NDArray[np.bool_]) -> npt.NDArray[np.int8]:
    """Return the phase of each event, that of the last named one before where it is not named."""
    if not len(own):
        return own
    last = np.maximum.accumulate(np.where(is_named, np.arange(len(own)), -1))
    return np.where(last >= 0, own[last], np.int8(RunPhase.NONE)).astype(np.int8)


def _ends(
    of_event: npt.NDArray[np.int8],
    own: npt.NDArray[np.int8],
    phase: RunPhase,
    marks: npt.NDArray[np.bool_],
) -> Ints:
    """Return the instant after the last event of each stretch of a phase that has a mark."""
    if not marks.any():
        return np.zeros(0, np.int64)
    within = (of_event == phase).astype(np.int8)
    begins = np.flatnonzero(np.diff(within, prepend=0) == 1)
    finishes = np.flatnonzero(np.diff(within, append=0) == -1) + 1
    counts = np.r_[0, np.cumsum(marks)]
    has_mark = counts[finishes] > counts[begins]
    last = np.maximum.accumulate(np.where(own == phase, np.arange(len(own)), -1))
    found: Ints = last[finishes[has_mark] - 1] + 1
    return found


def columns_of(lives: BlockLives, phased: Phases) -> npt.NDArray[np.int8]:
    """Return the category of each block, as an index into `COLUMNS`."""
    end = len(phased.of_event)
    own = phased.of_stack[np.where(lives.stack == NOT_RECORDED, -1, lives.stack)]
    freed, seen = lives.death < end, lives.birth >= 0
    last = max(end - 1, 0)
    if not end:
        born_in = died_in = np.zeros(len(lives), np.int64)
        died_as = np.zeros(len(lives), np.int8)
    else:
        born_in = phased.stretch[np.maximum(lives.birth, 0)]
        died_in = phased.stretch[np.minimum(lives.death, last)]
        died_as = phased.of_event[np.minimum(lives.death, last)]
    in_one_phase = seen & freed & (born_in == died_in)
    steps_outlived = np.searchsorted(phased.step_ends, lives.death, side="right") - np.searchsorted(
        phased.step_ends, lives.birth, side="right"
    )

    columns = np.full(len(lives), COLUMN[UNKNOWN], np.int8)

    def put(where: npt.NDArray[np.bool_], category: Category) -> None:
        columns[where] = COLUMN[str(category)]

    put(own == RunPhase.BUILD, Category.PARAMETERS)
    put(own == RunPhase.DATA, Category.INPUTS)
    put(own == RunPhase.BACKWARD, Category.GRADIENTS)
    put(own == RunPhase.OPTIMIZER, Category.OPTIMIZER_STATE)
    # the loss of a step may live until the next one replaces it
    put((own == RunPhase.FORWARD) & (steps_outlived <= 1), Category.ACTIVATIONS)
    is_other = (own == RunPhase.OTHER) & freed & (died_as == RunPhase.BACKWARD)
    put(is_other & (steps_outlived <= 1), Category.ACTIVATIONS)
    is_told = (own != RunPhase.NONE) & ((own != RunPhase.OTHER) | is_other)
    put(in_one_phase & is_told & (own != RunPhase.DATA), Category.TEMPORARIES)
    return columns


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
    if stack is None:
        return "stack not recorded"
    if not stack:
        return "no Python frame"
    python = [frame for frame in stack if _is_python(frame)] or list(stack)
    own = next((frame for frame in python if not _is_library(frame)), python[-1])
    inner = python[0]
    return str(own) if own == inner else f"{own}{BELOW}{inner}"


def holders(
    lives: BlockLives,
    columns: npt.NDArray[np.int8],
    stacks: Sequence[Stack],
    live: npt.NDArray[np.int64],
) -> tuple[StackHolding, ...]:
    """Return what these blocks hold by category and stack, the largest first."""
    keys = lives.stack[live] * len(COLUMNS) + columns[live]
    found, group, counts = np.unique(keys, return_inverse=True, return_counts=True)
    sizes = np.zeros(len(found), np.int64)
    np.add.at(sizes, group, lives.size[live])
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
    path = frame.filename.replace("\\", "/")
    return any(folder in path for folder in LIBRARIES) or path.startswith("<frozen")


def _is_python(frame: Frame) -> bool:
    return frame.filename.endswith(".py") or frame.filename.startswith("<")


# What grows from step to step: a leak, named by the stack that allocates it.
#
# At the end of each step the live bytes of each stack are summed. The first step is left
# out, since the optimizer makes its state in it. A stack leaks if its bytes never shrink
# from one step to the next and grow in at least three steps. Left out: what grows and
# shrinks, such as a cache or batches of different lengths; and a leak in blocks whose stack
# was not recorded is one row of its own.

LEAST_GROWTHS = 3  # steps in which a leak grows; one or two may be a cache that fills
SKIPPED_STEPS = 1  # the first, in which the optimizer makes its state
MOST_CELLS = 2 * 10**7  # stacks times steps that are looked at, the largest growth first


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


def leaks(
    lives: BlockLives, step_ends: npt.NDArray[np.int64], stacks: Sequence[Stack]
) -> tuple[Leak, ...]:
    """Return what grows from step to step, the largest growth first."""
    ends = step_ends[SKIPPED_STEPS:]
    if len(ends) <= LEAST_GROWTHS:
        return ()

    # the step ends at which a block is live are those from `first` to before `after`
    first = np.searchsorted(ends, lives.birth, side="right")
    after = np.searchsorted(ends, lives.death, side="right")
    spans = np.flatnonzero(after > first)
    numbers, group = np.unique(lives.stack[spans], return_inverse=True)
    at_begin, at_end = np.zeros((2, len(numbers)), np.int64)
    num_first, num_last = np.zeros((2, len(numbers)), np.int64)
    is_first, is_last = first[spans] == 0, after[spans] == len(ends)
    np.add.at(at_begin, group[is_first], lives.size[spans[is_first]])
    np.add.at(at_end, group[is_last], lives.size[spans[is_last]])
    np.add.at(num_first, group[is_first], 1)
    np.add.at(num_last, group[is_last], 1)

    growth = at_end - at_begin
    largest = np.argsort(-growth, kind="stable")[: max(1, MOST_CELLS // len(ends))]
    chosen = largest[growth[largest] > 0]
    row = np.full(len(numbers), -1)
    row[chosen] = np.arange(len(chosen))
    change = np.zeros((len(chosen), len(ends) + 1), np.int64)
    mine = row[group] >= 0
    rows, sizes = row[group[mine]], lives.size[spans[mine]]
    np.add.at(change, (rows, first[spans[mine]]), sizes)
    np.subtract.at(change, (rows, after[spans[mine]]), sizes)
    series = np.cumsum(change, axis=1)[:, :-1]

    found = []
    for index, line in zip(chosen.tolist(), series, strict=True):
        steps = np.diff(line)
        if (steps >= 0).all() and (steps > 0).sum() >= LEAST_GROWTHS:
            found.append(
                Leak(
                    stack=stack_of(stacks, int(numbers[index])),
                    bytes_at_step_ends=tuple(line.tolist()),
                    num_blocks=int(num_last[index] - num_first[index]),
                )
            )
    return tuple(found)


# The newest part of a trace, block by block: what a comparison with a prediction begins with.
#
# A whole trace may have tens of millions of blocks, and a comparison needs those of one
# step. So an opened snapshot keeps the blocks of its last `MOST_EVENTS` events, and those
# that were there before.

MOST_EVENTS = 2**18  # some 80,000 blocks; a step of a large language model has a tenth of them


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecentBlocks:
    """The blocks of the newest events of a trace, in the order in which they were allocated.

    Columns are (blocks,). Instants count events from the first of these.

    Attributes:
        birth: the event that allocated it; -1 if it was there before.
        death: the event that freed it; `num_events` if none did.
        size: bytes that were requested, rounded up to 512 B.
        phase: int8, the `RunPhase` of its stack.
        column: int8, its category, as an index into `COLUMNS`.
        stream: on which it was allocated; 0 if it was there before.
        stack: index into `stacks`.
        stacks: those of these blocks; None for one that was not recorded.
        num_events: how many there are.
        step_ends: the instants among them at which steps end, ascending.
        steps_by: what marks the end of a step, in words; empty if nothing does.
        is_whole: whether these are all events, and nothing was there before them.
    """

    birth: Ints
    death: Ints
    size: Ints
    phase: npt.NDArray[np.int8]
    column: npt.NDArray[np.int8]
    stream: Ints
    stack: Ints
    stacks: tuple[Stack | None, ...]
    num_events: int
    step_ends: Ints
    steps_by: str
    is_whole: bool

    def __len__(self) -> int:
        return len(self.birth)


def recent_blocks(
    record: CardRecord,
    lives: BlockLives,
    found: Phases,
    columns: npt.NDArray[np.int8],
    stacks: Sequence[Stack],
) -> RecentBlocks:
    """Return the blocks that were live during the newest events."""
    num_events = len(record.events)
    first = max(0, num_events - MOST_EVENTS)
    chosen = np.flatnonzero((lives.death >= first) & (lives.size > 0))
    chosen = chosen[np.argsort(lives.birth[chosen], kind="stable")]
    birth, numbers = lives.birth[chosen], lives.stack[chosen]
    stream = np.zeros(len(chosen), np.int64)
    if num_events:
        stream = np.where(birth >= 0, record.events.stream[np.maximum(birth, 0)], 0)
    kept, index = np.unique(numbers, return_inverse=True)
    ends = found.step_ends[found.step_ends > first] - first
    return RecentBlocks(
        birth=np.maximum(birth - first, -1),
        death=lives.death[chosen] - first,
        size=_requested(record, lives, chosen),
        phase=found.of_stack[np.where(numbers == NOT_RECORDED, -1, numbers)],
        column=columns[chosen],
        stream=stream,
        stack=index.astype(np.int64),
        stacks=tuple(stack_of(stacks, number) for number in kept.tolist()),
        num_events=num_events - first,
        step_ends=ends,
        steps_by=found.steps_by,
        is_whole=first == 0 and not (lives.birth < 0).any(),
    )


def _requested(record: CardRecord, lives: BlockLives, chosen: Ints) -> Ints:
    """Return the requests of blocks in bytes, rounded up; of a live block the file lists it."""
    size = lives.size[chosen].copy()
    final = record.blocks
    live = np.flatnonzero(lives.death[chosen] == len(record.events))
    _, here, there = np.intersect1d(lives.address[chosen[live]], final.address, return_indices=True)
    request = rounded(final.requested[there])
    is_known = (request > 0) & (request <= final.size[there])
    size[live[here[is_known]]] = request[is_known]
    return size
