"""Exercises whose answer is a setting: a `StepConfig` with which a step fits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memlab._util.units import format_bytes, is_a, shown
from memlab.api import predict
from memlab.config import StepConfig
from memlab.course.exercise import Exercise
from memlab.result import Outcome
from memlab.workload import Workload

SLACK = 1.02  # as long as the fastest, up to which an answer is right


@dataclass(frozen=True, kw_only=True, slots=True)
class MustFit:
    """A step that has to fit, and what of it has to stay: the `judge` of an exercise.

    Attributes:
        workload: what is trained.
        start: the setting that does not fit.
        card: of which the step is predicted.
        limit_bytes: that it may reserve.
        kept: fields that stay as they start, with the name of the hint for each.
        fastest: returns the seconds of a fast step that fits; None asks for no fast one.
    """

    workload: Workload
    start: StepConfig
    card: str
    limit_bytes: int
    kept: Mapping[str, str]
    fastest: Callable[[], float] | None = None

    def __call__(self, asked: Exercise, given: object) -> str:
        """Return the hint for a setting; "" for one that fits."""
        hints = asked.hints
        if not is_a(given, StepConfig):
            return hints["no_config"].format(given=shown(given))
        assert isinstance(given, StepConfig)
        for field, hint in self.kept.items():
            if getattr(given, field) != getattr(self.start, field):
                return hints[hint].format(given=getattr(given, field))
        found = predict(
            self.workload, given, self.card, memory_limit=self.limit_bytes, progress=False
        )
        if found.outcome is not Outcome.OK:
            return f"this step cannot be predicted: {found.message}"
        if found.fits and self.fastest is None:
            return ""
        if found.fits and self.fastest is not None:
            if found.step_seconds is None:
                return "it fits, and no time is predicted for it, so it cannot be compared"
            ratio = found.step_seconds / self.fastest()
            return hints["slower"].format(given=f"{ratio:.2f}") if ratio > SLACK else ""
        if given == self.start:
            return hints["not_moved"]
        return hints["not_yet"].format(given=format_bytes(found.peak_reserved_bytes or 0))
