"""The largest batch that fits a memory limit, without recompute and with it.

    python -m memlab.search.compare_batches vnet --limit 2GiB

It works for the four models of the checkpointing repository (pytorch_memonger, 2018) and the rest
of the zoo. Both batches are found by prediction. If the device is in this machine, both steps are
then measured under the limit. The optimizer is the repository's, SGD with momentum.
Left out: other ways to save memory, such as smaller micro-batches or number formats.
"""

import argparse
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from memlab import workloads
from memlab._util.checks import checked, count, seconds, size
from memlab._util.tables import aligned
from memlab._util.units import GIB, format_bytes, format_seconds, parse_bytes
from memlab.api import measure, predict, predict_with_forecast
from memlab.config import Checkpointing, Optimizer, StepConfig
from memlab.devices.cards import resolve
from memlab.devices.here import resolve_device
from memlab.errors import DeviceError, MemlabError, UnsupportedError
from memlab.prediction.interpolation import interpolated
from memlab.result import Outcome, StepResult, counted
from memlab.runtime.bar import shows_progress
from memlab.runtime.isolation import OnProgress
from memlab.search.largest_batch import LargestSearch
from memlab.store.frames import ResultList
from memlab.workload import Workload

if TYPE_CHECKING:
    from memlab.prediction.predict import Prediction

# from its table: how many times more images, volumes and words fit (tutorial/results.png; its
# LSTM has 20 samples of 800 and 8100 words, so that the ratio is one of words). None for DenseNet.
REPOSITORY_RATIOS = {"resnet": 51 / 15, "vnet": 9 / 5, "lstm": 8100 / 800}
DEFAULT_CPU_LIMIT_BYTES = 2 * GIB
DEFAULT_BATCH_LIMIT = 4096
FIRST_BATCH = 2  # a single sample often runs other operators than a larger batch
REPEATS = 3
TIMEOUT_SECONDS = 1800.0
RECOMPUTE = ({"memory_budget": 0.0}, {"checkpointing": Checkpointing.BLOCKS})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fit:
    """The largest batch within a limit.

    Attributes:
        predicted: the predicted step, whose peak is within the limit.
        measured: the same step, measured under the limit; None if the device is not here.
        is_capped: whether the batch limit ended the search, so that larger batches may fit.
    """

    predicted: StepResult
    measured: StepResult | None
    is_capped: bool

    @property
    def batch_size(self) -> int:
        """Samples in the batch."""
        return self.predicted.config.batch_size

    @property
    def is_confirmed(self) -> bool | None:
        """Whether the measured step stayed within the limit; None where it was not measured."""
        return None if self.measured is None else self.measured.fits is True


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pair:
    """A model without recompute and with it, under one limit.

    Attributes:
        limit_bytes: the limit, of allocated bytes on a CPU and of reserved bytes on CUDA.
        baseline: the plain step.
        optimized: the step with the kind of recompute that has the lowest peak.
    """

    limit_bytes: int
    baseline: Fit
    optimized: Fit

    @property
    def ratio(self) -> float:
        """How many times larger the optimized batch is."""
        return self.optimized.batch_size / self.baseline.batch_size

    @property
    def repository_ratio(self) -> float | None:
        """The ratio in the repository's table; None if the table does not have this model."""
        family = self.baseline.predicted.workload_name.partition("-")[0]
        return REPOSITORY_RATIOS.get(family)

    def __str__(self) -> str:
        """Return a table of plain text."""
        plain = self.baseline.predicted
        kind = counted(plain).kind
        rows = [["", "batch", "peak predicted", "peak measured", "step", "a sample"]]
        rows += [_row("baseline", self.baseline), _row("optimized", self.optimized)]
        theirs = self.repository_ratio
        said = f"the repository's is {theirs:.1f}x" if theirs else "the repository states none"
        more = " or more" if self.optimized.is_capped else ""
        return "\n".join([
            f"{plain.workload_name} on {plain.device}, {format_bytes(self.limit_bytes)} {kind}; "
            "peaks are allocated bytes",
            *aligned(rows),
            f"baseline: {plain.config}",
            f"optimized: {self.optimized.predicted.config}",
            f"ratio of the batches: {self.ratio:.1f}x{more}; {said}",
        ])  # fmt: skip


