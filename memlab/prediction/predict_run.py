"""A predicted `RunResult`: the stages of a run over fake tensors, in this process.

As for one step (`memlab.prediction`): kernels of a CPU run once alone, those of a card follow
rules. One caching allocator serves the whole run. Nothing is given back between the stages, so what
one of them leaves in the cache, and how it is cut up, counts in those after it. Left out: time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memlab._util.torch_private.tensors import FakeTensorMode, without_modes
from memlab._util.units import format_bytes
from memlab.config import StepConfig
from memlab.cost_model.targets import Kernels
from memlab.cost_model.traced_step import Failure, TracedStep, from_recording
from memlab.devices.cards import Target
from memlab.errors import UnsupportedError
from memlab.memory.replay import AllocatorSettings, replay
from memlab.prediction.error_bounds import Compiled, compiled_part
from memlab.prediction.evidence import CONVOLUTIONS, width_of
from memlab.prediction.predict import (
    ASSUMED,
    ASSUMED_BRANCH,
    ASSUMED_SPREAD,
    CPU_MEMORY,
    in_the_middle,
    notes_of_recording,
    possible_sizes,
    versions_of,
)
from memlab.prediction.run_result import RunResult, StageCost
from memlab.prediction.run_settings import TrainingRun
from memlab.prediction.run_spec import RunSpec
from memlab.prediction.run_stages import (
    ReplayedRun,
    StageName,
    judged,
    names_of,
    run_all_stages,
    stage_costs,
)
from memlab.result import Outcome, Source
from memlab.running import Report
from memlab.techniques.checkpoint_contents import added_by_saving, saved_tensors, weights_in
from memlab.techniques.step import Step
from memlab.trace import Interval, Phase, Trace
from memlab.tracing.assembly import KernelMemory, layout_of, sizes_of
from memlab.tracing.fake_workload import over_fakes
from memlab.tracing.program import Program
from memlab.tracing.trace_step import attention_notes_of_stages
from memlab.tracing.tracker import Tracker, record_fake

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

# Continue a recorded run: batches and tokens that were not recorded, from two that were.
#
# The idea. Batches of an evaluation and tokens of a generation run the same operators, and
# what they allocate is affine in their number. A cache of 100 tokens becomes one of 101,
# then one of 102. So the last recorded token and the one before it give all later ones:
#
#     token   recorded                        continued 2     allocates 102, frees 101 3
# allocates 103, frees 102        4: allocates 104, frees 103    5: 105, frees 104   ...
#
# A block that token 3 allocates is paired with the one that token 2 allocates at the same
# place. Where token 3 frees a block of token 2, token 4 frees the paired block of token 3.
# What the last recorded token leaves behind, each continued one leaves behind too, unless
# the next one frees it.
#
# Left out: kernels whose own memory is not affine in the number of tokens.

# A row takes 48 bytes in `Rows` and 40 in a trace, of which there are up to five, and is copied
# while they are made: some GB in all.
MOST_ROWS = 10**7


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Allocations and frees of a run in order, and the size of each block.

    Attributes:
        columns: int64, (6, rows): block, whether it is allocated, index of the interval, operators
            so far, module, stream.
        sizes: int64, (blocks,), bytes.
        intervals: in order.
    """

    columns: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    intervals: tuple[Interval, ...]

    def of(self, step: int, number: int) -> tuple[slice, list[int]]:
        """Return the rows of a batch or token of a stage, and its intervals."""
        found = [
            index
            for index, interval in enumerate(self.intervals)
            if (interval.step, interval.micro_batch) == (step, number)
        ]
        begin, end = np.searchsorted(self.columns[2], (found[0], found[-1] + 1))
        return slice(int(begin), int(end)), found


