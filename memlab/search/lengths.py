"""`predict_lengths`: what a step costs over the lengths that the samples of a data set have."""

import contextlib
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from memlab._util.checks import (
    checked,
    count,
    optional_count,
    optional_lengths,
    sample_lengths,
    seconds,
    size,
)
from memlab._util.tables import columns_table, facts_table
from memlab._util.units import format_bytes, format_percent, parse_bytes
from memlab.api import predict_with_size_model
from memlab.config import Sharding, StepConfig
from memlab.errors import ConfigError, UnsupportedError, WorkloadError
from memlab.result import StepResult, counted, outcome_checked
from memlab.runtime.bar import shows_progress
from memlab.runtime.isolation import OnProgress
from memlab.search.length_curve import (
    Batching,
    Distribution,
    LengthCurve,
    ReservedRun,
    Truncation,
    batchings,
    longest_within,
    recorded_curve,
    reserved_run,
    truncation,
)
from memlab.store import recorded
from memlab.workload import SampleSize, Workload

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

    from memlab.prediction.predict import Prediction

# `LengthsResult`: what a step costs over all the batches that a data set makes.

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
            f"on {self.worst.device}: the worst batch takes {counted(self.worst).in_words}"
        )
        return f"{found}, {self._fit_words()}" if self.memory_limit_bytes else found

    def _fit_words(self) -> str:
        """Return what the limit means, in words."""
        assert self.memory_limit_bytes is not None
        limit, chance = format_bytes(self.memory_limit_bytes), self.chance_above_limit
        if not self.longest_that_fits:
            return f"and not even one of {min(self.curve.recorded):,} {self.unit} fits {limit}"
        if not chance:
            peak = counted(self.worst)
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
            "worst batch": counted(self.worst).in_words,
            "limit": self._fit_words() if self.memory_limit_bytes else "",
            "notes": " ".join(self.notes),
        }
        title = f"{self.workload_name} in batches of {self.batch_size} on {self.worst.device}"
        heads = [
            "batches", "updates an epoch", f"{self.unit} an update", "of them padding",
            "typical longest", "its peak", "worst peak", "that do not fit",
        ]  # fmt: skip
        worst = format_bytes(counted(self.worst).nbytes)
        rows = [[
            each.name, f"{each.num_batches:,}", f"{each.tokens_per_batch:,.0f}",
            format_percent(each.padding_fraction), f"{each.typical_longest:,}",
            format_bytes(self.curve.peak_bytes(each.typical_longest)), worst,
            "" if each.chance_above is None else format_percent(each.chance_above),
        ] for each in self.batchings]  # fmt: skip
        return facts_table(title, facts) + columns_table(heads, rows)


def _certain(result: StepResult, limit_bytes: int, error: float) -> int:
    """Return the limit that a step has to fit by its prediction to certainly fit another one.

    That is what `fit` of a result asks: whether a step that takes as much more as the uncertainty
    allows would fit. A length that was not recorded may take more by the error of the curve.
    """
    peak = counted(result)
    return int(limit_bytes / (1 + (peak.needed_uncertainty or peak.uncertainty) + error))


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


