"""What the panel says about the setting on screen: badge, costs, note, advice. Pure functions.

If this setting has been run, the panel shows that run; otherwise its prediction. If there is
neither, it shows the last run and says that it belongs to other settings. While a prediction is
being made, the page keeps what it shows.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memlab._panel import state
from memlab._panel.questions import Estimate, How, Question
from memlab._panel.runs import Run, RunLog
from memlab._panel.state import (
    BAD,
    FIELDS,
    GOOD,
    OPEN,
    WARN,
    Verdict,
    briefly,
    fit_verdict,
    from_config,
    setting_of,
    setting_words,
)
from memlab._panel.texts import Line
from memlab._util.units import format_bytes, format_seconds
from memlab.config import BudgetEngine, Checkpointing, Precision, StepConfig
from memlab.cost_model.power import OF_LAPTOP
from memlab.errors import ConfigError
from memlab.result import Outcome, StepResult, format_percent, signed_percent
from memlab.search.explain import remedies
from memlab.techniques import registry
from memlab.techniques.attention import MATH_KERNEL
from memlab.techniques.checkpointing.blocks import OFF
from memlab.techniques.technique import offers_of
from memlab.trace import CATEGORIES, STANDING

# What to do when the step does not fit: a run that does, or the next step to try.
#
# A pure function of the runs and the kept predictions. It predicts nothing itself.


def advice_line(
    shown: StepResult | None,
    runs: Sequence[Run],
    limit_bytes: int | None,
    said_of_division: Callable[[StepConfig], str] = lambda config: "",
) -> Line:
    """Return what to do about the shown step; an empty line if it fits.

    Attention that holds its whole matrix is told in any case, with the number format that does not,
    and so is how many watts a laptop's time is for.
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
    noted = Line("") if shown is None else _noted_line(shown)
    if shown is None or fit_verdict(shown, limit_bytes).kind != BAD or noted.remedy:
        return noted

    limit = limit_bytes or shown.memory_limit_bytes
    fitting = _nearest_that_fits(shown, runs, limit)
    hopeless = _standing_line(shown, limit)
    if fitting is not None:
        line = _fitting_line(shown, fitting)
        text = f"{hopeless.text}: {line.text}" if hopeless else line.text
        return Line(text, remedy=line.remedy, kind=WARN)

    return hopeless or _next_line(shown, runs, said_of_division)


def _noted_line(shown: StepResult) -> Line:
    """Return what a person may not expect: in which kernel attention runs, or a laptop's watts."""
    note = next((note for note in shown.notes if MATH_KERNEL in note), "")
    of_laptop = next((note for note in shown.notes if OF_LAPTOP in note), "")
    precision = Precision.BF16_MIXED
    if not note:
        return Line(of_laptop)
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
    size = f": {peak}" if peak else ""
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

        if not registry.is_refused(asked, kind):
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
    budgets = (offer["memory_budget"] for offer in offers_of("memory_budget"))
    lower = next((budget for budget in budgets if budget < config.memory_budget), None)
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