@checked(memory_limit=size, batch_limit=count(1))
def compare_recompute(
    workload: Workload,
    memory_limit: int | str | None = None,
    device: str | None = None,
    *,
    batch_limit: int = DEFAULT_BATCH_LIMIT,
) -> Pair:
    """Return the largest batch of a workload within a limit, without recompute and with it.

    Args:
        workload: what is trained.
        memory_limit: bytes, or text such as "2GiB": allocated on a CPU, reserved on CUDA. None is
            2 GiB on a CPU and what a process can use of a card.
        device: as for `memlab.predict`; measured too if it is in this machine.
        batch_limit: the largest batch that is tried.

    Raises:
        MemlabError: not even one sample fits, or no part of the model can be recomputed.

    >>> workload = workloads.get("lstm-text", hidden_size=64, chunk_length=8)
    >>> pair = compare_recompute(workload, "48MiB", "t4", batch_limit=64)
    >>> pair.ratio > 1  # how many times larger the batch is
    True
    """
    limit_bytes = _limit(memory_limit, device)
    plain = StepConfig(batch_size=1, optimizer=Optimizer.SGD_MOMENTUM)
    options = {"timeout_seconds": TIMEOUT_SECONDS}
    search = _Search(workload, limit_bytes, device, batch_limit, options)
    baseline = search.largest(plain, FIRST_BATCH)
    first = baseline.config.batch_size
    optimized = search.largest(search.least(replace(plain, batch_size=first)), first)
    return Pair(
        limit_bytes=limit_bytes,
        baseline=search.confirmed(baseline),
        optimized=search.confirmed(optimized),
    )


@dataclass(frozen=True, slots=True)
class _Search(LargestSearch):
    """The search for both steps of a pair."""

    def least(self, config: StepConfig) -> StepConfig:
        """Return the config with the recompute whose step has the lowest predicted peak.

        Raises:
            UnsupportedError: neither kind of recompute supports the model.
        """
        results = [
            predict(self.workload, replace(config, **change), self.device,
                    timeout_seconds=TIMEOUT_SECONDS)
            for change in RECOMPUTE
        ]  # fmt: skip
        possible = [result for result in results if result.outcome is Outcome.OK]
        if not possible:
            raise UnsupportedError(results[0].message)
        return min(possible, key=lambda result: counted(result).nbytes).config

    def confirmed(self, predicted: StepResult) -> Fit:
        """Return a prediction with its measurement, where the device is here."""
        is_capped = predicted.config.batch_size == self.batch_limit
        try:
            here = resolve_device(self.device)
        except DeviceError:
            return Fit(predicted=predicted, measured=None, is_capped=is_capped)
        measured = measure(
            self.workload, predicted.config, here, repeats=REPEATS,
            memory_limit=self.limit_bytes, timeout_seconds=TIMEOUT_SECONDS,
        )  # fmt: skip
        return Fit(predicted=predicted, measured=measured, is_capped=is_capped)


def _limit(limit: int | str | None, device: str | None) -> int:
    if limit is not None:
        return parse_bytes(limit)
    card = resolve(device).card
    return DEFAULT_CPU_LIMIT_BYTES if card is None else card.usable_bytes


def _row(title: str, fit: Fit) -> list[str]:
    measured, best = fit.measured, fit.measured or fit.predicted
    seconds, source = best.step_seconds, "" if measured else " predicted"
    if measured is None:
        peak = "not here"
    elif measured.outcome is Outcome.OK:
        peak = format_bytes(measured.peak_allocated_bytes or 0)
    else:
        peak = str(measured.outcome)
    return [
        title,
        f"{fit.batch_size}",
        format_bytes(fit.predicted.peak_allocated_bytes or 0),
        peak,
        "not known" if seconds is None else format_seconds(seconds) + source,
        "not known" if seconds is None else format_seconds(seconds / fit.batch_size) + source,
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare one workload as the command line says, and return the exit code."""
    options = _parse(arguments)
    try:
        pair = compare_recompute(
            workloads.get(options.name),
            options.limit,
            options.device,
            batch_limit=options.batch_limit,
        )
    except MemlabError as error:
        print(error, file=sys.stderr)
        return 2
    print(pair)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m memlab.search.compare_batches",
        description="The largest batch within a memory limit, without recompute and with it.",
    )
    parser.add_argument("name", help=f"one of {', '.join(workloads.names())}")
    parser.add_argument("--limit", help='such as "2GiB"; by default 2 GiB, or the whole card')
    parser.add_argument("--device", help='"cpu", or a card by name such as "h200"')
    parser.add_argument("--batch-limit", type=int, default=DEFAULT_BATCH_LIMIT)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())


# `predict_batches`: what a step would cost with each of several batch sizes, from few
# predictions.
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
        return predict_with_forecast(
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
            assert base.forecast is not None  # it covers this config
            result = interpolated(base, asked)
            results.append(base.forecast.against_limit(result, base.result.memory_limit_bytes))
    return results


def _covering(made: Sequence["Prediction"], asked: StepConfig) -> "Prediction | None":
    """Return the first prediction whose forecast can tell of this config; None if none can."""
    for base in made:
        if base.forecast is not None and base.forecast.covers(asked.micro_batch_sizes):
            return base
    return None
