"""`BatchSizeModel`: a recorded step as arithmetic: the timeline of any batch in a few milliseconds.

It is what a slider moves over: no model, no tensor and no torch, only sums in numpy. The timeline
of the step that was recorded last is exact. For other batches every size is taken as affine in the
micro-batch size, which workspace inside kernels is not: such a timeline is interpolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from memlab.memory.lifetimes import step_memory
from memlab.memory.replay import AllocatorSettings, least_limit, replay, serves
from memlab.result import CountedPeak, StepResult
from memlab.trace import CATEGORIES, PHASES, Phase, Timeline, Trace
from memlab.tracing.program import MOST_RECORDED, Part, Program

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

STEP = 1  # the recorded step that begins with optimizer state


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchSizeModel:
    """A program with its sizes and times.

    Attributes:
        program: the recorded run.
        own: int64, (blocks,), bytes of every block as recorded.
        least: the same without what kernels take only where there is room.
        columns: int64, (rows,), index into `CATEGORIES` of each row's block, as seen in `STEP`.
        seconds: float64, (intervals,), of every recorded interval; None if times are not known.
        settings: of the caching allocator that serves the blocks; None where there is none.
        least_seconds: as in `Overlap`, of every recorded interval; None on a CPU.
        products_seconds: as in `Kernels`, of the recorded step.
    """

    program: Program
    own: npt.NDArray[np.int64]
    least: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64] | None
    settings: AllocatorSettings | None
    least_seconds: npt.NDArray[np.float64] | None = None
    products_seconds: float = 0.0

    def covers(self, micro_batch_sizes: Sequence[int]) -> bool:
        """Return whether the timeline of these micro-batches can be computed from this run."""
        program, count = self.program, len(micro_batch_sizes)
        if tuple(micro_batch_sizes) == program.sizes:
            return True
        if len(set(program.sizes)) > 1:
            return False
        recorded, wanted = {program.size, program.other_size}, set(micro_batch_sizes)
        repeats = program.num_recorded == MOST_RECORDED and count > MOST_RECORDED
        if not repeats and count != program.num_recorded:
            return False
        if program.differs:
            return False
        return wanted <= recorded or (len(recorded) == 2 and 1 not in wanted | recorded)

    @property
    def is_of_one_size(self) -> bool:
        """Whether it tells of no other size, as of a rank or of a compiled step on a card."""
        return bool(self.program.differs) or {self.program.other_size} == set(self.program.sizes)

    def is_exact(self, micro_batch_sizes: Sequence[int]) -> bool:
        """Return whether it is a recorded step itself, not interpolated from two others."""
        return set(micro_batch_sizes) <= set(self.program.sizes)

    def trace(self, micro_batch_sizes: Sequence[int]) -> tuple[Trace, int | None]:
        """Return the trace of a whole run, and the most bytes reserved during `STEP`.

        On CUDA sizes are those of the blocks that the caching allocator gives out; as `measure`
        does, its cached segments are given back before each step.
        """
        trace = self.program.trace(self.own, micro_batch_sizes)
        if self.settings is None:
            return trace, None
        held = replayed(trace, self.settings)
        return held.given, held.reserved_bytes

    def fits(self, micro_batch_sizes: Sequence[int], limit_bytes: int) -> bool:
        """Return whether a step with these micro-batches fits a limit."""
        _, reserved = self.trace(micro_batch_sizes)
        if reserved is None:
            live = self.timeline(micro_batch_sizes).total_bytes
            return CountedPeak(kind="allocated", nbytes=int(live.max())).fits(limit_bytes)

        peak = CountedPeak(kind="reserved", nbytes=reserved)
        return peak.fits(limit_bytes, partial(self.runs_within, micro_batch_sizes))

    def runs_within(self, micro_batch_sizes: Sequence[int], limit_bytes: int) -> bool:
        """Return whether a caching allocator serves the whole run within a limit.

        At the limit it gives cached segments back before it is out of memory, and kernels do with
        less workspace, so a run may take less than its peak without a limit. False where there is
        no such allocator.
        """
        if self.settings is None or limit_bytes < 1:
            return False
        trace = self.program.trace(self.least, micro_batch_sizes)
        return serves(
            trace.address,
            trace.nbytes,
            self.settings,
            limit_bytes,
            flush_before=_starts(trace),
            stream=trace.stream,
        )

    def against_limit(self, result: StepResult, limit_bytes: int | None) -> StepResult:
        """Return a result that this size model gave with a limit, and whether the step fits it."""
        sizes = result.config.micro_batch_sizes
        return result.against_limit(limit_bytes, partial(self.runs_within, sizes))

    def timeline(self, micro_batch_sizes: Sequence[int]) -> Timeline:
        """Return the timeline of a step with these micro-batches, which `covers` must allow.

        On CUDA without what the caching allocator adds to large blocks.
        """
        every = self.program.parts(len(micro_batch_sizes))
        first = next(i for i, part in enumerate(every) if part.interval.step == STEP)
        parts = [part for part in every if part.interval.step == STEP]
        standing = self._by_category(every[:first], micro_batch_sizes)[0].sum(axis=0)
        change, order, part_of = self._by_category(parts, micro_batch_sizes)
        live = standing + np.cumsum(change, axis=0)
        rows = np.concatenate([[False], change.any(axis=1)])
        rows[0] = True
        counts = self.program.operator_counts(order, part_of, parts)
        phases = np.array([PHASES.index(part.interval.phase) for part in parts], np.int8)
        micro = np.array([part.interval.micro_batch for part in parts], np.int32)
        padded = np.concatenate([part_of[:1], part_of])
        return Timeline(
            bytes_by_category=np.concatenate([standing[None], live])[rows],
            phase=phases[padded][rows],
            micro_batch=micro[padded][rows],
            operator=np.concatenate([[0], counts]).astype(np.int32)[rows],
        )

    def ran(self, micro_batch_sizes: Sequence[int]) -> list[tuple[str, str]]:
        """Return the operators of a step in order: the path of the module, and the name.

        `Timeline.operator` counts them: instant `i` comes after `ran[operator[i] - 1]`.
        """
        ran = self.program.ran
        paths = {index: path for path, index in self.program.recording.modules.items()}
        slices = self.program.operator_slices()
        parts = self.program.parts(len(micro_batch_sizes))
        recorded = [slices[part.recorded] for part in parts if part.interval.step == STEP]
        modules = ran.module.tolist()
        return [
            (paths.get(modules[number], ""), ran.names[number])
            for begin, end in recorded
            for number in range(begin, end)
        ]

    def step_seconds(self, micro_batch_sizes: Sequence[int]) -> float | None:
        """Return the time of a step with these micro-batches; None if times are not known."""
        if self.seconds is None:
            return None
        return sum(
            self._seconds_of(part, micro_batch_sizes[part.interval.micro_batch])
            for part in self.program.parts(len(micro_batch_sizes))
            if part.interval.step == STEP
        )

    def micro_batch_seconds(self, size: int) -> float | None:
        """Return the time of one more micro-batch of this size; None if times are not known."""
        if self.seconds is None:
            return None
        count = self.program.num_recorded
        second = min(1, count - 1)  # the first one, if only one was recorded
        return sum(
            self._seconds_of(part, size)
            for part in self.program.parts(count)
            if part.interval.step == STEP
            and part.interval.micro_batch == second
            and part.interval.phase is not Phase.OPTIMIZER
        )

    def host_share(self, micro_batch_sizes: Sequence[int]) -> float:
        """Return in what share of a step's time, 0..1, a card's host decides it; 0 on a CPU."""
        whole = self.step_seconds(micro_batch_sizes)
        if not whole or self.least_seconds is None:
            return 0.0
        by_host = 0.0
        for part in self.program.parts(len(micro_batch_sizes)):
            if part.interval.step == STEP:
                taken = self._seconds_of(part, micro_batch_sizes[part.interval.micro_batch])
                host = float(self.least_seconds[1][part.recorded])
                by_host += taken if taken <= host else 0.0
        return by_host / whole

    def _seconds_of(self, part: Part, size: int) -> float:
        """Return the time of an interval whose micro-batch has this size."""
        more = size - self.program.size
        return max(own + slope * more for own, slope in self.lines(part.recorded))

    def lines(self, interval: int) -> list[tuple[float, float]]:
        """Return seconds as recorded, and of each further sample: an interval takes the longest.

        The first are its own. On a card those of its kernels alone follow, and those of the host,
        which no sample changes: with few samples the card may wait for the host, with many not.
        """
        assert self.seconds is not None
        found = [self._line(self.seconds, interval)]
        if self.least_seconds is not None:
            without_host, host = self.least_seconds
            found += [self._line(without_host, interval), (float(host[interval]), 0.0)]
        return found

    def _line(self, seconds: npt.NDArray[np.float64], interval: int) -> tuple[float, float]:
        """Return a time as recorded, and of each further sample.

        The latter is 0 where it is not known: for a run of one size, and in an interval that has no
        partner.
        """
        program, partner = self.program, self.program.partners.get(interval)
        own = float(seconds[interval])
        if partner is None or program.size == program.other_size:
            return own, 0.0
        slope = (float(seconds[partner]) - own) / (program.other_size - program.size)
        # timings scatter: no interval gets faster with samples, nor more than in proportion
        return own, min(max(slope, 0.0), own / program.size)

    def _by_category(
        self, parts: Sequence[Part], micro_batch_sizes: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the change that each row makes, (rows, categories); the rows; their parts."""
        program = self.program
        order, part_of = program.rows_of(parts)
        sizes = program.bytes_of(self.own, order, part_of, parts, micro_batch_sizes)
        signed = np.where(program.layout.is_birth[order], sizes, -sizes)
        change = np.zeros((len(order), len(CATEGORIES)), np.int64)
        change[np.arange(len(order)), self.columns[order]] = signed
        return change, order, part_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replayed:
    """A run as a caching allocator serves it without a limit; `replayed` makes it.

    Attributes:
        asked: the trace with the sizes that were asked for.
        given: the same with the sizes of the blocks that were given out.
        reserved_bytes: the most bytes reserved during `STEP`.
        run_reserved_bytes: the most bytes reserved in the whole run.
        settings: of the allocator.
    """

    asked: Trace
    given: Trace
    reserved_bytes: int
    run_reserved_bytes: int
    settings: AllocatorSettings

    def needed_bytes(self) -> int:
        """Return the least memory limit within which the allocator serves the whole run."""
        return least_limit(
            self.asked.address,
            self.asked.nbytes,
            self.settings,
            flush_before=_starts(self.asked),
            stream=self.asked.stream,
            peak_reserved_bytes=self.run_reserved_bytes,
        )


