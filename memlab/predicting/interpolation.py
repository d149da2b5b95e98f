"""What a prediction of one batch size says of another, by the arithmetic of its `Forecast`.

No model runs and none is recorded again. Between the two recorded sizes, and beyond them, the
workspace of kernels is interpolated, and the result states a larger uncertainty.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memlab.arguments.units import format_bytes
from memlab.config import StepConfig
from memlab.meters.lifetimes import step_memory
from memlab.result import StepResult
from memlab.techniques.offload import offload
from memlab.trace import Timeline

if TYPE_CHECKING:
    from memlab.predicting.predict import Prediction

# added to each uncertainty between recorded sizes; see tests/system/test_panel_forecasts.py
INTERPOLATED = 0.03


def interpolated(base: Prediction, config: StepConfig) -> StepResult:
    """Return what the forecast of another prediction says of this config, which it must cover.

    The result has no limit: `Forecast.against_limit` judges whether it fits one.
    """
    forecast, sizes = base.forecast, config.micro_batch_sizes
    assert forecast is not None
    exact = forecast.is_exact(sizes)
    trace, reserved = forecast.trace(sizes)
    memory = step_memory(trace, 1)
    seconds = forecast.step_seconds(sizes) or None  # 0: timing noise, drawn out beyond the recorded
    spread = dict(base.result.uncertainty or {})
    if not exact:
        spread = {name: width + INTERPOLATED for name, width in spread.items()}

    # how much offloading holds in host memory is known of the batch that was recorded
    of_batch = offload.notes(
        base.result.config, forecast.program.recording.host_memory, base.result.timeline
    )
    is_same = sizes == base.result.config.micro_batch_sizes

    how = "predicted" if exact else "interpolated"
    return dataclasses.replace(
        base.result,
        message=f"{how} peak {format_bytes(memory.peak_bytes)} allocated in {memory.peak_place}",
        config=config,
        timeline=memory.timeline,
        peak_allocated_bytes=memory.peak_bytes,
        peak_reserved_bytes=reserved,
        needed_bytes=None,  # searching for it takes as long as drawing the picture several times
        peak_by_category=memory.timeline.peak_by_category,
        peak_place=memory.peak_place,
        peak_holdings=memory.holdings(),
        first_step_peak_bytes=step_memory(trace, 0).peak_bytes,
        host_bytes=base.result.host_bytes if is_same else None,
        locked_host_bytes=base.result.locked_host_bytes if is_same else None,
        saving_peak_bytes=_saving_peak(base.result, memory.timeline),
        step_seconds=seconds,
        samples_per_second=config.batch_size / seconds if seconds else None,
        uncertainty=spread,
        notes=tuple(n for n in base.result.notes if is_same or n not in of_batch),
        memory_limit_bytes=None,
        fits=None,
        close_to_limit=None,
        fit=None,
        printed="",  # the shapes that it may name are of another batch
    )


def _saving_peak(result: StepResult, timeline: Timeline) -> int | None:
    """Return the peak of saving after this timeline: what is added does not depend on the batch."""
    if result.saving_peak_bytes is None or result.timeline is None:
        return None
    more = timeline.total_bytes[-1] - result.timeline.total_bytes[-1]
    return result.saving_peak_bytes + int(more)
