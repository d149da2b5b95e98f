"""`explain`: what holds the peak of a result, and which settings would lower it.

It reads the result alone and runs nothing. A block is named by the module and operator that
allocated it, which is where a tensor was made and not every place where it is used.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from memlab._util.checks import checked
from memlab._util.tables import columns_table
from memlab._util.units import format_bytes, listed
from memlab.config import FP32_FORMATS, Precision, StepConfig
from memlab.devices import cards
from memlab.errors import ConfigError, DeviceError
from memlab.result import StepResult, format_percent
from memlab.search.holdings import (
    WORKSPACE,
    Group,
    blocks_pattern,
    group,
    name_of_buffers,
    patterns,
)
from memlab.techniques import compilation, precision, registry
from memlab.techniques.sharding.ranks import REPLICATED, is_tensor_parallel
from memlab.techniques.technique import Saving, catalogue, in_words
from memlab.trace import CATEGORIES, PHASES, Category, Holding, Phase, Timeline

if TYPE_CHECKING:
    import pandas as pd

# What the logits of a cross entropy hold, read off a result: what a chunked loss would not
# hold.
#
# A plain loss saves the log-softmax of the logits; the logits themselves, and their
# gradient twice, live for a while around it. Told by operators: `nll_loss` takes (tokens,
# classes), as a linear head makes them, and `nll_loss2d` what a convolution makes. Left
# out: whether that head is the last `nn.Linear`, and whether something else reads the
# logits, which no result knows.

SAVED = "aten::_log_softmax"
OPERATORS = (SAVED, "aten::_log_softmax_backward_data", "aten::nll_loss_backward")
OF_TOKENS = ("aten::nll_loss_forward", "aten::nll_loss_backward")
ACTIVATIONS, TEMPORARIES = (
    CATEGORIES.index(c) for c in (Category.ACTIVATIONS, Category.TEMPORARIES)
)
OUTSIDE = [PHASES.index(phase) for phase in PHASES if phase not in (Phase.FORWARD, Phase.BACKWARD)]


def saved_logits(holdings: Sequence[Holding]) -> tuple[int, int]:
    """Return the bytes of all log-softmaxes that are saved at the peak, and of one; 0 if none."""
    saved = [h for h in holdings if h.operator == SAVED and h.category is Category.ACTIVATIONS]
    if not saved or not any(h.operator in OF_TOKENS for h in holdings):
        return 0, 0
    total = sum(h.nbytes for h in saved)
    return total, total // sum(h.num_blocks for h in saved)


def without_logits(
    timeline: Timeline, live: npt.NDArray[np.float64], holdings: Sequence[Holding], chunks: int
) -> npt.NDArray[np.float64]:
    """Return the live bytes (instants, categories) with the loss in chunks.

    Lowered is only what surely is the loss's, around the highest instant of each micro-batch: from
    the last rise of the activations by as much as a log-softmax to the first such fall. A loss in
    stretches holds several, at most instants: their share of the activations is taken off all.
    """
    total, one = saved_logits(holdings)
    live, saving = live.copy(), 1 - 1 / chunks
    if total > one:
        live[:, ACTIVATIONS] *= 1 - total * saving / live[timeline.peak_index, ACTIVATIONS]
        return live
    in_batch = ~np.isin(timeline.phase, OUTSIDE)
    for micro_batch in np.unique(timeline.micro_batch[in_batch]):
        instants = np.flatnonzero(in_batch & (timeline.micro_batch == micro_batch))
        part = live[instants]
        born, dead = _life(part[:, ACTIVATIONS], int(part.sum(axis=1).argmax()), one)
        large = part[:, TEMPORARIES] >= one / 2  # under autocast logits have half the bytes
        first, end = born, dead
        while first and large[first - 1]:
            first -= 1
        while dead and end < len(part) and large[end]:
            end += 1
        part[first:end, TEMPORARIES] /= np.where(large[first:end], chunks, 1)
        part[born:dead, ACTIVATIONS] -= total * saving
        live[instants] = part
    return live


def _life(activations: npt.NDArray[np.float64], peak: int, nbytes: int) -> tuple[int, int]:
    """Return the instants of birth and death of a block of activations that is live at the peak."""
    changes = np.diff(activations)
    rises = np.flatnonzero(changes[:peak] >= 0.9 * nbytes)
    falls = np.flatnonzero(changes[peak:] <= -0.9 * nbytes)
    if not len(rises):
        return 0, 0
    return int(rises[-1]) + 1, peak + int(falls[0]) + 1 if len(falls) else len(activations)


# Which settings would lower a peak, and by how much: read off the result, nothing is run.
#
# Offered are the rows of the techniques' catalogue that say what they free, if this config can
# still take them and they act at the peak. Bytes are estimated from the timeline: every instant
# is scaled as the technique would scale it, and the highest one is taken, since a peak may move.
# Where no scaling is known there is no number. On the zoo's four small models on a CPU the
# savings were as estimated to 0.3 % for optimizers, to 40 % for the rest, mostly to 5 %; of a few
# MiB they may be half. Whether a model breaks a graph is not known here: `measure` says it.

LEAST_SHARE = 0.005  # of the peak; a remedy that frees less is not offered
# parts of operators' names: one fused operator holds all of a recurrent layer, so that a budget
# often finds nothing to cut, and its workspace does not halve
RECURRENT = ("rnn", "lstm", "gru")


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
        return in_words(self.change, ", ")

    def frees(self, held: Group) -> bool:
        """Return whether it acts on blocks of this category, place in the model and operator."""
        if held.is_bucket:
            return self.needs_no_buckets
        is_there = f"{held.pattern}.".startswith(self.within)
        is_its = not self.operators or held.operator in self.operators
        return held.category in self.categories and is_there and is_its


@dataclass(frozen=True, kw_only=True, slots=True)
class _ExplainedStep:
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
    step = _ExplainedStep(result=result, holdings=result.peak_holdings, timeline=timeline,
                       live=timeline.bytes_by_category.astype(np.float64), peak=peak)  # fmt: skip
    least = LEAST_SHARE * peak
    offered = (_remedy(step, row) for rows in catalogue().values() for row in rows if row.frees)
    found = [
        remedy
        for remedy in offered
        # of the device with all estimators: that of a result was possible where it was made
        if remedy is not None
        and not registry.is_refused(remedy.config, "cuda", own_optimizer=result.own_optimizer)
        and step.freed(dict.fromkeys(remedy.categories, 0.0)) > least
        and (remedy.freed_bytes is None or remedy.freed_bytes > least)
    ]
    return tuple(sorted(found, key=lambda remedy: -(remedy.freed_bytes or 0)))


def _remedy(step: _ExplainedStep, row: Saving) -> Remedy | None:
    """Return what a row of the catalogue would do here; None if this config cannot take it."""
    offer = row.offers[0] if row.offers else {}
    rule = RULES.get(next(iter(offer), "accumulation_steps"), _by_share)
    is_another = any(getattr(step.config, name) not in row.replaces[name] for name in row.replaces)
    facts = None if is_another else rule(step, row)
    if facts is None:
        return None
    change = {**offer, **facts.pop("change", {})}
    try:
        config = replace(step.config, **change)
    except ConfigError:  # no config is like this
        return None
    now = {name: getattr(config, name) for name in change}
    costs = f"{row.costs}; not for {row.not_for}" if row.not_for else row.costs
    return Remedy(
        change={name: now[name] for name in now if now[name] != getattr(step.config, name)},
        config=config,
        price=costs.replace("`", ""),
        **{"effect": f"saves {row.saves}".replace("`", ""), "categories": row.frees, **facts},
    )


Facts = dict[str, Any]
"""Attributes of a `Remedy` that depend on the step."""


def _by_share(step: _ExplainedStep, row: Saving) -> Facts:
    if row.left is None:
        return {}
    return {"freed_bytes": step.freed(dict.fromkeys(row.frees, row.left))}


def _accumulation(step: _ExplainedStep, row: Saving) -> Facts | None:
    config = step.config
    further = config.divided_further()
    if further is None or config.optimizer_in_backward:
        return None
    divided = further.micro_batch_size
    smaller = divided / config.micro_batch_size
    scaled = [*row.frees]
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
    return {
        "change": {"accumulation_steps": further.accumulation_steps},
        "effect": f"micro-batches of {divided} instead of {config.micro_batch_size}: saves "
        f"{row.saves}",
        "categories": tuple(scaled),
        "freed_bytes": step.fall_to(live.sum(axis=1)),
    }


def _checkpointing(step: _ExplainedStep, row: Saving) -> Facts | None:
    blocks = blocks_pattern(step.holdings)
    if not blocks:
        return None
    inside = _activations_by_block(step.holdings, blocks)
    activations = step.at_peak(Category.ACTIVATIONS)
    share = (sum(inside) - max(inside, default=0)) / activations if activations else 0.0
    traced = bool(inside) or not compilation.is_compiled(step.config)
    return {
        "effect": f"of the blocks {blocks}: saves {row.saves}; one block at a time is run again",
        "within": f"{blocks}.",
        "freed_bytes": step.freed({Category.ACTIVATIONS: 1.0 - share}) if traced else None,
    }


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


def _chunks(step: _ExplainedStep, row: Saving) -> Facts | None:
    total, _ = saved_logits(step.holdings)
    if step.config.loss_reads_head or not total:
        return None
    chunks = row.offers[0]["loss_chunks"]
    live = without_logits(step.timeline, step.live, step.holdings, chunks)
    return {"operators": OPERATORS, "freed_bytes": step.fall_to(live.sum(axis=1))}


def _precision(step: _ExplainedStep, row: Saving) -> Facts | None:
    kind, wanted = step.config.precision, row.offers[0]["precision"]
    has_bf16 = _has_bf16(step.result)
    if wanted != Precision.BF16:  # a mixed one
        # casting the weights takes half their bytes again, so there must be more to win
        worth_it = step.at_peak(Category.ACTIVATIONS) > step.at_peak(Category.PARAMETERS)
        is_its = has_bf16 is (wanted == Precision.BF16_MIXED)
        return {} if step.is_fp32 and worth_it and is_its else None
    if kind is Precision.AS_BUILT and not step.is_fp32:
        return None  # what halves is not known of a model in formats of its own
    if kind in precision.MODEL_DTYPE or not has_bf16:
        return None
    halved = row.frees
    if step.is_fp32:
        halved = (*halved, Category.ACTIVATIONS, Category.TEMPORARIES)
    # under autocast copies of the weights go too; the workspace of an RNN does not halve
    can_say = step.is_fp32 and not step.has_operator(*RECURRENT)
    freed = step.freed(dict.fromkeys(halved, 0.5)) if can_say else None
    facts: Facts = {"categories": halved, "freed_bytes": freed}
    if not step.is_fp32:
        facts["effect"] = f"saves half of the {listed([c.replace('_', ' ') for c in halved])}"
    return facts


def _parts(step: _ExplainedStep, row: Saving) -> Facts | None:
    return {"needs_no_buckets": True} if step.config.data_parallel_size > 1 else None


def _budget(step: _ExplainedStep, row: Saving) -> Facts | None:
    config = step.config
    is_plain = config == config.without_recompute() and not compilation.is_compiled(config)
    return {} if is_plain and step.holdings and not step.has_operator(*RECURRENT) else None


RULES: Mapping[str, Callable[[_ExplainedStep, Saving], Facts | None]] = {
    "accumulation_steps": _accumulation, "checkpointing": _checkpointing, "loss_chunks": _chunks,
    "precision": _precision, "sharding": _parts, "memory_budget": _budget,
}  # fmt: skip
"""What depends on the step, by the setting; None where this config cannot take it."""


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


BUCKETS = "buckets of gradients"
MOST_ROWS, MOST_SAVED = 8, 5  # in print: the largest of all, and of the saved tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of what holds the peak; see `Explanation.rows`.

    Attributes:
        category: what the blocks are for.
        where: path of the module, or of the parameter; "*" stands for the number of a repeated
            block. Empty where no module was running.
        num_modules: paths that `where` stands for.
        operator: that allocated them; empty for parameters and optimizer state.
        num_blocks: of memory.
        nbytes: that they hold together.
        fraction: of the peak.
        freed_by: the settings that would free some of them.
        is_workspace: whether a library such as cuBLAS holds them; they count as buffers.
        is_bucket: whether DistributedDataParallel averages gradients in them; they count so too.
    """

    category: Category
    where: str
    num_modules: int
    operator: str
    num_blocks: int
    nbytes: int
    fraction: float
    freed_by: tuple[str, ...]
    is_workspace: bool = False
    is_bucket: bool = False

    def __str__(self) -> str:
        """Return one line, such as "12.0 MiB  9 %  activations of h.*.mlp.act (12 modules)"."""
        return "  ".join(_cells(self)).rstrip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What holds a peak, and what would lower it.

    Attributes:
        title: what ran, and where the numbers come from.
        message: one sentence: how high the peak is and where, or why there is nothing to explain.
        peak_bytes: allocated at the peak; None if none is known.
        by_category: bytes of each category at the peak.
        rows: what holds it, the largest first; they sum to `peak_bytes`.
        remedies: settings that would lower it, those of most bytes first.
    """

    title: str
    message: str
    peak_bytes: int | None = None
    by_category: Mapping[str, int]
    rows: tuple[Row, ...] = ()
    remedies: tuple[Remedy, ...] = ()

    @property
    def saved(self) -> tuple[Row, ...]:
        """The rows of tensors that forward saved for backward, the largest first."""
        return tuple(row for row in self.rows if row.category is Category.ACTIVATIONS)

    def to_frame(self) -> "pd.DataFrame":
        """Return one line a row."""
        import pandas as pd

        names = tuple(Row.__slots__)
        table = [{name: getattr(row, name) for name in names} for row in self.rows]
        frame = pd.DataFrame(table, columns=names)
        return frame.assign(category=frame["category"].astype(str),
                            freed_by=[", ".join(row.freed_by) for row in self.rows])  # fmt: skip

    def __str__(self) -> str:
        """Return a page of plain text: the peak, what holds it, what would lower it."""
        lines = [self.title, self.message]
        if self.by_category:
            lines.append(", ".join(self._shares()))
        if shown := self._shown():
            table = [(*_cells(row), self._numbers(row)) for row in shown]
            lines += ["", "held by (in brackets what would free it)", *_aligned(table)]
            lines += [f"  {line}" for line in self._rest(shown)]
        if self.remedies:
            lines += ["", "what would lower the peak"]
        for number, remedy in enumerate(self.remedies, start=1):
            lines.append(f"  [{number}] {remedy.name}: {_freed(remedy)}")
            lines += [f"      {remedy.effect}", f"      price: {remedy.price}"]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return two small tables for notebooks: what holds the peak, what would lower it."""
        import html  # not before a table is shown

        head = f"<p><b>{html.escape(self.title)}</b><br>{html.escape(self.message)}</p>"
        shares = f"<p>{', '.join(self._shares())}</p>" if self.by_category else ""
        shown = self._shown()
        rest = "".join(f"<p>{html.escape(line)}</p>" for line in self._rest(shown))
        held = columns_table(("bytes", "share", "category", "held by", "operator", "freed by"),
                      [(*_cells(row), self._numbers(row)) for row in shown])  # fmt: skip
        lowered = columns_table(
            ("", "what would lower the peak", "by", "how", "price"),
            [(f"[{number}]", r.name, _freed(r), r.effect, r.price)
             for number, r in enumerate(self.remedies, start=1)],
        )  # fmt: skip
        return f"{head}{shares}{held}{rest}{lowered}"

    def _shares(self) -> list[str]:
        """Return every category that holds anything, its bytes and its share, largest first."""
        kinds = {row.is_workspace for row in self.rows if row.category is Category.BUFFERS}
        total = sum(self.by_category.values())
        ranked = sorted(self.by_category.items(), key=lambda item: -item[1])
        return [
            f"{name_of_buffers(kinds) if name == Category.BUFFERS else name.replace('_', ' ')} "
            f"{format_bytes(size)} ({_share(size / total)})"
            for name, size in ranked
            if size
        ]

    def _shown(self) -> list[Row]:
        saved = [row for row in self.saved[:MOST_SAVED] if row.fraction >= LEAST_SHARE]
        chosen = {*self.rows[:MOST_ROWS], *saved}
        return [row for row in self.rows if row in chosen]

    def _numbers(self, row: Row) -> str:
        """Return the remedies that free a row, as they are numbered in print."""
        names = enumerate((remedy.name for remedy in self.remedies), start=1)
        numbers = [str(number) for number, name in names if name in row.freed_by]
        return f"[{', '.join(numbers)}]" if numbers else ""

    def _rest(self, shown: Sequence[Row]) -> list[str]:
        left = sum(row.nbytes for row in self.rows) - sum(row.nbytes for row in shown)
        count = len(self.rows) - len(shown)
        return [f"{format_bytes(left)} in {count} smaller ones"] if count else []


