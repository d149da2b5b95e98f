"""What a quantized base changes at the peak of a step, as two predictions show it.

The causes are read off what both hold at their peaks: a weight that takes fewer bytes is quantized,
one that takes more was cast, and the activations of a module take twice as much if they are in
fp32. No setting is asked by its name what it does.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from memlab.arguments.units import format_bytes
from memlab.explaining.holdings import patterns
from memlab.result import StepResult
from memlab.trace import Category, Holding, Phase, Place

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


def signed(nbytes: int) -> str:
    """Return bytes with their sign.

    >>> signed(-512 * 2**20), signed(0)
    ('-512 MiB', '0 B')
    """
    return f"{'-' if nbytes < 0 else '+' if nbytes else ''}{format_bytes(abs(nbytes))}"


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
    return f"{signed(more)} in {most}" if more else ""