WRONG = "a setting is not valid"
MAKING = "making the workload"
PREDICTING, STARTING = "predicting", "starting the worker"
FOLLOWS = "; the exact prediction follows"
NO_PREDICTION = "There is no prediction for this setting; the reason is above."


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """What is known about the setting on screen.

    Attributes:
        run: the latest measurement of it.
        estimate: what is predicted for it.
        last: the last run or kept prediction of any setting that was not stopped.
        question: the setting; None while it is not valid, or its workload is being made.
        doing: what the worker is doing to predict it; "" if nothing.
        plain: the prediction for the same setting without recomputing; None if it is not known
            or nothing is recomputed.
        is_being_made: whether the workload is being made in the sample size on screen.
    """

    run: Run | None
    estimate: Estimate | None
    last: Run | None
    question: Question | None
    doing: str = ""
    plain: StepResult | None = None
    is_being_made: bool = False

    @property
    def predicted(self) -> StepResult | None:
        """The prediction with numbers: the one made for the run, otherwise the newest.

        A run is compared with an exact prediction alone.
        """
        if self.run is not None and self.run.prediction is not None:
            return self.run.prediction
        if self.estimate is None or not self.estimate.is_ok:
            return None
        return self.estimate.result if self.run is None or self.estimate.exact else None

    @property
    def is_pending(self) -> bool:
        """Whether there is neither a run nor a prediction of the setting yet."""
        return self.run is None and self.estimate is None

    @property
    def failure(self) -> StepResult | None:
        """The run or prediction in which the model failed, or a prediction that took too long."""
        estimated = self.estimate.result if self.estimate else None
        result = self.run.result if self.run else estimated
        failures = {Outcome.FAILED, Outcome.CRASHED, *([] if self.run else [Outcome.TIMED_OUT])}
        return result if result is not None and result.outcome in failures else None

    @property
    def printed(self) -> tuple[str, str]:
        """What the model printed, and before it a line that says when; both "" if nothing."""
        if self.run is not None:
            text, when = self.run.result.printed, "The model printed:"
        else:
            text = self.estimate.result.printed if self.estimate else ""
            when = "The model printed, while it was predicted with several small batches:"
        return (when, text) if text else ("", "")

    def fit(self, limit_bytes: int | None) -> Verdict:
        """Return the badge."""
        if self.run is not None:
            return state.fit_verdict(self.run.result, limit_bytes)
        if self.predicted is not None:
            return state.fit_verdict(self.predicted, limit_bytes)
        if self.is_being_made:
            return Verdict(OPEN, MAKING)
        if self.question is not None and self.is_pending:
            return Verdict(OPEN, PREDICTING)
        fit = state.fit_verdict(self.last.result if self.last else None, limit_bytes)
        return state.of_last_run(fit, self.last.result) if self.last else fit

    def note(self) -> str:
        """Return the text over the greyed picture; "" if the picture shows this setting."""
        if self.run is not None or self.predicted is not None:
            return ""
        if self.question is None:
            return MAKING if self.is_being_made else WRONG
        if self.is_pending:
            return PREDICTING

        here = self.question
        if self.last is None:
            return ""

        return state.stale_note(self.last.result, here.workload_name, here.device, here.config)

    def costs(self) -> str:
        """Return the line below the badge: every number with its kind and source."""
        if self.run is not None and self.run.result.outcome is Outcome.OK:
            result = self.run.result
            said = f"{result.source} {_numbers(result)}"
            return f"{said}; {_against(self.run, self.predicted)}" if self.predicted else said

        if self.predicted is not None:
            said = f"{self._how} for {self.predicted.device}: {_numbers(self.predicted)}"
            follows = FOLLOWS if self._how is How.ESTIMATED else ""
            # an estimate and the exact prediction of the plain step are not of one kind
            is_exact = self._how is How.PREDICTED
            return said + (_recomputing(self.predicted, self.plain) if is_exact else "") + follows

        if self.question is None:
            return MAKING if self.is_being_made else ""
        if self.estimate is None:
            once = " (takes some seconds, once)" if self.doing == STARTING else ""
            return f"{PREDICTING}: {self.doing}{once}" if self.doing else PREDICTING

        if self.failure is not None:
            return NO_PREDICTION
        words = state.OUTCOME_WORDS[self.estimate.result.outcome]
        return f"no prediction ({words}): {self.estimate.result.message}"

    @property
    def _how(self) -> How:
        """How the prediction was made."""
        if self.run is not None or self.estimate is None:
            return How.PREDICTED
        return self.estimate.how

    def advice(
        self,
        runs: Sequence[Run],
        limit_bytes: int | None,
        said_of_division: Callable[[StepConfig], str],
    ) -> Line:
        """Return what to do if this setting does not fit or is refused."""
        estimated = self.predicted or (self.estimate.result if self.estimate else None)
        about = self.run.result if self.run else estimated
        return advice_line(about, runs, limit_bytes, said_of_division)


def outlook(
    log: RunLog,
    question: Question | None,
    estimate: Estimate | None,
    doing: str,
    plain: StepResult | None = None,
    *,
    is_being_made: bool = False,
) -> Outlook:
    """Return what is known about the question.

    Args:
        log: of the runs.
        question: on screen; None while it is not valid.
        estimate: of this question or an older one.
        doing: what the worker is doing.
        plain: the prediction for the same without recomputing, if that is known.
        is_being_made: whether the workload on screen is being made, so that there is no question.
    """
    runs = [run for run in log.runs if run.result.outcome is not Outcome.CANCELLED]
    same = [
        run
        for run in runs
        if question is not None
        and question.is_of(run.result)
        and not run.is_earlier
        and not run.is_predicted
    ]
    return Outlook(
        run=same[-1] if same else None,
        estimate=estimate if estimate and estimate.question == question else None,
        last=runs[-1] if runs else None,
        question=question,
        doing=doing,
        plain=plain,
        is_being_made=is_being_made,
    )


