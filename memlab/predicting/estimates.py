"""An estimate: the result of another config, with a timeline that was put together for this one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from memlab.arguments.units import format_bytes
from memlab.config import StepConfig
from memlab.result import StepResult
from memlab.trace import Timeline


def estimated(
    result: StepResult,
    config: StepConfig,
    timeline: Timeline,
    *,
    reserved_bytes: int | None,
    seconds: float | None,
    uncertainty: Mapping[str, float],
    of_what: str,
) -> StepResult:
    """Return what the result of another config says of this one.

    The result has no limit. Where in the model the memory is held is not known, nor how much
    the step needs.

    Args:
        result: of the other config.
        config: what is wanted.
        timeline: of a step with this config.
        reserved_bytes: the peak of reserved bytes; None if there is no caching allocator.
        seconds: the time of a step; None if it is not known.
        uncertainty: half-widths, relative, by field.
        of_what: the other config in words, for the message.
    """
    peak = int(timeline.total_bytes.max())
    return dataclasses.replace(
        result,
        message=f"estimated peak {format_bytes(peak)} allocated, from {of_what}",
        config=config,
        timeline=timeline,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved_bytes,
        needed_bytes=None,
        peak_by_category=timeline.peak_by_category,
        peak_place=None,
        peak_holdings=(),
        first_step_peak_bytes=None,
        saving_peak_bytes=None,
        saving_host_bytes=None,
        host_bytes=None,
        locked_host_bytes=None,
        step_seconds=seconds,
        samples_per_second=config.batch_size / seconds if seconds else None,
        uncertainty={name: w for name, w in uncertainty.items() if name != "needed_bytes"},
        memory_limit_bytes=None,
        fits=None,
        close_to_limit=None,
        fit=None,
    )
