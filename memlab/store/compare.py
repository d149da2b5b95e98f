"""`compare`: what changed in bytes and time between two results, or two sets of them."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memlab._util.checks import anything, checked, number, of_type
from memlab._util.tables import columns_table, facts_table
from memlab._util.units import format_bytes, format_seconds, is_a, shown
from memlab.config import StepConfig
from memlab.errors import ConfigError, MemlabError, StoreError
from memlab.result import Outcome, Source, StepResult, format_percent, signed_percent
from memlab.store.frames import stored_runs

if TYPE_CHECKING:
    import pandas as pd

HARDWARE = ("device_name", "threads")  # of `StepResult.versions`; times depend on both


def setting_of(result: StepResult) -> tuple[Any, ...]:
    """Return what must be equal on both sides: workload, device, source, limit and config."""
    settings = tuple(result.config.to_dict().items())
    limit = result.memory_limit_bytes
    return result.workload_name, result.device, result.source, limit, settings


def in_words(result: StepResult) -> str:
    """Return the setting of a result in one line."""
    return f"{result.workload_name} on {result.device} ({result.source}), {result.config}"


def _hardware(result: StepResult) -> tuple[str, ...]:
    """Return processor or card and threads, as far as they are known."""
    return tuple(result.versions.get(name, "") for name in HARDWARE)


def _fastest(result: StepResult) -> float | None:
    """Return the fastest repeat in seconds; None if a table says only the median."""
    return min(result.step_seconds_all, default=None)


# Whether a setting costs more than before, and which of it may be noise.
#
# Memory. The same step takes the same bytes each time, so a small tolerance does: it lets
# pass a few blocks that a new version of a library adds.
#
# Time. Noise only adds to a measured time. So a step is slower only if its median and its
# fastest repeat have both risen by more than the tolerance and the spread of the noisier
# side, which is how far its median lies above its fastest repeat: medians alone rise
# whenever other programs run. A predicted time has no repeats. That of a card is the same
# each time; that of a CPU comes from timed operators, so its stated uncertainty is added to
# the tolerance. Times of another processor, card or number of threads are not judged.

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
        old: its result then.
        new: its result now.
        verdict: worse if anything of it rose beyond its tolerance or it does not run or fit any
            more; else better if anything fell beyond it; else the same.
        rose: names of `COSTS` that rose beyond their tolerance.
        fell: names of `COSTS` that fell beyond it.
        reasons: why, a clause each; empty for the same.
        not_judged: what was not compared, and why, a clause each.
    """

    old: StepResult
    new: StepResult
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
        attribute, _ = COSTS[name]
        return relative(getattr(self.old, attribute), getattr(self.new, attribute))

    def costs(self) -> dict[str, str]:
        """Return each cost in words, such as "1.00 MiB -> 1.20 MiB (+20.0 %)"."""
        found = {}
        for name, (attribute, show) in COSTS.items():
            before, after = getattr(self.old, attribute), getattr(self.new, attribute)
            change = self.change_of(name)
            if before is not None or after is not None:
                said = [
                    ("not known" if value is None else show(value)) for value in (before, after)
                ]
                by = "" if change is None else f" ({signed_percent(change)})"
                found[name] = f"{' -> '.join(said)}{by}"
        return found


def judged(
    old: StepResult, new: StepResult, memory_tolerance: float, time_tolerance: float
) -> CostChange:
    """Return how one setting has changed."""
    worse, better = _outcomes(old, new)
    rose, fell, unknown = {}, {}, []
    if Outcome.OK not in (old.outcome, new.outcome):
        unknown.append(f"it ran on neither side: {old.outcome} in old, {new.outcome} in new")
    for name, (attribute, _) in COSTS.items():
        before, after = getattr(old, attribute), getattr(new, attribute)
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
            fastest = relative(_fastest(old), _fastest(new))
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


def is_other_hardware(old: StepResult, new: StepResult) -> bool:
    """Return whether both sides know what they ran on, and it is not the same."""
    before, after = _hardware(old), _hardware(new)
    return any(before) and any(after) and before != after


def _outcomes(old: StepResult, new: StepResult) -> tuple[list[str], list[str]]:
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


def _noise(cost: StepResult) -> float:
    """Return by which share a time may differ in the next run or prediction of the same step."""
    if cost.step_seconds is None:
        return 0.0
    if cost.source is Source.PREDICTED:
        is_of_cpu = "threads" in cost.versions
        return (cost.uncertainty or {}).get("step_seconds", 0.0) if is_of_cpu else 0.0
    return relative(_fastest(cost), cost.step_seconds) or 0.0


# `CostChanges`: what `compare` found.

