"""`SweepTable`: the results of a sweep, in the order of its settings."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from memlab.config import StepConfig
from memlab.result import Outcome, StepResult
from memlab.store.frames import COSTS, table, to_frame
from memlab.sweeping.settings import Setting

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SweepTable:
    """What a sweep found.

    Attributes:
        settings: what was asked for, in order; a combination that no config allows has no result.
        by_setting: the result of each setting, or None.
        num_reused: how many results were in the store already.
        notes: sentences that a reader of the results must know.

    >>> import memlab
    >>> workload = memlab.workloads.get("vit-digits")
    >>> table = memlab.sweep(workload, {"batch_size": [2, 4]}, "t4")
    >>> list(table.frame()["batch_size"])
    [2, 4]
    """

    settings: tuple[Setting, ...]
    by_setting: tuple[StepResult | None, ...]
    num_reused: int = 0
    notes: tuple[str, ...] = ()

    @property
    def results(self) -> tuple[StepResult, ...]:
        """The results, without combinations that no config allows."""
        return tuple(result for result in self.by_setting if result is not None)

    @property
    def varied(self) -> list[str]:
        """The fields of the config in which the settings differ."""
        asked = {name for setting in self.settings for name in setting.asked}
        configs = [setting.config for setting in self.settings if setting.config is not None]
        for field in fields(StepConfig):
            if len({str(getattr(config, field.name)) for config in configs}) > 1:
                asked.add(field.name)
        return [field.name for field in fields(StepConfig) if field.name in asked]

    def frame(self) -> "pd.DataFrame":
        """Return one row a setting, in order: the columns of `memlab.to_frame`.

        A combination that no config allows has the values that were asked for, the outcome
        "unsupported" and the reason.
        """
        import pandas as pd

        found = to_frame(self.results)
        found.index = pd.Index([i for i, each in enumerate(self.by_setting) if each is not None])
        refused = {
            i: {**setting.asked, "outcome": str(Outcome.UNSUPPORTED), "message": setting.refusal}
            for i, setting in enumerate(self.settings)
            if setting.config is None
        }
        if not refused:
            return found
        if found.empty:
            return pd.DataFrame.from_dict(refused, orient="index")

        both = found.astype(object).T.to_dict() | refused
        whole = pd.DataFrame.from_dict(both, orient="index").sort_index()
        names = [*found.columns, *(name for name in whole.columns if name not in found.columns)]
        return whole[names].infer_objects()

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain JSON types; timelines are left to the store."""
        results = (replace(result, timeline=None) for result in self.results)
        refused = [
            {"settings": {name: _plain(value) for name, value in setting.asked.items()},
             "message": setting.refusal}
            for setting in self.settings
            if setting.config is None
        ]  # fmt: skip
        return {
            "results": [result.to_dict() for result in results],
            "refused": refused,
            "num_reused": self.num_reused,
            "notes": list(self.notes),
        }

    def __len__(self) -> int:
        """Return the number of settings."""
        return len(self.settings)

    def __iter__(self) -> Iterator[StepResult]:
        """Iterate over the results."""
        return iter(self.results)

    def __str__(self) -> str:
        """Return one line: how many settings ended how, and how many were in the store."""
        outcomes = [str(result.outcome) for result in self.results]
        num_refused = len(self.settings) - len(self.results)
        outcomes += [str(Outcome.UNSUPPORTED)] * num_refused
        counts = [f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes)]
        said = f"sweep of {len(self)} settings: {', '.join(counts)}"
        if self.num_reused:
            said += f"; {self.num_reused} were in the store"
        return " ".join([f"{said}.", *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return a table for notebooks: what varies, and what it costs."""
        frame = self.frame()
        shown = [name for name in (*self.varied, *COSTS) if name in frame.columns]
        told = table(frame[shown].dropna(axis="columns", how="all"))
        return replace(told, notes=self.notes)._repr_html_()


def _plain(value: Any) -> Any:
    """Return a value of a setting as JSON has it."""
    return value if value is None or isinstance(value, bool | int | float) else str(value)
