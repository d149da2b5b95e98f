"""What the panel says about the setting on screen: badge, costs, note, advice. Pure functions.

If this setting has been run, the panel shows that run; otherwise its prediction. If there is
neither, it shows the last run and says that it belongs to other settings. While a prediction is
being made, the page keeps what it shows.
"""

import dataclasses
import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memlab._panel import verdicts
from memlab._panel.advice import advice_line
from memlab._panel.comparisons import neighbours
from memlab._panel.line import Line
from memlab._panel.pictures import Scene
from memlab._panel.questions import Estimate, How, Question
from memlab._panel.runs import Run, RunLog
from memlab._panel.verdicts import OPEN, Verdict
from memlab.arguments.units import format_bytes, format_seconds
from memlab.config import StepConfig
from memlab.records.recorded import SAID
from memlab.result import Outcome, StepResult, format_percent, signed_percent

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
        """The run or prediction of the setting in which the model failed; None if it did not."""
        estimated = self.estimate.result if self.estimate else None
        result = self.run.result if self.run else estimated
        failed = result is not None and result.outcome in (Outcome.FAILED, Outcome.CRASHED)
        return result if failed else None

    @property
    def printed(self) -> tuple[str, str]:
        """What the model printed, and before it a line that says when; both "" if nothing."""
        if self.run is not None:
            text, when = self.run.result.printed, "The model printed:"
        else:
            text = self.estimate.result.printed if self.estimate else ""
            when = "The model printed, while it was predicted with several small batches:"
        return (when, text) if text else ("", "")

    @property
    def shown(self) -> Run | None:
        """The run whose memory is drawn: that of this setting, or the last if none is predicted.

        While a prediction is being made it is None, which leaves the picture as it is.
        """
        is_last_word = self.predicted is None and not self.is_pending
        return self.last if self.run is None and is_last_word else self.run

    def fit(self, limit_bytes: int | None) -> Verdict:
        """Return the badge."""
        if self.run is not None:
            return verdicts.fit_verdict(self.run.result, limit_bytes)
        if self.predicted is not None:
            return verdicts.fit_verdict(self.predicted, limit_bytes)
        if self.is_being_made:
            return Verdict(OPEN, MAKING)
        if self.question is not None and self.is_pending:
            return Verdict(OPEN, PREDICTING)
        fit = verdicts.fit_verdict(self.last.result if self.last else None, limit_bytes)
        return verdicts.of_last_run(fit, self.last.result) if self.last else fit

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

        return verdicts.stale_note(self.last.result, here.workload_name, here.device, here.config)

    def scene(
        self,
        log: RunLog,
        where: tuple[str, str],
        limit_bytes: int | None,
        known: Sequence[StepResult] = (),
    ) -> Scene:
        """Return what the pictures show.

        Args:
            log: of the runs.
            where: the workload and the device on screen, whose runs the charts show.
            limit_bytes: on screen.
            known: predictions for that workload and device, of any settings.
        """
        failed = self.estimate is not None and not self.estimate.is_ok
        shown, compared = self.shown, log.compared_run
        return Scene(
            predicted=self.predicted,
            shown=shown,
            comparison=None if compared is shown else compared,
            runs=tuple(
                run
                for run in log.visible
                if (run.result.workload_name, run.result.device) == where
                and run.result.outcome is not Outcome.CANCELLED
                and not run.is_earlier  # its model may have been another
            ),
            limit_bytes=limit_bytes,
            why=NO_PREDICTION if failed else "",
            forecast=self.estimate.forecast if self.estimate else None,
            neighbours=tuple(neighbours(self.question.config, known)) if self.question else (),
            is_settled=self.estimate is None or self.estimate.exact,
        )

    def costs(self) -> str:
        """Return the line below the badge as HTML: every number with its kind and source."""
        text = self._costs()
        return f'<div class="memlab-costs" title="{html.escape(text)}">{html.escape(text)}</div>'

    def _costs(self) -> str:
        if self.run is not None and self.run.result.outcome is Outcome.OK:
            result = self.run.result
            said = f"on {result.device.removesuffix(SAID)}: {result.source} {_numbers(result)}"
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
        words = verdicts.OUTCOME_WORDS[self.estimate.result.outcome]
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
    peak, said = result.counted_peak, []
    if peak is not None:
        spread = _spread(result, f"peak_{peak.kind}_bytes")
        said.append(f"{format_bytes(peak.nbytes)}{spread} {peak.kind}")
    if result.step_seconds is not None:
        about = "about " if result.uncertainty else ""
        time = format_seconds(result.step_seconds)
        said.append(f"{about}{time}{_spread(result, 'step_seconds')} a step")

    return ", ".join(said)


def _spread(result: StepResult, field: str) -> str:
    width = (result.uncertainty or {}).get(field)
    return f" ± {format_percent(width)}" if width else ""


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
