"""`predict_lengths`: what a step costs over the lengths that the samples of a data set have."""

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from memlab.api import predict_with_forecast
from memlab.arguments.checks import checked, count, seconds, size
from memlab.arguments.lengths import optional_lengths
from memlab.config import Sharding, StepConfig
from memlab.errors import ConfigError, MemlabError, UnsupportedError, WorkloadError
from memlab.lengths.distribution import Distribution
from memlab.lengths.lengths_result import LengthsResult, check_batch, result_over
from memlab.lengths.recorded_lengths import recorded_curve
from memlab.records import where
from memlab.result import Outcome
from memlab.worker.bar import shows_progress
from memlab.worker.isolation import OnProgress
from memlab.workload import SampleSize, Workload

if TYPE_CHECKING:
    from memlab.predicting.predict import Prediction


def _max_length(name: str, value: Any) -> int | None:
    return None if value is None else count(1)(name, value)


@checked(
    lengths=optional_lengths, max_length=_max_length, memory_limit=size, timeout_seconds=seconds
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
        return _ran(predict_with_forecast(
            own, config, device, seed=seed, timeout_seconds=timeout_seconds,
            on_progress=on_progress, cancel=cancel,
        ))  # fmt: skip

    def is_possible(length: int) -> bool:
        with contextlib.suppress(WorkloadError):
            return workload.resized(length) is not None
        return False

    curve = recorded_curve(
        f"{workload.base_name}, {sized.name}", data.values.tolist(), predicted, is_possible
    )
    limit_bytes = size("memory_limit", memory_limit) or where.capacity(device)
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


def _ran(prediction: "Prediction") -> "Prediction":
    result = prediction.result
    if result.outcome in (Outcome.CANCELLED, Outcome.TIMED_OUT):
        raise MemlabError(f"the prediction over lengths ended: {result.message}")
    if result.outcome is not Outcome.OK:
        raise UnsupportedError(f"{result.workload_name}, {result.config}: {result.message}")
    return prediction
