"""`compare_base`: what a quantized base saves beside one of 16 bits, what it costs, and where.

The causes are read off what both predictions hold at their peaks.

Left out: what another base does to the numbers that are computed.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from memlab._util.checks import checked, seconds
from memlab._util.tables import columns_table, facts_table
from memlab._util.units import format_bytes, shown, signed_bytes
from memlab.api import predict
from memlab.config import StepConfig
from memlab.errors import ConfigError, MemlabError, WorkloadError
from memlab.result import Outcome, StepResult, outcome_checked
from memlab.runtime.bar import shows_progress
from memlab.runtime.isolation import OnProgress
from memlab.search.holdings import patterns
from memlab.techniques.technique import Saving, catalogue, in_words
from memlab.trace import Category, Holding, Phase, Place
from memlab.workload import Workload
from memlab.workloads.finetuned import BASE_FORMATS, FORMATS

# What a quantized base changes at the peak of a step, as two predictions show it.
#
# The causes are read off what both hold at their peaks: a weight that takes fewer bytes is
# quantized, one that takes more was cast, and the activations of a module take twice as
# much if they are in fp32. No setting is asked by its name what it does.

SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")  # of attention that is written out
MOST_NAMED = 2
QUANTIZED, CASTED = "weights that are quantized", "weights that are cast to a wider format"
ATTENTION, BETWEEN = "activations of attention", "other activations"
SCALES, DEQUANTIZED = "scales of the quantized weights", "weights dequantized for their layer"
REST = {
    Category.BUFFERS: "other buffers and library workspace",
    Category.GRADIENTS: "gradients",
    Category.OPTIMIZER_STATE: "optimizer state",
    Category.TEMPORARIES: "other temporaries",
    Category.INPUTS: "inputs",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BasePart:
    """What one cause adds to the peak.

    Attributes:
        name: in words.
        nbytes: signed: with the quantized base minus without.
        why: what the two predictions show of it; "" where the number says all.
    """

    name: str
    nbytes: int
    why: str = ""


def place_words(place: Place | None) -> str:
    """Return where a peak is by its module, or as the loss; no operator is named.

    >>> place_words(Place(phase=Phase.BACKWARD, micro_batch=0, loss="log-softmax"))
    'backward of micro-batch 1, in the loss: log-softmax'
    """
    if place is None:
        return "a part that is not known"
    module = _short(f"{place.module}.").removesuffix(".")
    return str(replace(place, module=module, operator=""))


def parts_of(quantized: StepResult, plain: StepResult) -> Iterator[BasePart]:
    """Yield what the quantized base changes at the peak; the parts sum to the whole difference."""
    held = quantized.peak_holdings or (), plain.peak_holdings or ()
    weights = _by(_of(held[0], Category.PARAMETERS), _of(held[1], Category.PARAMETERS), _module)
    smaller = {path: pair for path, pair in weights.items() if pair[0] < pair[1]}
    larger = {path: pair for path, pair in weights.items() if pair[0] > pair[1]}
    pattern_of = patterns([*held[0], *held[1]])
    for name, pairs in ((QUANTIZED, smaller), (CASTED, larger)):
        why = _of_weights(pairs, pattern_of)
        yield BasePart(name=name, nbytes=_sum(pairs.values()), why=why)
    scales = [[each for each in one if _is_scale(each)] for one in held]
    yield BasePart(name=SCALES, nbytes=_bytes(scales[0]) - _bytes(scales[1]))

    activations = [_of(one, Category.ACTIVATIONS) for one in held]
    attending = {h.module for one in activations for h in one if _is_attention(h.operator)}
    own, others = ([h for h in one if h.module in attending] for one in activations)
    why = _of_attention(own, others)
    yield BasePart(name=ATTENTION, nbytes=_bytes(own) - _bytes(others), why=why)
    own, others = ([h for h in one if h.module not in attending] for one in activations)
    why = _of_activations(own, others, pattern_of)
    yield BasePart(name=BETWEEN, nbytes=_bytes(own) - _bytes(others), why=why)

    rest = [[h for h in one if h.category in REST and not _is_scale(h)] for one in held]
    dequantized = [[h for h in one if "dequantize" in h.operator] for one in rest]
    more = _bytes(dequantized[0]) - _bytes(dequantized[1])
    yield BasePart(
        name=DEQUANTIZED, nbytes=more, why="" if more else "none is held where the peak is"
    )
    for category, name in REST.items():
        own, others = (
            [h for h in one if h.category is category and "dequantize" not in h.operator]
            for one in rest
        )
        if nbytes := _bytes(own) - _bytes(others):
            yield BasePart(name=name, nbytes=nbytes, why=_most(own, others, pattern_of))


Pairs = dict[str, tuple[int, int]]
Pattern = Callable[[str], str]


def _of(held: Iterable[Holding], category: Category) -> list[Holding]:
    return [each for each in held if each.category is category]


def _module(held: Holding) -> str:
    return held.module


def _by(some: Sequence[Holding], others: Sequence[Holding], key: Callable[[Holding], str]) -> Pairs:
    """Return the bytes of both by a key, such as the path of a parameter."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for side, held in enumerate((some, others)):
        for each in held:
            found[key(each)][side] += each.nbytes
    return {name: (pair[0], pair[1]) for name, pair in found.items()}


