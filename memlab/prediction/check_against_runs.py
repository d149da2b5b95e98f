"""A prediction for this CPU, compared with what was measured of the very same step.

Load only ever slows a step down. So where the fastest measured step took less than the prediction
allows, the times that memlab keeps of operators are too long, and those that were found before that
run are found again. A step that took more says the same only if the machine is known to have been
quiet. What still disagrees then is covered by a wider uncertainty, and a note says so: something
other than single operators decides how long that step takes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from memlab._util.units import format_seconds
from memlab.cost_model.cost_store import Store
from memlab.cost_model.measured_runs import MeasuredRun, write_run
from memlab.cost_model.targets import LEAST_NOISE, Kernels
from memlab.prediction.batch_size_model import BatchSizeModel

IN_VAIN_SECONDS = 3600.0  # for which costs that were found again in vain are left alone
Measured = tuple[MeasuredRun | None, str | None]
"""A run of the step, if one was measured, and a note on one that cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Attempt:
    """A prediction from the costs that are known.

    Attributes:
        kernels: what is known of the operators.
        size_model: the arithmetic.
        facts: fields of the result.
        noise: what of the uncertainty of the time is for operators of a busy machine.
        is_whole: whether enough operators have a known time for the step to have one.
    """

    kernels: Kernels
    size_model: BatchSizeModel
    facts: dict[str, Any]
    noise: float
    is_whole: bool

    @property
    def seconds(self) -> float:
        """The predicted time of a step; 0 if there is none."""
        return self.facts["step_seconds"] or 0.0

    @property
    def width(self) -> float:
        """The relative half-width of that time."""
        width: float = self.facts["uncertainty"].get("step_seconds", 0.0)
        return width


def check_against_runs(measured: Measured, attempt: Callable[[float | None], Attempt]) -> Attempt:
    """Return a prediction that a measured run of the step does not speak against.

    Args:
        measured: what is known of such a run.
        attempt: predicts; of costs that were found before the date that it is given, if any, new
            ones are found.
    """
    run, damage = measured
    made = attempt(None)
    notes = [] if damage is None else [damage]
    widths = made.facts["uncertainty"]
    if run is not None and _speaks_against(run, made):
        first, now = made.seconds, time.time()
        is_again = run.taken_at <= now and not _was_in_vain(run, now)
        if is_again:
            made = attempt(run.taken_at)
            widths = made.facts["uncertainty"]
            if made.seconds != first:
                notes.append(_found_again(run, first))

        if made.is_whole and _speaks_against(run, made):
            needed = abs(run.least_seconds / made.seconds - 1.0)
            if needed > made.width:
                widths = widths | {"step_seconds": math.ceil(100.0 * needed) / 100.0}
                notes.append(_widened(run, made))
            if is_again and made.kernels.noisy_share < LEAST_NOISE:
                write_run(Store(), replace(run, in_vain_at=now))
    notes = [*made.facts["notes"], *notes]
    return replace(made, facts=made.facts | {"uncertainty": widths, "notes": tuple(notes)})


def _is_too_slow(run: MeasuredRun, made: Attempt) -> bool:
    """Return whether the step has been faster than predicted.

    What the uncertainty holds for a busy machine does not count: that machine was quieter.
    """
    return run.least_seconds < made.seconds * (1.0 - made.width + made.noise)


def _is_too_fast(run: MeasuredRun, made: Attempt) -> bool:
    """Return whether the step is slower than predicted, and not for want of a quiet machine."""
    is_time = made.is_whole and made.seconds > 0.0
    return is_time and run.is_quiet and run.least_seconds > made.seconds * (1.0 + made.width)


def _speaks_against(run: MeasuredRun, made: Attempt) -> bool:
    """Return whether the run and the prediction cannot both be right about the time.

    Where they disagree about the memory too, one of them is of something else.
    """
    peak = made.facts["peak_allocated_bytes"]
    is_same = abs(run.peak_bytes - peak) <= peak * made.facts["uncertainty"]["peak_allocated_bytes"]
    return is_same and (_is_too_slow(run, made) or _is_too_fast(run, made))


def _was_in_vain(run: MeasuredRun, now: float) -> bool:
    return run.in_vain_at is not None and abs(now - run.in_vain_at) < IN_VAIN_SECONDS


def _found_again(run: MeasuredRun, first: float) -> str:
    return (
        f"From times of operators that memlab had kept {format_seconds(first)} was predicted, but "
        f"{_said_by(run)}: so these times were taken again."
    )


def _widened(run: MeasuredRun, made: Attempt) -> str:
    how = "less" if run.least_seconds < made.seconds else "more, on a quiet machine,"
    return (
        f"The uncertainty of the time is wider than usual: {_said_by(run)}, {how} than its "
        "operators alone explain."
    )


def _said_by(run: MeasuredRun) -> str:
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.taken_at))
    return f"this step took {format_seconds(run.least_seconds)} when it was measured ({date})"
