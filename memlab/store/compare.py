"""`compare`: what changed in bytes and time between two results, two sets of them, or two runs."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab._util.checks import anything, checked, number
from memlab._util.tables import aligned, columns_table, facts_table
from memlab._util.units import format_bytes, format_seconds, shown, signed_bytes
from memlab.errors import ConfigError
from memlab.prediction.run_result import (
    MOST_ROWS,
    LineHolding,
    RunResult,
    ScriptFault,
    in_plain_words,
)
from memlab.result import Outcome, Source, StepResult, format_percent, signed_percent
from memlab.store.sources import A_RUN, results_of

if TYPE_CHECKING:
    import pandas as pd

WHOLE = "the whole run"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageOfRun:
    """A stage of a run, or the whole run, with what is compared of a `StepResult`.

    Attributes:
        config: the name of the stage, which tells stages apart as a config tells steps; or
            "the whole run", which alone has a time.
    """

    config: str
    outcome: Outcome
    message: str
    source: Source
    device: str
    workload_name: str
    versions: Mapping[str, str]
    memory_limit_bytes: int | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    fits: bool | None
    step_seconds: float | None = None
    step_seconds_all: tuple[float, ...] = ()
    uncertainty: Mapping[str, float] | None = None


Cost = StepResult | StageOfRun
HARDWARE = ("device_name", "threads")  # of `StepResult.versions`; times depend on both


def setting_of(result: Cost) -> tuple[Any, ...]:
    """Return what must be equal on both sides: workload, device, source, limit and config.

    Two runs are compared wherever they ran, so of a stage that is its name.
    """
    if isinstance(result, StageOfRun):
        return (result.config,)
    settings = tuple(result.config.to_dict().items())
    limit = result.memory_limit_bytes
    return result.workload_name, result.device, result.source, limit, settings


def in_words(result: Cost) -> str:
    """Return the setting of a result in one line."""
    return f"{result.workload_name} on {result.device} ({result.source}), {result.config}"


def _hardware(result: Cost) -> tuple[str, ...]:
    """Return processor or card and threads, as far as they are known."""
    return tuple(result.versions.get(name, "") for name in HARDWARE)


def _fastest(result: Cost) -> float | None:
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
        old: its result then; of runs a stage.
        new: its result now; of runs a stage.
        verdict: worse if anything of it rose beyond its tolerance or it does not run or fit any
            more; else better if anything fell beyond it; else the same.
        rose: names of `COSTS` that rose beyond their tolerance.
        fell: names of `COSTS` that fell beyond it.
        reasons: why, a clause each; empty for the same.
        not_judged: what was not compared, and why, a clause each.
    """

    old: Cost
    new: Cost
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


def judged(old: Cost, new: Cost, memory_tolerance: float, time_tolerance: float) -> CostChange:
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


def is_other_hardware(old: Cost, new: Cost) -> bool:
    """Return whether both sides know what they ran on, and it is not the same."""
    before, after = _hardware(old), _hardware(new)
    return any(before) and any(after) and before != after


def _outcomes(old: Cost, new: Cost) -> tuple[list[str], list[str]]:
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


