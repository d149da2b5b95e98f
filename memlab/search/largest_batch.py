"""`largest_batch`: the most samples with which a step fits a limit, found by prediction."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from memlab._util.checks import checked, count, seconds, size
from memlab._util.units import format_bytes
from memlab.api import accumulation_effect, predict_with_size_model
from memlab.config import Sharding, StepConfig
from memlab.errors import ConfigError
from memlab.prediction.interpolation import interpolated
from memlab.result import CountedPeak, FitStatus, Outcome, StepResult, counted, outcome_checked
from memlab.runtime.bar import shows_progress
from memlab.runtime.isolation import OnProgress
from memlab.store import recorded
from memlab.store.frames import ResultList
from memlab.workload import Workload

if TYPE_CHECKING:
    from memlab.prediction.batch_size_model import BatchSizeModel
    from memlab.prediction.predict import Prediction


BATCH_LIMIT = 2**20
FIRST_BATCH = 8
MOST_GROWTH = 16  # from one batch that fits to the next that is tried by the peaks alone
GUESSES = 6  # tries that a size model chooses; after them peaks of exact predictions do


class LargestBatch(int):
    """A number of samples, with the prediction behind it.

    Attributes:
        result: the predicted step with that many samples.
        is_capped: whether `batch_limit` ended the search, so that larger batches may fit.
    """

    result: StepResult
    is_capped: bool

    @classmethod
    def of(cls, result: StepResult, batch_limit: int) -> "LargestBatch":
        """Return the batch size of a predicted step."""
        found = cls(result.config.batch_size)
        found.result = result
        found.is_capped = int(found) + unit_of(result.config) > batch_limit
        return found


@checked(memory_limit=size, batch_limit=count(1), timeout_seconds=seconds)
@shows_progress
def largest_batch(
    workload: Workload,
    config: StepConfig | None = None,
    device: str | torch.device | None = None,
    *,
    memory_limit: int | str | None = None,
    batch_limit: int = BATCH_LIMIT,
    seed: int = 0,
    timeout_seconds: float = 600,
    on_progress: OnProgress | None = None,
    progress: bool = True,
    cancel: threading.Event | None = None,
) -> LargestBatch:
    """Return the largest batch with which a step certainly fits, by prediction.

    It certainly fits if its predicted peak does at the upper end of its uncertainty. Nothing runs.
    A batch that the workload cannot make, because its data set is smaller, does not count. With
    sharding the batch is that of all ranks together, a multiple of `data_parallel_size` and of
    `accumulation_steps`, and each rank must fit the limit. If micro-batches do not give the
    gradient of the whole batch, or that is not known, the notes of the result say why.

    Args:
        workload: what is trained.
        config: how it is trained; its batch size is ignored. None is `StepConfig()`.
        device: as for `predict`.
        memory_limit: bytes, or text such as "2GiB": allocated on a CPU, reserved on CUDA. None is
            what PyTorch can reserve on the card, or the memory of this machine. Of several ranks
            each has as much.
        batch_limit: the largest batch that is tried.
        seed: as for `predict`.
        timeout_seconds: as for `predict`, for each of some ten predictions.
        on_progress: as for `measure`.
        progress: as for `measure`.
        cancel: as for `measure`.

    Returns:
        An int, which has the prediction as its `result`.

    Raises:
        ConfigError: not even the smallest batch fits, or there is no limit.
        UnsupportedError: the step cannot be predicted; the message says why.
        MemlabError: a prediction was cancelled or took too long.

    >>> model, batch = torch.nn.Linear(64, 8), (torch.zeros(4, 64), torch.zeros(4, 8))
    >>> workload = Workload.from_module(model, batch, torch.nn.functional.mse_loss)
    >>> found = largest_batch(workload, device="t4", memory_limit="64MiB", batch_limit=1024)
    >>> found, found.result.fit
    (1024, <FitStatus.FITS: 'fits'>)
    """
    config = config or StepConfig()
    limit_bytes = limit_of(memory_limit, device)
    options: dict[str, Any] = {"seed": seed, "timeout_seconds": timeout_seconds}
    options |= {"on_progress": on_progress, "cancel": cancel}
    search = LargestSearch(workload, limit_bytes, device, batch_limit, options)
    found = search.largest(config, FIRST_BATCH)
    if config.accumulation_steps * config.data_parallel_size > 1:
        said = str(accumulation_effect(workload, on_progress=on_progress, cancel=cancel))
        found = replace(found, notes=(*found.notes, *([said] if said else [])))
    return LargestBatch.of(found, batch_limit)


def unit_of(config: StepConfig) -> int:
    """Return by how many samples the batches of these settings differ."""
    if config.sharding is Sharding.NONE:
        return 1  # micro-batches need not have the same size
    return config.data_parallel_size * config.accumulation_steps


def limit_of(memory_limit: int | str | None, device: str | torch.device | None) -> int:
    """Return a limit in bytes; None is what the device can hold.

    Raises:
        ConfigError: there is no limit, and what the device can hold is not known.
    """
    limit_bytes = size("memory_limit", memory_limit) or recorded.capacity(device)
    if limit_bytes is None:
        raise ConfigError(
            f"memory_limit=None needs a device whose memory is known, and device={device!r} has "
            "none; pass memory_limit='24GiB', or the name of a card"
        )
    return int(limit_bytes)


@dataclass(frozen=True, slots=True)
class LargestSearch:
    """The search for the largest batch within a limit.

    Attributes:
        workload: what is trained.
        limit_bytes: that the step may hold.
        device: as for `predict`.
        batch_limit: the largest batch that is tried.
        options: further options of `predict_with_size_model`.
    """

    workload: Workload
    limit_bytes: int
    device: str | torch.device | None
    batch_limit: int
    options: dict[str, Any] = field(default_factory=dict)

    def largest(self, config: StepConfig, first: int) -> StepResult:
        """Return the step with the largest batch that certainly fits.

        Args:
            config: the settings; their batch size is ignored.
            first: the batch that is tried first; with sharding a multiple near it is.

        Raises:
            ConfigError: the smallest batch does not fit, or is larger than `batch_limit`.
            UnsupportedError: the step cannot be predicted.
        """
        best: StepResult | None = None
        unit, smallest = unit_of(config), config.data_parallel_size * config.accumulation_steps
        if self.batch_limit < smallest:
            raise ConfigError(
                f"batch_limit={self.batch_limit} is less than the {smallest} samples that "
                f"{', '.join(_settings(config))} takes at least, one for each micro-batch of each "
                "rank; raise batch_limit"
            )
        low, high, guess = smallest - unit, (self.batch_limit // unit + 1) * unit, first
        peaks = dict[int, int]()  # the upper end of what is judged, by the samples
        is_forecast_right, is_sharded = True, config.sharding is not Sharding.NONE
        while high - low > unit:
            samples = min(max(guess // unit * unit, low + unit), high - unit)
            found = self._predicted(replace(config, batch_size=samples))
            result = found.result
            if result.outcome is Outcome.FAILED and best is not None:
                high, guess = samples, (low + samples) // 2  # a data set may have no more samples
                continue
            peak = counted(outcome_checked(result, "the search for the largest batch"))
            is_alone = is_sharded or (
                found.size_model is not None and found.size_model.is_of_one_size
            )
            peaks[samples] = _judged_bytes(peak) if is_alone else peak.upper_bytes
            if result.fit is FitStatus.FITS:
                is_forecast_right &= len(peaks) == 1 or samples <= guess
                low, best = samples, result
            else:
                high = samples
            if is_alone:
                guess = _by_peaks(peaks, low, high, self.limit_bytes)
                continue
            guess = _on_a_line(peaks, low, high, self.limit_bytes)
            if is_forecast_right and len(peaks) <= GUESSES and found.size_model is not None:
                limit_bytes = int(self.limit_bytes * peak.nbytes / peak.upper_bytes)
                guess = _guess(found.size_model, low, high, limit_bytes, config.accumulation_steps)
        return best or self._refused(config, smallest)

    def _predicted(self, config: StepConfig) -> "Prediction":
        return predict_with_size_model(
            self.workload, config, self.device, memory_limit=self.limit_bytes, **self.options
        )

    def _refused(self, config: StepConfig, smallest: int) -> NoReturn:
        samples = "one sample" if smallest == 1 else f"{smallest} samples"
        raise ConfigError(
            f"memory_limit={format_bytes(self.limit_bytes)} is not enough for {samples} of "
            f"{', '.join([self.workload.name, *_settings(config)])}; allowed is what that takes, "
            "or more: use memlab.recommend, which looks for settings that take less"
        )


def _settings(config: StepConfig) -> list[str]:
    """Return the settings as text, without the batch size, which the search chooses."""
    return str(config).split(", ")[1:]


def _guess(size_model: "BatchSizeModel", low: int, high: int, limit_bytes: int, steps: int) -> int:
    """Return the largest batch from `low` to `high` that fits according to the size model.

    Args:
        size_model: of a step with this many micro-batches.
        low: a batch that fits.
        high: a batch that does not.
        limit_bytes: that the step may hold.
        steps: micro-batches of a batch, which get the same number of samples.
    """
    fits, fits_not = low // steps, -(-high // steps)
    while fits_not - fits > 1:
        samples = (fits + fits_not) // 2
        sizes = [samples] * steps
        if not size_model.covers(sizes):
            return steps * min(samples, 2 * max(fits, 1))
        if size_model.fits(sizes, limit_bytes):
            fits = samples
        else:
            fits_not = samples
    return steps * fits


def _on_a_line(peaks: dict[int, int], low: int, high: int, limit_bytes: int) -> int:
    """Return the batch from `low` to `high` whose peak is the limit on a line through two peaks.

    A peak may rise faster and faster, and then a line alone comes closer only by small steps: so
    every second batch is the middle, once there is one that does not fit.

    Args:
        peaks: in bytes, by the samples of a batch.
        low: a batch that fits.
        high: a batch that does not, or one too many.
        limit_bytes: that the step may hold.
    """
    is_bounded = high in peaks
    ends = [low, high] if is_bounded and low in peaks else sorted(peaks)[-2:]
    samples = _crossing(peaks, ends, limit_bytes)
    if samples is None or (is_bounded and len(peaks) % 2 == 0):
        return (low + high) // 2
    return min(max(samples, low), high - 1)


def _judged_bytes(peak: CountedPeak) -> int:
    """Return the upper end of what a limit is compared with: what is needed, where that is less."""
    least = min(peak.nbytes, peak.needed_bytes or peak.nbytes)
    return int(least * (1 + peak.judged_uncertainty))


def _by_peaks(peaks: dict[int, int], low: int, high: int, limit_bytes: int) -> int:
    """Return a batch that is worth a prediction, by the peaks of those before it alone.

    What a step holds at one of its instants is a line over the batch, so its peak is the highest of
    such lines: it bends upwards only. So the line through two batches that fit, drawn on, ends at
    or above the largest one that fits, and the line from one that fits to one that does not passes
    the limit at or below it. Taken in turn they close in from both sides. The caching allocator
    adds steps of some MiB, so each third batch is the middle.

    Args:
        peaks: in bytes, by the samples of a batch; the last that was predicted is the last.
        low: a batch that fits.
        high: a batch that does not, or one too many.
        limit_bytes: that the step may hold.
    """
    fitting = [samples for samples in sorted(peaks) if samples <= low][-2:]
    if high not in peaks:
        drawn_on = _crossing(peaks, fitting, limit_bytes)
        return 2 * low if drawn_on is None else min(drawn_on, MOST_GROWTH * low)
    if low not in peaks or len(peaks) % 3 == 0:
        return (low + high) // 2
    is_from_below = next(reversed(peaks)) == low
    crossing = _crossing(peaks, fitting if is_from_below else [low, high], limit_bytes)
    return (low + high) // 2 if crossing is None else crossing


def _crossing(peaks: dict[int, int], ends: Sequence[int], limit_bytes: int) -> int | None:
    """Return where the line through two peaks is at the limit; None if it does not rise."""
    first, last = ends[0], ends[-1]
    rise = peaks[last] - peaks[first]
    return first + (limit_bytes - peaks[first]) * (last - first) // rise if rise > 0 else None


# `predict_batches`: what a step would cost with each batch size, from few predictions.
#
# Left out: which of them is best; other fields than the batch size.


@checked(memory_limit=size, timeout_seconds=seconds)
@shows_progress
def predict_batches(
    workload: Workload,
    config: StepConfig,
    batch_sizes: Sequence[int],
    device: str | torch.device | None = None,
    *,
    seed: int = 0,
    memory_limit: int | str | None = None,
    timeout_seconds: float = 120,
    on_progress: OnProgress | None = None,
    progress: bool = True,
    cancel: threading.Event | None = None,
) -> list[StepResult]:
    """Return what one training step would cost with each batch size, in the order of these.

    `config` is predicted as it is. That prediction is arithmetic for most other batch sizes: such a
    result takes milliseconds, says "interpolated" in its message and states a larger uncertainty. A
    batch size that no prediction covers is predicted as `memlab.predict` does it.

    Args:
        workload: what is trained.
        config: how it is trained; results differ from it in `batch_size` alone.
        batch_sizes: samples per optimizer update.
        device: as for `predict`.
        seed: as for `predict`.
        memory_limit: as for `predict`; `fits` of each result says whether it fits.
        timeout_seconds: after which a single prediction ends as `timed_out`.
        on_progress: as for `measure`.
        progress: as for `measure`.
        cancel: as for `measure`.

    Raises:
        MemlabError: an argument is not allowed; the message names it and what is allowed.

    >>> model, batch = torch.nn.Linear(64, 8), (torch.zeros(4, 64), torch.zeros(4, 8))
    >>> workload = Workload.from_module(model, batch, torch.nn.functional.mse_loss)
    >>> results = predict_batches(workload, StepConfig(batch_size=256), [256, 512, 1024], "t4")
    >>> [result.peak_by_category["inputs"] for result in results]  # (64 + 8) * 4 bytes a sample
    [73728, 147456, 294912]
    """
    configs = [replace(config, batch_size=batch_size) for batch_size in batch_sizes]

    def predicted(asked: StepConfig) -> "Prediction":
        return predict_with_size_model(
            workload,
            asked,
            device,
            seed=seed,
            memory_limit=memory_limit,
            timeout_seconds=timeout_seconds,
            on_progress=on_progress,
            cancel=cancel,
        )

    made = {config: predicted(config)}
    results = ResultList()
    for asked in configs:
        if asked in made:
            results.append(made[asked].result)
            continue
        base = _covering(list(made.values()), asked)
        if base is None:
            made[asked] = predicted(asked)
            results.append(made[asked].result)
        else:
            assert base.size_model is not None  # it covers this config
            result = interpolated(base, asked)
            results.append(base.size_model.against_limit(result, base.result.memory_limit_bytes))
    return results


def _covering(made: Sequence["Prediction"], asked: StepConfig) -> "Prediction | None":
    """Return the first prediction whose size model can tell of this config; None if none can."""
    for base in made:
        if base.size_model is not None and base.size_model.covers(asked.micro_batch_sizes):
            return base
    return None
