"""`ImportedTraining`: what became of a configured trainer or of a config file."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from memlab.arguments.quoting import shown
from memlab.arguments.tables import columns_table, facts_table
from memlab.config import StepConfig
from memlab.workload import Workload


class FieldStatus(StrEnum):
    """What became of a field of the source."""

    IMPORTED = "imported"
    NOT_CONCERNED = "not concerned"
    NOT_IMPORTED = "not imported"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceField:
    """One field of a trainer or of a config file.

    Attributes:
        name: as the source names it; parts of a nested config are joined by dots.
        value: as the source has it. Tokens are hidden.
        status: see `FieldStatus`.
        became: what memlab has for it, such as "batch_size=32"; for a field that is not imported,
            what the config has in its place. Empty if there is nothing.
        why: a sentence; empty where `became` says everything.
    """

    name: str
    value: Any
    status: FieldStatus
    became: str = ""
    why: str = ""

    def __str__(self) -> str:
        """Return the field, what became of it, and why, in one line."""
        became = f" -> {self.became}" if self.became else ""
        why = f": {self.why}" if self.why else ""
        return f"{self.name}={shown(self.value)}, {self.status}{became}{why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedTraining:
    """A training step as a trainer or a config file describes it.

    Attributes:
        source: what was read, in words.
        config: the step that the source describes, as far as memlab can express it.
        workload: model, batch and loss; None if the source has no model or no data, or computes
            its loss in code that memlab cannot take. A field that is not imported says which.
        fields: every field of the source, in its order.
    """

    source: str
    config: StepConfig
    workload: Workload | None
    fields: tuple[SourceField, ...]

    @property
    def not_imported(self) -> tuple[SourceField, ...]:
        """The fields that the config and the workload do not express, each with the reason."""
        return tuple(each for each in self.fields if each.status is FieldStatus.NOT_IMPORTED)

    def __str__(self) -> str:
        """Return the config, how many fields were imported, and which were not."""
        counts = Counter(each.status for each in self.fields)
        names = ", ".join(each.name for each in self.not_imported)
        without = "" if self.workload else ", without a workload"
        return (
            f"{self.source}: {self.config}{without}; {counts[FieldStatus.IMPORTED]} fields "
            f"imported, {counts[FieldStatus.NOT_CONCERNED]} do not concern the step, "
            f"{counts[FieldStatus.NOT_IMPORTED]} not imported{f' ({names})' if names else ''}"
        )

    def _repr_html_(self) -> str:
        """Return tables of the config and of all fields for notebooks."""
        others = [each for each in self.fields if each.status is FieldStatus.NOT_CONCERNED]
        told = [each for each in self.fields if each.status is FieldStatus.IMPORTED]
        summary = facts_table(self.source, {
            "config": str(self.config),
            "workload": "none" if self.workload is None else self.workload.name,
            "not concerned": ", ".join(each.name for each in others),
        })  # fmt: skip
        rows = [
            (each.name, shown(each.value), str(each.status), each.became, each.why)
            for each in (*self.not_imported, *told)
        ]
        return summary + columns_table(("field", "value", "status", "memlab has", "why"), rows)