def _noise(cost: Cost) -> float:
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
    only_old: tuple[Cost, ...]
    only_new: tuple[Cost, ...]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LineChange:
    """What a line of a script holds at the peak of two runs.

    Attributes:
        line: such as "train.py:12: loss.backward()"; its number is that of the new run, if it
            holds something there.
        category: what the blocks are for.
        old_bytes: that it held.
        new_bytes: that it holds.
    """

    line: str
    category: str
    old_bytes: int
    new_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class RunChanges(CostChanges):
    """What changed between two runs: in each stage, at the peak, and in what is wrong.

    Lines are matched by what stands in them, since their numbers move, and by the name of their
    file, but for the script itself, which may be a copy of another name.

    Attributes:
        old: the run then.
        new: the run now.
    """

    old: RunResult
    new: RunResult

    @property
    def ok(self) -> bool:
        """Whether something was compared, nothing of it is worse, and nothing new is wrong."""
        return bool(self.compared) and not self.worse and not self.new_faults

    @property
    def new_faults(self) -> tuple[ScriptFault, ...]:
        """What is wrong in the new run alone."""
        return _without(self.new, self.old)

    @property
    def gone_faults(self) -> tuple[ScriptFault, ...]:
        """What was wrong in the old run alone."""
        return _without(self.old, self.new)

    @property
    def categories(self) -> dict[str, tuple[int, int]]:
        """Bytes at the peak, old and new, by what they are for, where they differ."""
        old, new = (
            run.worst.bytes_by_category if run.worst else {} for run in (self.old, self.new)
        )
        found = {name: (old.get(name, 0), new.get(name, 0)) for name in {**old, **new}}
        return dict(sorted(
            ((name, both) for name, both in found.items() if both[0] != both[1]),
            key=lambda each: -abs(each[1][1] - each[1][0]),
        ))  # fmt: skip

    @property
    def lines(self) -> tuple[LineChange, ...]:
        """Lines that hold more or less at the peak, by how much, the most first."""
        old, new = _by_line(self.old), _by_line(self.new)
        found = [
            LineChange(
                line=(new.get(key) or old[key])[0].quoted,
                category=key[-1],
                old_bytes=sum(held.nbytes for held in old.get(key, ())),
                new_bytes=sum(held.nbytes for held in new.get(key, ())),
            )
            for key in {**old, **new}
        ]
        changed = [each for each in found if each.old_bytes != each.new_bytes]
        return tuple(sorted(changed, key=lambda each: -abs(each.new_bytes - each.old_bytes)))

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON types."""
        return {
            **CostChanges.to_dict(self),
            "old": str(self.old),
            "new": str(self.new),
            "categories": {name: list(both) for name, both in self.categories.items()},
            "lines": [asdict(each) for each in self.lines],
            "new_faults": [asdict(each) for each in self.new_faults],
            "gone_faults": [asdict(each) for each in self.gone_faults],
        }

    def __str__(self) -> str:
        """Return both verdicts, what a comparison of steps says, and what changed at the peak."""
        lines = [f"old: {self.old}", f"new: {self.new}", CostChanges.__str__(self)]
        for table in self._tables():
            lines += ["", *aligned(table)]
        return "\n".join([*lines, *self._faults()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return tables for notebooks."""
        facts = {"old": str(self.old), "new": str(self.new), "faults": " ".join(self._faults())}
        tables = (columns_table(heads, rows) for heads, *rows in self._tables())
        html = facts_table(f"two runs of {self.new.workload_name}", facts)
        return html + CostChanges._repr_html_(self) + "".join(tables)

    def _summary(self) -> str:
        num_new = len(self.new_faults)
        return CostChanges._summary(self) + (f"; faults only in new: {num_new}" if num_new else "")

    def _faults(self) -> list[str]:
        return [
            *(f"only in old: {fault}" for fault in self.gone_faults),
            *(f"only in new: {fault}" for fault in self.new_faults),
        ]

    def _tables(self) -> list[list[list[str]]]:
        """Return what changed at the peak as tables of texts, their heads first."""

        def row(name: str, old: int, new: int, *rest: str) -> list[str]:
            return [name, format_bytes(old), format_bytes(new), signed_bytes(new - old), *rest]

        sizes = ["old", "new", "change"]
        kinds = [row(in_plain_words(name), *both) for name, both in self.categories.items()]
        lines = [
            row(each.line, each.old_bytes, each.new_bytes, in_plain_words(each.category))
            for each in self.lines[:MOST_ROWS]
        ]
        by_kind = [["at the peak, by kind", *sizes], *kinds]
        by_line = [["at the peak, by line", *sizes, "as"], *lines]
        return [table for table in (by_kind, by_line) if len(table) > 1]


def _by_line(run: RunResult) -> dict[tuple[str, ...], list[LineHolding]]:
    """Return what holds the peak of a run by what a line is known by in another run."""
    found: dict[tuple[str, ...], list[LineHolding]] = {}
    for held in run.lines:
        found.setdefault((*_known_by(held, run), held.category), []).append(held)
    return found


def _known_by(place: LineHolding | ScriptFault, run: RunResult) -> tuple[str, str]:
    file = Path(place.file).name
    is_own = file == run.workload_name  # a changed script may have another name
    return "" if is_own else file, place.text or str(place.line)


