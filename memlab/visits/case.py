"""`Case`: one thing that a visit to a device records, and what tells it from all others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memlab.config import StepConfig
from memlab.records.records import Kind

# Set aside for good: what memlab says of them owes nothing to what they did.
HOLDOUT = {"vit-large", "lstm-large", "densenet-121", "lstm-text", "densenet-digits"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One thing to record.

    Attributes:
        kind: a run, or what else a line can hold.
        group: of runs: why; else empty.
        workload: name in the zoo.
        options: of the zoo.
        config: of the step.
        setting: of the allocator, or the memory limit of a boundary; else empty.
    """

    kind: Kind = Kind.RUN
    group: str = "grid"
    workload: str
    config: StepConfig
    options: Mapping[str, Any] = field(default_factory=dict)
    setting: str = ""

    @property
    def holdout(self) -> bool:
        """Whether it is set aside, never to be fitted."""
        return self.workload in HOLDOUT

    def key(self, torch_version: str) -> str:
        """Return what tells this case from all others, in a record of one device."""
        again = self.group if self.group == "again" else ""
        options = ", ".join(f"{name}={value!r}" for name, value in sorted(self.options.items()))
        parts = (self.kind, again, self.workload, options, self.config, self.setting, torch_version)
        return "|".join(map(str, parts))
