"""`CostChanges`: what `compare` found."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memlab.arguments.tables import columns_table, facts_table
from memlab.changes.judging import COSTS, CostChange, CostVerdict
from memlab.changes.setting_cost import SettingCost
from memlab.result import format_percent

if TYPE_CHECKING:
    import pandas as pd

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
    only_old: tuple[SettingCost, ...]
    only_new: tuple[SettingCost, ...]
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

        rows = [_row(str(one.verdict), one.old, one.new) for one in self.changes]
        rows += [_row("only in old", one, None) for one in self.only_old]
        rows += [_row("only in new", None, one) for one in self.only_new]
        return pd.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON types."""
        return {
            "ok": self.ok,
            "memory_tolerance": self.memory_tolerance,
            "time_tolerance": self.time_tolerance,
            "settings": [
                *(
                    _row(str(one.verdict), one.old, one.new)
                    | {"reasons": list(one.reasons), "not_judged": list(one.not_judged)}
                    for one in self.changes
                ),
                *(_row("only in old", one, None) for one in self.only_old),
                *(_row("only in new", None, one) for one in self.only_new),
            ],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """Return a line that sums up, then each setting with its costs, and the notes."""
        lines = [self._summary()]
        for one in self.changes:
            why = f": {'; '.join(one.reasons)}" if one.reasons else ""
            lines += [f"{one.verdict}: {one.new}{why}"]
            lines += [f"  {name} {text}" for name, text in one.costs().items()]
            lines += [f"  not compared: {said}" for said in one.not_judged]
        lines += [f"only in old: {one}" for one in self.only_old]
        lines += [f"only in new: {one}" for one in self.only_new]
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return tables for notebooks: what changed, and what was not compared."""
        heads = ["", "setting", *COSTS, "why"]
        rows = []
        for one in self.changes:
            said, costs = [*one.reasons, *one.not_judged], one.costs()
            rows.append([one.verdict, one.new, *(costs.get(name, "") for name in COSTS),
                         "; ".join(said)])  # fmt: skip
        for name, costs_of_side in (("old", self.only_old), ("new", self.only_new)):
            rows += [[f"only in {name}", one, *[""] * len(COSTS), ""] for one in costs_of_side]
        return columns_table(heads, rows) + facts_table(
            self._summary(), {"notes": " ".join(self.notes)}
        )

    def _summary(self) -> str:
        verdicts = [one.verdict for one in self.changes]
        counts = [f"{verdicts.count(each)} {each}" for each in ORDER if each in verdicts]
        found = ", ".join(counts) if counts else "nothing was compared"
        return (
            f"{found} (the same within {format_percent(self.memory_tolerance)} of memory and "
            f"{format_percent(self.time_tolerance)} of time)"
        )


def _row(verdict: str, old: SettingCost | None, new: SettingCost | None) -> dict[str, Any]:
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
    for field in ("outcome", *(field for field, _ in COSTS.values())):
        for name, one in (("old", old), ("new", new)):
            value = None if one is None else getattr(one, field)
            row[f"{name}_{field}"] = str(value) if field == "outcome" and value else value
    return row