def _is_scale(held: Holding) -> bool:
    """Return whether it is a buffer that was there before the first step, as scales are."""
    return held.category is Category.BUFFERS and held.phase is Phase.BUILD


def _is_attention(operator: str) -> bool:
    return "scaled_dot_product" in operator or operator in SOFTMAX


def _bytes(held: Iterable[Holding]) -> int:
    return sum(each.nbytes for each in held)


def _sum(pairs: Iterable[tuple[int, int]]) -> int:
    return sum(own - other for own, other in pairs)


def _of_weights(pairs: Pairs, pattern_of: Pattern) -> str:
    """Return how many weights take other bytes than without, and the largest of them."""
    if not pairs:
        return ""
    own, other = (sum(pair[side] for pair in pairs.values()) for side in (0, 1))
    largest = sorted(pairs, key=lambda path: -abs(pairs[path][0] - pairs[path][1]))
    places = list(dict.fromkeys(_short(pattern_of(path)) for path in largest))
    named = " and ".join(places[:MOST_NAMED])
    which = f", the largest {named}" if len(places) > MOST_NAMED else f": {named}"
    return f"{format_bytes(own)} instead of {format_bytes(other)} in {len(pairs)} of them{which}"


def _short(path: str) -> str:
    """Return the path of a parameter or module without what an adapter puts around the model."""
    return path.removeprefix("base_model.model.").removesuffix(".weight")


def _of_attention(some: Sequence[Holding], others: Sequence[Holding]) -> str:
    """Return by which operators attention keeps what it keeps, where they differ."""
    own, other = (_kept_by(held) for held in (some, others))
    if own == other or not (own and other):
        return ""
    return f"kept by {own}, without the quantized base by {other}"


def _kept_by(held: Sequence[Holding]) -> str:
    found = sorted({each.operator.removeprefix("aten::") for each in held
                    if _is_attention(each.operator)})  # fmt: skip
    return " and ".join(found)


def _of_activations(some: Sequence[Holding], others: Sequence[Holding], pattern_of: Pattern) -> str:
    """Return how many modules keep twice as much, and where most is added."""
    pairs = {name: pair for name, pair in _by(some, others, _module).items() if all(pair)}
    twice = [name for name, (own, other) in pairs.items() if own == 2 * other]
    said = []
    if twice:
        said.append(
            f"{len(twice)} of {len(pairs)} modules keep exactly twice as many bytes, as fp32 does "
            "beside 16 bits"
        )
    if most := _most(some, others, pattern_of):
        said.append(most)
    return "; ".join(said)


def _most(some: Sequence[Holding], others: Sequence[Holding], pattern_of: Pattern) -> str:
    """Return where the most is added or missing."""
    places = _by(some, others, lambda held: _short(pattern_of(held.module)) or "no module")
    most = max(places, key=lambda name: abs(places[name][0] - places[name][1]), default="")
    more = places[most][0] - places[most][1] if most else 0
    return f"{signed_bytes(more)} in {most}" if more else ""


BASE, CAST = "base", "prepare_for_kbit"
ENDING = "the comparison of two bases"
RAISED = {Category.ACTIVATIONS, Category.TEMPORARIES}  # by a quantized base: logits in fp32, too


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
        time = self.result.time_words
        return f"{signed_bytes(self.nbytes)}{f', {time}' if time else ''}"


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
            f"  {signed_bytes(part.nbytes):>12}  {part.name}{f' ({part.why})' if part.why else ''}"
            for part in self.parts
        ]
        ways = [f"  {way.name}: {way.effect}" for way in self.remedies]
        return "\n".join([self.message, *parts, *(["what would change it"] * bool(ways)), *ways])

    def _repr_html_(self) -> str:
        """Return tables for notebooks."""
        parts = [[part.name, signed_bytes(part.nbytes), part.why] for part in self.parts]
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

    quantized, plain = (
        outcome_checked(predicted(one, config), ENDING) for one in (workload, other)
    )
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
            outcome_checked(result, ENDING)
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
    for rows in catalogue().values():
        row = next(filter(_lowers, rows), None)
        if row is None:
            continue
        name, value = next(iter(row.offers[0].items()))
        if getattr(config, name) != getattr(default, name):
            continue
        try:
            yield in_words({name: value}), workload, replace(config, **{name: value})
        except MemlabError:
            continue  # it does not go with the other settings


def _lowers(row: Saving) -> bool:
    """Return whether a setting lowers what a quantized base raises, and nothing else."""
    is_offered = row.searched and bool(row.offers)
    return is_offered and bool(row.frees) and {*row.frees} <= RAISED


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