def replayed(trace: Trace, settings: AllocatorSettings) -> Replayed:
    """Return a run as a caching allocator serves it.

    As `measure` does, cached segments are given back before each step.
    """
    starts = _starts(trace)
    last = int(np.flatnonzero(_steps(trace) == STEP)[-1])
    held = replay(trace.address, trace.nbytes, settings, flush_before=starts, stream=trace.stream)
    return Replayed(
        asked=trace,
        given=replace(trace, nbytes=np.diff(held.allocated_bytes, prepend=0)),
        reserved_bytes=int(held.reserved_bytes[starts[-1] : last + 1].max()),
        run_reserved_bytes=held.peak_reserved_bytes,
        settings=settings,
    )


def _steps(trace: Trace) -> npt.NDArray[np.int64]:
    return np.array([interval.step for interval in trace.intervals])[trace.interval]


def _starts(trace: Trace) -> list[int]:
    """Return the rows at which the two recorded steps begin."""
    steps = _steps(trace)
    return [int(np.flatnonzero(steps == number)[0]) for number in (0, STEP)]


def size_model_of(
    program: Program,
    own: npt.NDArray[np.int64],
    seconds: npt.NDArray[np.float64] | None,
    *,
    settings: AllocatorSettings | None,
    least: npt.NDArray[np.int64] | None = None,
) -> BatchSizeModel:
    """Return the size model of a program whose blocks have these bytes.

    Args:
        program: of the run.
        own: bytes of every block.
        seconds: of every interval; None if times are not known.
        settings: of the caching allocator; None where there is none.
        least: bytes without what kernels take only where there is room; None if they take nothing.
    """
    sizes = [program.size] * program.num_recorded
    trace = program.trace(np.ones_like(own), sizes)  # every row is there, none has zero bytes
    blocks = step_memory(trace, STEP).blocks
    columns = np.zeros(len(trace.nbytes), np.int64)
    columns[blocks.births] = blocks.columns
    freed = blocks.deaths < len(columns)
    columns[blocks.deaths[freed]] = blocks.columns[freed]
    return BatchSizeModel(
        program=program,
        own=own,
        least=own if least is None else least,
        columns=columns,
        seconds=seconds,
        settings=settings,
    )
