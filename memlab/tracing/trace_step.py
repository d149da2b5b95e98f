"""Record the step of a workload as a `Program`, over its own micro-batches and others.

A run builds the step with `build_step` over fake tensors and makes two updates. The first is over a
batch of another size where it can be, so that `Program` knows how every block grows with the
samples. Left out: the memory and time of kernels, see `memlab.cost_model.traced_step`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memlab._util.torch_private.compiler import compiled_inside_of_modes
from memlab._util.torch_private.inductor import planned_by_inductor
from memlab._util.torch_private.tensors import (
    FakeTensorMode,
    subclasses_left_out,
    whole_of,
    without_modes,
)
from memlab._util.units import format_bytes
from memlab.config import Sharding, StepConfig
from memlab.techniques.attention import MATH_KERNEL
from memlab.techniques.batches import tensors_of
from memlab.techniques.checkpoint_contents import saved_tensors
from memlab.techniques.compilation import backend, forget, is_compiled
from memlab.techniques.step import Step, build_step
from memlab.techniques.technique import Plan
from memlab.trace import Phase
from memlab.tracing import triton_launches
from memlab.tracing.assembly import sizes_of
from memlab.tracing.attention_kernels import AttentionCall, AttentionKernel, attention_traced
from memlab.tracing.fake_workload import over_fakes
from memlab.tracing.fakify import as_own_format
from memlab.tracing.program import MOST_RECORDED, Program, program_of
from memlab.tracing.recording import OUTSIDE, OpTrace
from memlab.tracing.simulated_ranks import (
    SameRanks,
    as_rank,
    heaviest_ranks,
    same_ranks,
    with_other_ranks,
)
from memlab.tracing.tracker import Tracker, record_fake
from memlab.workload import Workload

# Say where attention on a card runs another kernel than flash attention, and what that holds.
#
# Told is what holds memory of the size tokens x tokens, and what a person may not expect.
# Not told is memory-efficient attention in fp32 or on an old card: it holds no more than
# flash attention.


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


def attention_notes(recording: OpTrace) -> tuple[str, ...]:
    """Return a note for each kind of call in the last forward of a recording."""
    forwards = list(_forwards(recording).values())
    return tuple(note.text for note in _notes(forwards[-1])) if forwards else ()


def attention_notes_of_stages(recording: OpTrace, names: Sequence[str]) -> tuple[str, ...]:
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


def _forwards(recording: OpTrace) -> dict[int, list[AttentionCall]]:
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


def trace_step(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    seed: int,
    tracker: Tracker,
    plan: Plan | None = None,
    *,
    every_rank: bool = True,
) -> Program:
    """Return the program of a step: recorded over this config's micro-batches and others.

    Only this config is recorded if it is compiled for a card, if some micro-batches have one sample
    and others have more, if the two sizes run different operators, or if the model keeps something
    from the first batch: a hidden state, a cache, its last outputs. Of several ranks the one that
    holds most is recorded, with `every_rank` those that hold something else too.
    """
    if config.sharding is not Sharding.NONE:
        return _heaviest_rank(workload, config, device, seed, tracker, plan, every_rank)

    sizes = config.micro_batch_sizes
    size, least = sizes[0], sizes[-1]
    other = least if least < size else max(2, size // 2) if size > 2 else {1: 1, 2: 3}[size]
    record = partial(_recorded, workload, device=device, seed=seed, plan=plan)
    if is_compiled(config) and device.type != "cpu":  # what is planned differs from size to size
        return _of_few(config, tracker, lambda of, by: record(of, tracker=by, first=of))
    if other == 1 < size:
        return record(config, tracker=tracker, first=config)
    count = min(len(sizes), MOST_RECORDED)
    this = dataclasses.replace(config, batch_size=size * count, accumulation_steps=count)
    that = dataclasses.replace(this, batch_size=other * count)
    is_whole = other == size and count == len(sizes)

    def alone() -> Program:
        return record(config, tracker=_another(tracker), first=config)

    try:
        program = record(this, tracker=tracker, first=that)
    except Exception as error:  # a state of another batch can raise any error
        if is_whole:
            raise
        try:
            return alone()
        except Exception:
            raise error from None  # the tracker knows the place of this error
    if not is_whole and (program.differs or _keeps_of_batch(program.recording)):
        return alone()
    return program


def record_layers(
    workload: Workload, config: StepConfig, device: torch.device, seed: int, tracker: Tracker
) -> Mapping[str, tuple[str, int | None]]:
    """Return which layers the ranks of a config divide, as `Divided` has them.

    The step is built and not run: the trial that finds them is part of its build.
    """
    found: list[Mapping[str, tuple[str, int | None]]] = []

    def run(mode: FakeTensorMode) -> None:
        with as_rank(config, 0, tracker):
            step = build_step(over_fakes(workload, mode, tracker), config, device, seed=seed)
            assert step.sharded is not None
            found[:] = [step.sharded.layers]

    record_fake(run, tracker)
    return found[0]


def _heaviest_rank(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    seed: int,
    tracker: Tracker,
    plan: Plan | None,
    every_rank: bool,
) -> Program:
    """Return the program of the rank that holds the most, and with it those of other ranks.

    The first step of a rank makes what later ones use again, so that no two steps are alike and
    other sizes would have to be recorded apart.
    """
    heaviest: list[tuple[int, ...]] = []
    classes: list[SameRanks] = []

    def look_at(step: Step) -> None:
        if heaviest:
            return
        heaviest.append(heaviest_ranks(step.optimizer, config))
        classes[:] = same_ranks(step.model, step.optimizer, config)
        if 0 not in heaviest[0]:
            raise _HoldsLess

    def record(asked: StepConfig, tracker: Tracker, rank: int) -> Program:
        return _recorded(
            workload, asked, device=device, seed=seed, plan=plan, tracker=tracker, first=asked,
            rank=rank, on_built=look_at,
        )  # fmt: skip

    def program_of_rank(rank: int, tracker: Tracker) -> Program:
        if not config.sync_each_micro_batch:
            return record(config, tracker, rank)
        return _of_few(config, tracker, partial(record, rank=rank))

    found: dict[int, Program] = {}
    with contextlib.suppress(_HoldsLess):
        found[0] = program_of_rank(0, tracker)
    if not found:
        gc.collect()  # what was built of rank 0
        tracker.restart()
        found[heaviest[0][0]] = program_of_rank(heaviest[0][0], tracker)

    def of_rank(rank: int) -> Program:
        if rank not in found:
            found[rank] = program_of_rank(rank, type(tracker)(tracker.device_type))
        return found[rank]

    worst = max(heaviest[0], key=lambda rank: _peak_without_kernels(of_rank(rank)))
    return with_other_ranks(worst, of_rank, classes, every_rank=every_rank)


def _of_few(
    config: StepConfig, tracker: Tracker, record: Callable[[StepConfig, Tracker], Program]
) -> Program:
    """Return the program of a few micro-batches if others repeat the second, else of all."""
    count = len(config.micro_batch_sizes)
    if count <= MOST_RECORDED or len(set(config.micro_batch_sizes)) > 1:
        return record(config, tracker)
    samples = config.batch_size // count * MOST_RECORDED
    few = dataclasses.replace(config, batch_size=samples, accumulation_steps=MOST_RECORDED)
    program = record(few, tracker)
    return program if program.repeats else record(config, _another(tracker))


def _another(tracker: Tracker) -> Tracker:
    """Return a tracker of another attempt, which has the blocks that the first has left."""
    another = type(tracker)(tracker.device_type)
    another.blocks.adopt(tracker.blocks.left())
    return another


class _HoldsLess(BaseException):
    """Rank 0 is not the one that holds most; no `Exception`, after which it would run again."""


def _peak_without_kernels(program: Program) -> int:
    recording = program.recording
    own = sizes_of(recording, program.layout, [None] * len(recording.operators))
    peak: int = program.trace(own, program.sizes).nbytes.cumsum().max()
    return peak


def _keeps_of_batch(recording: OpTrace) -> bool:
    """Return whether the two steps leave blocks of different sizes, as large as their batches."""
    kept: list[list[int]] = [[], []]
    for event in recording.events:
        born = recording.intervals[
            recording.operators[recording.blocks[event.block].operator].interval
        ]
        died = recording.intervals[event.interval].step
        computed = born.phase in (Phase.FORWARD, Phase.BACKWARD)
        if not event.is_birth and computed and born.step >= 0 and died != born.step:
            kept[born.step].append(recording.blocks[event.block].nbytes)
    return sorted(kept[0]) != sorted(kept[1])


def _recorded(
    workload: Workload,
    config: StepConfig,
    *,
    device: torch.device,
    seed: int,
    plan: Plan | None,
    tracker: Tracker,
    first: StepConfig,
    rank: int = 0,
    on_built: Callable[[Step], None] = lambda step: None,
) -> Program:
    """Return the program of a run whose two steps may be over different batches."""
    called_in = partial(_compiled, tracker) if tracker.lets_compile else tracker.modules

    def run(mode: FakeTensorMode) -> None:
        with as_rank(config, rank, tracker):
            run_two_steps(mode)

    def run_two_steps(mode: FakeTensorMode) -> None:
        fake = over_fakes(workload, mode, tracker)
        mark = partial(tracker.mark, -1)
        step = build_step(fake, first, device, plan=plan, seed=seed, mark=mark)
        on_built(step)
        tracker.know(step.model, step.with_loss)
        tracker.recording.parameter_formats = step.parameter_formats
        tracker.recording.notes += step.notes
        if step.scaler is not None:  # its first call allocates its scale, outside of any step
            tracker.mark(-1, Phase.BUILD, 0)
            step.scaler.scale(torch.zeros((), device=device))
        with subclasses_left_out(as_own_format), called_in(step.model):
            step.set_seed(seed)
            step(partial(tracker.mark, 0))
            tracker.know_states(step.with_loss, step.optimizer)
            if tracker.recording.is_scripted:
                step.set_seed(seed)
                step(lambda phase, micro_batch: tracker.mark(-1, Phase.BUILD, 0))
            before = step.micro_batches
            step.take_batch(config, seed=seed, mark=partial(tracker.mark, -1))
            tracker.mark(-1, Phase.BUILD, 0)
            _leave_gradients(before, step.micro_batches)
            del before
            step.set_seed(seed)
            step(partial(tracker.mark, 1))
            tracker.recording.host_memory = step.host_memory
            tracker.recording.notes += attention_notes(tracker.recording)
        with without_modes():  # what is only looked at is no operator of the step
            tracker.recording.saved = saved_tensors(step)
        tracker.mark(-1, Phase.TEARDOWN, 0)

    recording = record_fake(run, tracker)
    return program_of(recording, config.micro_batch_sizes, first.micro_batch_sizes[0])


@contextlib.contextmanager
def _compiled(tracker: Tracker, model: torch.nn.Module) -> Iterator[None]:
    """Compile the model where it is called, and forget what was compiled of fake tensors."""
    device = next(model.parameters()).device
    try:
        with contextlib.ExitStack() as stack:
            padded: list[int] = []
            if device.type != "cpu":
                padded = stack.enter_context(
                    planned_by_inductor(device, triton_launches.tell, tracker.beat)
                )
            attention = attention_traced(tracker.note_attention)
            stack.enter_context(compiled_inside_of_modes(backend(device), tracker.beat, *attention))
            yield
            tracker.recording.padded_bytes = max(padded, default=0)
    finally:
        forget()


def _leave_gradients(before: list[Any], after: list[Any]) -> None:
    """Give the second step's batch gradients like those that the first step left on its own.

    If a model computes gradients of its batch, for a penalty on them, and the step works on the
    batch itself, they stay from step to step. In a real run both steps have the same batch.
    """

    def holders(batches: list[Any]) -> list[torch.Tensor]:
        return [t if t.is_leaf else whole_of(t) for t in tensors_of(batches)]

    for old, new in zip(holders(before), holders(after), strict=False):
        if old.is_leaf and old.grad is not None and new.grad is None:
            new.requires_grad_()
            new.grad = torch.empty_like(new)
