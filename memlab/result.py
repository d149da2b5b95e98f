"""`StepResult`: what one step cost, one type whether measured, predicted or recorded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from memlab.config import StepConfig
from memlab.trace import Phase, Place, Timeline
from memlab.units import format_bytes, format_seconds


class Outcome(StrEnum):
    """How a run ended. Out of memory is an outcome, not an error: people provoke it on purpose."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"
    CRASHED = "crashed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"


class Source(StrEnum):
    """Where the numbers of a result come from."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    RECORDED = "recorded"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepResult:
    """What one optimizer update cost in memory and time. What was not measured is None, never 0.

    Attributes:
        outcome: see `Outcome`.
        message: one sentence on the outcome, with a remedy where there is one.
        source: measured, predicted or recorded.
        device: "cpu", "cuda:0" or the name of a card.
        versions: torch, memlab, Python, processor or card, threads.
        config: the settings that ran.
        workload_name: the workload that ran.
        peak_allocated_bytes: most bytes in live storages during a step in which the optimizer
            state exists (the second or a later one). Of an out-of-memory run: of what ran.
        peak_reserved_bytes: most bytes that the caching allocator held; None on a CPU.
        peak_by_category: bytes of each `Category` at that peak; they sum to it.
        peak_place: phase, module and operator of that peak.
        first_step_peak_bytes: the same peak over the first step alone.
        timeline: the step whose peak this is.
        step_seconds: median of `step_seconds_all`.
        step_seconds_all: wall time of every counted repeat, in order.
        samples_per_second: batch size over `step_seconds`.
        loss: of the last repeat, weighted over the micro-batches; None if predicted.
        finite: whether that loss is a finite number.
        memory_limit_bytes: the limit that was set, or None.
        fits: whether the peak stays within the limit; None without a limit.
        notes: sentences that a reader of the numbers must know.
    """

    outcome: Outcome
    message: str
    source: Source
    device: str
    config: StepConfig
    workload_name: str
    versions: Mapping[str, str] = field(default_factory=dict)
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_by_category: Mapping[str, int] | None = None
    peak_place: Place | None = None
    first_step_peak_bytes: int | None = None
    timeline: Timeline | None = None
    step_seconds: float | None = None
    step_seconds_all: tuple[float, ...] = ()
    samples_per_second: float | None = None
    loss: float | None = None
    finite: bool | None = None
    memory_limit_bytes: int | None = None
    fits: bool | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON types; `from_dict` gives it back."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        place, loss = self.peak_place, self.loss
        return data | {
            "outcome": str(self.outcome),
            "source": str(self.source),
            "config": self.config.to_dict(),
            "versions": dict(self.versions),
            "peak_by_category": self.peak_by_category and dict(self.peak_by_category),
            "peak_place": place and {
                "phase": str(place.phase), "micro_batch": place.micro_batch,
                "module": place.module, "operator": place.operator,
            },
            "timeline": self.timeline and self.timeline.to_dict(),
            "step_seconds_all": list(self.step_seconds_all),
            "loss": loss if loss is None or math.isfinite(loss) else str(loss),  # JSON has no NaN
            "notes": list(self.notes),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "StepResult":
        """Return the result that `to_dict` wrote."""
        place, timeline = data["peak_place"], data["timeline"]
        return cls(**{
            **data,
            "outcome": Outcome(data["outcome"]),
            "source": Source(data["source"]),
            "config": StepConfig(**data["config"]),
            "peak_place": place and Place(**{**place, "phase": Phase(place["phase"])}),
            "timeline": timeline and Timeline.from_dict(timeline),
            "step_seconds_all": tuple(data["step_seconds_all"]),
            "loss": None if data["loss"] is None else float(data["loss"]),
            "notes": tuple(data["notes"]),
        })  # fmt: skip

    def __str__(self) -> str:
        """Return one line: what ran, how it ended, what it cost."""
        costs = [
            f"peak {format_bytes(size)} {kind}"
            for size, kind in (
                (self.peak_allocated_bytes, "allocated"),
                (self.peak_reserved_bytes, "reserved"),
            )
            if size is not None
        ]
        if self.step_seconds is not None:
            costs.append(f"{format_seconds(self.step_seconds)} a step")
        said = [] if self.outcome is Outcome.OK else [self.message]
        head = f"{self.workload_name} on {self.device}, {self.config}: {self.outcome}"
        return ", ".join([f"{head} ({self.source})", *costs, *said])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return a small table for notebooks."""
        import html  # 5 ms that `import memlab` need not wait for

        none = "not measured"
        rows = {
            "outcome": f"{self.outcome} ({self.source} on {self.device}, "
            f"torch {self.versions.get('torch', '?')})",
            "message": self.message,
            "config": str(self.config),
            "peak allocated": _or(none, self.peak_allocated_bytes, format_bytes),
            "peak reserved": _or(none, self.peak_reserved_bytes, format_bytes),
            "first step's peak": _or(none, self.first_step_peak_bytes, format_bytes),
            "time a step": _or(none, self.step_seconds, format_seconds),
            "loss": _or(none, self.loss, "{:.4f}".format),
            "notes": " ".join(self.notes),
        }
        body = "".join(
            f"<tr><th style='text-align:left'>{name}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in rows.items()
            if text
        )
        return f"<table><caption>{html.escape(self.workload_name)}</caption>{body}</table>"


def _or(default: str, value: Any, show: Any) -> str:
    return default if value is None else str(show(value))