def continued(rows: Rows, step: int, recorded: int, wanted: int, *, field: str) -> Rows:
    """Return a run in which a stage goes on to the wanted number of batches or tokens.

    Args:
        rows: of the recorded run.
        step: the number of the stage.
        recorded: batches or tokens that were recorded, at least two.
        wanted: how many there are to be.
        field: what says so, for a message.

    Raises:
        UnsupportedError: the last two do not do the same, or the run would have too many rows.
    """
    count = wanted - recorded
    if count <= 0:
        return rows
    before, _ = rows.of(step, recorded - 2)
    last, intervals = rows.of(step, recorded - 1)
    _check_length(rows, last, recorded, wanted, field)
    paired = _Paired(rows, before, last)
    copies = np.arange(1, count + 1)[:, None]

    # the rows of all copies, one after the other
    made = np.tile(rows.columns[:, last], count)
    made[0] = paired.blocks(copies).ravel()
    made[2] += len(intervals) * np.repeat(copies.ravel(), last.stop - last.start)
    tail = paired.tail(rows.columns[:, last.stop :], count)
    tail[2] += len(intervals) * count

    more = [
        replace(rows.intervals[index], micro_batch=recorded + copy)
        for copy in range(count)
        for index in intervals
    ]
    at = intervals[-1] + 1
    return Rows(
        columns=np.concatenate((rows.columns[:, : last.stop], made, tail), axis=1),
        sizes=np.concatenate((rows.sizes, paired.sizes(copies).ravel())),
        intervals=(*rows.intervals[:at], *more, *rows.intervals[at:]),
    )


def _check_length(rows: Rows, last: slice, recorded: int, wanted: int, field: str) -> None:
    """Raise UnsupportedError if the copies make more rows than this machine should hold."""
    given, each = rows.columns.shape[1], last.stop - last.start
    made = given + each * (wanted - recorded)
    if made > MOST_ROWS:
        most = recorded + max(MOST_ROWS - given, 0) // each
        raise UnsupportedError(
            f"{field}={wanted} makes a run of {made:,} allocations and frees, and a prediction "
            f"holds at most {MOST_ROWS:,}; allowed here is at most {most}; use that, or "
            "memlab.measure_run"
        )


