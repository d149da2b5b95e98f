"""How far predictions are from what was measured, and what that means, in words."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from memlab._util.tables import aligned
from memlab._util.units import format_bytes, format_seconds
from memlab.cli.device_visit import Case
from memlab.devices.operators import BUSY_SHARE
from memlab.result import Outcome, StepResult, format_percent, signed_percent

# median and 95th percentile of the errors that predictions are held to, as shares
GOALS = {"allocated": (0.01, 0.03), "reserved": (0.02, 0.05), "time": (0.05, 0.12)}
FIELDS = {
    "allocated": "peak_allocated_bytes",
    "reserved": "peak_reserved_bytes",
    "time": "step_seconds",
}
COVERAGE = 0.9  # of the settings, that the stated uncertainty should hold
NUM_WORST = 3
ROUGH = 0.5  # an error of time with which it still says which of two settings is faster


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingPair:
    """A setting that was predicted, then measured."""

    case: Case
    predicted: StepResult
    measured: StepResult

    @property
    def is_compared(self) -> bool:
        """Whether both have numbers, and it is no second reading."""
        outcomes = {self.predicted.outcome, self.measured.outcome}
        return outcomes == {Outcome.OK} and self.case.group != "again"

    @property
    def why_not(self) -> str:
        """Why it is not compared: how the prediction ended, or the measured step."""
        for result, how in ((self.measured, "measured"), (self.predicted, "predicted")):
            if result.outcome is not Outcome.OK:
                return f"{how}, {result.outcome}: {result.message}"
        return ""

    @property
    def name(self) -> str:
        """The setting in words."""
        return f"{self.case.workload}, {self.case.config}"

    def error(self, what: str) -> float | None:
        """Return the error of a prediction as a share of what was measured; None without both."""
        told, true = (getattr(r, FIELDS[what]) for r in (self.predicted, self.measured))
        return None if told is None or not true else float(told / true - 1)

    def width(self, what: str) -> float | None:
        """Return the stated half-width of a prediction, as a share of it."""
        return (self.predicted.uncertainty or {}).get(FIELDS[what])

    def is_held(self, what: str) -> bool:
        """Return whether what was measured lies within the stated uncertainty."""
        told, true = (getattr(r, FIELDS[what]) for r in (self.predicted, self.measured))
        return bool(abs(true - told) <= (self.width(what) or 0.0) * told)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How good the predictions of one number are.

    Attributes:
        what: "allocated", "reserved" or "time".
        errors: signed, as shares of what was measured.
        held: how many of them lie within the stated uncertainty.
        width: the median of the stated half-widths.
    """

    what: str
    errors: tuple[float, ...]
    held: int
    width: float

    @property
    def median(self) -> float:
        """Of the absolute errors."""
        return statistics.median(map(abs, self.errors))

    @property
    def p95(self) -> float:
        """The 95th percentile of the absolute errors."""
        return float(np.quantile(np.abs(self.errors), 0.95))

    @property
    def is_good(self) -> bool:
        """Whether both are within the goals."""
        median, p95 = GOALS[self.what]
        return self.median <= median and self.p95 <= p95


def score(pairs: Sequence[SettingPair], what: str) -> Score | None:
    """Return how good the predictions of one number are; None if nothing can be compared."""
    found = [(pair, pair.error(what)) for pair in pairs if pair.is_compared]
    known = [(pair, error) for pair, error in found if error is not None]
    if not known:
        return None
    return Score(
        what=what,
        errors=tuple(error for _, error in known),
        held=sum(pair.is_held(what) for pair, _ in known),
        width=statistics.median(pair.width(what) or 0.0 for pair, _ in known),
    )


def unsteadiness(pairs: Sequence[SettingPair]) -> float | None:
    """Return how far second readings of time are from the first, in the median; None without."""
    first = {pair.name: pair.measured.step_seconds for pair in pairs if pair.case.group != "again"}
    found = [
        abs(pair.measured.step_seconds / once - 1)
        for pair in pairs
        if pair.case.group == "again"
        and pair.measured.step_seconds
        and (once := first.get(pair.name))
    ]
    return statistics.median(found) if found else None


def settings_table(pairs: Sequence[SettingPair]) -> list[str]:
    """Return a line for each setting: what was measured, and how far predictions are from it."""
    has_reserved = any(pair.measured.peak_reserved_bytes for pair in pairs)
    whats = [what for what in FIELDS if what != "reserved" or has_reserved]
    rows = [["setting", *(cell for what in whats for cell in (what, "error"))]]
    for pair in pairs:
        if pair.is_compared:
            rows.append([pair.name, *(cell for what in whats for cell in _cells(pair, what))])
    return aligned(rows) if len(rows) > 1 else []


