"""`LengthCurve`: what a step costs with batches of any length, from recordings at a few lengths.

While a step runs the same operators, the size of each of its blocks is a polynomial of the length:
constant for a weight, a line for a hidden state, a parabola for the weights of eager attention. So
three recorded lengths give each block at every other one, and the timeline, the caching allocator
and the limit follow from the blocks as in any prediction. Kernels that round a length up make small
steps, which a parabola cuts through. Left out: the time of a step.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from memlab._util.units import format_bytes
from memlab.errors import UnsupportedError
from memlab.memory.lifetimes import step_memory
from memlab.memory.replay import AllocatorSettings, Piece, replay_in_turn
from memlab.prediction.batch_size_model import STEP, BatchSizeModel
from memlab.prediction.interpolation import interpolated
from memlab.prediction.predict import TIMED, Prediction
from memlab.result import StepResult
from memlab.trace import Phase, Trace
from memlab.tracing.program import Program

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt  # it costs 5 ms at import

NODES = 3  # recorded lengths for a parabola


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LengthCurve:
    """Predictions of one step with batches of several lengths, all of the same operators.

    Attributes:
        recorded: predictions by length, ascending.
        name: of the workload, up to its length.
        errors: the relative error at each recorded length that the others were tried on first.
    """

    recorded: Mapping[int, Prediction]
    name: str
    errors: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        """The largest error that was seen; 0 if none was looked for."""
        return max(self.errors, default=0.0)

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return sum(self._sizes)

    @property
    def longest(self) -> int:
        """The longest recorded length, which no batch may exceed."""
        return max(self.recorded)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was assumed of values that a step reads, each sentence once."""
        steps = [size_model_of(found).program.recording for found in self.recorded.values()]
        return tuple(dict.fromkeys(said for step in steps for said in step.assumptions))

    def at(self, length: int, limit_bytes: int | None = None) -> StepResult:
        """Return what a step costs whose longest sample has this length.

        Batches that are shorter than the shortest recorded one count as that one. A time is stated
        only at recorded lengths.

        Args:
            length: at most the longest recorded one.
            limit_bytes: that the step may hold; None is what the device has.
        """
        length = max(length, min(self.recorded))
        size_model = self._size_model(length)
        known = self.recorded.get(length)
        result = self._between(length, size_model) if known is None else known.result
        return size_model.against_limit(result, limit_bytes)

    def peak_bytes(self, length: int) -> int:
        """Return the peak that counts against a limit, which takes a part of the time of `at`."""
        trace, reserved = self._size_model(length).trace(self._sizes)
        return step_memory(trace, STEP).peak_bytes if reserved is None else reserved

    def trace(self, length: int) -> Trace:
        """Return what a run allocates and frees whose longest sample has this length.

        Sizes are those that are asked for, before an allocator rounds them.
        """
        size_model = self._size_model(length)
        return size_model.program.trace(size_model.own, self._sizes)

    def fits(self, length: int, limit_bytes: int) -> bool:
        """Return whether a step fits a limit whose longest sample has this length."""
        return self._size_model(length).fits(self._sizes, limit_bytes)

    def error_of(self, prediction: Prediction, length: int) -> float:
        """Return how far off the curve is of a prediction at another length, relative to it.

        It is that of allocated or reserved bytes, whichever is larger.
        """
        told, found = self.at(length), prediction.result
        pairs = [
            (told.peak_allocated_bytes, found.peak_allocated_bytes),
            (told.peak_reserved_bytes, found.peak_reserved_bytes),
        ]
        return max(abs(one / other - 1) for one, other in pairs if one and other)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.recorded[self.longest].result.config.micro_batch_sizes

    def _between(self, length: int, size_model: BatchSizeModel) -> StepResult:
        """Return the result at a length that was not recorded."""
        near = min(self.recorded, key=lambda other: abs(other - length))
        base = self.recorded[near]
        timeless = dataclasses.replace(size_model, seconds=None)
        found = interpolated(dataclasses.replace(base, size_model=timeless), base.result.config)
        widths = {name: width + self.error for name, width in (found.uncertainty or {}).items()}
        assert found.peak_allocated_bytes is not None
        return dataclasses.replace(
            found,
            workload_name=f"{self.name} {length}",
            message=f"interpolated peak {format_bytes(found.peak_allocated_bytes)} allocated in "
            f"{found.peak_place}",
            watts=None,
            uncertainty={name: w for name, w in widths.items() if name not in TIMED},
        )

    def _size_model(self, length: int) -> BatchSizeModel:
        """Return the arithmetic of a step whose longest sample has this length."""
        length = max(length, min(self.recorded))
        known = self.recorded.get(length)
        nodes = _nodes(sorted(self.recorded), length) if known is None else [length]
        forecasts = [size_model_of(self.recorded[node]) for node in nodes]
        weights = _weights(nodes, length)
        return dataclasses.replace(
            forecasts[0],
            own=_mixed([size_model.own for size_model in forecasts], weights),
            least=_mixed([size_model.least for size_model in forecasts], weights),
        )