@checked()
def explain(result: StepResult) -> Explanation:
    """Return what holds the peak of a result, and which settings would lower it.

    Args:
        result: measured, predicted or recorded; one that ran out of memory too, if it was traced.

    Raises:
        MemlabError: `result` is no `StepResult`.

    >>> import memlab
    >>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
    >>> result = memlab.recorded(workload, memlab.StepConfig(batch_size=4), "amd-epyc")
    >>> explanation = explain(result)
    >>> sum(row.nbytes for row in explanation.rows) == explanation.peak_bytes
    True
    >>> [remedy.name for remedy in explanation.remedies][:2]
    ["precision='bf16'", "optimizer='adafactor'"]
    """
    title = (
        f"{result.workload_name} on {result.device}, {result.settings}: "
        f"{str(result.outcome).replace('_', ' ')} ({result.source})"
    )
    peak, by_category = result.peak_allocated_bytes, result.peak_by_category
    if peak is None or by_category is None:
        return Explanation(title=title, message=_nothing(result), peak_bytes=peak, by_category={})
    offered = remedies(result)
    groups = group(
        result.peak_holdings,
        is_cuda=result.peak_reserved_bytes is not None,
        is_tried=is_tensor_parallel(result.config),
        bucketed_bytes=_bucketed_bytes(result),
    )
    return Explanation(
        title=title,
        message=_peak(result, peak),
        peak_bytes=peak,
        by_category=dict(by_category),
        rows=tuple(_row(held, peak, offered) for held in groups),
        remedies=offered,
    )


