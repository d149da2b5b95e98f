"""Runs of others on real cards, beside what memlab predicts of them: why to believe a number.

`evidence.csv` beside this file is written by `python -m benchmarks.calibrate_memory`. Each row is a
run that somebody else measured and published. How hypotheses on cuDNN weigh was fitted without the
model of the row; how long the samples of peft's table are, by one of its rows, which is left out.
Where new segments lie was found with the rows of xMem. How long convolutions take on CUDA cores was
fitted to steps of convnets in fp32 on cards before Ampere, and a host's pace to those of Megatron.

The width that is stated for memory is that of split conformal prediction over the rows of the same
kind: within it lie nine in ten of them, with the correction for few rows. It is a share of rows,
and models have different numbers of them. Rows whose source leaves something open do not count, but
for what a card held when xMem's convnets were first read.
"""

import bisect
import csv
import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memlab._util.checks import checked, choice
from memlab._util.checks import count as count_of
from memlab._util.units import format_bytes, format_seconds, signed_percent
from memlab.devices import cards
from memlab.errors import DeviceError
from memlab.result import Source, StepResult

FILE = Path(__file__).parent / "evidence.csv"
CONVOLUTIONS, QUANTIZED, SHARDED = "convolutions", "quantized weights", "several cards"
# the first compute capability of Pascal, Volta, Turing, Ampere, Ada, Hopper and Blackwell
GENERATIONS = ((6, 0), (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0))
NUMBERS = ("peak_allocated_bytes", "peak_reserved_bytes", "step_seconds")
COVERAGE = 0.9
MOST_OF_A_MODEL = 2  # rows on one card, so that what is shown are several models


@dataclass(frozen=True, kw_only=True, slots=True)
class Width:
    """A relative half-width, 0.01 for +-1 %, and what it was found on."""

    half_width: float
    runs: int
    models: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicRun:
    """A run that somebody measured on a real card and published, and what memlab predicts of it.

    Attributes:
        number: which field of a result was measured: "peak_allocated_bytes", "peak_reserved_bytes"
            or "step_seconds".
        device: the card, as `predict` takes it.
        model: that was trained.
        kernels: kinds of kernels that decide how exact a prediction is, as `StepResult.kernels`.
        precision: of the step.
        setting: how it was trained, in words.
        measured: bytes or seconds.
        predicted: bytes or seconds; see above for what was fitted.
        left_open: what a prediction needs and the source does not say; empty if that is nothing.
        source: the repository, at a commit, or the paper.
    """

    number: str
    device: str
    model: str
    kernels: tuple[str, ...]
    precision: str
    setting: str
    measured: float
    predicted: float
    left_open: str
    source: str

    @property
    def is_known(self) -> bool:
        """Whether the source says all that a prediction needs."""
        return not self.left_open

    @property
    def error(self) -> float:
        """The measured number over the predicted one, minus 1: what a width has to cover."""
        return self.measured / self.predicted - 1

    @property
    def cells(self) -> tuple[str, ...]:
        """Model, card, setting, measured, predicted, by how much that is off, and source."""
        is_time = self.number == "step_seconds"
        measured, predicted = (
            format_seconds(value) if is_time else format_bytes(round(value))
            for value in (self.measured, self.predicted)
        )
        off = signed_percent(self.predicted / self.measured - 1)
        setting = (
            f"{self.setting} (not known: {self.left_open})" if self.left_open else self.setting
        )
        return self.model, self.device, setting, measured, predicted, off, self.source

    def __str__(self) -> str:
        model, device, setting, measured, predicted, off, _ = self.cells
        return f"{model} on {device}, {setting}: measured {measured}, predicted {predicted} ({off})"