@checked(
    lengths=optional_lengths, max_length=optional_count, memory_limit=size, timeout_seconds=seconds
)
@shows_progress
def predict_lengths(
    workload: Workload,
    lengths: Sequence[int] | None = None,
    config: StepConfig | None = None,
    device: str | torch.device | None = None,
    *,
    max_length: int | None = None,
    memory_limit: int | str | None = None,
    seed: int = 0,
    timeout_seconds: float = 120,
    on_progress: OnProgress | None = None,
    progress: bool = True,
    cancel: threading.Event | None = None,
) -> LengthsResult:
    """Predict what a step costs over batches of samples that differ in length.

    The step is recorded at a few lengths (four, if the fourth is as predicted from the others).
    All else is arithmetic: the peak at each length, how likely a batch is that does not fit, what
    padding, grouping by length and packing make of the samples, and where cutting them would help.
    Nothing runs. The model is the one for the longest sample.

    Args:
        workload: what is trained; it needs a `sample_size`.
        lengths: of the samples, one int for each (`workloads.lengths_of` counts tokens). None
            is `workload.lengths`.
        config: how it is trained. None is `StepConfig()`.
        device: as for `predict`.
        max_length: longer samples are cut to this, as by a tokenizer with truncation.
        memory_limit: bytes, or text such as "2GiB": allocated on a CPU, reserved on CUDA. None is
            what PyTorch can reserve on the card, or the memory of this machine.
        seed: as for `predict`.
        timeout_seconds: as for `predict`, for each of the recordings.
        on_progress: as for `measure`.
        progress: as for `measure`.
        cancel: as for `measure`.

    Returns:
        The result, whose `over` answers for other samples without another recording.

    Raises:
        WorkloadError: the workload has no other sizes, or cannot have the longest sample.
        UnsupportedError: the step cannot be predicted, or runs other operators at some lengths.
        MemlabError: an argument is not allowed; the message names it and what is allowed.

    >>> import memlab
    >>> workload = memlab.workloads.get("gpt-small", num_layers=1)
    >>> lengths = [16, 24, 40, 128] * 8
    >>> found = predict_lengths(workload, lengths, StepConfig(batch_size=4), "t4")
    >>> found.longest_that_fits, found.batchings[0].typical_longest
    (128, 128)
    """
    config = config or StepConfig()
    _check_config(config)
    data = _data(workload, lengths, max_length)
    check_batch(data, config.batch_size)
    sized = _sized(workload)
    longest = _at(workload, data.longest, sized)

    def predicted(length: int) -> "Prediction":
        own = replace(_at(workload, length, sized), build_model=longest.build_model)
        found = predict_with_size_model(
            own, config, device, seed=seed, timeout_seconds=timeout_seconds,
            on_progress=on_progress, cancel=cancel,
        )  # fmt: skip
        outcome_checked(found.result, "the prediction over lengths")
        return found

    def is_possible(length: int) -> bool:
        with contextlib.suppress(WorkloadError):
            return workload.resized(length) is not None
        return False

    curve = recorded_curve(
        f"{workload.base_name}, {sized.name}", data.values.tolist(), predicted, is_possible
    )
    limit_bytes = size("memory_limit", memory_limit) or recorded.capacity(device)
    return result_over(curve, data, workload.base_name, sized.unit, limit_bytes)


def _check_config(config: StepConfig) -> None:
    """Raise if the settings are decided for one length, or for several ranks."""
    if config.sharding is not Sharding.NONE:
        raise UnsupportedError(
            f"sharding={str(config.sharding)!r}: batches of several lengths are predicted for one "
            "process only; allowed is sharding='none', or memlab.predict(workload.resized(length), "
            "config) for the lengths that matter"
        )
    if config.is_planned:
        raise UnsupportedError(
            f"memory_budget={config.memory_budget:g} is planned anew for each length; allowed is "
            "memory_budget=1.0, for instance with checkpointing='blocks'"
        )


def _data(
    workload: Workload, lengths: Sequence[int] | None, max_length: int | None
) -> Distribution:
    given = workload.lengths if lengths is None else lengths
    if given is None:
        raise ConfigError(
            f"lengths=None, and {workload.name} has none; pass one int for each sample, such as "
            "memlab.workloads.lengths_of(texts, tokenizer)"
        )
    data = Distribution.of(given)
    return data if max_length is None else data.cut_to(max_length)


def _sized(workload: Workload) -> SampleSize:
    size = workload.sample_size
    if size is None:
        raise WorkloadError(
            f"{workload.name} has samples of one size only; give it a sample_size, such as "
            "memlab.SampleSize(name='sequence length', unit='tokens', value=..., offered=..., "
            "make_workload=...)"
        )
    if size.dimensions > 1:
        raise WorkloadError(
            f"the samples of {workload.name} have their {size.name} along {size.dimensions} "
            "dimensions; allowed is a workload whose samples have a length"
        )
    return size


def _at(workload: Workload, length: int, size: SampleSize) -> Workload:
    """Return the workload with samples of this length.

    Raises:
        WorkloadError: it cannot have them.
    """
    try:
        return workload.resized(length)
    except WorkloadError as error:
        raise WorkloadError(
            f"lengths has a sample of {length} {size.unit}: {error}; pass max_length=... to cut "
            "longer samples, or lengths that are rounded up to what it can have"
        ) from None