def with_numbers(predicted: StepResult | None) -> StepResult | None:
    """Return the prediction, or None if it has no numbers to compare a run with."""
    return predicted if predicted is not None and predicted.outcome is Outcome.OK else None


def _numbers(result: StepResult) -> str:
    """Return peak and time of a result, each with its kind and uncertainty."""
    peak = result.counted_peak
    said = [] if peak is None else [peak.in_words]
    if result.time_words:
        said.append(f"{'about ' if result.uncertainty else ''}{result.time_words}")
    return ", ".join(said)


def _recomputing(predicted: StepResult, plain: StepResult | None) -> str:
    """Return what recomputing changes against the plain step; "" if that is not known.

    To run operators again takes no less time. Two predictions between which times were measured
    anew may say so, and then nothing is said of the time.
    """
    if plain is None or not plain.peak_allocated_bytes or not predicted.peak_allocated_bytes:
        return ""

    lower = predicted.peak_allocated_bytes / plain.peak_allocated_bytes - 1
    time = 0.0
    if plain.step_seconds and predicted.step_seconds:
        time = predicted.step_seconds / plain.step_seconds - 1
    if lower >= 0 and time > 0:
        off = "set the budget to 1" if predicted.config.memory_budget < 1 else "switch it off"
        return f"; recomputing saves nothing here and costs {format_percent(time)} time: {off}"
    costs = f", {signed_percent(time)} time" if time > 0 else ""
    return f"; recomputing: {signed_percent(lower)} allocated{costs}"


def _against(run: Run, predicted: StepResult) -> str:
    error = dataclasses.replace(run, prediction=predicted).prediction_error
    peak = format_bytes(predicted.peak_allocated_bytes or 0)
    off = "" if error is None else f" ({signed_percent(error)})"
    time = predicted.step_seconds
    seconds = "" if time is None else f", {format_seconds(time)}"
    return f"predicted {peak}{off}{seconds}"


# The status line: what was said last, and to which settings it belongs. Pure functions.
#
# A sentence about a run stays when the settings change, named and greyed. Any other
# sentence is about the settings on screen and goes with them.

KEPT = "this prediction is in the table"


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """A sentence of the status line.

    Attributes:
        text: the sentence, without the run that it is about.
        kind: of the verdict that colours it; "" for none.
        question: the settings that it belongs to; None while a run goes on, which has its own.
        run: that it is about; None if it is about none.
    """

    text: str
    kind: str = ""
    question: Question | None = None
    run: Run | None = None

    def is_past(self, here: Question | None) -> bool:
        """Return whether the settings on screen are others by now."""
        if self.run is not None:
            return self.run.is_earlier or here is None or not here.is_of(self.run.result)
        return self.question is not None and here != self.question

    def named(self, here: Question | None) -> str:
        """Return the sentence, beginning with the run and what differs from the screen."""
        if self.run is None:
            return self.text
        result = self.run.result
        words = [f"run {self.run.number}", *(["earlier"] if self.run.is_earlier else [])]
        if here is None or result.workload_name != here.workload_name:
            words.append(result.workload_name)
        if here is None or result.device != here.device:
            words.append(f"on {result.device}")
        return f"{', '.join([*words, briefly(result)])}: {self.text}"


def of_run(run: Run) -> Status:
    """Return how a run ended, or that it is a kept prediction, with its notes."""
    result = run.result
    kept = (KEPT,) if run.is_predicted else ()
    text = ". ".join(said.rstrip(".") for said in (*kept, result.message, *result.notes))
    return Status(text=text, kind=state.outcome_verdict(result).kind, run=run)


def told(status: Status, here: Question | None) -> dict[str, Any]:
    """Return the line as the page is told; `here`: what is on screen."""
    return {"kind": status.kind, "text": status.named(here), "isPast": status.is_past(here)}
