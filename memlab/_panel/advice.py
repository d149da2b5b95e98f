"""What to do when the step does not fit: a run that does, or the next step to try.

A pure function of the runs and the kept predictions. It predicts nothing itself.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from memlab._panel.line import Line
from memlab._panel.runs import Run
from memlab._panel.state import FIELDS, from_config
from memlab._panel.verdicts import BAD, GOOD, WARN, fit_verdict, setting_of, setting_words
from memlab.arguments.units import format_bytes
from memlab.config import BudgetEngine, Checkpointing, Precision, StepConfig
from memlab.errors import ConfigError
from memlab.explaining.remedies import remedies
from memlab.result import Outcome, StepResult
from memlab.techniques import every
from memlab.techniques.attention import MATH_KERNEL
from memlab.techniques.recompute.model_cache import OFF
from memlab.trace import CATEGORIES, Category

NEXT_BUDGETS = (0.5, 0.2, 0.0)
STANDING = (Category.PARAMETERS, Category.BUFFERS, Category.OPTIMIZER_STATE, Category.INPUTS)


def advice_line(
    shown: StepResult | None,
    runs: Sequence[Run],
    limit_bytes: int | None,
    said_of_division: Callable[[StepConfig], str] = lambda config: "",
) -> Line:
    """Return what to do about the shown step; an empty line if it fits.

    Attention that holds its whole matrix is told in any case, with the number format that does not.
    For a step that is refused because of the model's cache, the line offers to switch it off.

    Args:
        shown: the measurement or prediction on screen.
        runs: all runs, oldest first.
        limit_bytes: the limit on screen.
        said_of_division: returns what more micro-batches would do to the gradient; "" if nothing.
    """
    if shown is not None and shown.outcome is Outcome.UNSUPPORTED and OFF in shown.message:
        text = "the model fills a cache of keys and values, and a recompute would fill it twice"
        return Line(text, remedy=("switch it off", {"model_cache": False}), kind=WARN)
    attention = Line("") if shown is None else _attention_line(shown)
    if shown is None or fit_verdict(shown, limit_bytes).kind != BAD or attention.remedy:
        return attention

    limit = limit_bytes or shown.memory_limit_bytes
    fitting = _nearest_that_fits(shown, runs, limit)
    hopeless = _standing_line(shown, limit)
    if fitting is not None:
        line = _fitting_line(shown, fitting)
        text = f"{hopeless.text}: {line.text}" if hopeless else line.text
        return Line(text, remedy=line.remedy, kind=WARN)

    return hopeless or _next_line(shown, runs, said_of_division)


def _attention_line(shown: StepResult) -> Line:
    """Return what attention holds that runs in another kernel than a person may expect."""
    note = next((note for note in shown.notes if MATH_KERNEL in note), "")
    precision = Precision.BF16_MIXED
    if not note:
        return Line("")
    words = f"precision={str(precision)!r}"
    remedy = (f"use {precision}", {"precision": precision}) if words in note else None
    return Line(note, remedy=remedy, kind=WARN)


def recorded_line(config: StepConfig, nearest: StepConfig | None, other_sizes: str) -> Line | None:
    """Return a line that leads to a recorded run; None if these settings are recorded.

    Args:
        config: on screen.
        nearest: the recorded settings that are nearest; None if this workload has none.
        other_sizes: code that makes the workload in recorded sizes; "" if there are none.
    """
    if nearest == config:
        return None
    if nearest is None:
        where = f"; memlab.panel({other_sizes}) is" if other_sizes else ""
        return Line(f"this workload is not recorded in these sizes{where}", kind=WARN)

    text = f"not recorded; the nearest recorded run is {nearest}"
    try:
        fields = from_config(nearest)
    except ConfigError:  # the panel cannot show it
        return Line(f"{text}, which memlab.recorded shows", kind=WARN)

    return Line(text, remedy=("go there", fields), kind=WARN)


def _comparable(here: StepResult, runs: Sequence[Run]) -> list[Run]:
    """Return the runs and kept predictions of the same workload on the same device."""
    where = (here.workload_name, here.device)
    return [run for run in runs if (run.result.workload_name, run.result.device) == where]


def _nearest_that_fits(here: StepResult, runs: Sequence[Run], limit: int | None) -> Run | None:
    fitting = [
        run
        for run in reversed(_comparable(here, runs))
        if run.result.outcome is Outcome.OK
        and run.result.config != here.config
        and (limit is None or fit_verdict(run.result, limit).kind == GOOD)
    ]
    return min(fitting, key=lambda run: _distance(run.result.config, here.config), default=None)


def _distance(one: StepConfig, other: StepConfig) -> tuple[int, bool, float]:
    """Return how many settings differ, whether the batch size does, and by how many doublings."""
    names = ("batch_size", "accumulation_steps")
    doublings = (abs(math.log2(getattr(one, n) / getattr(other, n))) for n in names)
    return len(_differing(one, other)), one.batch_size != other.batch_size, sum(doublings)


def _differing(one: StepConfig, other: StepConfig) -> list[str]:
    return [field for field in FIELDS if getattr(one, field) != getattr(other, field)]


def _fitting_line(shown: StepResult, fitting: Run) -> Line:
    result = fitting.result
    fields = {
        field: getattr(result.config, field) for field in _differing(result.config, shown.config)
    }
    words = ", ".join(setting_of(result, field) for field in fields)
    peak = result.counted_peak
    size = f": {format_bytes(peak.nbytes)} {peak.kind}" if peak else ""
    text = f"{words} fits{size}, {result.source} in run {fitting.number}"
    return Line(text, remedy=(f"use run {fitting.number}", fields))


def _standing_line(result: StepResult, limit: int | None) -> Line | None:
    """Say that saving activations cannot help, if what is held before forward is over the limit."""
    if limit is None or result.timeline is None or not len(result.timeline):
        return None

    first = result.timeline.bytes_by_category[0]
    standing = sum(int(first[CATEGORIES.index(category)]) for category in STANDING)
    if standing <= limit:
        return None

    return Line(
        f"{format_bytes(standing)} are held before the first forward: use a smaller model, "
        "optimizer or precision; saving activations cannot help",
        kind=WARN,
    )


def _next_line(
    here: StepResult, runs: Sequence[Run], said_of_division: Callable[[StepConfig], str]
) -> Line:
    """Offer the next setting to try, where nothing on the table fits."""
    if line := _loss_line(here):
        return line

    kind = "cpu" if here.device.startswith("cpu") else "cuda"
    for fields in _next_settings(here.config):
        try:
            asked = replace(here.config, **fields)
        except ConfigError:
            continue

        if not every.is_refused(asked, kind):
            field, value = next(iter(fields.items()))
            words = f"try {setting_words(field, value)}"
            said = said_of_division(here.config) if field == "accumulation_steps" else ""
            text = f"{_none_fits(here, runs)}{words}{f' ({said})' if said else ''}"
            return Line(text, remedy=(words, fields), kind=WARN)

    each = "for each rank " if here.config.world_size > 1 else ""
    return Line(f"a single sample {each}does not fit, however much is recomputed", kind=WARN)


def _loss_line(here: StepResult) -> Line | None:
    """Offer the loss in chunks, where the peak is in the loss and the saving can be estimated."""
    if here.peak_place is None or not here.peak_place.loss:
        return None
    for remedy in remedies(here):
        if "loss_chunks" in remedy.change and remedy.freed_bytes is not None:
            words = f"try {setting_words('loss_chunks', remedy.change['loss_chunks'])}"
            text = f"the peak is in the loss, {here.peak_place.loss}: {words}, about "
            text += f"{format_bytes(remedy.freed_bytes)} less"
            return Line(text, remedy=(words, dict(remedy.change)), kind=WARN)
    return None


def _next_settings(config: StepConfig) -> Iterator[dict[str, Any]]:
    """Yield what may be tried next, what changes least first: budget, micro-batches, batch."""
    lower = next((b for b in NEXT_BUDGETS if b < config.memory_budget), None)
    is_eager = not config.compile and config.checkpointing is Checkpointing.NONE

    if is_eager and lower is not None and config.budget_engine is BudgetEngine.EAGER:
        yield {"memory_budget": lower}  # it leaves the gradient as it is, bit by bit
    if further := config.divided_further():
        yield {"accumulation_steps": further.accumulation_steps}
    if half := config.rank_batch_size // 2:
        steps = min(config.accumulation_steps, half)
        batch = half * config.data_parallel_size
        yield {"batch_size": batch, "accumulation_steps": steps}


def _none_fits(here: StepResult, runs: Sequence[Run]) -> str:
    """Return that none of the runs and kept predictions fits; "" if there are none."""
    kinds = {run.is_predicted for run in _comparable(here, runs) if not run.is_stopped}
    words = [name for name, kind in (("run", False), ("kept prediction", True)) if kind in kinds]
    return f"no {' or '.join(words)} fits; next, " if words else ""