def size_model_of(prediction: Prediction) -> BatchSizeModel:
    """Return the size model of a prediction that was made."""
    assert prediction.size_model is not None
    return prediction.size_model


def runs_same(one: Program, other: Program) -> bool:
    """Return whether two recorded runs allocate and free the same blocks in the same order.

    In which order blocks are freed one after the other does not matter: at its end, autocast frees
    the weights that it has cast in an order that differs from run to run. Nor does that in which
    the model is deleted after the last step.
    """
    if one.ran.names != other.ran.names or one.recording.intervals != other.recording.intervals:
        return False
    if (one.sizes, one.other_size) != (other.sizes, other.other_size):
        return False
    if not np.array_equal(one.layout.interval, other.layout.interval):
        return False
    if not np.array_equal(one.layout.is_birth, other.layout.is_birth):
        return False
    ends = np.array([i.phase is Phase.TEARDOWN for i in one.recording.intervals])
    counted = ~ends[one.layout.interval]
    return np.array_equal(_in_any_order(one)[counted], _in_any_order(other)[counted])


def _in_any_order(program: Program) -> npt.NDArray[np.int64]:
    """Return the block of each row, with blocks that are freed one after the other by number."""
    layout = program.layout
    allocated = np.cumsum(layout.is_birth)  # so far: equal where nothing is allocated in between
    order = np.lexsort((layout.block, ~layout.is_birth, allocated, layout.interval))
    return layout.block[order]


def _nodes(lengths: Sequence[int], length: int) -> Sequence[int]:
    """Return the recorded lengths around another one, of which one may be on its other side."""
    after = next(i for i, recorded in enumerate(lengths) if recorded >= length)
    first = min(max(after - 1, 0), max(len(lengths) - NODES, 0))
    return lengths[first : first + NODES]


def _weights(nodes: Sequence[int], length: int) -> list[float]:
    """Return what each node counts in the polynomial through all of them (Lagrange's form)."""
    return [
        float(np.prod([(length - other) / (node - other) for other in nodes if other != node]))
        for node in nodes
    ]


def _mixed(
    sizes: Sequence[npt.NDArray[np.int64]], weights: Sequence[float]
) -> npt.NDArray[np.int64]:
    """Return the bytes of every block, of which none is negative."""
    found = sum(weight * held for weight, held in zip(weights, sizes, strict=True))
    return np.maximum(np.rint(found), 0).astype(np.int64)


# At which lengths a step is recorded: three, and then one more that is predicted from them
# first.
#
# If the curve through the first recordings gives the peak of the next one to a thousandth,
# it is trusted everywhere. If not, that recording joins the others, and the curve is tried
# at another length; the largest error that was seen widens what is stated. The lengths
# reach from the longest sample down to where a batch hardly fills memory, whatever lengths
# the data set has in between, so that a gap in it is no gap in the curve. One that the
# workload cannot have is replaced by one near.

EXACT = 0.001  # of a peak: the error at a length that was left out, for no more to be recorded
MOST_RECORDED = 8
SHORTEST = 32  # times shorter than the longest: what is shorter still hardly fills a batch's memory
LEAST_REACH = 4  # how many times shorter than the longest is recorded in any case
LEAST = 2  # a dimension of one element takes other paths through kernels and through models
MULTIPLES = (1, 8, 64, 256)  # of which lengths are that workloads may ask for


