"""Whether a setting costs more than before, and which of it may be noise.

Memory. The same step takes the same bytes each time, so a small tolerance does: it lets pass a few
blocks that a new version of a library adds.

Time. Noise only adds to a measured time. So a step is slower only if its median and its fastest
repeat have both risen by more than the tolerance and the spread of the noisier side, which is how
far its median lies above its fastest repeat: medians alone rise whenever other programs run.
A predicted time has no repeats. That of a card is the same each time; that of a CPU comes from
timed operators, so its stated uncertainty is added to the tolerance. Times of another processor,
card or number of threads are not judged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from memlab.arguments.units import format_bytes, format_seconds
from memlab.changes.setting_cost import SettingCost
from memlab.result import Outcome, Source, signed_percent

MEMORY_TOLERANCE = 0.005  # 36 of 36 such runs had the same bytes, to the byte
TIME_TOLERANCE = 0.2
COSTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "peak allocated": ("peak_allocated_bytes", format_bytes),
    "peak reserved": ("peak_reserved_bytes", format_bytes),
    "time per step": ("step_seconds", format_seconds),
}
TIME = "time per step"


class CostVerdict(StrEnum):
    """How a setting has changed."""

    WORSE = "worse"
    BETTER = "better"
    SAME = "same"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CostChange:
    """One setting, before and after.

    Attributes:
        old: what it cost.
        new: what it costs.
        verdict: worse if anything of it rose beyond its tolerance or it does not run or fit any
            more; else better if anything fell beyond it; else the same.
        rose: names of `COSTS` that rose beyond their tolerance.
        fell: names of `COSTS` that fell beyond it.
        reasons: why, a clause each; empty for the same.
        not_judged: what was not compared, and why, a clause each.
    """

    old: SettingCost
    new: SettingCost
    verdict: CostVerdict
    rose: tuple[str, ...] = ()
    fell: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    not_judged: tuple[str, ...] = ()

    @property
    def ran(self) -> bool:
        """Whether at least one side has an answer; without one nothing was compared."""
        return Outcome.OK in (self.old.outcome, self.new.outcome)

    @property
    def counted_peak(self) -> str:
        """Which peak counts, a name of `COSTS`: the reserved one if both sides know it."""
        is_reserved = None not in (self.old.peak_reserved_bytes, self.new.peak_reserved_bytes)
        return "peak reserved" if is_reserved else "peak allocated"

    def change_of(self, name: str) -> float | None:
        """Return the relative change of a name of `COSTS`; None if it is not known."""
        field, _ = COSTS[name]
        return relative(getattr(self.old, field), getattr(self.new, field))

    def costs(self) -> dict[str, str]:
        """Return each cost in words, such as "1.00 MiB -> 1.20 MiB (+20.0 %)"."""
        found = {}
        for name, (field, show) in COSTS.items():
            before, after = getattr(self.old, field), getattr(self.new, field)
            change = self.change_of(name)
            if before is not None or after is not None:
                said = [
                    ("not known" if value is None else show(value)) for value in (before, after)
                ]
                by = "" if change is None else f" ({signed_percent(change)})"
                found[name] = f"{' -> '.join(said)}{by}"
        return found


def judged(
    old: SettingCost, new: SettingCost, memory_tolerance: float, time_tolerance: float
) -> CostChange:
    """Return how one setting has changed."""
    worse, better = _outcomes(old, new)
    rose, fell, unknown = {}, {}, []
    if Outcome.OK not in (old.outcome, new.outcome):
        unknown.append(f"it ran on neither side: {old.outcome} in old, {new.outcome} in new")
    for name, (field, _) in COSTS.items():
        before, after = getattr(old, field), getattr(new, field)
        change = relative(before, after)
        if change is None:
            if (before is None) != (after is None):
                unknown.append(f"{name} is not known in {'old' if before is None else 'new'}")
            elif before is not None:
                rose[name] = f"{name} rose from 0"
            continue

        least = most = change
        tolerance = memory_tolerance
        if name == TIME:
            if is_other_hardware(old, new):
                continue  # `CostChanges.notes` says so once
            fastest = relative(old.fastest_seconds, new.fastest_seconds)
            least, most = sorted((change, change if fastest is None else fastest))
            tolerance = time_tolerance + max(_noise(old), _noise(new))
        if least > tolerance:
            rose[name] = f"{name} {signed_percent(change)}"
        elif most < -tolerance:
            fell[name] = f"{name} {signed_percent(change)}"

    verdict = CostVerdict.BETTER if better or fell else CostVerdict.SAME
    return CostChange(
        old=old,
        new=new,
        verdict=CostVerdict.WORSE if worse or rose else verdict,
        rose=tuple(rose),
        fell=tuple(fell),
        reasons=(*worse, *rose.values(), *better, *fell.values()),
        not_judged=tuple(unknown),
    )


def relative(before: float | None, after: float | None) -> float | None:
    """Return by which share a number has changed; None if one is unknown, or it was 0."""
    if before is None or after is None or (not before and after):
        return None
    return after / before - 1.0 if before else 0.0


def is_other_hardware(old: SettingCost, new: SettingCost) -> bool:
    """Return whether both sides know what they ran on, and it is not the same."""
    is_known = any(old.hardware) and any(new.hardware)
    return is_known and old.hardware != new.hardware


def _outcomes(old: SettingCost, new: SettingCost) -> tuple[list[str], list[str]]:
    """Return what is worse and what is better about how both ended."""
    ran, runs = old.outcome is Outcome.OK, new.outcome is Outcome.OK
    if ran and not runs:
        return [f"{new.outcome} now, was ok: {new.message or 'no reason is given'}"], []
    if runs and not ran:
        return [], [f"ok now, was {old.outcome}"]
    if old.fits and new.fits is False:
        return ["it no longer fits the memory limit"], []
    if new.fits and old.fits is False:
        return [], ["it fits the memory limit now"]
    return [], []


def _noise(cost: SettingCost) -> float:
    """Return by which share a time may differ in the next run or prediction of the same step."""
    if cost.step_seconds is None:
        return 0.0
    if cost.source is Source.PREDICTED:
        is_of_cpu = "threads" in cost.versions
        return cost.time_uncertainty if is_of_cpu else 0.0
    return relative(cost.fastest_seconds, cost.step_seconds) or 0.0