def _bucketed_bytes(result: StepResult) -> int:
    """Return the bytes of the gradients that are averaged in buckets; 0 where none are."""
    if result.config.sharding not in REPLICATED or result.timeline is None:
        return 0
    return int(result.timeline.bytes_of(Category.GRADIENTS).max())


def _nothing(result: StepResult) -> str:
    if result.peak_allocated_bytes is not None:
        why = f"the peak of {format_bytes(result.peak_allocated_bytes)} allocated has no breakdown"
        return f"Nothing to explain: {why}: {' '.join(result.notes) or result.message}"
    ended = str(result.outcome).replace("_", " ")
    return f"Nothing to explain: no memory was {result.source}, the outcome is {ended}: " \
        f"{result.message}"  # fmt: skip


def _peak(result: StepResult, peak: int) -> str:
    text = f"peak {format_bytes(peak)} allocated ({result.source})"
    if result.peak_place is not None:
        text += f", in {result.peak_place}"
    limit, counted = result.memory_limit_bytes, result.counted_peak
    if limit is not None and counted is not None and counted.nbytes > limit:
        text += f"; {counted.beside(limit, fits=result.fits)}"
    if result.host_bytes:
        text += f"; {format_bytes(result.host_bytes)} are held in host memory"
        if result.locked_host_bytes is not None:
            text += f", where {format_bytes(result.locked_host_bytes)} are locked for them"
    if result.sent_bytes:
        how = "; ".join(map(str, result.communication))
        text += f"; a rank sends {format_bytes(result.sent_bytes)} a step ({how})"
    return text if result.peak_holdings else f"{text}; which modules hold it was not traced"


