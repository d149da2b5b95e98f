"""`compare_base`: what a quantized base saves beside one of 16 bits, what it costs, and where.

`base_parts.py` reads the causes off what both predictions hold at their peaks.

Left out: what another base does to the numbers that are computed.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from memlab.api import predict
from memlab.arguments.checks import checked, seconds
from memlab.arguments.quoting import shown
from memlab.arguments.tables import columns_table, facts_table
from memlab.arguments.units import format_bytes, format_seconds
from memlab.comparing.base_parts import QUANTIZED, BasePart, parts_of, place_words, signed
from memlab.config import StepConfig
from memlab.errors import ConfigError, MemlabError, UnsupportedError, WorkloadError
from memlab.result import Outcome, StepResult
from memlab.worker.bar import shows_progress
from memlab.worker.isolation import OnProgress
from memlab.workload import Workload
from memlab.workloads.finetuned import BASE_FORMATS, FORMATS

BASE, CAST = "base", "prepare_for_kbit"
SETTINGS: tuple[dict[str, Any], ...] = (
    {"precision": "bf16-mixed"}, {"checkpointing": "blocks"}, {"loss_chunks": 16},
)  # fmt: skip
"""Settings that lower what a quantized base raises: activations, and logits in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BaseRemedy:
    """A change that may help, predicted.

    Attributes:
        name: as a person writes it.
        workload: with it; the config with it is `result.config`.
        result: the step with it and the quantized base.
        nbytes: signed: its allocated peak minus that of the step without it; None if it has none.
    """

    name: str
    workload: Workload
    result: StepResult
    nbytes: int | None

    @property
    def effect(self) -> str:
        """The change of the peak and of the time, or why there is none."""
        if self.nbytes is None:
            return self.result.message
        seconds = self.result.step_seconds
        time = "" if seconds is None else f", {format_seconds(seconds)} a step"
        return f"{signed(self.nbytes)}{time}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BaseComparison:
    """A step with a quantized base beside the same step with one of 16 bits.

    Attributes:
        quantized: the predicted step as it is.
        plain: the same with the base of 16 bits, nothing cast.
        parts: what the base adds to the allocated peak or takes off it; they sum to the difference.
        remedies: what may lower the peak of the quantized one, each predicted.
        message: in one sentence, whether the quantized base helps.
    """

    quantized: StepResult
    plain: StepResult
    parts: tuple[BasePart, ...]
    remedies: tuple[BaseRemedy, ...]
    message: str

    def __str__(self) -> str:
        """Return the message, the parts and the remedies, one to a line."""
        parts = [
            f"  {signed(part.nbytes):>12}  {part.name}{f' ({part.why})' if part.why else ''}"
            for part in self.parts
        ]
        ways = [f"  {way.name}: {way.effect}" for way in self.remedies]
        return "\n".join([self.message, *parts, *(["what would change it"] * bool(ways)), *ways])

    def _repr_html_(self) -> str:
        """Return tables for notebooks."""
        parts = [[part.name, signed(part.nbytes), part.why] for part in self.parts]
        ways = [[way.name, way.effect] for way in self.remedies]
        return (
            facts_table("a quantized base", {"answer": self.message})
            + columns_table(["at the peak", "difference", "why"], parts)
            + columns_table(["what would change it", "effect on the peak"], ways)
        )


