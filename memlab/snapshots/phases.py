"""The phase in which a line ran, by its stack, and the category of a block, by its lifetime.

PyTorch records where a block was allocated, not what for. The names of files and functions in its
stack show the phase; `RULES` lists them all. Then the rule of `meters/lifetimes.py` applies:

    allocated in   freed in the same phase   freed later
    building       temporary                 parameter (buffers are among them)
    forward        temporary                 activation
    backward       temporary                 gradient
    optimizer      temporary                 optimizer state

Blocks without a stack are "unknown", and so are blocks of lines that no rule names (unless backward
frees them: then they are activations), and what a forward left behind for longer than a step.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memlab.snapshots.columns import (
    ALLOC,
    NOT_RECORDED,
    CardRecord,
    Stack,
)
from memlab.snapshots.lifetimes import BlockLives
from memlab.trace import CATEGORIES, Category

Ints = npt.NDArray[np.int64]

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

    >>> from memlab.snapshots.columns import (Frame,)
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
