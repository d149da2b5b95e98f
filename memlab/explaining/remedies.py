"""Which settings would lower a peak, and by how much: read off the result, nothing is run.

Offered is what memlab has built, what this config can still take, and what acts at the peak. Bytes
are estimated from the timeline: every instant is scaled as the technique would scale it, and the
highest one is taken, since a peak may move. Where no scaling is known there is no number. On the
zoo's four small models on a CPU the savings were as estimated to 0.3 % for optimizers, to 40 % for
the rest, mostly to 5 %; of a few MiB they may be half. Whether a model breaks a graph is not known
here: `measure` says it.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from memlab.config import (
    FP32_FORMATS,
    Checkpointing,
    Optimizer,
    Precision,
    Sharding,
    StepConfig,
)
from memlab.devices import cards
from memlab.errors import ConfigError, DeviceError
from memlab.explaining import logits
from memlab.explaining.holdings import Group, blocks_pattern, patterns
from memlab.result import StepResult
from memlab.techniques import every, precision
from memlab.techniques.compiling import compilation
from memlab.trace import CATEGORIES, PHASES, Category, Holding, Phase, Timeline

LEAST_SHARE = 0.005  # of the peak; a remedy that frees less is not offered
CHUNKS = 16  # of a loss: what is left of its logits is little beside anything else
BUDGET = 0.5  # half of the activations that the plain step keeps
# parts of operators' names: one fused operator holds all of a recurrent layer, so that a budget
# often finds nothing to cut, and its workspace does not halve
RECURRENT = ("rnn", "lstm", "gru")
TWO_STATES = (Optimizer.ADAM, Optimizer.ADAMW)
REPLICATED = (Sharding.DDP, Sharding.ZERO1)  # each rank holds all weights, gradients and buckets
ANOTHER_OPTIMIZER = "another optimizer: its learning rate has to be found anew"


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change of the settings that would lower the peak.

    Attributes:
        change: the `StepConfig` fields to set.
        config: the config with that change, ready to be measured.
        effect: what it does to the memory.
        price: what it costs.
        categories: what it frees.
        within: pattern of the modules that it acts in; empty for all.
        operators: whose blocks it frees; empty for all.
        freed_bytes: about how much the peak would fall; None where that cannot be said.
        needs_no_buckets: whether no gradients are averaged in buckets of their own then.
    """

    change: Mapping[str, Any]
    config: StepConfig
    effect: str
    price: str
    categories: tuple[Category, ...]
    within: str = ""
    operators: tuple[str, ...] = ()
    freed_bytes: int | None = None
    needs_no_buckets: bool = False

    @property
    def name(self) -> str:
        """The change as it is written, such as "accumulation_steps=2"."""
        return ", ".join(f"{field}={_text(value)}" for field, value in self.change.items())

    def frees(self, held: Group) -> bool:
        """Return whether it acts on blocks of this category, place in the model and operator."""
        if held.is_bucket:
            return self.needs_no_buckets
        is_there = f"{held.pattern}.".startswith(self.within)
        is_its = not self.operators or held.operator in self.operators
        return held.category in self.categories and is_there and is_its


@dataclass(frozen=True, kw_only=True, slots=True)
class _TracedStep:
    """What the estimates read; live bytes by category are (instants, len(CATEGORIES)) floats."""

    result: StepResult
    holdings: Sequence[Holding]
    timeline: Timeline
    live: npt.NDArray[np.float64]
    peak: float

    @property
    def config(self) -> StepConfig:
        return self.result.config

    @property
    def is_fp32(self) -> bool:
        """Whether all is computed in fp32: asked for, or as the model was built."""
        is_built_so = self.result.parameter_formats in ((), FP32_FORMATS)  # older results have none
        kind = self.config.precision
        return kind is Precision.FP32 or (kind is Precision.AS_BUILT and is_built_so)

    def at_peak(self, category: Category) -> int:
        return int(self.live[self.timeline.peak_index, CATEGORIES.index(category)])

    def has_operator(self, *names: str) -> bool:
        """Return whether an operator with one of these in its name holds some of the peak."""
        return any(name in holding.operator for holding in self.holdings for name in names)

    def freed(self, factors: Mapping[Category, float]) -> int:
        """Return by how much the peak falls if these categories are scaled at every instant."""
        # one product, since the panel asks for every remedy at each move of a slider
        return self.fall_to(self.live @ [factors.get(category, 1.0) for category in CATEGORIES])

    def fall_to(self, total: npt.NDArray[np.float64]) -> int:
        return int(self.peak - total.max())


