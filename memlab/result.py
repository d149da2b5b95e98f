"""`StepResult`: what one step cost, one type whether measured, predicted or recorded."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from memlab.arguments.checks import check_fields, of_type
from memlab.arguments.quoting import shown
from memlab.arguments.units import format_bytes, format_seconds
from memlab.config import FP32_FORMATS, Precision, StepConfig
from memlab.errors import MemlabError
from memlab.trace import Category, Phase, Place, Timeline


class Outcome(StrEnum):
    """How a run ended. Out of memory is an outcome, not an error: people provoke it on purpose.

    >>> Outcome.OUT_OF_MEMORY == "out_of_memory"
    True
    """

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """Blocks that are live at the peak and alike: of one category, module, operator and phase.

    Attributes:
        category: what they are for.
        module: path of the module at work when they were allocated; of parameters and optimizer
            state the path of the parameter. Empty where it is not known.
        operator: that allocated them, such as "aten::addmm"; empty where none was at work.
        phase: that they were born in.
        num_blocks: how many.
        nbytes: that they hold together.
    """

    category: Category
    module: str
    operator: str
    phase: Phase
    num_blocks: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the holding as plain JSON types; `from_dict` gives it back."""
        return asdict(self) | {"category": str(self.category), "phase": str(self.phase)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Holding":
        """Return the holding that `to_dict` wrote."""
        kinds = {"category": Category(data["category"]), "phase": Phase(data["phase"])}
        return cls(**{**data, **kinds})


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
        peak_holdings: what holds that peak, the largest first; they sum to it. Empty where it was
            not traced.
        peak_place: phase, module and operator of that peak.
        first_step_peak_bytes: the same peak over the first step alone.
        timeline: the step whose peak this is.
        step_seconds: median of `step_seconds_all`.
        step_seconds_all: wall time of every counted repeat, in order.
        others_share: of all processors, what other programs used while the step was built and
            timed, 0..1; None where that is not known.
        samples_per_second: batch size over `step_seconds`.
        loss: of the last repeat, weighted over the micro-batches; None if predicted.
        finite: whether that loss is a finite number.
        memory_limit_bytes: the limit that was set, or None.
        fits: whether the peak stays within the limit; None without a limit.
        uncertainty: relative half-width of predicted numbers by field name, 0.01 for +-1 %; None
            if measured.
        notes: sentences that a reader of the numbers must know.
        parameter_formats: number formats of the model's parameters as they were trained, by torch's
            names, those of most bytes first; empty where no model was built.

    >>> import memlab
    >>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
    >>> result = memlab.recorded(workload, memlab.StepConfig(batch_size=4), "amd-epyc")
    >>> sum(result.peak_by_category.values()) == result.peak_allocated_bytes
    True
    >>> result.source, result.outcome, result.peak_allocated_bytes
    (<Source.RECORDED: 'recorded'>, <Outcome.OK: 'ok'>, 38325928)
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
    peak_holdings: tuple[Holding, ...] = ()
    peak_place: Place | None = None
    first_step_peak_bytes: int | None = None
    timeline: Timeline | None = None
    step_seconds: float | None = None
    step_seconds_all: tuple[float, ...] = ()
    others_share: float | None = None
    samples_per_second: float | None = None
    loss: float | None = None
    finite: bool | None = None
    memory_limit_bytes: int | None = None
    fits: bool | None = None
    uncertainty: Mapping[str, float] | None = None
    notes: tuple[str, ...] = ()
    parameter_formats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def number_format(self) -> str:
        """The precision in words: "bf16", or what "as-built" was, such as "fp32"."""
        return self.config.precision.in_words(self.parameter_formats)

    @property
    def settings(self) -> str:
        """The config in one line, with the formats of a model that was not built in fp32."""
        is_said = self.config.precision is Precision.AS_BUILT and len(self.parameter_formats) > 0
        is_said = is_said and self.parameter_formats != FP32_FORMATS
        return f"{self.config}{f', {self.number_format}' * is_said}"

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
            "peak_holdings": [holding.to_dict() for holding in self.peak_holdings],
            "peak_place": place and {
                "phase": str(place.phase), "micro_batch": place.micro_batch,
                "module": place.module, "operator": place.operator,
            },
            "timeline": self.timeline and self.timeline.to_dict(),
            "step_seconds_all": list(self.step_seconds_all),
            "loss": loss if loss is None or math.isfinite(loss) else str(loss),  # JSON has no NaN
            "uncertainty": self.uncertainty and dict(self.uncertainty),
            "notes": list(self.notes),
            "parameter_formats": list(self.parameter_formats),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "StepResult":
        """Return the result that `to_dict` wrote, in this version or an older one.

        Raises:
            MemlabError: the data is nothing that `to_dict` wrote.
        """
        data = of_type("data", data, Mapping)
        try:
            return cls._from_dict(data)
        except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise MemlabError(
                f"data={shown(data)} is no written StepResult ({type(error).__name__}: "
                f"{shown(str(error))}); pass what StepResult.to_dict returned"
            ) from error

    @classmethod
    def _from_dict(cls, data: Mapping[str, Any]) -> "StepResult":
        place, timeline = data["peak_place"], data["timeline"]
        holdings = data.get("peak_holdings", ())  # older records have none
        return cls(**{
            **data,
            "outcome": Outcome(data["outcome"]),
            "source": Source(data["source"]),
            "config": StepConfig(**data["config"]),
            "peak_holdings": tuple(Holding.from_dict(holding) for holding in holdings),
            "peak_place": place and Place(**{**place, "phase": Phase(place["phase"])}),
            "timeline": timeline and Timeline.from_dict(timeline),
            "step_seconds_all": tuple(data["step_seconds_all"]),
            "loss": None if data["loss"] is None else float(data["loss"]),
            "notes": tuple(data["notes"]),
            "parameter_formats": tuple(data.get("parameter_formats", ())),
        })  # fmt: skip

    def __str__(self) -> str:
        """Return one line: what ran, how it ended, what it cost."""
        costs = [
            f"peak {format_bytes(size)} {kind}{self._spread(f'peak_{kind}_bytes')}"
            for size, kind in (
                (self.peak_allocated_bytes, "allocated"),
                (self.peak_reserved_bytes, "reserved"),
            )
            if size is not None
        ]
        if self.step_seconds is not None:
            spread = self._spread("step_seconds")
            costs.append(f"{format_seconds(self.step_seconds)} a step{spread}")
        said = [] if self.outcome is Outcome.OK else [self.message]
        head = f"{self.workload_name} on {self.device}, {self.settings}: {self.outcome}"
        return ", ".join([f"{head} ({self.source})", *costs, *said])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return a small table for notebooks."""
        import html  # 5 ms that `import memlab` need not wait for

        def cost(field: str, show: Callable[[Any], str]) -> str:
            value = getattr(self, field)
            return f"not {self.source}" if value is None else show(value) + self._spread(field)

        rows = {
            "outcome": f"{self.outcome} ({self.source} on {self.device}, "
            f"torch {self.versions.get('torch', '?')})",
            "message": self.message,
            "config": self.settings,
            "peak allocated": cost("peak_allocated_bytes", format_bytes),
            "peak reserved": cost("peak_reserved_bytes", format_bytes),
            "first step's peak": cost("first_step_peak_bytes", format_bytes),
            "time a step": cost("step_seconds", format_seconds),
            "loss": cost("loss", "{:.4f}".format),
            "notes": " ".join(self.notes),
        }
        body = "".join(
            f"<tr><th style='text-align:left'>{name}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in rows.items()
            if text
        )
        return f"<table><caption>{html.escape(self.workload_name)}</caption>{body}</table>"

    def _spread(self, field: str) -> str:
        """Return the uncertainty of a number as it is printed after it, such as " +-1 %"."""
        width = (self.uncertainty or {}).get(field)
        return f" +-{format_percent(width)}" if width else ""


def format_percent(fraction: float) -> str:
    """Return a share or a relative error with one or two significant digits.

    >>> format_percent(0.0125), format_percent(0.473), format_percent(0.0)
    ('1.2 %', '47 %', '0 %')
    """
    percent = 100 * fraction
    return f"{percent:.0f} %" if abs(percent) >= 10 else f"{percent:.2g} %"


def signed_percent(error: float) -> str:
    """Return a signed relative error.

    >>> signed_percent(-0.0078), signed_percent(0.0), signed_percent(0.123)
    ('-0.78 %', '+0.00 %', '+12.3 %')
    """
    digits = 1 if abs(error) >= 0.1 else 2
    return f"{round(100 * error, digits) + 0.0:+.{digits}f} %"  # 0.0: no minus before a zero