ORDER = (CostVerdict.WORSE, CostVerdict.BETTER, CostVerdict.SAME)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CostChanges:
    """What changed between two sets of results.

    Attributes:
        changes: settings that both sides have, worse ones first.
        only_old: settings that only the old side has.
        only_new: settings that only the new side has.
        memory_tolerance: the relative change of a peak that counts as none.
        time_tolerance: the same for the time of a step.
        notes: other versions, other processors, and what was left out.
    """

    changes: tuple[CostChange, ...]
    only_old: tuple[StepResult, ...]
    only_new: tuple[StepResult, ...]
    memory_tolerance: float
    time_tolerance: float
    notes: tuple[str, ...] = ()

    @property
    def worse(self) -> tuple[CostChange, ...]:
        """The settings that take more memory or time than before, or do not run any more."""
        return tuple(one for one in self.changes if one.verdict is CostVerdict.WORSE)

    @property
    def compared(self) -> tuple[CostChange, ...]:
        """The settings that at least one side has run."""
        return tuple(one for one in self.changes if one.ran)

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing of it is worse."""
        return bool(self.compared) and not self.worse

    def frame(self) -> "pd.DataFrame":
        """Return one row a setting, those of one side only at the end, in bytes and seconds."""
        import pandas as pd

        return pd.DataFrame(self._rows())

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON types."""
        settings = self._rows()
        for row, one in zip(settings, self.changes, strict=False):  # those of one side have none
            row |= {"reasons": list(one.reasons), "not_judged": list(one.not_judged)}
        return {
            "ok": self.ok,
            "memory_tolerance": self.memory_tolerance,
            "time_tolerance": self.time_tolerance,
            "settings": settings,
            "notes": list(self.notes),
        }

    def _rows(self) -> list[dict[str, Any]]:
        rows = [_row(str(one.verdict), one.old, one.new) for one in self.changes]
        rows += [_row("only in old", one, None) for one in self.only_old]
        return rows + [_row("only in new", None, one) for one in self.only_new]

    def __str__(self) -> str:
        """Return a line that sums up, then each setting with its costs, and the notes."""
        lines = [self._summary()]
        for one in self.changes:
            why = f": {'; '.join(one.reasons)}" if one.reasons else ""
            lines += [f"{one.verdict}: {in_words(one.new)}{why}"]
            lines += [f"  {name} {text}" for name, text in one.costs().items()]
            lines += [f"  not compared: {said}" for said in one.not_judged]
        lines += [f"only in old: {in_words(one)}" for one in self.only_old]
        lines += [f"only in new: {in_words(one)}" for one in self.only_new]
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return tables for notebooks: what changed, and what was not compared."""
        rows = []
        for one in self.changes:
            costs, why = one.costs(), "; ".join([*one.reasons, *one.not_judged])
            shown_costs = [costs.get(name, "") for name in COSTS]
            rows.append([one.verdict, in_words(one.new), *shown_costs, why])
        for name, results in (("old", self.only_old), ("new", self.only_new)):
            rows += [[f"only in {name}", in_words(one), *[""] * len(COSTS), ""] for one in results]
        table = columns_table(["", "setting", *COSTS, "why"], rows)
        return table + facts_table(self._summary(), {"notes": " ".join(self.notes)})

    def _summary(self) -> str:
        verdicts = [one.verdict for one in self.changes]
        counts = [f"{verdicts.count(each)} {each}" for each in ORDER if each in verdicts]
        found = ", ".join(counts) if counts else "nothing was compared"
        return (
            f"{found} (the same within {format_percent(self.memory_tolerance)} of memory and "
            f"{format_percent(self.time_tolerance)} of time)"
        )


def _row(verdict: str, old: StepResult | None, new: StepResult | None) -> dict[str, Any]:
    """Return a setting with its costs on both sides as plain JSON types."""
    known = new or old
    assert known is not None  # one side has it
    row: dict[str, Any] = {
        "verdict": verdict,
        "workload_name": known.workload_name,
        "device": known.device,
        "source": str(known.source),
        "settings": str(known.config),
        "memory_limit_bytes": known.memory_limit_bytes,
    }
    for attribute in ("outcome", *(attribute for attribute, _ in COSTS.values())):
        for name, one in (("old", old), ("new", new)):
            value = None if one is None else getattr(one, attribute)
            row[f"{name}_{attribute}"] = str(value) if attribute == "outcome" and value else value
    return row


# Results of tables, of JSON and CSV files, and of stores.
#
# A file is recognised by its content, whatever its name: an SQLite file is a store, what
# begins with a brace or a bracket is JSON, anything else is CSV. A table of
# `memlab.results()` has no repeats and no versions.

SQLITE = b"SQLite format 3\0"
EVERYTHING = {"workload": None, "device": None, "source": None}
ALLOWED = (
    "a StepResult, several of them, the table of memlab.results(), or the path of a JSON or CSV "
    "file or of a store"
)
NUMBERS = {"memory_limit_bytes": int, "peak_allocated_bytes": int, "peak_reserved_bytes": int,
           "step_seconds": float}  # fmt: skip
TRUTHS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


def results_of(side: str, given: Any) -> list[StepResult]:
    """Return the results of one side, in order.

    Args:
        side: "old" or "new", for messages.
        given: what a person passed to `compare`.

    Raises:
        MemlabError: it holds no results; the message says what is allowed.
    """
    if is_a(given, str | os.PathLike):
        return _of_file(side, given)
    if is_a(given, StepResult):
        return [given]

    pandas = sys.modules.get("pandas")  # whoever has a DataFrame has imported it
    if pandas is not None and is_a(given, pandas.DataFrame):
        try:
            return [_of_row(row) for row in given.to_dict("records")]
        except MemlabError as error:
            raise type(error)(f"{side} {error}") from None
    try:
        results = of_type(side, given, Iterable[StepResult])
    except MemlabError as error:
        raise ConfigError(f"{error}; {side} is {ALLOWED}") from None
    return list(results)


def _of_file(side: str, given: str | os.PathLike[str]) -> list[StepResult]:
    try:
        path = Path(os.fsdecode(given)).expanduser()
        data = path.read_bytes()
    except Exception as error:  # no such file, or a person's own class, which may raise anything
        why = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(
            f"{side}={shown(given)} cannot be read ({why}); {side} is {ALLOWED}"
        ) from None

    try:
        return _of_content(path, data)
    except StoreError as error:
        raise StoreError(f"{side}: {error}") from None
    except MemlabError as error:
        raise ConfigError(f"{side}={shown(given)} {error}") from None


def _of_content(path: Path, data: bytes) -> list[StepResult]:
    if data.startswith(SQLITE):
        runs = stored_runs(EVERYTHING, path, is_whole=False)
        return [run.result for run in runs]
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"is no text and no store; allowed is {ALLOWED}") from None
    return results_of_json(text) if text.lstrip()[:1] in ("{", "[") else _of_csv(text)


def results_of_json(text: str) -> list[StepResult]:
    """Return what `--json` and `DataFrame.to_json(orient="records")` write, and lists of it.

    Raises:
        ConfigError: it is something else; the message says what it is, after a subject.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is no JSON ({error}); write it with `--json`") from None

    listed = data if isinstance(data, list) else data.get("results", [data])
    if not isinstance(listed, list):
        raise ConfigError("has no list of results; write it with `--json`")
    return [_of_object(each) for each in listed]