def remedies(result: StepResult) -> tuple[Remedy, ...]:
    """Return what would lower the peak of this result, most bytes first; it needs a timeline."""
    timeline = result.timeline
    if timeline is None or not len(timeline):
        return ()
    peak = float(timeline.total_bytes.max())
    step = _TracedStep(result=result, holdings=result.peak_holdings, timeline=timeline,
                       live=timeline.bytes_by_category.astype(np.float64), peak=peak)  # fmt: skip
    least = LEAST_SHARE * peak
    found = [
        remedy
        for make in MAKERS
        for remedy in make(step)
        # of the device with all estimators: that of a result was possible where it was made
        if not every.is_refused(remedy.config, "cuda", own_optimizer=result.own_optimizer)
        and step.freed(dict.fromkeys(remedy.categories, 0.0)) > least
        and (remedy.freed_bytes is None or remedy.freed_bytes > least)
    ]
    return tuple(sorted(found, key=lambda remedy: -(remedy.freed_bytes or 0)))


def _remedy(step: _TracedStep, change: Mapping[str, Any], **facts: Any) -> Iterator[Remedy]:
    """Yield the remedy of this change; nothing where no config is like this."""
    with contextlib.suppress(ConfigError):
        config = replace(step.config, **change)
        yield Remedy(change=change, config=config, **facts)


def _accumulation(step: _TracedStep) -> Iterator[Remedy]:
    config = step.config
    further = config.divided_further()
    if further is None or config.optimizer_in_backward:
        return
    divided = further.micro_batch_size
    smaller = divided / config.micro_batch_size
    scaled = [Category.ACTIVATIONS, Category.TEMPORARIES]
    if not step.result.device.startswith("cpu"):
        scaled.append(Category.INPUTS)  # on a card only the current micro-batch
    live = step.live.copy()
    in_batch = step.timeline.phase != PHASES.index(Phase.OPTIMIZER)
    for category in scaled:
        live[in_batch, CATEGORIES.index(category)] *= smaller
    if config.accumulation_steps == 1:  # from the second micro-batch on the gradients stand
        gradients = live[:, CATEGORIES.index(Category.GRADIENTS)]
        newborn = np.maximum(np.diff(gradients, prepend=gradients[0]), 0)
        gradients[in_batch] = gradients.max() + newborn[in_batch]
    yield from _remedy(
        step,
        {"accumulation_steps": further.accumulation_steps},
        effect=f"micro-batches of {divided} instead of {config.micro_batch_size}, so less is saved "
        "for each backward",
        price="more and smaller kernels; equal gradients within rounding, unless BatchNorm, "
        "dropout or the loss depends on which samples are together (memlab.verify tells)",
        categories=tuple(scaled),
        freed_bytes=step.fall_to(live.sum(axis=1)),
    )


def _checkpointing(step: _TracedStep) -> Iterator[Remedy]:
    blocks = blocks_pattern(step.holdings)
    if step.config.checkpointing is not Checkpointing.NONE or not blocks:
        return
    inside = _activations_by_block(step.holdings, blocks)
    activations = step.at_peak(Category.ACTIVATIONS)
    share = (sum(inside) - max(inside, default=0)) / activations if activations else 0.0
    traced = bool(inside) or not compilation.is_compiled(step.config)
    yield from _remedy(
        step,
        {"checkpointing": Checkpointing.BLOCKS},
        effect=f"of the blocks {blocks} only the input of each is kept, and one at a time is run "
        "again",
        price="one more forward of the blocks, about a third more compute",
        categories=(Category.ACTIVATIONS,),
        within=f"{blocks}.",
        freed_bytes=step.freed({Category.ACTIVATIONS: 1.0 - share}) if traced else None,
    )


def _activations_by_block(holdings: Sequence[Holding], blocks: str) -> list[int]:
    """Return the bytes of activations in each repeated block."""
    pattern_of, depth = patterns(holdings), blocks.count(".") + 1
    sizes: dict[str, int] = {}
    for holding in holdings:
        is_inside = f"{pattern_of(holding.module)}.".startswith(f"{blocks}.")
        if holding.category is Category.ACTIVATIONS and is_inside:
            block = ".".join(holding.module.split(".")[:depth])
            sizes[block] = sizes.get(block, 0) + holding.nbytes
    return list(sizes.values())


def _chunks(step: _TracedStep) -> Iterator[Remedy]:
    total, _ = logits.saved_logits(step.holdings)
    if step.config.loss_reads_head or not total:
        return
    live = logits.without_logits(step.timeline, step.live, step.holdings, CHUNKS)
    yield from _remedy(
        step,
        {"loss_chunks": CHUNKS},
        effect="the logits, their log-softmax and their gradient are never whole",
        price="one more product with the head; the logits must be what the last nn.Linear returns, "
        "and only torch's cross_entropy may read them (memlab.measure tells)",
        categories=(Category.ACTIVATIONS, Category.TEMPORARIES),
        operators=logits.OPERATORS,
        freed_bytes=step.fall_to(live.sum(axis=1)),
    )


