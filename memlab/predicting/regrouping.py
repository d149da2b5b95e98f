"""What a prediction of one number of micro-batches says of another number: an estimate.

A step with two micro-batches does twice what a step with one does, except that gradients
are there when the second one begins. So its timeline can be put together from pieces of another
step whose micro-batches have the same size:

    recorded       forward 0, backward 0, optimizer
    two wanted     forward 0, backward 0, forward 0*, backward 0*, optimizer

Over a piece with a star every gradient is held from its beginning on. What its backward computes is
added to these gradients and freed at once. If two micro-batches or more were recorded, the pieces
are those of the recorded ones, and fewer can be had by leaving some out.

Left out: what a micro-batch leaves to the next one, and where in the model memory is allocated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from memlab.config import Sharding, StepConfig
from memlab.predicting.estimates import estimated
from memlab.predicting.interpolation import interpolated
from memlab.result import StepResult
from memlab.techniques import every
from memlab.trace import CATEGORIES, PHASES, Category, Phase, Timeline

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

    from memlab.predicting.forecast import Forecast
    from memlab.predicting.predict import Prediction

# added to each uncertainty; see tests/system/test_panel_forecasts.py
REGROUPED = 0.03
ADDITIONS = 0.3  # more for time, where the kernels that add to gradients were not recorded
INPUTS, GRADIENTS, TEMPORARIES = (
    CATEGORIES.index(category)
    for category in (Category.INPUTS, Category.GRADIENTS, Category.TEMPORARIES)
)


def can_regroup(forecast: Forecast, config: StepConfig) -> bool:
    """Return whether a recorded step has micro-batches like those of this config.

    No two micro-batches of a rank of several are alike: what they gather, others use again.
    """
    if config.sharding is not Sharding.NONE:
        return False
    sizes = (config.micro_batch_size,) * forecast.program.num_recorded
    if not forecast.covers(sizes):
        return False
    return not every.is_refused(config, "cpu" if forecast.settings is None else "cuda")


def regrouped(base: Prediction, config: StepConfig, *, most_drawn: int | None = None) -> StepResult:
    """Return what another number of micro-batches would cost, which `can_regroup` must allow.

    The result has no limit.

    Args:
        base: the prediction of another config.
        config: what is wanted.
        most_drawn: as for `with_micro_batches`.
    """
    forecast = base.forecast
    assert forecast is not None
    count, recorded = config.accumulation_steps, forecast.program.num_recorded
    same = dataclasses.replace(
        config,
        batch_size=config.micro_batch_size * recorded,
        accumulation_steps=recorded,
    )
    told = interpolated(base, same)
    assert told.timeline is not None
    timeline = with_micro_batches(told.timeline, count, most_drawn=most_drawn)
    peak = int(timeline.total_bytes.max())
    more = peak - (told.peak_allocated_bytes or 0)
    reserved = told.peak_reserved_bytes

    each = forecast.micro_batch_seconds(config.micro_batch_size)
    seconds = None
    if told.step_seconds is not None and each is not None:
        seconds = told.step_seconds + (count - recorded) * each

    return estimated(
        told,
        config,
        timeline,
        reserved_bytes=None if reserved is None else reserved + more,
        seconds=seconds,
        uncertainty=_wider(told.uncertainty or {}, has_additions=recorded > 1),
        of_what=f"a step with {recorded} micro-batches",
    )


def _wider(uncertainty: Mapping[str, float], *, has_additions: bool) -> dict[str, float]:
    found = {name: width + REGROUPED for name, width in uncertainty.items()}
    if "step_seconds" in found and not has_additions:
        found["step_seconds"] += ADDITIONS
    return found


def with_micro_batches(
    timeline: Timeline, count: int, *, most_drawn: int | None = None
) -> Timeline:
    """Return a timeline with another number of micro-batches of the same size.

    Args:
        timeline: of a recorded step.
        count: of micro-batches.
        most_drawn: leave out all but so many of them, 3 or more; None draws them all. Those between
            the first and the last are alike, so the peak is the same.
    """
    recorded = int(timeline.micro_batch.max()) + 1
    is_update = timeline.phase == PHASES.index(Phase.OPTIMIZER)
    rows = [np.flatnonzero((timeline.micro_batch == i) & ~is_update) for i in range(recorded)]
    update = np.flatnonzero(is_update)

    drawn = count if most_drawn is None else min(count, most_drawn)
    # the first and the last are those of the recording, where it has both
    middle = rows[1] if recorded > 1 else rows[0]
    order = [rows[0], *[middle] * (drawn - 2), *([rows[-1]] if drawn > 1 else []), update]
    held = timeline.bytes_by_category
    pieces = [held[piece] for piece in order]
    if recorded == 1:
        later = _accumulating(pieces[0], timeline.operator[rows[0]])
        pieces[1:-1] = [later] * (drawn - 1)

    batch = int(held[0, INPUTS])  # of all micro-batches together
    together = np.concatenate(pieces)
    together[:, INPUTS] += batch * count // recorded - batch
    numbers = [*range(drawn), drawn - 1]
    return Timeline(
        bytes_by_category=together,
        phase=timeline.phase[np.concatenate(order)],
        micro_batch=np.repeat(numbers, [len(piece) for piece in order]).astype(np.int32),
        operator=_in_a_row([timeline.operator[piece] for piece in order]),
    )


def _accumulating(
    held: npt.NDArray[np.int64], operator: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """Return what a micro-batch holds if the gradients are there when it begins.

    A gradient that is computed then lives as long as the operator that computes it.
    """
    later, gradients = held.copy(), held[:, GRADIENTS]
    begin = np.searchsorted(operator, operator, "left")  # of each row's operator
    computed = gradients - gradients[np.maximum(begin - 1, 0)]
    later[:, GRADIENTS] = gradients[-1]
    later[:, TEMPORARIES] += np.maximum(computed, 0)
    return later


def _in_a_row(operators: list[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """Return the numbers of operators of pieces that run one after the other."""
    found, before = [], 0
    for numbers in operators:
        if len(numbers):
            found.append(numbers - numbers[0] + before)
            before = int(found[-1][-1]) + 1
    return np.concatenate(found).astype(np.int32)