class _Paired:
    """The blocks of the last recorded batch or token, paired with those of the one before."""

    def __init__(self, rows: Rows, before: slice, last: slice) -> None:
        blocks, is_birth = rows.columns[0], rows.columns[1].astype(bool)
        if not np.array_equal(is_birth[before], is_birth[last]):
            raise UnsupportedError(
                "the batches of the evaluation, or the tokens of the generation, do not all run "
                "the same operators, so that later ones do not follow from the first; use fewer "
                "of them, or memlab.measure_run"
            )
        self.num_blocks = len(rows.sizes)
        self.old, self.new = (blocks[part][is_birth[part]] for part in (before, last))
        place = {name: np.full(self.num_blocks, -1, np.int64) for name in ("old", "new")}
        place["old"][self.old] = place["new"][self.new] = np.arange(len(self.new))
        self.of_new = place["new"]
        self.rows_new = self.of_new[blocks[last]]
        self.rows_old = place["old"][blocks[last]]
        self.own_sizes = rows.sizes[self.new]
        self.slopes = self.own_sizes - rows.sizes[self.old]
        # positions of blocks that the next one frees
        is_freed_next = np.zeros(len(self.new), bool)
        is_freed_next[self.rows_old[(self.rows_new < 0) & (self.rows_old >= 0)]] = True
        self.is_freed_next = is_freed_next
        self.older = blocks[last][(self.rows_new < 0) & (self.rows_old < 0)]
        if rows.sizes[self.older].any():
            raise UnsupportedError(
                "a batch of the evaluation, or a token of the generation, frees what was allocated "
                "long before it, so that later ones do not follow from it; use fewer of them, or "
                "memlab.measure_run"
            )

    def blocks(self, copies: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the block of each row of each copy, (copies, rows)."""
        is_new = self.rows_new >= 0
        place = np.where(is_new, self.rows_new, self.rows_old)
        copy = np.where(is_new, copies, copies - 1)
        named = np.where(copy > 0, self._name(copy, place), self.new[place])
        found: npt.NDArray[np.int64] = np.where(place >= 0, named, 0)  # 0: of no bytes
        return found

    def sizes(self, copies: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the bytes of the blocks of each copy, (copies, blocks)."""
        found: npt.NDArray[np.int64] = np.maximum(self.own_sizes + copies * self.slopes, 0)
        return found

    def tail(self, columns: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
        """Return what comes after the last recorded one, for the last copy in its place."""
        place = self.of_new[columns[0]]
        is_last_only = (place >= 0) & self.is_freed_next[place]
        found = columns.copy()
        found[0] = np.where(is_last_only, self._name(np.int64(count), place), found[0])

        # what no copy frees, all of them leave behind
        is_of_each = (place >= 0) & ~is_last_only
        times = np.where(is_of_each, count + 1, 1)
        repeated = np.repeat(found, times, axis=1)
        first = np.cumsum(times) - times
        copy = np.arange(repeated.shape[1]) - np.repeat(first, times)
        return np.concatenate(
            (
                np.where(copy > 0, self._name(copy, np.repeat(place, times)), repeated[0])[None],
                repeated[1:],
            )
        )

    def _name(self, copy: npt.NDArray[np.int64] | np.int64, place: npt.NDArray[np.int64]) -> Any:
        return self.num_blocks + (copy - 1) * len(self.new) + place


# A run over fake tensors: recorded once, and continued to all its batches and tokens.

MOST_BATCHES, MOST_TOKENS = 4, 5  # that are recorded
OWN_STATE = (
    "What the model's own state_dict makes for the checkpoint is not counted, since it needs "
    "values: on a CPU bitsandbytes, for one, gives 4-bit weights another format for it."
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunRecording:
    """A run over fake tensors.

    Attributes:
        program: its operators and blocks, as recorded.
        run: its stages.
        saving_bytes: what writing the checkpoint allocates.
    """

    program: Program
    run: TrainingRun
    saving_bytes: int

    def sizes(self, effects: Sequence[KernelMemory | None]) -> npt.NDArray[np.int64]:
        """Return the bytes of every block as recorded, with the memory of the kernels."""
        return sizes_of(self.program.recording, self.program.layout, effects)

    def trace(self, own: npt.NDArray[np.int64]) -> Trace:
        """Return the trace of the whole run.

        Args:
            own: int64, (blocks,), bytes of every block as recorded.
        """
        rows = self._continued(self._with_saving(self._rows(own)))
        block, is_birth, interval, operator, module, stream = rows.columns
        nbytes = np.where(is_birth > 0, rows.sizes[block], -rows.sizes[block])
        real = nbytes != 0
        recording = self.program.recording
        return Trace(
            address=block[real],
            nbytes=nbytes[real],
            interval=interval[real].astype(np.int32),
            operator=operator[real].astype(np.int32),
            in_operator=is_birth[real] > 0,
            module=module[real].astype(np.int32),
            intervals=rows.intervals,
            operators=tuple(self.program.ran.names),
            modules=tuple(recording.modules),
            parameters=dict(recording.parameters),
            states=dict(recording.states),
            logits=recording.logits,
            gradients=frozenset(recording.gradients),
            leftover_bytes=0,
            stream=stream[real].astype(np.int32) if stream.any() else None,
        )

    def _rows(self, own: npt.NDArray[np.int64]) -> Rows:
        layout = self.program.layout
        stream = np.zeros_like(layout.block) if layout.stream is None else layout.stream
        columns = (
            layout.block, layout.is_birth, layout.interval, layout.operator, layout.module, stream,
        )  # fmt: skip
        return Rows(
            columns=np.array(columns, np.int64),
            sizes=own,
            intervals=tuple(self.program.recording.intervals),
        )

    def _with_saving(self, rows: Rows) -> Rows:
        """Return the run with what a checkpoint allocates, which runs no operators."""
        names = names_of(self.run)
        if StageName.SAVING not in names:
            return rows
        _, (interval,) = rows.of(names.index(StageName.SAVING), 0)
        at = int(np.searchsorted(rows.columns[2], interval, "right"))
        before = rows.columns[3, at - 1]
        block = len(rows.sizes)
        made = np.array([[block, is_birth, interval, before, -1, 0] for is_birth in (1, 0)]).T
        return replace(
            rows,
            columns=np.concatenate((rows.columns[:, :at], made, rows.columns[:, at:]), axis=1),
            sizes=np.append(rows.sizes, self.saving_bytes),
        )

    def _continued(self, rows: Rows) -> Rows:
        """Return the run with all batches and tokens; the last stage first, whose rows move."""
        names, run = names_of(self.run), self.run
        if run.generate is not None:
            wanted, number = run.generate.new_tokens, names.index(StageName.GENERATION)
            field = "generate: new_tokens"
            rows = continued(rows, number, min(wanted, MOST_TOKENS), wanted, field=field)
        if run.evaluate is not None:
            wanted, number = run.evaluate.num_batches, names.index(StageName.EVALUATION)
            field = "evaluate: num_samples / batch_size"
            rows = continued(rows, number, min(wanted, MOST_BATCHES), wanted, field=field)
        return rows


def record_run(spec: RunSpec, device: torch.device, tracker: Tracker) -> RunRecording:
    """Return a run as recorded over fake tensors.

    Raises:
        UnsupportedError: the model cannot do what a stage asks for.
    """
    saved: list[int] = []
    run, sizes = spec.run, spec.config.micro_batch_sizes

    def go(mode: FakeTensorMode) -> None:
        fake = over_fakes(spec.workload, mode, tracker)
        step = spec.build(device, partial(tracker.mark, -1), fake)
        tracker.know(step.model, step.with_loss)
        tracker.recording.parameter_formats = step.parameter_formats
        tracker.recording.notes += step.notes
        if step.scaler is not None:  # its first call allocates its scale, outside of any step
            tracker.mark(-1, Phase.BUILD, 0)
            step.scaler.scale(torch.zeros((), device=device))
        with tracker.modules(step.model):
            run_all_stages(
                step,
                run,
                tracker.mark,
                seed=spec.seed,
                num_new_tokens=min(run.generate.new_tokens, MOST_TOKENS) if run.generate else 0,
                num_batches=min(run.evaluate.num_batches, MOST_BATCHES) if run.evaluate else 0,
                save=lambda: saved.append(_bytes_of_saving(step, tracker)),
                stepped=lambda: tracker.know_states(step.with_loss, step.optimizer),
            )
        tracker.recording.host_memory = step.host_memory
        tracker.recording.notes += attention_notes_of_stages(tracker.recording, names_of(run))
        tracker.mark(-1, Phase.TEARDOWN, 0)

    recording = record_fake(go, tracker)
    program = Program(
        recording=recording,
        ran=recording.ran(),
        layout=layout_of(recording),
        partners={},
        sizes=sizes,
        other_size=sizes[0],
        differs="the stages of a run are recorded once",
    )
    return RunRecording(program=program, run=run, saving_bytes=saved[-1] if saved else 0)


def _bytes_of_saving(step: Step, tracker: Tracker) -> int:
    """Return what writing a checkpoint of a recorded step allocates on its device."""
    found = None
    # asked for their state, quantized weights of bitsandbytes change their format
    if all(p.is_floating_point() for p in step.model.parameters()):
        with without_modes():  # what is only looked at is no operator of the run
            found = saved_tensors(step)
            if found is None:
                _check_saved(step)
    if found is None:
        tracker.recording.notes += (OWN_STATE,)
    is_cpu = step.device.type == "cpu"
    return added_by_saving(found or (), step.config, is_first=True, is_cpu=is_cpu).device_bytes


def _check_saved(step: Step) -> None:
    """Raise UnsupportedError if checkpoints of such a step are not implemented."""
    try:
        weights_in(step)
    except UnsupportedError:
        raise
    except Exception:  # the model's own `state_dict` needs values
        return


def predict_run_in_process(spec: RunSpec, target: Target, *, report: Report) -> RunResult:
    """Return what a run would cost on the target; never raises for the run.

    Args:
        spec: the run.
        target: a CPU, or a CUDA card that need not be there.
        report: called as the prediction goes on; what it raises ends it.
    """
    config, device = spec.config, torch.device(target.kind)
    facts: dict[str, Any] = {
        "source": Source.PREDICTED,
        "device": target.name,
        "versions": versions_of(config, target),
    }

    def make(recorded: RunRecording) -> RunResult:
        step = TracedStep(
            config=config, target=target, device=device, program=recorded.program, report=report
        )
        kernels = step.kernels(timed=False)
        found = stages_of(recorded, names_of(recorded.run), kernels, config, target)
        result = spec.result(
            Outcome.OK,
            summary_of(found.costs),
            **facts,
            stages=found.costs,
            uncertainty=found.width,
            notes=(
                *spec.notes(device),
                *notes_of_recording(recorded.program.recording, target),
                *kernels.notes,
                *found.compiled.notes,
                *recorded.program.recording.assumptions,
            ),
        )
        return with_judgement(result, found.replayed)

    text = f"recording a run of {spec.workload.name}"
    made = from_recording(partial(record_run, spec), make, config, target, report=report, text=text)
    if isinstance(made, Failure):
        return spec.result(made.outcome, made.message, **facts)
    return made


def with_judgement(result: RunResult, replayed: ReplayedRun | None = None) -> RunResult:
    """Return the result with whether each stage fits its limit."""
    counted = [result.counted(stage) for stage in result.stages]
    return replace(
        result, stages=judged(result.stages, counted, result.memory_limit_bytes, replayed)
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stages:
    """What the stages of a recorded run cost.

    Attributes:
        costs: of each.
        width: the uncertainty of their peaks.
        trace: the run, with the sizes that the allocator gives out.
        compiled: what compiled parts leave unknown.
        replayed: on a card the run at any limit.
    """

    costs: tuple[StageCost, ...]
    width: float
    trace: Trace
    compiled: Compiled
    replayed: ReplayedRun | None = None


def stages_of(
    recorded: RunRecording,
    names: Sequence[str],
    kernels: Kernels,
    config: StepConfig,
    target: Target,
    seconds: npt.NDArray[np.float64] | None = None,
) -> Stages:
    """Return what the stages of a run cost.

    Args:
        recorded: the run.
        names: of its stages after the build, by number.
        kernels: their memory.
        config: of its steps.
        target: a CPU, or a CUDA card.
        seconds: float64, (operators,), of which the compiled ones are a share.
    """
    program = recorded.program
    own = recorded.sizes(kernels.effects)
    compiled = compiled_part(program, config, own, seconds, of_run=True)
    if target.kind == "cpu":
        trace = recorded.trace(own)
        costs = stage_costs(trace, names, None)
        width = CPU_MEMORY + compiled.half_width + _unsure(program, kernels, costs)
        return Stages(costs=costs, width=width, trace=trace, compiled=compiled)

    settings = AllocatorSettings(expandable_segments=config.expandable_segments)
    owns = possible_sizes(program, kernels, target.card)
    traces = {hypothesis: recorded.trace(own) for hypothesis, own in owns.items()}
    runs = {
        hypothesis: replay(trace.address, trace.nbytes, settings, stream=trace.stream)
        for hypothesis, trace in traces.items()
    }
    chosen = in_the_middle({name: held.peak_reserved_bytes for name, held in runs.items()})
    requested, held = traces[chosen], runs[chosen]
    # blocks have the sizes that the allocator gave out
    given_out = replace(requested, nbytes=np.diff(held.allocated_bytes, prepend=0))
    costs = stage_costs(given_out, names, held.reserved_bytes)
    kinds = (CONVOLUTIONS,) if len(owns) > 1 else ()
    width = width_of("peak_reserved_bytes", kinds).half_width
    return Stages(
        costs=costs,
        width=width + compiled.half_width + _unsure(program, kernels, costs),
        trace=given_out,
        compiled=compiled,
        # the first hypothesis, without any workspace, is what the run needs
        replayed=ReplayedRun(next(iter(traces.values())), names, settings),
    )


def _unsure(program: Program, kernels: Kernels, stages: tuple[StageCost, ...]) -> float:
    """Return what is not known of kernels and of values, as a part of the peak."""
    recording = program.recording
    unsure = kernels.unsure_bytes / max(stage.peak_allocated_bytes for stage in stages)
    if recording.assumptions:
        spread = ASSUMED_SPREAD if recording.spread else ASSUMED
        unsure += ASSUMED_BRANCH if recording.branched else spread
    return unsure


def summary_of(stages: tuple[StageCost, ...]) -> str:
    """Return the sentence of a run that went well."""
    worst = max(stages, key=lambda stage: stage.peak_allocated_bytes)
    return f"peak {format_bytes(worst.peak_allocated_bytes)} allocated in the {worst.name}"