def _cells(pair: SettingPair, what: str) -> tuple[str, str]:
    true, error = getattr(pair.measured, FIELDS[what]), pair.error(what)
    shown: Callable[[float], str] = format_seconds if what == "time" else format_bytes
    mark = "" if error is None or pair.is_held(what) else " !"
    said = "-" if error is None else f"{signed_percent(error)}{mark}"
    return "-" if true is None else shown(true), said


def summary_table(scores: Sequence[Score]) -> list[str]:
    """Return a line for each number: its errors, and the stated uncertainty beside them."""
    rows = [["", "settings", "median error", "95 % of them", "largest", "stated", "within it"]]
    for found in scores:
        largest = max(map(abs, found.errors))
        rows.append([
            found.what, str(len(found.errors)), *map(format_percent, (found.median, found.p95)),
            format_percent(largest), f"+-{format_percent(found.width)}",
            f"{found.held} of {len(found.errors)}",
        ])  # fmt: skip
    return aligned(rows)


def words(scores: Sequence[Score], pairs: Sequence[SettingPair], *, is_card: bool) -> list[str]:
    """Return the verdict: how good predictions are here, and what to do."""
    if not scores:
        return ["Nothing could be compared, so that nothing can be said of predictions here."]

    memory = [found for found in scores if found.what != "time"]
    said = [_of_memory(memory)] if memory else []
    busy = _why_busy(pairs)
    said += [_of_time(found, busy) for found in scores if found.what == "time"]
    if "time" not in {found.what for found in scores}:
        why = "memlab has no datasheet of this card" if is_card else "no operator could be timed"
        said.append(f"Time: not predicted here, because {why}.")

    judged = [found for found in scores if found.what != "time" or not busy]
    said += [
        f"The stated uncertainty of {found.what} holds in {found.held} of {len(found.errors)} "
        f"settings; it should in {COVERAGE:.0%}. Do not rely on it here."
        for found in judged
        if found.held < COVERAGE * len(found.errors)
    ]
    if any(not found.is_good for found in memory):
        said.append(f"Furthest off: {'; '.join(_worst(pairs))}.")
    return said


def _of_memory(scores: Sequence[Score]) -> str:
    errors = ", ".join(f"{found.what} {format_percent(found.median)}" for found in scores)
    if all(found.is_good for found in scores):
        worst = max(max(map(abs, found.errors)) for found in scores)
        return (
            f"Memory: predictions are good here (median error: {errors}; the largest "
            f"{format_percent(worst)}), in the settings that were tried."
        )
    return (
        f"Memory: predictions are further off here than they should be (median error: {errors}). "
        "Measure before you rely on them, and please send the record in an issue."
    )


def _why_busy(pairs: Sequence[SettingPair]) -> str:
    """Return how busy the machine was, a clause; empty if times can be judged."""
    unsteady = unsteadiness(pairs)
    shares = [share for pair in pairs if (share := pair.measured.others_share) is not None]
    others = statistics.median(shares) if shares else 0.0
    if (unsteady or 0.0) <= GOALS["time"][0] and others <= BUSY_SHARE:
        return ""
    twice = "" if unsteady is None else f", two readings differ by {format_percent(unsteady)}"
    return f"other programs used {format_percent(others)} of the processors{twice}"


def _of_time(found: Score, busy: str) -> str:
    median = format_percent(found.median)
    if busy:
        return (
            f"Time: it cannot be judged, because the machine was busy: {busy}. Predictions are "
            f"{median} off in the median; run doctor again when nothing else runs."
        )
    if found.is_good:
        return f"Time: predictions are good here (median error {median})."
    if found.p95 <= ROUGH:
        return f"Time: take it as rough (median error {median}): it says which setting is faster."
    return (
        f"Time: predictions are not good here (median error {median}). Measure; take predicted "
        "times for no more than an order of settings."
    )


def _worst(pairs: Sequence[SettingPair]) -> list[str]:
    found = [
        (abs(error), f"{pair.name}: {what} {signed_percent(error)}")
        for pair in pairs
        if pair.is_compared
        for what in ("allocated", "reserved")
        if (error := pair.error(what)) is not None
    ]
    return [text for _, text in sorted(found, reverse=True)[:NUM_WORST]]