def _without(run: RunResult, other: RunResult) -> tuple[ScriptFault, ...]:
    """Return the faults of a run that the other one has not."""
    there = Counter((fault.kind, *_known_by(fault, other)) for fault in other.faults)
    found = []
    for fault in run.faults:
        key = (fault.kind, *_known_by(fault, run))
        there[key] -= 1
        if there[key] < 0:
            found.append(fault)
    return tuple(found)


def _stages_of(run: RunResult, *, with_stages: bool) -> list[StageOfRun]:
    """Return a run as a whole, then its stages."""
    facts: dict[str, Any] = {
        name: getattr(run, name)
        for name in ("source", "device", "workload_name", "versions", "memory_limit_bytes")
    }
    whole = StageOfRun(
        **facts, config=WHOLE, outcome=run.outcome, message=run.message, fits=run.fits,
        peak_allocated_bytes=run.peak_allocated_bytes,
        peak_reserved_bytes=run.peak_reserved_bytes,
        step_seconds=run.step_seconds, uncertainty={"step_seconds": run.seconds_uncertainty},
    )  # fmt: skip
    stages = [
        StageOfRun(
            **facts, config=stage.name, outcome=Outcome.OK, message="", fits=stage.fits,
            peak_allocated_bytes=stage.peak_allocated_bytes,
            peak_reserved_bytes=stage.peak_reserved_bytes,
        )
        for stage in (run.stages if with_stages else ())
    ]  # fmt: skip
    return [whole, *stages]


def _row(verdict: str, old: Cost | None, new: Cost | None) -> dict[str, Any]:
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

    Two runs are compared stage by stage, whatever their cards and scripts, and in what holds their
    peaks and is wrong in them: then a `RunChanges` is returned.

    Args:
        old: a `StepResult`, several of them (a sweep too), a `RunResult`, the table of
            `memlab.results()`, or the path of a file: JSON that the command line wrote with
            `--json`, JSON or CSV of a table, or a store.
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
    before, after = results_of("old", old), results_of("new", new)
    tolerances = memory_tolerance, time_tolerance
    if isinstance(before, RunResult) and isinstance(after, RunResult):
        return _of_runs(before, after, *tolerances)
    for side, given, found in (("old", old, before), ("new", new, after)):
        if isinstance(found, RunResult):
            raise ConfigError(f"{side}={shown(given)} {A_RUN}")
    assert not isinstance(before, RunResult)
    assert not isinstance(after, RunResult)
    return CostChanges(**_changes(before, after, *tolerances))


def _of_runs(
    old: RunResult, new: RunResult, memory_tolerance: float, time_tolerance: float
) -> RunChanges:
    are_ok = old.outcome is Outcome.OK and new.outcome is Outcome.OK
    before, after = (_stages_of(run, with_stages=are_ok) for run in (old, new))
    found = _changes(before, after, memory_tolerance, time_tolerance)
    notes = found.pop("notes")
    if old.workload_name != new.workload_name:
        notes += (f"Other scripts: {old.workload_name} in old, {new.workload_name} in new.",)
    if not are_ok:
        notes += ("Stages were not compared, since not both runs came to their end.",)
    return RunChanges(**found, notes=notes, old=old, new=new)


def _changes(
    old: Sequence[Cost], new: Sequence[Cost], memory_tolerance: float, time_tolerance: float
) -> dict[str, Any]:
    """Return the fields of a `CostChanges`."""
    before, old_notes = _by_setting("old", old)
    after, new_notes = _by_setting("new", new)
    changes = [
        judged(before[key], cost, memory_tolerance, time_tolerance)
        for key, cost in after.items()
        if key in before
    ]
    return {
        "changes": tuple(sorted(changes, key=lambda one: ORDER.index(one.verdict))),
        "only_old": tuple(cost for key, cost in before.items() if key not in after),
        "only_new": tuple(cost for key, cost in after.items() if key not in before),
        "memory_tolerance": memory_tolerance,
        "time_tolerance": time_tolerance,
        "notes": (*old_notes, *new_notes, *_notes(before, after)),
    }


Costs = dict[tuple[Any, ...], Cost]


def _by_setting(side: str, costs: Sequence[Cost]) -> tuple[Costs, list[str]]:
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