@checked(timeout_seconds=seconds)
@shows_progress
def compare_base(
    workload: Workload,
    config: StepConfig | None = None,
    device: str | torch.device | None = None,
    *,
    base: str = "bf16",
    seed: int = 0,
    timeout_seconds: float = 120,
    on_progress: OnProgress | None = None,
    progress: bool = True,
    cancel: threading.Event | None = None,
) -> BaseComparison:
    """Say why a quantized base saves as much memory as it does, or does not help.

    The step is predicted with its quantized base and with one of 16 bits, and then with each change
    that may help and that `predict` does not refuse for this workload. Nothing runs.

    Args:
        workload: a fine-tuning with a quantized base, as `workloads.finetune` makes it.
        config: how it is trained. None is `StepConfig()`.
        device: as for `predict`.
        base: the number format of the other base, which is not quantized.
        seed: as for `predict`.
        timeout_seconds: as for `predict`, for each of some six predictions.
        on_progress: as for `measure`.
        progress: as for `measure`.
        cancel: as for `measure`.

    Raises:
        ConfigError: the workload has no choice of a base, or its base is not quantized.
        UnsupportedError: one of the two steps cannot be predicted; the message says why.
        MemlabError: it was cancelled or took too long.

    `print(compare_base(workload.chosen(base="nf4"), config, "rtx-4060"))` shows the causes and the
    changes, one to a line. A base that is not quantized has nothing to be compared:

    >>> import memlab
    >>> workload = memlab.workloads.finetune("llama-tiny", base="bf16")
    >>> try:
    ...     compare_base(workload, memlab.StepConfig(batch_size=2), "rtx-4060")
    ... except memlab.MemlabError as error:
    ...     print(str(error).partition(";")[0])
    base='bf16' is what llama-tiny, lora of rank 16 on bf16, sequence length 512 has
    """
    config = config or StepConfig()
    other = _with_plain_base(workload, base)

    def predicted(one: Workload, own: StepConfig) -> StepResult:
        return predict(
            one, own, device, seed=seed, timeout_seconds=timeout_seconds,
            on_progress=on_progress, cancel=cancel,
        )  # fmt: skip

    quantized, plain = (_ran(predicted(one, config)) for one in (workload, other))
    parts = tuple(parts_of(quantized, plain))
    if not any(part.name == QUANTIZED and part.nbytes < 0 for part in parts):
        raise ConfigError(
            f"the base of {workload.name} is not quantized: no weight takes less memory than with "
            f"base={base!r}; allowed is a quantized base, such as workload.chosen(base='nf4')"
        )
    before = _peak(quantized)
    remedies = list[BaseRemedy]()
    for name, one, own in _changes(workload, config):
        result = predicted(one, own)
        if result.outcome in (Outcome.CANCELLED, Outcome.TIMED_OUT):
            _ran(result)
        if result.outcome is Outcome.UNSUPPORTED:
            continue  # such as chunks of a loss that has one already
        peak = result.peak_allocated_bytes
        nbytes = None if peak is None else peak - before
        remedies.append(BaseRemedy(name=name, workload=one, result=result, nbytes=nbytes))
    remedies.sort(key=lambda way: (way.nbytes is None, way.nbytes or 0))
    return BaseComparison(
        quantized=quantized,
        plain=plain,
        parts=parts,
        remedies=tuple(remedies),
        message=_message(quantized, plain, _asked(workload), base),
    )


def _asked(workload: Workload) -> str:
    own = workload.choices
    return "" if own is None else str(own.values.get(BASE))


def _with_plain_base(workload: Workload, base: str) -> Workload:
    """Return the workload with the other base, of which nothing is cast.

    Raises:
        ConfigError: it has no such choice, has this base already, or the base is quantized too.
    """
    own = workload.choices
    if own is None or BASE not in own.values:
        raise ConfigError(
            f"{workload.name} has no choice of a base; allowed is a workload of "
            "memlab.workloads.finetune(..., base='nf4'), or one with such a WorkloadChoices"
        )
    if own.values[BASE] == base:
        raise ConfigError(
            f"base={shown(base)} is what {workload.name} has; allowed is a workload whose base is "
            "quantized, such as workload.chosen(base='nf4')"
        )
    if base in BASE_FORMATS and base not in FORMATS:
        raise ConfigError(
            f"base={shown(base)} is quantized as well, and a quantized base is compared with one "
            f"that is not; allowed is one of {list(FORMATS)}"
        )
    try:
        return workload.chosen(**{BASE: base} | ({CAST: False} if CAST in own.values else {}))
    except WorkloadError as error:
        raise ConfigError(f"base={shown(base)}: {error}") from None


def _changes(workload: Workload, config: StepConfig) -> Iterator[tuple[str, Workload, StepConfig]]:
    """Yield what may help, in words, with the workload and the settings."""
    own = workload.choices
    if own is not None and own.values.get(CAST):
        yield f"{CAST}=False", workload.chosen(**{CAST: False}), config
    default = StepConfig()
    for settings in SETTINGS:
        (name, value), *_ = settings.items()
        if getattr(config, name) == getattr(default, name):
            try:
                yield f"{name}={value!r}", workload, replace(config, **settings)
            except MemlabError:
                continue  # it does not go with the other settings


def _ran(result: StepResult) -> StepResult:
    if result.outcome in (Outcome.CANCELLED, Outcome.TIMED_OUT):
        raise MemlabError(f"the comparison of two bases ended: {result.message}")
    if result.outcome is not Outcome.OK:
        raise UnsupportedError(f"{result.workload_name}, {result.config}: {result.message}")
    return result


def _peak(result: StepResult) -> int:
    assert result.peak_allocated_bytes is not None
    return result.peak_allocated_bytes


def _message(quantized: StepResult, plain: StepResult, own: str, base: str) -> str:
    """Return whether the quantized base helps, in one sentence."""
    peaks = _peak(quantized), _peak(plain)
    more = peaks[0] - peaks[1]
    places = [place_words(result.peak_place) for result in (quantized, plain)]
    moved = "" if places[0] == places[1] else f"; the peak is in {places[0]}, not in {places[1]}"
    how = "less" if more < 0 else "more"
    verdict = "" if more < 0 else f": {own} does not help here"
    return (
        f"the step takes {format_bytes(abs(more))} {how} with base={own!r} than with base={base!r} "
        f"({format_bytes(peaks[0])} instead of {format_bytes(peaks[1])} allocated at the peak, "
        f"predicted){verdict}{moved}"
    )
