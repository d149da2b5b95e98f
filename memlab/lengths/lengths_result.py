"""`LengthsResult`: what a step costs over all the batches that a data set makes."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memlab.arguments.checks import checked, count, size
from memlab.arguments.lengths import sample_lengths
from memlab.arguments.tables import columns_table, facts_table
from memlab.arguments.units import format_bytes, format_percent, parse_bytes
from memlab.errors import ConfigError, UnsupportedError
from memlab.lengths.batchings import Batching, batchings
from memlab.lengths.curve import LengthCurve
from memlab.lengths.distribution import Distribution
from memlab.lengths.fitting import Truncation, longest_within, truncation
from memlab.lengths.many_batches import ReservedRun, reserved_run
from memlab.limits.judgement import CountedPeak
from memlab.result import StepResult

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

MOST_BATCHES = 10**6
POINTS = 20  # lengths at which the curve is drawn; between them it is a line


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LengthsResult:
    """What a step costs with batches of samples that differ in length, by prediction.

    Bytes are those that count against a limit: reserved on a card, allocated on a CPU. A batch is
    one of random samples of the data set, padded to its longest one, and all its micro-batches
    count as long as that. Masks of padding are taken to cost nothing.

    Attributes:
        workload_name: the workload, without a length.
        unit: what is counted in a sample, such as "tokens".
        data: the lengths.
        worst: the step whose batch has the longest sample.
        memory_limit_bytes: that a step may hold; None if it is not known.
        longest_that_fits: the longest sample whose batch fits the limit; 0 if none does, None
            without a limit.
        truncation: where to cut samples so that each batch certainly fits; None without a limit,
            and if not even the shortest recorded length does: what is shorter is not known.
        batchings: padding, grouping by length and packing.
        curve_lengths: int64, (points,), ascending.
        curve_bytes: int64, (points,), the peak of a step whose longest sample is as long.
        curve: the step at any length.
        notes: what was recorded, and what was assumed; those of the step are in `worst.notes`.
    """

    workload_name: str
    unit: str
    data: Distribution
    worst: StepResult
    memory_limit_bytes: int | None
    longest_that_fits: int | None
    truncation: Truncation | None
    batchings: tuple[Batching, ...]
    curve_lengths: "npt.NDArray[np.int64]"
    curve_bytes: "npt.NDArray[np.int64]"
    curve: LengthCurve
    notes: tuple[str, ...]

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return self.worst.config.batch_size

    @property
    def chance_above_limit(self) -> float | None:
        """The chance that a random batch does not fit the limit; None without a limit."""
        return self.batchings[0].chance_above

    @checked(length=count(1))
    def at(self, length: int) -> StepResult:
        """Return what a step costs whose longest sample has this length.

        Raises:
            ConfigError: the length is longer than all that was predicted.
        """
        _check_reach(self.curve, length)
        return self.curve.at(length, self.memory_limit_bytes)

    @checked(nbytes=size)
    def chance_above(self, nbytes: int | str) -> float:
        """Return the chance that a random batch holds more than this, as text or in bytes."""
        most, values = parse_bytes(nbytes, "nbytes"), self.data.values.tolist()
        at = bisect_right(values, most, key=self.curve.peak_bytes)  # a longer one holds more
        return self.data.chance_above(values[at - 1] if at else 0, self.batch_size)

    @checked(lengths=sample_lengths, memory_limit=size)
    def over(
        self, lengths: Sequence[int], *, memory_limit: int | str | None = None
    ) -> "LengthsResult":
        """Return the same for other samples, without another recording.

        Args:
            lengths: of the samples, of which none is longer than the longest that was predicted.
            memory_limit: as for `predict_lengths`; None is the limit of this result.

        Raises:
            ConfigError: a sample is too long, or there are fewer than in a batch.
        """
        limit = size("memory_limit", memory_limit) or self.memory_limit_bytes
        return result_over(
            self.curve, Distribution.of(lengths), self.workload_name, self.unit, limit
        )

    @checked(num_batches=count(1, MOST_BATCHES))
    def reserved_after(self, num_batches: int = 1000, *, seed: int = 0) -> tuple[ReservedRun, ...]:
        """Return what CUDA's caching allocator reserves in a run of random batches.

        It takes some seconds for a thousand batches: each allocation of each batch is replayed.

        Args:
            num_batches: updates of the run, each over other samples.
            seed: of the shuffled data set.

        Returns:
            The run with PyTorch's default segments, and the same with expandable segments.

        Raises:
            UnsupportedError: the device is a CPU, which has no such allocator.
        """
        if self.worst.peak_reserved_bytes is None:
            raise UnsupportedError(
                f"{self.worst.device} has no caching allocator, so nothing is reserved; predict "
                "for a card, such as device='rtx-4060'"
            )
        first, second = (
            reserved_run(
                self.curve, self.data, num_batches, expandable_segments=expandable, seed=seed
            )
            for expandable in (False, True)
        )
        return first, second

    def __str__(self) -> str:
        """Return the worst batch, and how likely one is that does not fit, in one line."""
        found = (
            f"{self.workload_name}, {self.data.words(self.unit)} in batches of {self.batch_size} "
            f"on {self.worst.device}: the worst batch takes {_peak_words(self.worst)}"
        )
        return f"{found}, {self._fit_words()}" if self.memory_limit_bytes else found

    def _fit_words(self) -> str:
        """Return what the limit means, in words."""
        assert self.memory_limit_bytes is not None
        limit, chance = format_bytes(self.memory_limit_bytes), self.chance_above_limit
        if not self.longest_that_fits:
            return f"and not even one of {min(self.curve.recorded):,} {self.unit} fits {limit}"
        if not chance:
            peak = _counted(self.worst)
            close = "" if self.worst.fit == "fits" else ", though within the uncertainty"
            return f"{peak.beside(self.memory_limit_bytes, fits=True)}{close}"
        said = f"and {format_percent(chance)} of random batches do not fit {limit}"
        if self.truncation is None:
            return f"{said}; no length certainly fits"
        return (
            f"{said}; cut to "
            f"{self.truncation.max_length:,} {self.unit}, all do, and "
            f"{format_percent(self.truncation.tokens_cut_fraction)} of the {self.unit} are lost"
        )

    def _repr_html_(self) -> str:
        """Return a table of the batches for notebooks."""
        facts = {
            "data": f"{self.data.words(self.unit)}, {self.data.total / len(self.data):,.0f} on "
            "average",
            "worst batch": _peak_words(self.worst),
            "limit": self._fit_words() if self.memory_limit_bytes else "",
            "notes": " ".join(self.notes),
        }
        title = f"{self.workload_name} in batches of {self.batch_size} on {self.worst.device}"
        heads = [
            "batches", "updates an epoch", f"{self.unit} an update", "of them padding",
            "typical longest", "its peak", "worst peak", "that do not fit",
        ]  # fmt: skip
        worst = format_bytes(_counted(self.worst).nbytes)
        rows = [[
            each.name, f"{each.num_batches:,}", f"{each.tokens_per_batch:,.0f}",
            format_percent(each.padding_fraction), f"{each.typical_longest:,}",
            format_bytes(self.curve.peak_bytes(each.typical_longest)), worst,
            "" if each.chance_above is None else format_percent(each.chance_above),
        ] for each in self.batchings]  # fmt: skip
        return facts_table(title, facts) + columns_table(heads, rows)


def _counted(result: StepResult) -> CountedPeak:
    assert result.counted_peak is not None
    return result.counted_peak


def _certain(result: StepResult, limit_bytes: int, error: float) -> int:
    """Return the limit that a step has to fit by its prediction to certainly fit another one.

    That is what `fit` of a result asks: whether a step that takes as much more as the uncertainty
    allows would fit. A length that was not recorded may take more by the error of the curve.
    """
    peak = _counted(result)
    return int(limit_bytes / (1 + (peak.needed_uncertainty or peak.uncertainty) + error))


def _peak_words(result: StepResult) -> str:
    peak = _counted(result)
    return f"{format_bytes(peak.nbytes)} {peak.kind} (± {peak.uncertainty:.1%})"


def result_over(
    curve: LengthCurve, data: Distribution, name: str, unit: str, limit_bytes: int | None
) -> LengthsResult:
    """Return the result for a data set, by arithmetic.

    Args:
        curve: of the step.
        data: the lengths of the samples.
        name: of the workload, without a length.
        unit: what is counted in a sample.
        limit_bytes: that a step may hold; None if it is not known.

    Raises:
        ConfigError: a sample is too long, or there are fewer than in a batch.
    """
    _check_reach(curve, data.longest)
    worst = curve.at(data.longest, limit_bytes)
    check_batch(data, worst.config.batch_size)
    low = min(data.shortest, min(curve.recorded))
    points = np.unique(np.linspace(low, data.longest, POINTS).astype(np.int64))
    peaks = [(length, curve.peak_bytes(length)) for length in points.tolist()]
    fitting, cut = None, None
    if limit_bytes is not None:
        fitting = longest_within(curve, peaks, limit_bytes)
        certain = longest_within(curve, peaks, _certain(worst, limit_bytes, curve.error))
        cut = truncation(data, certain) if certain else None
    return LengthsResult(
        workload_name=name,
        unit=unit,
        data=data,
        worst=worst,
        memory_limit_bytes=limit_bytes,
        longest_that_fits=fitting,
        truncation=cut,
        batchings=batchings(data, worst.config.micro_batch_sizes, fitting),
        curve_lengths=points,
        curve_bytes=np.array([peak for _, peak in peaks], np.int64),
        curve=curve,
        notes=_notes(curve, unit),
    )


def check_batch(data: Distribution, batch_size: int) -> None:
    """Check that there are samples for one batch.

    Raises:
        ConfigError: there are fewer.
    """
    if len(data) < batch_size:
        raise ConfigError(
            f"batch_size={batch_size} is more than the samples that lengths has ({len(data)}); "
            "pass the lengths of the whole data set, or a smaller batch_size"
        )


def _check_reach(curve: LengthCurve, length: int) -> None:
    if length > curve.longest:
        raise ConfigError(
            f"length {length} is longer than {curve.longest}, the longest that was predicted; call "
            "memlab.predict_lengths with it"
        )


def _notes(curve: LengthCurve, unit: str) -> tuple[str, ...]:
    """Return how the curve was found."""
    lengths = [f"{length:,}" for length in curve.recorded]
    said = ", ".join(lengths[:-1]) + f" and {lengths[-1]}" if len(lengths) > 1 else lengths[0]
    notes = [
        f"Recorded with batches of {said} {unit}; other lengths are interpolated block by block."
    ]
    if curve.errors:
        times = "one of them" if len(curve.errors) == 1 else f"{len(curve.errors)} of them"
        notes.append(
            f"At {times} the step was predicted from others first: at most {curve.error:.3%} off, "
            "by which the uncertainty of other lengths is wider."
        )
    else:
        notes.append("There was no other length to check the interpolation with.")
    shortest = min(curve.recorded)
    notes.append(f"Batches below {shortest:,} {unit} count as {shortest:,}.")
    return (*notes, *curve.assumptions)