def _of_object(data: Any) -> StepResult:
    if not isinstance(data, dict) or "outcome" not in data:
        raise ConfigError(
            f"holds {shown(data)}, which is no result; write it with `--json` of `memlab predict`, "
            "`measure` or `sweep`"
        )
    if "config" not in data:
        return _of_row(data)
    if "stages" in data:
        raise ConfigError("holds a run, which has stages; allowed is the result of a step")
    try:
        return StepResult.from_dict(data)
    except MemlabError as error:
        raise ConfigError(f"holds a result that `--json` did not write: {error}") from None


def _of_csv(text: str) -> list[StepResult]:
    import csv

    try:
        return [_of_row(row) for row in csv.DictReader(text.splitlines())]
    except csv.Error as error:
        raise ConfigError(f"is no table ({error}); write it with memlab.results().to_csv") from None


def _of_row(row: Mapping[Any, Any]) -> StepResult:
    """Return the result that one row of `memlab.results()` says.

    Raises:
        ConfigError: it is a row of something else.
    """
    try:
        settings = {
            field.name: _setting(field.type, row[field.name])
            for field in fields(StepConfig)
            if field.name in row
        }
        fits = _known(row.get("fits"))
        return StepResult(
            workload_name=str(row["workload_name"]),
            device=str(row["device"]),
            source=Source(str(row["source"])),
            config=StepConfig(**settings),
            outcome=Outcome(str(row["outcome"])),
            message=str(_known(row.get("message")) or ""),
            fits=None if fits is None else TRUTHS[str(fits).lower()],
            **{name: _number(kind, row.get(name)) for name, kind in NUMBERS.items()},
        )
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        missing = "it has no " if isinstance(error, KeyError) else ""
        raise ConfigError(
            f"holds a row that is no result ({missing}{error}); write it with "
            "memlab.results().to_csv(...)"
        ) from None