def _row(held: Group, peak: int, offered: Iterable[Remedy]) -> Row:
    return Row(
        category=held.category,
        where=held.where,
        num_modules=len(held.modules),
        operator=held.operator,
        num_blocks=held.num_blocks,
        nbytes=held.nbytes,
        fraction=held.nbytes / peak,
        freed_by=tuple(remedy.name for remedy in offered if remedy.frees(held)),
        is_workspace=held.is_workspace,
        is_bucket=held.is_bucket,
    )


def _cells(row: Row) -> tuple[str, ...]:
    where = BUCKETS if row.is_bucket else row.where or "module not known"
    if row.num_modules > 1:
        where += f" ({row.num_modules} {_kind(row)})"
    category = WORKSPACE if row.is_workspace else str(row.category).replace("_", " ")
    return (format_bytes(row.nbytes), _share(row.fraction), category, where, row.operator)


def _kind(row: Row) -> str:
    named = row.category in (Category.PARAMETERS, Category.OPTIMIZER_STATE)
    return "parameters" if named else "modules"


def _freed(remedy: Remedy) -> str:
    if remedy.freed_bytes is None:
        return "no estimate"
    return f"about {format_bytes(remedy.freed_bytes)} less"


def _share(fraction: float) -> str:
    return "<0.1 %" if fraction < 0.001 else format_percent(fraction)


def _aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table of text; sizes and shares stand at the right of their column."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  " + "  ".join(
            cell.rjust(width) if column < 2 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in table
    ]  # fmt: skip