def recorded_curve(
    name: str,
    lengths: Sequence[int],
    predict: Callable[[int], Prediction],
    is_possible: Callable[[int], bool],
) -> LengthCurve:
    """Return the curve over the lengths of a data set.

    Args:
        name: of the workload, up to its length.
        lengths: each once, ascending.
        predict: length -> the step with batches of that length.
        is_possible: length -> whether the workload can have samples of it.

    Raises:
        UnsupportedError: the step runs other operators at some lengths.
    """
    longest = lengths[-1]
    low = min(max(lengths[0], -(-longest // SHORTEST)), longest // LEAST_REACH)

    def near(length: int, above: int, below: int) -> int | None:
        """Return a length between two others that the workload can have, close to this one."""
        held = sorted(lengths, key=lambda other: abs(other - length))[:1]
        tried = [*(length // m * m for m in MULTIPLES), *held]
        inside = [other for other in dict.fromkeys(tried) if above < other < below]
        return next((other for other in inside if is_possible(other)), None)

    # the longest first: if that is not possible, nothing else is worth its time
    recorded = {longest: predict(longest)}
    for wanted in (max(low, LEAST), (low + longest) // 2):
        if (other := near(wanted, LEAST - 1, longest)) is not None and other not in recorded:
            recorded[other] = predict(other)
    if _unlike(recorded) is not None:
        # the first run of a process may import a library, and count the tables that this makes
        recorded[longest] = predict(longest)
    curve = _curve(name, recorded, ())
    while len(curve.recorded) < MOST_RECORDED:
        left = _left_out(sorted(curve.recorded), near)
        if left is None:
            break
        found = predict(left)
        error = curve.error_of(found, left)
        curve = _curve(name, {**curve.recorded, left: found}, (*curve.errors, error))
        if error <= EXACT:
            break
    return curve


def _curve(name: str, recorded: Mapping[int, Prediction], errors: tuple[float, ...]) -> LengthCurve:
    _check_operators(recorded)
    return LengthCurve(recorded=dict(sorted(recorded.items())), name=name, errors=errors)


def _left_out(recorded: Sequence[int], near: Callable[[int, int, int], int | None]) -> int | None:
    """Return a length in the middle of the widest gap between recorded ones; None if none is."""
    for gap in sorted(pairwise(recorded), key=lambda gap: gap[0] - gap[1]):
        if (found := near(sum(gap) // 2, *gap)) is not None:
            return found
    return None


def _check_operators(recorded: Mapping[int, Prediction]) -> None:
    """Raise if the recorded steps do not all run the same operators."""
    length, longest = _unlike(recorded), max(recorded)
    if length is None:
        return
    ran = [size_model_of(recorded[one]).program.ran.names for one in (length, longest)]
    name = recorded[length].result.workload_name
    if ran[0] == ran[1]:
        does = f"{name} does not allocate and free in the order of one with batches of {longest}"
    else:
        does = (
            f"{name} runs other operators with batches of {length} than with batches of {longest} "
            f"({len(ran[0])} and {len(ran[1])} of them)"
        )
    raise UnsupportedError(
        f"{does}, so that no length follows from others; predict the lengths that matter one by "
        "one: memlab.predict(workload.resized(length), config)"
    )


def _unlike(recorded: Mapping[int, Prediction]) -> int | None:
    """Return a length whose step runs other operators than that of the longest; None if none."""
    program = size_model_of(recorded[max(recorded)]).program
    return next(
        (
            n
            for n, found in recorded.items()
            if not runs_same(program, size_model_of(found).program)
        ),
        None,
    )


# `Distribution`: the lengths of all samples, and the longest one of a random batch.
#
# A batch of b samples is padded to its longest one, so that decides what the batch costs. A
# shuffled data set gives each set of b samples the same chance. Of N samples, c are at most
# as long as v, so the longest of a batch is at most v with the chance that all b come from
# those c:
#
#     c (c - 1) ... (c - b + 1)  /  N (N - 1) ... (N - b + 1)
#
# This is exact; no batch is drawn.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Distribution:
    """The lengths of all samples.

    Attributes:
        lengths: int64, (samples,), ascending.
        values: int64, (values,), each length once, ascending.
        num_up_to: int64, (values,), how many samples are at most as long.

    >>> Distribution.of([1, 1, 3]).expected_longest(2)  # 1 in one of three pairs, else 3
    2.3333333333333335
    """

    lengths: npt.NDArray[np.int64]
    values: npt.NDArray[np.int64] = field(init=False)
    num_up_to: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        values, counts = np.unique(self.lengths, return_counts=True)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "num_up_to", np.cumsum(counts))

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Distribution:
        """Return the distribution of lengths in any order."""
        return cls(lengths=np.sort(np.array(lengths, np.int64)))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def shortest(self) -> int:
        """The shortest sample."""
        return int(self.values[0])

    @property
    def longest(self) -> int:
        """The longest sample."""
        return int(self.values[-1])

    @property
    def total(self) -> int:
        """All samples together."""
        return int(self.lengths.sum())

    def words(self, unit: str) -> str:
        """Return how many samples there are, and of which lengths.

        >>> Distribution.of([1, 1, 3]).words("tokens"), Distribution.of([2]).words("tokens")
        ('3 samples of 1 to 3 tokens', '1 sample of 2 tokens')
        """
        several = f"{self.shortest:,} to " if self.shortest < self.longest else ""
        samples = "sample" if len(self) == 1 else "samples"
        return f"{len(self):,} {samples} of {several}{self.longest:,} {unit}"

    def cut_to(self, length: int) -> Distribution:
        """Return the distribution of samples of which the longer ones are cut to a length."""
        return Distribution(lengths=np.minimum(self.lengths, length))

    def chances_up_to(self, num_samples: int) -> npt.NDArray[np.float64]:
        """Return for each value the chance that no sample of a random batch is longer."""
        chances = np.ones(len(self.values))
        for drawn in range(num_samples):
            chances *= np.maximum(self.num_up_to - drawn, 0) / (len(self) - drawn)
        return chances

    def chance_above(self, length: int, num_samples: int) -> float:
        """Return the chance that a random batch has a sample that is longer than this."""
        at = int(np.searchsorted(self.values, length, "right")) - 1
        return 1.0 if at < 0 else 1.0 - float(self.chances_up_to(num_samples)[at])

    def expected_longest(self, num_samples: int) -> float:
        """Return the mean, over random batches, of their longest sample."""
        chances = np.diff(self.chances_up_to(num_samples), prepend=0.0)
        return float(chances @ self.values)

    def median_longest(self, num_samples: int) -> int:
        """Return the longest sample of the batch in the middle: half of all are no longer."""
        at = int(np.searchsorted(self.chances_up_to(num_samples), 0.5))
        return int(self.values[min(at, len(self.values) - 1)])


# Ways to make batches of samples that differ in length, and how much of a batch is padding.
#
# - *padding*: the data set is shuffled, and each micro-batch is padded to its longest
#   sample.
# - *grouping by length*: samples are sorted first, so that those of a batch are about
#   equally long, beginning with the longest. The batches are shuffled afterwards, so a step
#   may be of any length. Trainers that sort only a part of the data set at a time are
#   between this and padding.
# - *packing*: samples are put one after the other into rows that are as long as the longest
#   sample. A sample goes into the row with the least room that is enough, the longest
#   samples first (best fit decreasing). No sample is cut.
#
# In each of them some batch is as long as the longest sample, so the worst batch costs the
# same.


@dataclass(frozen=True, kw_only=True, slots=True)
class Batching:
    """What batches of one kind are like.

    Attributes:
        name: "padding", "grouping by length" or "packing".
        num_batches: optimizer updates in which each sample occurs once.
        tokens_per_batch: mean of an update, padding included.
        padding_fraction: how much of them is padding, 0..1.
        typical_longest: half of the batches are no longer.
        chance_above: the share of the batches that are longer than the longest that fits a limit;
            None without a limit.
    """

    name: str
    num_batches: int
    tokens_per_batch: float
    padding_fraction: float
    typical_longest: int
    chance_above: float | None


def batchings(
    data: Distribution, micro_batch_sizes: Sequence[int], fitting: int | None
) -> tuple[Batching, ...]:
    """Return the three ways to make batches.

    Args:
        data: the lengths of all samples.
        micro_batch_sizes: samples of each micro-batch of an update.
        fitting: the longest sample that fits a limit; 0 if none does, None without a limit.
    """
    return (
        _padded(data, micro_batch_sizes, fitting),
        _grouped(data, micro_batch_sizes, fitting),
        _packed(data, sum(micro_batch_sizes), fitting),
    )


def _padded(data: Distribution, sizes: Sequence[int], fitting: int | None) -> Batching:
    batch = sum(sizes)
    tokens = sum(size * data.expected_longest(size) for size in sizes)
    return Batching(
        name="padding",
        num_batches=-(-len(data) // batch),
        tokens_per_batch=tokens,
        padding_fraction=1.0 - batch * data.total / len(data) / tokens,
        typical_longest=data.median_longest(batch),
        chance_above=None if fitting is None else data.chance_above(fitting, batch),
    )


def _grouped(data: Distribution, sizes: Sequence[int], fitting: int | None) -> Batching:
    batch, count = sum(sizes), len(data)
    lengths = data.lengths[::-1]  # from the longest on: the batch that is not full has the shortest
    starts = np.arange(0, count, batch)
    begins = starts[:, None] + np.cumsum([0, *sizes[:-1]])  # (batches, micro-batches)
    num_samples = np.clip(count - begins, 0, sizes)
    tokens = int((num_samples * lengths[np.minimum(begins, count - 1)]).sum())
    longest = lengths[starts]
    return Batching(
        name="grouping by length",
        num_batches=len(starts),
        tokens_per_batch=tokens / len(starts),
        padding_fraction=1.0 - data.total / tokens,
        typical_longest=int(longest[len(longest) // 2]),
        chance_above=None if fitting is None else float((longest > fitting).mean()),
    )


def _packed(data: Distribution, batch: int, fitting: int | None) -> Batching:
    rows, longest = packed_rows(data), data.longest
    num_batches = -(-rows // batch)
    return Batching(
        name="packing",
        num_batches=num_batches,
        tokens_per_batch=rows * longest / num_batches,
        padding_fraction=1.0 - data.total / (rows * longest),
        typical_longest=longest,
        chance_above=None if fitting is None else float(longest > fitting),
    )


def packed_rows(data: Distribution) -> int:
    """Return into how many rows, as long as the longest sample, all samples are packed.

    Samples of one length are packed together, since rows with the same room are alike.

    >>> packed_rows(Distribution.of([8, 5, 4, 3, 2, 2]))  # 8, 5 + 3, 4 + 2 + 2
    3
    """
    longest, rows = data.longest, 0
    with_room: dict[int, int] = defaultdict(int)  # rows by their room
    rooms: list[int] = []  # the keys, ascending
    counts = np.diff(data.num_up_to, prepend=0)
    for length, count in zip(data.values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        while left:
            at = bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else longest
            each = room // length  # samples until the room of such a row is used up
            taken = max(left // each, 1)
            if at < len(rooms):
                taken = min(taken, with_room[room])
                with_room[room] -= taken
                if not with_room[room]:
                    rooms.pop(at)
            else:
                rows += taken
            each = min(each, left)
            left -= taken * each
            rest = room - each * length
            if rest and not with_room[rest]:
                insort(rooms, rest)
            with_room[rest] += taken
    return rows


# Up to which length a step fits a limit, and what cutting samples there would lose.


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """Samples that are cut at a length, so that each batch fits.

    Attributes:
        max_length: the longest sample that certainly fits: at the upper end of the uncertainty.
        num_samples_cut: samples that are longer.
        samples_cut_fraction: of all samples, 0..1.
        tokens_cut_fraction: of all tokens, 0..1.
    """

    max_length: int
    num_samples_cut: int
    samples_cut_fraction: float
    tokens_cut_fraction: float


def longest_within(curve: LengthCurve, peaks: Sequence[tuple[int, int]], limit_bytes: int) -> int:
    """Return the longest length whose step fits a limit; 0 if none does.

    A longer batch is taken to hold more, so it is found by halving.

    Args:
        curve: of the step.
        peaks: some lengths with the peaks of their steps, ascending; none beyond is asked for.
        limit_bytes: that the step may hold.
    """
    longest = peaks[-1][0]
    if curve.fits(longest, limit_bytes):
        return longest
    low, high = max((length for length, peak in peaks if peak <= limit_bytes), default=0), longest
    while high - low > 1:
        middle = (low + high) // 2
        if curve.fits(middle, limit_bytes):
            low = middle
        else:
            high = middle
    return low


def truncation(data: Distribution, max_length: int) -> Truncation:
    """Return what cutting samples at a length loses."""
    cut = int((data.lengths > max_length).sum())
    return Truncation(
        max_length=max_length,
        num_samples_cut=cut,
        samples_cut_fraction=cut / len(data),
        tokens_cut_fraction=1.0 - data.cut_to(max_length).total / data.total,
    )


# The reserved memory of a run of many batches that differ in length, by replay of the
# allocator.
#
# The caching allocator keeps what is freed for later. A batch whose blocks fit none of the
# kept ones gets new segments, so reserved memory creeps up from batch to batch, above what
# the worst batch needs alone. Here one allocator serves batch after batch; its cache is
# never given back, as in a run that does not call `torch.cuda.empty_cache()`. At a limit it
# is given back before memory runs out.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReservedRun:
    """What the caching allocator holds in a run of many batches, by prediction.

    Attributes:
        expandable_segments: whether its segments grow by pages.
        longest: int64, (batches,), the longest sample of each batch.
        reserved_bytes: int64, (batches,), reserved after each batch.
    """

    expandable_segments: bool
    longest: npt.NDArray[np.int64]
    reserved_bytes: npt.NDArray[np.int64]

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes reserved: nothing is given back, so it is what the last batch leaves."""
        return int(self.reserved_bytes.max())


def reserved_run(
    curve: LengthCurve,
    data: Distribution,
    num_batches: int,
    *,
    expandable_segments: bool,
    seed: int,
) -> ReservedRun:
    """Return what a run of random batches reserves.

    Raises:
        UnsupportedError: what a step allocates outlives it.
    """
    longest = longest_of_batches(data, curve.batch_size, num_batches, seed)
    settings = AllocatorSettings(expandable_segments=expandable_segments)
    reserved = replay_in_turn(_pieces(curve, longest.tolist()), settings)
    return ReservedRun(
        expandable_segments=expandable_segments,
        longest=longest,
        reserved_bytes=np.array(reserved, np.int64),
    )


def longest_of_batches(
    data: Distribution, batch_size: int, num_batches: int, seed: int
) -> npt.NDArray[np.int64]:
    """Return the longest sample of each batch; an epoch is shuffled and leaves out a rest."""
    generator, each = np.random.default_rng(seed), len(data) // batch_size
    epochs = [
        generator.permutation(data.lengths)[: each * batch_size].reshape(each, batch_size)
        for _ in range(-(-num_batches // each))
    ]
    found: npt.NDArray[np.int64] = np.concatenate(epochs).max(axis=1)[:num_batches]
    return found


def _pieces(curve: LengthCurve, lengths: list[int]) -> Iterator[Piece]:
    """Yield what each batch allocates and frees; the first also what is built before it.

    The first batch is that of the recorded step 0, which makes the optimizer's state. All others
    repeat the next step with blocks of their own sizes.
    """
    known: dict[int, Piece] = {}
    for number, length in enumerate(lengths):
        if number and length in known:
            yield known[length]
            continue
        trace = curve.trace(length)
        step = np.array([interval.step for interval in trace.intervals])[trace.interval]
        begin, end = (int(np.flatnonzero(step == which)[-1]) + 1 for which in (STEP - 1, STEP))
        rows = slice(begin, end) if number else slice(0, begin)
        stream = None if trace.stream is None else trace.stream[rows]
        piece = Piece(trace.address[rows], trace.nbytes[rows], stream)
        if number:
            _check_ends(piece)
            known[length] = piece
        yield piece


def _check_ends(piece: Piece) -> None:
    """Raise if a step leaves a block, or frees one of an earlier step: it could not be repeated."""
    changes = dict[int, int]()
    for address, nbytes in zip(piece.address.tolist(), piece.nbytes.tolist(), strict=True):
        changes[address] = changes.get(address, 0) + nbytes
    if any(changes.values()):
        raise UnsupportedError(
            "what a step of this workload allocates is freed in a later one, so that a run of many "
            "batches cannot be put together from single steps; allowed is a model that keeps "
            "nothing of a batch"
        )