def _setting(kind: Any, value: Any) -> Any:
    """Return the value of a setting as `StepConfig` takes it; a CSV file holds texts alone."""
    value = _known(value)
    if not isinstance(value, str):
        return value.item() if isinstance(value, np.generic) else value
    if kind is bool:
        return TRUTHS[value.lower()]
    if kind is int:
        return int(float(value))
    return float(value) if kind is float or kind == float | None else value


def _number(kind: type, value: Any) -> Any:
    value = _known(value)
    if value is None:
        return None
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{value} is not a number from 0")
    return kind(number)


def _known(value: Any) -> Any:
    """Return a value of a table; None for a cell that is empty."""
    is_empty = value is None or value == "" or (isinstance(value, float) and math.isnan(value))
    return None if is_empty else value


MOST_TOLERANCE = 100.0  # a hundred times as much
WORDS = {"device_name": "processor or card", "threads": "number of threads"}


@checked(
    old=anything,
    new=anything,
    memory_tolerance=number(0.0, MOST_TOLERANCE),
    time_tolerance=number(0.0, MOST_TOLERANCE),
)
def compare(
    old: Any,
    new: Any,
    *,
    memory_tolerance: float = MEMORY_TOLERANCE,
    time_tolerance: float = TIME_TOLERANCE,
) -> CostChanges:
    """Return what changed in bytes and time from `old` to `new`.

    Settings are matched by workload, config, memory limit, device, and whether they are measured,
    predicted or recorded. What only one side has is listed, not judged. Of several results of one
    setting the last one counts, and a note says how many were left out.

    Args:
        old: a `StepResult`, several of them (a sweep too), the table of `memlab.results()`, or the
            path of a file: JSON that the command line wrote with `--json`, JSON or CSV of a table,
            or a store.
        new: the same, of the newer version.
        memory_tolerance: the relative change of a peak that counts as none, 0.005 for 0.5 %.
        time_tolerance: the same for the time of a step, to which noise is added: the spread of
            measured repeats, or the stated uncertainty of the predicted time of a CPU. Times of
            two processors or cards are not judged.

    Raises:
        MemlabError: an argument is not allowed, or holds no results.

    >>> import memlab
    >>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
    >>> result = memlab.recorded(workload, memlab.StepConfig(batch_size=4), "amd-epyc")
    >>> memlab.compare(result, [result]).ok
    True
    """
    before, old_notes = _by_setting("old", results_of("old", old))
    after, new_notes = _by_setting("new", results_of("new", new))
    changes = [
        judged(before[key], cost, memory_tolerance, time_tolerance)
        for key, cost in after.items()
        if key in before
    ]
    return CostChanges(
        changes=tuple(sorted(changes, key=lambda one: ORDER.index(one.verdict))),
        only_old=tuple(cost for key, cost in before.items() if key not in after),
        only_new=tuple(cost for key, cost in after.items() if key not in before),
        memory_tolerance=memory_tolerance,
        time_tolerance=time_tolerance,
        notes=(*old_notes, *new_notes, *_notes(before, after)),
    )


Costs = dict[tuple[Any, ...], StepResult]


def _by_setting(side: str, costs: Sequence[StepResult]) -> tuple[Costs, list[str]]:
    """Return the last cost of each setting, and a note on those that it replaces."""
    found = {setting_of(cost): cost for cost in costs}
    num_left_out = len(costs) - len(found)
    if not num_left_out:
        return found, []
    return found, [
        f"Results in {side} that a later one of the same setting replaces: {num_left_out}."
    ]


def _notes(before: Costs, after: Costs) -> list[str]:
    """Return in what the two sides differ as a whole."""
    notes = []
    if not before.keys() & after.keys():
        notes.append(
            "No setting is on both sides, so nothing was compared: workload, settings, device, "
            "limit and source (measured, predicted) must be the same."
        )
    devices = [sorted({f"{c.device} ({c.source})" for c in side.values()})
               for side in (before, after)]  # fmt: skip
    if devices[0] != devices[1]:
        old, new = (", ".join(each) or "none" for each in devices)
        notes.append(f"Other devices: {old} in old, {new} in new.")

    both = [(before[key], after[key]) for key in after if key in before]
    names = {name for pair in both for cost in pair for name in cost.versions}
    for name in sorted(names):
        said = {(old.versions.get(name), new.versions.get(name)) for old, new in both}
        for was, now in sorted(said, key=str):
            if was != now and was is not None and now is not None:
                notes.append(f"Other {WORDS.get(name, name)}: {was} in old, {now} in new.")
    if any(is_other_hardware(old, new) for old, new in both):
        notes.append("Times of another processor, card or number of threads were not judged.")
    if any(not old.versions or not new.versions for old, new in both):
        notes.append("A table holds no versions, so another processor or torch would not be seen.")
    return notes