@functools.cache
def public_runs() -> tuple[PublicRun, ...]:
    """Return all runs of the file."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(map(_run_of, csv.DictReader(file)))


def _run_of(row: Mapping[str, str]) -> PublicRun:
    read: dict[str, Any] = {
        **row,
        "kernels": tuple(row["kernels"].split("|")) if row["kernels"] else (),
        "measured": float(row["measured"]),
        "predicted": float(row["predicted"]),
    }
    return PublicRun(**read)


def half_width(errors: Iterable[float], share: float = COVERAGE) -> float:
    """Return the half-width of split conformal prediction: it covers this share of such errors.

    >>> half_width([0.01, -0.02, 0.03], 0.5)
    0.02
    """
    sizes = np.sort(np.abs(list(errors)))
    return float(sizes[min(math.ceil((len(sizes) + 1) * share), len(sizes)) - 1])


def runs_of_kind(number: str, *, convolutions: bool) -> list[PublicRun]:
    """Return the runs that the width of a peak rests on.

    Allocated memory of whole convnets was not measured by anyone whose runs are here: that of what
    the card reserved stands for it.

    Args:
        number: "peak_allocated_bytes" or "peak_reserved_bytes".
        convolutions: whether the step has convolutions that may take a workspace.
    """
    asked = _measured_for(number, convolutions=convolutions)
    return [
        run
        for run in public_runs()
        if run.number == asked and run.is_known and (CONVOLUTIONS in run.kernels) == convolutions
    ]


def _measured_for(number: str, *, convolutions: bool) -> str:
    """Return which number of runs a number rests on."""
    is_peak = number == "peak_allocated_bytes"
    return "peak_reserved_bytes" if convolutions and is_peak else number


@functools.cache
def width_of(number: str, kinds: tuple[str, ...]) -> Width:
    """Return the half-width of a predicted peak.

    Of several cards only a few runs are known, none of them wholly: their largest error counts.

    Args:
        number: as for `runs_of_kind`.
        kinds: of the step's kernels, as `StepResult.kernels`.
    """
    runs = runs_of_kind(number, convolutions=CONVOLUTIONS in kinds)
    width = half_width(run.error for run in runs)
    if SHARDED in kinds:
        peaks = (run for run in public_runs() if run.number == "peak_reserved_bytes")
        width = max([width, *(abs(run.error) for run in peaks if SHARDED in run.kernels)])
    return Width(half_width=width, runs=len(runs), models=len({run.model for run in runs}))


@checked(number=choice(*NUMBERS), count=count_of(1))
def evidence(
    result: StepResult, number: str = "peak_reserved_bytes", count: int = 5
) -> tuple[PublicRun, ...]:
    """Return the real runs that are nearest to a prediction for a card, the nearest first.

    Near is, in this order: the same kinds of kernels, all known of the run, the same or a near
    generation of cards, the same number format, and a number of like size. At most two settings of
    a model on one card are among them.

    Args:
        result: a prediction; for a CPU, and for what was measured, there are none.
        number: the field of the result: "peak_reserved_bytes", which counts against a limit,
            "peak_allocated_bytes", for which what was reserved stands where there are convolutions,
            or "step_seconds".
        count: at most so many.

    Raises:
        ConfigError: an argument is not allowed; the message names it and what is allowed.

    >>> import memlab
    >>> step = memlab.StepConfig(batch_size=4)
    >>> result = memlab.predict(memlab.workloads.get("gpt-small"), step, "rtx-4060", progress=False)
    >>> for run in memlab.evidence(result, count=2):
    ...     print(run.device, run.model, run.source.partition("@")[0])
    rtx-4060 distilbert/distilgpt2 Stone-ResearchLife/xMem
    rtx-4060 T5-small Stone-ResearchLife/xMem
    """
    value = getattr(result, number)
    if result.source is not Source.PREDICTED or result.peak_reserved_bytes is None or not value:
        return ()
    asked = _measured_for(number, convolutions=CONVOLUTIONS in result.kernels)
    runs = sorted(
        (run for run in public_runs() if run.number == asked),
        key=lambda run: _distance(run, result, value),
    )
    found: list[PublicRun] = []
    for run in runs:
        same = [one for one in found if (one.model, one.device) == (run.model, run.device)]
        is_new = run.setting not in [one.setting for one in same]
        if is_new and len(same) < MOST_OF_A_MODEL and len(found) < count:
            found.append(run)
    return tuple(found)


def _distance(run: PublicRun, result: StepResult, value: float) -> tuple[float, ...]:
    """Return how far a run is from a prediction, to be compared part by part."""
    return (
        len(set(run.kernels) ^ set(result.kernels)),
        not run.is_known,
        _generations_between(run.device, result.device),
        run.precision != str(result.config.precision),
        abs(math.log(run.measured / value)),
    )


def _generations_between(device: str, other: str) -> int:
    """Return how many generations lie between two cards; 0 if one is not known by its name."""
    one, two = _generation(device), _generation(other)
    return 0 if one is None or two is None else abs(one - two)


def _generation(device: str) -> int | None:
    try:
        card = cards.resolve(device).card
    except DeviceError:
        return None
    capability = card.compute_capability if card else None
    return None if capability is None else bisect.bisect(GENERATIONS, capability)
