"""`StepResult`: what one step costs. Measured, predicted and recorded results have one type."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from typing import Any

from memlab._util.checks import check_fields, checked, count, of_type, size
from memlab._util.collectives import Communication
from memlab._util.tables import facts_table
from memlab._util.units import (
    HOUR,
    KWH,
    format_bytes,
    format_duration,
    format_energy,
    format_percent,
    format_seconds,
    plus_minus,
    shown,
    signed_percent,
)
from memlab.config import FP32_FORMATS, Precision, Sharding, StepConfig
from memlab.errors import MemlabError, UnsupportedError
from memlab.trace import Holding, Phase, Place, Timeline

# Whether a step fits a memory limit: the peak that counts, and the one judgement of it.

RunsWithin = Callable[[int], bool]
"""Whether a step whose peak is above a limit runs within it all the same."""


class FitStatus(StrEnum):
    """Whether a step fits, as far as the uncertainty of its peak allows to say.

    >>> FitStatus.TOO_CLOSE == "too close"
    True
    """

    FITS = "fits"
    TOO_CLOSE = "too close"
    DOES_NOT_FIT = "does not fit"

    @classmethod
    def of(cls, fits: bool | None, *, is_close: bool | None) -> "FitStatus | None":
        """Return the judgement whose halves are `StepResult.fits` and `close_to_limit`."""
        if fits is None:
            return None
        if is_close:
            return cls.TOO_CLOSE
        return cls.FITS if fits else cls.DOES_NOT_FIT


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedPeak:
    """The peak that counts against a memory limit, and the judgement of whether it fits.

    On CUDA the caching allocator may not reserve more than the limit, so reserved bytes count. On a
    CPU there is no such allocator: allocated bytes count.

    >>> peak = CountedPeak(kind="allocated", nbytes=1000, uncertainty=0.05)
    >>> peak.upper_bytes, peak.fits(1020), peak.is_close_to(1020)
    (1050, True, True)

    Attributes:
        kind: "reserved" or "allocated".
        nbytes: measured or predicted.
        uncertainty: relative half-width of what was predicted, 0.01 for +-1 %; 0 if measured.
        needed_bytes: the least limit within which the step runs, if that is known. It is below the
            peak if the step takes less where there is less room.
        needed_uncertainty: relative half-width of that.
    """

    kind: str
    nbytes: int
    uncertainty: float = 0.0
    needed_bytes: int | None = None
    needed_uncertainty: float = 0.0

    @property
    def upper_bytes(self) -> int:
        """The peak at the upper end of its uncertainty."""
        return math.ceil(self.nbytes * (1 + self.uncertainty))

    @property
    def judged_uncertainty(self) -> float:
        """The uncertainty of what a limit is compared with: what is needed, where it is known."""
        is_known = self.needed_bytes is not None and self.needed_uncertainty
        return self.needed_uncertainty if is_known else self.uncertainty

    def __str__(self) -> str:
        """Return the peak with its kind, such as "1.31 GiB reserved"."""
        return f"{format_bytes(self.nbytes)} {self.kind}"

    @property
    def in_words(self) -> str:
        """The peak with its uncertainty and its kind, such as "1.31 GiB ± 2 % reserved"."""
        return f"{format_bytes(self.nbytes)}{plus_minus(self.uncertainty)} {self.kind}"

    def fits(self, limit_bytes: int, runs_within: RunsWithin | None = None) -> bool:
        """Return whether a step with this peak runs within a limit.

        Args:
            limit_bytes: that it may hold.
            runs_within: asked if the peak is above the limit. The peak was reached without one; at
                a limit the caching allocator first gives back what it holds unused. None if that
                is not known: then what is needed decides, or else the peak.
        """
        if self.nbytes <= limit_bytes:
            return True
        if runs_within is not None:
            return runs_within(limit_bytes)
        return self.needed_bytes is not None and self.needed_bytes <= limit_bytes

    def is_close_to(self, limit_bytes: int, runs_within: RunsWithin | None = None) -> bool:
        """Return whether `fits` is another at one end of the uncertainty.

        A step that takes 5 % more fits a limit if this one fits a limit that is 1.05 times smaller.
        """
        width = self.judged_uncertainty
        if runs_within is not None and self.needed_uncertainty:
            width = self.needed_uncertainty
        if not width:
            return False

        if self.fits(limit_bytes, runs_within):
            return not self.fits(int(limit_bytes / (1 + width)), runs_within)
        return width >= 1 or self.fits(int(limit_bytes / (1 - width)), runs_within)

    def beside(self, limit_bytes: int, *, fits: bool | None) -> str:
        """Return how far the peak is from a limit, such as "1.00 GiB over the limit of 8.00 GiB".

        Args:
            limit_bytes: the limit.
            fits: whether the step runs within it, which one with less cache may.
        """
        is_over, limit = self.nbytes > limit_bytes, format_bytes(limit_bytes)
        distance = format_bytes(abs(limit_bytes - self.nbytes))
        text = f"{distance} {'over' if is_over else 'below'} the limit of {limit}"
        if is_over and fits:
            text = f"which fits the limit of {limit} with less cache"
        is_reserved = self.kind == "reserved"  # the text around it speaks of allocated bytes
        return f"{self}, {text}" if is_reserved else text


def counted(result: "StepResult") -> CountedPeak:
    """Return the peak that counts against a limit, of a result that has one."""
    peak = result.counted_peak
    assert peak is not None
    return peak


@contextmanager
def reading(kind: str, data: Any) -> Iterator[None]:
    """Say what is wrong with data that the `to_dict` of this kind of result should have written.

    Raises:
        MemlabError: it did not; what is done with the data raised an error.
    """
    of_type("data", data, Mapping)
    try:
        yield
    except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise MemlabError(
            f"data={shown(data)} was not written by {kind}.to_dict "
            f"({type(error).__name__}: {shown(str(error))}); pass the dict that it returned"
        ) from error


def outcome_checked(result: "StepResult", what: str) -> "StepResult":
    """Return a result that is ok; `what` is what ends if it is not.

    Raises:
        UnsupportedError: the step cannot be predicted; the message says why.
        MemlabError: it was cancelled or took too long.
    """
    if result.outcome in (Outcome.CANCELLED, Outcome.TIMED_OUT):
        raise MemlabError(f"{what} ended: {result.message}")
    if result.outcome is not Outcome.OK:
        raise UnsupportedError(f"{result.workload_name}, {result.config}: {result.message}")
    return result


__all__ = ["Outcome", "RunCost", "Source", "StepResult", "format_percent", "signed_percent"]


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
class RunCost:
    """What `StepResult.run_cost` returns. None is what is not known, or has no price.

    Attributes:
        seconds: of all steps, without loading, evaluation and saving.
        num_devices: that work all this time.
        joules: that the cards draw.
        money: of the hours and of the energy, as far as their prices were given.
        time_width: relative half-width of the seconds, 0.2 for +-20 %; 0 if measured.
        energy_width: relative half-width of the joules.
    """

    seconds: float
    num_devices: int = 1
    joules: float | None = None
    money: float | None = None
    time_width: float = 0.0
    energy_width: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(
        cls,
        seconds: float,
        num_devices: int,
        watts: float | None,
        *,
        prices: tuple[float | None, float | None],
        widths: tuple[float, float],
    ) -> "RunCost":
        """Return the cost of this time; prices of an hour and a kWh, widths of time and power."""
        per_hour, per_kwh = prices
        joules = None if watts is None else watts * seconds * num_devices
        parts = []
        if per_hour is not None:
            parts.append(per_hour * seconds / HOUR * num_devices)
        if per_kwh is not None and joules is not None:
            parts.append(per_kwh * joules / KWH)
        return cls(
            seconds=seconds,
            num_devices=num_devices,
            joules=joules,
            money=sum(parts) if parts else None,
            time_width=widths[0],
            energy_width=math.hypot(*widths) if joules is not None else 0.0,
        )

    @property
    def hours(self) -> float:
        """The seconds in hours."""
        return self.seconds / HOUR

    @property
    def kilowatt_hours(self) -> float | None:
        """The joules in kWh."""
        return None if self.joules is None else self.joules / KWH

    def __str__(self) -> str:
        """Return one line, such as "2.5 h +-20 %, 0.6 kWh +-25 %, 1.43 in money"."""
        said = [f"{format_duration(self.seconds)}{plus_minus(self.time_width)}"]
        said[0] += f" on {self.num_devices} devices" if self.num_devices > 1 else ""
        if self.joules is not None:
            said.append(f"{format_energy(self.joules)}{plus_minus(self.energy_width)}")
        if self.money is not None:
            said.append(f"{self.money:{'.2f' if self.money >= 0.1 else '.2g'}} in money")
        return ", ".join(said)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepResult:
    """What one optimizer update costs in memory and time. What was not measured is None, never 0.

    Attributes:
        outcome: see `Outcome`.
        message: one sentence about the outcome, with a remedy if there is one.
        source: measured, predicted or recorded.
        device: "cpu", "cuda:0" or the name of a card.
        versions: torch, memlab, Python, processor or card, threads.
        config: the settings that ran.
        workload_name: the workload that ran.
        own_optimizer: whether it has make_optimizer, which `config` does not say.
        peak_allocated_bytes: most bytes in live storages during a step in which the optimizer
            state exists (the second or a later one). After out of memory it covers what ran.
        peak_reserved_bytes: most bytes that the caching allocator held; None on a CPU. Kernels take
            some of them only where there is room.
        needed_bytes: the least memory limit of the caching allocator within which the step is
            predicted to run; None if measured, estimated for another size, or on a CPU.
        peak_by_category: bytes of each `Category` at that peak; they sum to it.
        peak_holdings: what holds the memory at that peak, the largest first; the bytes sum to the
            peak. Empty if it was not traced.
        peak_place: phase, module and operator of that peak.
        first_step_peak_bytes: the same peak over the first step alone.
        saving_peak_bytes: most bytes while `TrainingStep.save` runs after it; None if measured, or
            if what such a checkpoint holds is not known.
        saving_host_bytes: what the rank that copies most to the host has there; None on a CPU.
        host_bytes: the most that offloading held in host memory; None where nothing is offloaded,
            or if that is not known.
        locked_host_bytes: what PyTorch locks of host memory for them, each block a power of two.
        timeline: the step whose peak this is.
        step_seconds: median of `step_seconds_all`.
        watts: mean power that a card is predicted to draw in a step, each of several; None if
            measured, on a CPU, and where it is not known.
        step_seconds_all: wall time of every counted repeat, in order.
        others_share: the share of all processors that other programs used while the step was built
            and timed, 0..1; None if it is not known.
        samples_per_second: batch size over `step_seconds`.
        loss: of the last repeat, weighted over the micro-batches; None if predicted.
        finite: whether that loss is a finite number.
        memory_limit_bytes: the limit that was set, or None.
        fits: whether the step stays within the limit; None without a limit. See `counted_peak`.
        close_to_limit: whether the limit lies so near that, within the uncertainty, `fits` may be
            wrong; None without a limit.
        usable_memory_bytes: what a step can hold on a card, which is what PyTorch's allocator can
            reserve there. None for a CPU and where it is not known.
        fit: "fits", "too close" to say, or "does not fit": `fits` and its uncertainty in one, and
            without a limit the same of `usable_memory_bytes`, which a measured step fits because
            it ran. None where that is not known. So it is None for a CPU without a limit, unless
            the machine ran out of memory; the panel passes this machine's memory as the limit.
        uncertainty: relative half-width of predicted numbers by field name, 0.01 for +-1 %; None
            if measured.
        kernels: kinds of kernels of a prediction for a card that decide how exact it is:
            "convolutions" that may take a workspace, "quantized weights", "several cards". See
            `memlab.evidence`.
        notes: sentences that a reader of the numbers must know.
        parameter_formats: number formats of the trained parameters by torch's names, ordered by
            bytes; empty if no model was built.
        printed: the beginning of what the model printed; to predict, it runs with several batches.
        ranks: of a step of several ranks the result of each, in order; of a simulated step those
            that hold different things. The other fields are those of the rank with the highest
            peak.
        rank_numbers: which ranks this result stands for; empty without sharding.
        communication: what this rank does in a step together with others, by collective; empty
            without sharding.

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
    needed_bytes: int | None = None
    peak_by_category: Mapping[str, int] | None = None
    peak_holdings: tuple[Holding, ...] = ()
    peak_place: Place | None = None
    first_step_peak_bytes: int | None = None
    saving_peak_bytes: int | None = None
    saving_host_bytes: int | None = None
    host_bytes: int | None = None
    locked_host_bytes: int | None = None
    timeline: Timeline | None = None
    step_seconds: float | None = None
    watts: float | None = None
    step_seconds_all: tuple[float, ...] = ()
    others_share: float | None = None
    samples_per_second: float | None = None
    loss: float | None = None
    finite: bool | None = None
    memory_limit_bytes: int | None = None
    fits: bool | None = None
    close_to_limit: bool | None = None
    usable_memory_bytes: int | None = None
    fit: FitStatus | None = None
    uncertainty: Mapping[str, float] | None = None
    kernels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    parameter_formats: tuple[str, ...] = ()
    own_optimizer: bool = False
    printed: str = ""
    ranks: tuple["StepResult", ...] = ()
    rank_numbers: tuple[int, ...] = ()
    communication: tuple[Communication, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def number_format(self) -> str:
        """The precision in words: "bf16", or what "as-built" was, such as "fp32"."""
        return self.config.precision.in_words(self.parameter_formats)

    @property
    def settings(self) -> str:
        """The config in one line, with the number formats of a model that was not built in fp32."""
        is_said = self.config.precision is Precision.AS_BUILT and len(self.parameter_formats) > 0
        is_said = is_said and self.parameter_formats != FP32_FORMATS
        return f"{self.config}{f', {self.number_format}' * is_said}"

    @property
    def counted_peak(self) -> CountedPeak | None:
        """The peak that counts against a memory limit; None where no peak is known."""
        kind, nbytes = "reserved", self.peak_reserved_bytes
        if nbytes is None:
            kind, nbytes = "allocated", self.peak_allocated_bytes
        if nbytes is None:
            return None

        widths = self.uncertainty or {}
        return CountedPeak(
            kind=kind,
            nbytes=nbytes,
            uncertainty=widths.get(f"peak_{kind}_bytes", 0.0),
            needed_bytes=self.needed_bytes,
            needed_uncertainty=widths.get("needed_bytes", 0.0),
        )

    @property
    def time_width(self) -> float:
        """The relative uncertainty of the time of a step; 0 of a measured one."""
        return (self.uncertainty or {}).get("step_seconds", 0.0)

    @property
    def time_words(self) -> str:
        """The time in words, such as "412 ms ± 15 % a step"; "" if it is not known."""
        seconds = self.step_seconds
        about = plus_minus(self.time_width)
        return "" if seconds is None else f"{format_seconds(seconds)}{about} a step"

    @checked(num_updates=count(1))
    def run_cost(
        self,
        num_updates: int,
        *,
        price_per_hour: float | None = None,
        price_per_kwh: float | None = None,
    ) -> RunCost:
        """Return the time, the energy and the money of this many steps.

        Args:
            num_updates: how often the step runs.
            price_per_hour: of one device.
            price_per_kwh: of what the cards draw, in the same currency; the rest of the machine and
                its cooling are not in it.

        Raises:
            MemlabError: the time of the step is not known, or an argument is not allowed.

        >>> import math
        >>> import memlab
        >>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
        >>> result = memlab.predict(workload, memlab.StepConfig(batch_size=4), "rtx-4090, 300 W")
        >>> cost = result.run_cost(10_000, price_per_hour=0.5, price_per_kwh=0.3)
        >>> math.isclose(cost.kilowatt_hours, cost.hours * result.watts / 1000)
        True
        >>> math.isclose(cost.money, 0.5 * cost.hours + 0.3 * cost.kilowatt_hours)
        True
        """
        if self.step_seconds is None:
            raise UnsupportedError(
                f"{self.workload_name} on {self.device} has no time, so a run of its steps has no "
                f"cost: {self.message}"
            )
        return RunCost.of(
            num_updates * self.step_seconds,
            self.config.world_size,
            self.watts,
            prices=(price_per_hour, price_per_kwh),
            widths=(self.time_width, (self.uncertainty or {}).get("watts", 0.0)),
        )

    @property
    def sent_bytes(self) -> int | None:
        """Bytes that this rank sends to others in a step; None without sharding, or if unknown."""
        sent = [each.sent_bytes for each in self.communication]
        is_alone = self.config.world_size == 1 and self.config.sharding is not Sharding.NONE
        return sum(sent) if sent or (is_alone and self.outcome is Outcome.OK) else None

    @property
    def ended_before_its_peak(self) -> bool:
        """Whether memory ran out before the step could show how much it needs.

        A limit on a CPU does not end a step: it is compared with the step once that has run.
        """
        peak = self.counted_peak
        is_whole = peak is not None and peak.kind == "allocated" and self.memory_limit_bytes
        return self.outcome is Outcome.OUT_OF_MEMORY and not is_whole

    def against_limit(
        self, memory_limit: int | str | None, runs_within: RunsWithin | None = None
    ) -> "StepResult":
        """Return the result with this limit, and whether the step fits it.

        What was found under that very limit stays as it is. Ask the result of a run itself, not
        what this returned: the copy does not know any more under which limit it ran.

        Args:
            memory_limit: bytes, or text such as "2GiB"; None for none.
            runs_within: as for `CountedPeak.fits`.

        Raises:
            ConfigError: the limit is no size.
        """
        limit = size("memory_limit", memory_limit)
        fits, is_close = self._judged(limit, runs_within)
        of_limit = FitStatus.of(fits, is_close=is_close)
        fit = self._fit_of_device(runs_within) if limit is None else of_limit
        judged: dict[str, Any] = {
            "memory_limit_bytes": limit, "fits": fits, "close_to_limit": is_close, "fit": fit,
        }  # fmt: skip
        if all(getattr(self, name) == value for name, value in judged.items()):
            return self
        return replace(self, **judged)

    def _judged(
        self, limit_bytes: int | None, runs_within: RunsWithin | None
    ) -> tuple[bool | None, bool | None]:
        """Return `fits` and `close_to_limit` for a limit."""
        peak, ran_under = self.counted_peak, self.memory_limit_bytes
        if limit_bytes is None:
            return None, None
        if limit_bytes == ran_under and self.fits is not None:
            return self.fits, self.close_to_limit  # what was found under that very limit
        if ran_under is None and limit_bytes == self.usable_memory_bytes and self.fit and peak:
            is_close = self.fit is FitStatus.TOO_CLOSE  # likewise, for the memory of its device
            return peak.fits(limit_bytes) if is_close else self.fit is FitStatus.FITS, is_close

        # a prediction that runs out of memory says nothing of the step
        ran_out = self.outcome is Outcome.OUT_OF_MEMORY and self.source is not Source.PREDICTED
        if ran_out and ran_under is not None and limit_bytes <= ran_under:
            return False, False
        if peak is None:
            return None, None
        if self.ended_before_its_peak:  # it needs at least as much
            return (False, False) if peak.nbytes > limit_bytes else (None, None)
        if self._ran_on_its_device and limit_bytes >= (self.usable_memory_bytes or math.inf):
            return True, False  # whatever the estimate of what the device can hold

        runs_within = runs_within and cache(runs_within)  # both ask for this limit
        return peak.fits(limit_bytes, runs_within), peak.is_close_to(limit_bytes, runs_within)

    def _fit_of_device(self, runs_within: RunsWithin | None) -> FitStatus | None:
        """Return `fit` without a limit: that of the memory which the device has."""
        is_without_limit = self.memory_limit_bytes is None
        ran_out = self.outcome is Outcome.OUT_OF_MEMORY and self.source is not Source.PREDICTED
        if ran_out and is_without_limit:
            return FitStatus.DOES_NOT_FIT
        if is_without_limit and self.fit is not None:
            return self.fit

        fits, is_close = self._judged(self.usable_memory_bytes, runs_within)
        return FitStatus.of(fits, is_close=is_close)

    @property
    def _ran_on_its_device(self) -> bool:
        """Whether the whole step ran, so that nothing is left to be judged there."""
        return self.outcome is Outcome.OK and self.source is not Source.PREDICTED

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON types; `from_dict` gives it back."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        place, loss = self.peak_place, self.loss
        return data | {
            "outcome": str(self.outcome),
            "source": str(self.source),
            "fit": None if self.fit is None else str(self.fit),
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
            "kernels": list(self.kernels),
            "notes": list(self.notes),
            "parameter_formats": list(self.parameter_formats),
            "ranks": [rank.to_dict() for rank in self.ranks],
            "rank_numbers": list(self.rank_numbers),
            "communication": [each.to_dict() for each in self.communication],
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "StepResult":
        """Return the result that `to_dict` wrote, in this version or an older one.

        Raises:
            MemlabError: the data was not written by `to_dict`.
        """
        with reading(cls.__name__, data):
            return cls._from_dict(data)

    @classmethod
    def _from_dict(cls, data: Mapping[str, Any]) -> "StepResult":
        place, timeline = data["peak_place"], data["timeline"]
        holdings = data.get("peak_holdings", ())  # older records have none
        fit = data.get("fit")
        if fit is None:  # also in data of an older version
            fit = FitStatus.of(data.get("fits"), is_close=data.get("close_to_limit"))
        return cls(**{
            **data,
            "outcome": Outcome(data["outcome"]),
            "source": Source(data["source"]),
            "fit": None if fit is None else FitStatus(fit),
            "config": StepConfig(**data["config"]),
            "peak_holdings": tuple(Holding.from_dict(holding) for holding in holdings),
            "peak_place": place and Place(**{**place, "phase": Phase(place["phase"])}),
            "timeline": timeline and Timeline.from_dict(timeline),
            "step_seconds_all": tuple(data["step_seconds_all"]),
            "loss": None if data["loss"] is None else float(data["loss"]),
            "kernels": tuple(data.get("kernels", ())),
            "notes": tuple(data["notes"]),
            "parameter_formats": tuple(data.get("parameter_formats", ())),
            "ranks": tuple(cls.from_dict(rank) for rank in data.get("ranks", ())),
            "rank_numbers": tuple(data.get("rank_numbers", ())),
            "communication": tuple(map(Communication.from_dict, data.get("communication", ()))),
        })  # fmt: skip

    def __str__(self) -> str:
        """Return one line: what ran, how it ended, what it cost."""
        costs = [
            f"peak {format_bytes(size)} {kind}{self.spread(f'peak_{kind}_bytes')}"
            for size, kind in (
                (self.peak_allocated_bytes, "allocated"),
                (self.peak_reserved_bytes, "reserved"),
            )
            if size is not None
        ]
        if self.step_seconds is not None:
            spread = self.spread("step_seconds")
            costs.append(f"{format_seconds(self.step_seconds)} a step{spread}")
        said = [] if self.outcome is Outcome.OK else [self.message]
        head = f"{self.workload_name} on {self.device}, {self.settings}: {self.outcome}"
        return ", ".join([f"{head} ({self.source})", *costs, *said])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return a small table for notebooks. Each number says what it counts, and its source."""
        relation = "for" if self.source is Source.PREDICTED else "on"
        device = self.device.removesuffix(f", {self.source}")  # "amd-epyc, recorded"
        title = f"{self.workload_name}, {self.source} {relation} {device}"
        if "torch" in self.versions:
            title += f", torch {self.versions['torch']}"

        limit, usable, needed = self.memory_limit_bytes, self.usable_memory_bytes, self.needed_bytes
        judged = "not known whether it fits" if self.fit is None else str(self.fit)
        judged = "too close to say" if self.fit is FitStatus.TOO_CLOSE else judged
        of_device = f"{format_bytes(usable)}: {judged}" if usable and not limit else ""
        held = sorted((self.peak_by_category or {}).items(), key=lambda item: -item[1])
        named = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in held if size]
        return facts_table(title, {
            "outcome": str(self.outcome),
            "message": self.message,
            "settings": self.settings,
            "memory limit": f"{format_bytes(limit)}: {judged}" if limit else "",
            "memory of the device": of_device,
            "peak allocated": self._cost("peak_allocated_bytes", format_bytes),
            "of which": ", ".join(named),
            "peak reserved": self._cost("peak_reserved_bytes", format_bytes),
            "needed at least": self._cost("needed_bytes", format_bytes) if needed else "",
            "peak allocated in the first step": self._cost("first_step_peak_bytes", format_bytes),
            "peak while saving": format_bytes(saved) if (saved := self.saving_peak_bytes) else "",
            "sent to other ranks": "; ".join(map(str, self.communication)),
            "time per step": self._cost("step_seconds", format_seconds),
            "power": self._cost("watts", "{:.0f} W".format) if self.watts else "",
            "loss": self._cost("loss", "{:.4f}".format),
            "notes": " ".join(self.notes),
        })  # fmt: skip

    def _cost(self, field: str, show: Callable[[Any], str]) -> str:
        """Return a number with its source, such as "344 MiB predicted +-1.2 %"."""
        value = getattr(self, field)
        if value is not None:
            return f"{show(value)} {self.source}{self.spread(field)}"
        return f"not {self.source}" if self.outcome is Outcome.OK else ""

    def spread(self, field: str) -> str:
        """Return the uncertainty of a number as it is printed after it, such as " +-1 %"."""
        width = (self.uncertainty or {}).get(field)
        return f" +-{format_percent(width)}" if width else ""
