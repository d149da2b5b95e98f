"""`SettingCost`: what one setting of a workload costs, whichever file or table said so."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memlab.config import StepConfig
from memlab.result import Outcome, Source, StepResult

HARDWARE = ("device_name", "threads")  # of `StepResult.versions`; times depend on both


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SettingCost:
    """What one setting costs.

    Attributes:
        workload_name: what is trained.
        device: as `StepResult.device` names it.
        source: measured, predicted or recorded.
        config: how it is trained.
        outcome: how the run ended.
        message: the sentence about it.
        memory_limit_bytes: that the step may hold, or None.
        fits: whether it stays within the limit; None without a limit.
        peak_allocated_bytes: of the step.
        peak_reserved_bytes: of the caching allocator; None on a CPU.
        step_seconds: the median of the repeats.
        fastest_seconds: the fastest of them; None if a table says only the median.
        time_uncertainty: the stated relative half-width of a predicted time; 0 if there is none.
        versions: of torch, memlab and Python, processor or card; empty if a table has none.
    """

    workload_name: str
    device: str
    source: Source
    config: StepConfig
    outcome: Outcome
    message: str = ""
    memory_limit_bytes: int | None = None
    fits: bool | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    step_seconds: float | None = None
    fastest_seconds: float | None = None
    time_uncertainty: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, result: StepResult) -> "SettingCost":
        """Return the costs of a result."""
        same = ("workload_name", "device", "source", "config", "outcome", "message",
                "memory_limit_bytes", "fits", "peak_allocated_bytes", "peak_reserved_bytes",
                "step_seconds", "versions")  # fmt: skip
        return cls(
            **{name: getattr(result, name) for name in same},
            fastest_seconds=min(result.step_seconds_all, default=None),
            time_uncertainty=(result.uncertainty or {}).get("step_seconds", 0.0),
        )

    @property
    def setting(self) -> tuple[Any, ...]:
        """What must be equal on both sides: workload, device, source, limit and config."""
        settings = tuple(self.config.to_dict().items())
        return self.workload_name, self.device, self.source, self.memory_limit_bytes, settings

    @property
    def hardware(self) -> tuple[str, ...]:
        """Processor or card and threads, as far as they are known."""
        return tuple(self.versions.get(name, "") for name in HARDWARE)

    def __str__(self) -> str:
        """Return the setting in one line."""
        return f"{self.workload_name} on {self.device} ({self.source}), {self.config}"