def _mixed(step: _TracedStep) -> Iterator[Remedy]:
    # casting the weights takes half their bytes again, so there must be more to win
    worth_it = step.at_peak(Category.ACTIVATIONS) > step.at_peak(Category.PARAMETERS)
    if not step.is_fp32 or not worth_it:
        return
    has_bf16 = _has_bf16(step.result)
    if has_bf16 is None:
        return
    kind = Precision.BF16_MIXED if has_bf16 else Precision.FP16_MIXED
    yield from _remedy(
        step,
        {"precision": kind},
        effect="matrix products save 16-bit activations; the weights stay fp32, and a cast copy of "
        "them lives through forward",
        price=f"gradients within the rounding of {str(kind).removesuffix('-mixed')} (memlab.verify "
        "tells); slower on a processor without such arithmetic",
        categories=(Category.ACTIVATIONS,),
    )


def _bf16(step: _TracedStep) -> Iterator[Remedy]:
    kind = step.config.precision
    if kind is Precision.AS_BUILT and not step.is_fp32:
        return  # what halves is not known of a model in formats of its own
    if kind in precision.MODEL_DTYPE or not _has_bf16(step.result):
        return
    halved = [Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE]
    if step.is_fp32:
        halved += [Category.ACTIVATIONS, Category.TEMPORARIES]
    # under autocast copies of the weights go too; the workspace of an RNN does not halve
    can_say = step.is_fp32 and not step.has_operator(*RECURRENT)
    yield from _remedy(
        step,
        {"precision": Precision.BF16},
        effect="weights, gradients and optimizer state take 2 bytes a number instead of 4"
        + (", and so do activations" if step.is_fp32 else ""),
        price="weights are rounded to 8 bits of mantissa, so small updates are lost; "
        "precision='bf16-stochastic' keeps them, with fp32 states",
        categories=tuple(halved),
        freed_bytes=step.freed(dict.fromkeys(halved, 0.5)) if can_say else None,
    )


def _optimizer(step: _TracedStep) -> Iterator[Remedy]:
    if step.config.optimizer not in TWO_STATES:
        return
    yield from _remedy(
        step,
        {"optimizer": Optimizer.ADAFACTOR},
        effect="a row and a column of each matrix instead of two states as large as it",
        price=ANOTHER_OPTIMIZER,
        categories=(Category.OPTIMIZER_STATE,),
        freed_bytes=step.freed({Category.OPTIMIZER_STATE: 0.0}),
    )
    yield from _remedy(
        step,
        {"optimizer": Optimizer.SGD_MOMENTUM},
        effect="one state a weight instead of two",
        price=ANOTHER_OPTIMIZER,
        categories=(Category.OPTIMIZER_STATE,),
        freed_bytes=step.freed({Category.OPTIMIZER_STATE: 0.5}),
    )


def _in_backward(step: _TracedStep) -> Iterator[Remedy]:
    if step.config.optimizer_in_backward:
        return
    yield from _remedy(
        step,
        {"optimizer_in_backward": True},
        effect="each gradient is used and freed as soon as backward has it",
        price="no clipping by the norm of all gradients; an optimizer for each parameter in Python",
        categories=(Category.GRADIENTS,),
    )


def _parts(step: _TracedStep) -> Iterator[Remedy]:
    config = step.config
    if config.sharding not in REPLICATED or config.data_parallel_size == 1:
        return
    for sharding, price in (
        (Sharding.ZERO2, "weights are gathered in each forward, and are whole until backward ends"),
        (Sharding.ZERO3, "weights are gathered in each forward and again in each backward"),
    ):
        yield from _remedy(
            step,
            {"sharding": sharding},
            effect=f"each of {config.data_parallel_size} ranks holds its part of weights, "
            "gradients and optimizer state, and there are no buckets, which no smaller micro-batch "
            "shrinks",
            price=price,
            categories=(Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE),
            needs_no_buckets=True,
        )


def _budget(step: _TracedStep) -> Iterator[Remedy]:
    config = step.config
    is_plain = config == config.without_recompute() and not compilation.is_compiled(config)
    if not is_plain or not step.holdings or step.has_operator(*RECURRENT):
        return
    yield from _remedy(
        step,
        {"memory_budget": BUDGET},
        effect="at most half of the activations are held, what is cheapest to recompute goes first",
        price="a few percent of the step's time where pointwise operators hold most, up to a "
        "second forward; memlab.predict tells",
        categories=(Category.ACTIVATIONS,),
    )


def _has_bf16(result: StepResult) -> bool | None:
    """Return whether the device of a result computes in bf16; None if memlab cannot know it."""
    if result.device.startswith("cpu") or result.peak_reserved_bytes is None:  # a recorded CPU too
        return True
    name = result.versions.get("device_name", "")
    for known in (name, result.device):
        try:
            card = cards.resolve(known).card  # of a device of this machine the driver is asked
        except DeviceError:
            continue
        if card is None or card.compute_capability is None:
            continue
        if not known.startswith("cuda") or card.title == name:  # else one of another machine
            return card.has_bf16
    return None


MAKERS = (_accumulation, _checkpointing, _chunks, _mixed, _bf16, _optimizer, _in_backward,
          _parts, _budget)  # fmt: skip


def _text(value: Any) -> str:
    return repr(str(value)) if isinstance(value, str) else str(value)
