"""Record the step of a workload as a `Program`, over its own micro-batches and others.

A run builds the step with `build_step` over fake tensors and makes two updates. The first is over a
batch of another size, so that `Program` knows how every block grows with the samples. Left out: the
memory and time of kernels, see `memlab.costs.recorded_step`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from memlab.config import Sharding, StepConfig
from memlab.plan import Plan
from memlab.recording.assembly import sizes_of
from memlab.recording.attention_notes import attention_notes
from memlab.recording.built import as_own_format
from memlab.recording.distinct_ranks import SameRanks, same_ranks, with_other_ranks
from memlab.recording.fake_workload import over_fakes
from memlab.recording.program import MOST_RECORDED, Program, program_of
from memlab.recording.recording import Recording
from memlab.recording.simulated_ranks import as_rank, heaviest_ranks
from memlab.recording.tracker import Tracker, record_fake
from memlab.saving.contents import saved_tensors
from memlab.step import Step, build_step
from memlab.techniques.batches import tensors_of
from memlab.torch_private.dispatch import without_modes
from memlab.torch_private.fakes import FakeTensorMode, subclasses_left_out
from memlab.trace import Phase
from memlab.workload import Workload


def record_step(
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

    Only this config is recorded if some micro-batches have one sample and others have more, if the
    two sizes run different operators, or if the model keeps something from the first batch: a
    hidden state, a cache, its last outputs. Of several ranks the one that holds most is recorded,
    with `every_rank` those that hold something else too.
    """
    if config.sharding is not Sharding.NONE:
        return _heaviest_rank(workload, config, device, seed, tracker, plan, every_rank)

    sizes = config.micro_batch_sizes
    size, least = sizes[0], sizes[-1]
    other = least if least < size else max(2, size // 2) if size > 2 else {1: 1, 2: 3}[size]
    record = partial(_recorded, workload, device=device, seed=seed, plan=plan)
    if other == 1 < size:
        return record(config, tracker=tracker, first=config)
    count = min(len(sizes), MOST_RECORDED)
    this = dataclasses.replace(config, batch_size=size * count, accumulation_steps=count)
    that = dataclasses.replace(this, batch_size=other * count)
    is_whole = other == size and count == len(sizes)

    def alone() -> Program:
        another = Tracker(tracker.device_type)
        another.blocks.adopt(tracker.blocks.left())
        return record(config, tracker=another, first=config)

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
        count = len(config.micro_batch_sizes)
        if count <= MOST_RECORDED or not config.sync_each_micro_batch:
            return record(config, tracker, rank)
        samples = config.batch_size // count * MOST_RECORDED
        few = dataclasses.replace(config, batch_size=samples, accumulation_steps=MOST_RECORDED)
        program = record(few, tracker, rank)
        if program.repeats:
            return program
        another = Tracker(tracker.device_type)
        another.blocks.adopt(tracker.blocks.left())
        return record(config, another, rank)

    found: dict[int, Program] = {}
    with contextlib.suppress(_HoldsLess):
        found[0] = program_of_rank(0, tracker)
    if not found:
        gc.collect()  # what was built of rank 0
        tracker.restart()
        found[heaviest[0][0]] = program_of_rank(heaviest[0][0], tracker)

    def of_rank(rank: int) -> Program:
        if rank not in found:
            found[rank] = program_of_rank(rank, Tracker(tracker.device_type))
        return found[rank]

    worst = max(heaviest[0], key=lambda rank: _peak_without_kernels(of_rank(rank)))
    return with_other_ranks(worst, of_rank, classes, every_rank=every_rank)


class _HoldsLess(BaseException):
    """Rank 0 is not the one that holds most; no `Exception`, after which it would run again."""


def _peak_without_kernels(program: Program) -> int:
    recording = program.recording
    own = sizes_of(recording, program.layout, [None] * len(recording.operators))
    peak: int = program.trace(own, program.sizes).nbytes.cumsum().max()
    return peak


def _keeps_of_batch(recording: Recording) -> bool:
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
        with subclasses_left_out(as_own_format), tracker.modules(step.model):
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


def _leave_gradients(before: list[Any], after: list[Any]) -> None:
    """Give the second step's batch gradients like those that the first step left on its own.

    If a model computes gradients of its batch, for a penalty on them, and the step works on the
    batch itself, they stay from step to step. In a real run both steps have the same batch.
    """
    for old, new in zip(tensors_of(before), tensors_of(after), strict=False):
        if old.is_leaf and old.grad is not None:
            new.requires_grad_()
            new.grad = torch.empty_like(new)
