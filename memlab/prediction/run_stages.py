"""The course of a run: its stages one after the other, on real or on fake tensors.

    number  name            what happens
     -1     build           model, optimizer, batch; averaged weights
      0     first step      the optimizer's state is made
      1     EMA update      of the averaged weights, with `ema`
      2     step            like all later ones
      3     EMA update
      4     evaluation      if asked for, like the next two
      5     generation
      6     saving
      7     step afterwards if there was any of these

A stage that is left out has no number. Each stage draws from the seed, so that evaluation and
generation change nothing in the steps after them.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from memlab._util.torch_private import pytree
from memlab.errors import UnsupportedError
from memlab.memory.lifetimes import StepMemory, blocks_of_step, step_memory
from memlab.memory.replay import AllocatorSettings, replay
from memlab.prediction.run_result import RunTimeline, StageCost
from memlab.prediction.run_settings import Evaluation, EvaluationOutputs, Generation, TrainingRun
from memlab.result import CountedPeak
from memlab.techniques import precision
from memlab.techniques.batches import moved
from memlab.techniques.step import Step, own_batch
from memlab.trace import CATEGORIES, Category, Mark, Phase, Trace, highest_of_each
from memlab.workloads.generation_caches import (
    CACHE_ARGUMENTS,
    cache_argument,
    check_positions,
    check_window,
    generating_model,
    key_value_cache,
)

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

# Evaluation between two steps, as PyTorch loops and transformers' `Trainer` do it.
#
# Each batch is computed without gradients and in the mode of `eval()`: dropout is off,
# batch norm uses its running statistics, recomputed modules save nothing. Precision and
# offloading are those of the training step. What is kept of a batch: everything that the
# model returned beside its loss and its caches, and the labels. A variable of the loop
# keeps its value until the next batch replaces it, so the outputs of one batch are still
# there while the next one is computed. Source: `evaluation_loop` and `EvalLoopContainer` of
# transformers 5.
#
# Left out: `metrics` on the host, and labels that are neither an entry "labels" of the
# batch nor its last part.

END = -1  # the number of what comes after the last batch or token
CACHES = (*CACHE_ARGUMENTS, "mems", "cache_params")


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation without gradients; afterwards each module is as it was."""
    was = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in was:
            module.training = training


@contextlib.contextmanager
def in_forward(step: Step) -> Iterator[None]:
    """Run a forward pass in the precision of a step, with its offloaded weights."""
    with (
        step.run_in(),
        precision.matrix_products(step.config.precision),
        precision.autocast(step.config, step.device),
        step.offloader or contextlib.nullcontext(),
    ):
        yield


def evaluate(step: Step, settings: Evaluation, num_batches: int, mark: Mark) -> None:
    """Evaluate the first batches of an evaluation set; nothing of it remains.

    Raises:
        UnsupportedError: outputs are to be kept, and there are none.
    """
    found: list[Any] = []
    hook = None
    if settings.keeps:
        hook = step.run_model.register_forward_hook(lambda _, __, out: found.append(out))
    kept: Any = None
    total: Any = 0.0
    try:
        with evaluating(step.model):
            for index in range(num_batches):
                mark(Phase.DATA, index)
                made = step.workload.make_batch(settings.batch_size)
                batch = own_batch(made, step.config, step.device)
                batch = batch if step.device.type == "cpu" else moved(batch, step.device)
                del made

                mark(Phase.FORWARD, index)
                with in_forward(step):
                    loss = step.workload.compute_loss(step.run_model, batch)
                total = total + loss.detach()
                if settings.keeps:
                    outputs = _outputs(found.pop(), step.model, batch)
                    kept = _joined(kept, outputs, settings.keep_outputs)
                del loss
            mark(Phase.TEARDOWN, END)
    finally:
        if hook is not None:
            hook.remove()


def _joined(kept: Any, outputs: list[torch.Tensor], how: EvaluationOutputs) -> Any:
    """Return what is kept after another batch."""
    if how is EvaluationOutputs.LIST:
        return [*(kept or []), outputs]
    if kept is None:
        return outputs
    # all of them: the old ones live until the whole list has been made
    return [torch.cat((old, new), dim=0) for old, new in zip(kept, outputs, strict=True)]


def _outputs(out: Any, model: nn.Module, batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output that an evaluation keeps, and the labels.

    Raises:
        UnsupportedError: the model returns nothing beside its loss.
    """
    if isinstance(out, Mapping):
        config = getattr(model, "config", None)
        ignored = getattr(config, "keys_to_ignore_at_inference", None) or CACHES
        out = [value for name, value in out.items() if name not in (*ignored, "loss")]
    leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    found = [leaf.detach() for leaf in leaves if leaf.ndim]
    if not found:
        raise UnsupportedError(
            f"keep_outputs: {type(model).__name__} returns its loss alone, so there are no outputs "
            "to keep; use keep_outputs='none'"
        )
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(batch, tuple | list) and len(batch) > 1:
        labels = batch[-1]
    return [*found, labels.detach()] if isinstance(labels, torch.Tensor) else found


# Generation between two steps: greedy decoding with a cache of keys and values.
#
# What one call of `generate` (transformers 5) allocates, operator by operator:
#
#     prefill     the whole prompt through the model; logits of its last token only, if the
# model can leave out the others (`logits_to_keep`) each token  one token through the model.
# A dynamic cache concatenates: the new keys of a layer stand beside the old ones until the
# old ones are freed. A static cache writes in place, into room that was made for all
# tokens. after each  a copy of the last logits in fp32, its argmax, and ids, mask and
# positions with one token more
#
# The loop is written out, since `generate` itself asks after each token whether all prompts
# have ended, which fake tensors cannot answer. A test compares it with `generate` on the
# real allocator. Left out: sampling, beams, the scores that `generate` can return, and its
# compiled decoding with a static cache on a card.


def generate(step: Step, settings: Generation, num_new: int, mark: Mark) -> None:
    """Generate the first `num_new` of the new tokens; nothing of it remains.

    Raises:
        UnsupportedError: the model cannot generate, or has too few positions.
    """
    base = generating_model(step.model)
    check_positions(base, settings.num_tokens)
    if num_new < settings.new_tokens:  # the others are to follow from these
        check_window(base, settings.prompt_tokens, settings.num_tokens)
    mark(Phase.DATA, 0)
    vocab_size = base.config.get_text_config(decoder=True).vocab_size
    shape = (settings.batch_size, settings.prompt_tokens)
    tokens = torch.randint(vocab_size, shape).to(step.device)
    mask = torch.ones(shape, dtype=torch.long, device=step.device)
    positions = mask.cumsum(dim=-1) - 1
    accepted = inspect.signature(base.forward).parameters
    options: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in accepted:
        options["logits_to_keep"] = 1

    with evaluating(step.model):
        options[str(cache_argument(base))] = key_value_cache(
            base, settings.cache, settings.num_tokens, str(step.config.precision)
        )
        given = tokens.clone()
        for index in range(num_new):
            mark(Phase.FORWARD, index)
            if "position_ids" in accepted:
                options["position_ids"] = positions[:, -given.shape[1] :].clone()
            with in_forward(step):
                out = base(input_ids=given, attention_mask=mask, **options)
            mask = torch.cat((mask, mask.new_ones((len(mask), 1))), dim=-1)
            positions = torch.cat((positions, positions[:, -1:] + 1), dim=-1)
            # as in `generate`, these live until those of the next token replace them
            last = out.logits[:, -1].to(copy=True, dtype=torch.float32)
            chosen = last.argmax(dim=-1)
            tokens = torch.cat((tokens, chosen[:, None]), dim=-1)
            given = tokens[:, -1:].clone()
            del out
        mark(Phase.TEARDOWN, END)


EMA_COPY = 1  # the number of the micro-batch of the interval in which averaged weights are made
DECAY = 0.999  # it changes no size


class StageName(StrEnum):
    """The stages of a run, in their order."""

    BUILD = "build"
    FIRST_STEP = "first step"
    STEP = "step"
    EMA_UPDATE = "EMA update"
    EVALUATION = "evaluation"
    GENERATION = "generation"
    SAVING = "saving"
    STEP_AFTERWARDS = "step afterwards"


def names_of(run: TrainingRun) -> list[StageName]:
    """Return the names of the stages after the build, by number."""
    update = [StageName.EMA_UPDATE] if run.ema else []
    between = [
        name
        for name, is_asked in (
            (StageName.EVALUATION, run.evaluate is not None),
            (StageName.GENERATION, run.generate is not None),
            (StageName.SAVING, run.save),
        )
        if is_asked
    ]
    after = [StageName.STEP_AFTERWARDS] if between else []
    return [StageName.FIRST_STEP, *update, StageName.STEP, *update, *between, *after]


def run_all_stages(
    step: Step,
    run: TrainingRun,
    mark: Callable[[int, Phase, int], None],
    *,
    seed: int,
    num_new_tokens: int,
    num_batches: int,
    save: Callable[[], Any],
    stepped: Callable[[], Any],
    begin: Callable[[StageName], Any] = lambda name: None,
) -> None:
    """Run all stages of a step that was built.

    Args:
        step: of the workload.
        run: what is done beside the steps.
        mark: called with the number of a stage, a phase, and a micro-batch, batch or token.
        seed: set before each stage.
        num_new_tokens: of those that are to be generated; the others are like them.
        num_batches: of those that are to be evaluated; the others are like them.
        save: writes a checkpoint.
        stepped: called after each update.
        begin: called when a stage begins.
    """
    average = _averaged(step, mark) if run.ema else None

    def train(number: int) -> None:
        step(partial(mark, number))
        stepped()

    def update(number: int) -> None:
        assert average is not None
        mark(number, Phase.FORWARD, 0)
        average.update_parameters(step.model)

    def evaluation(number: int) -> None:
        assert run.evaluate is not None
        evaluate(step, run.evaluate, num_batches, partial(mark, number))

    def generation(number: int) -> None:
        assert run.generate is not None
        generate(step, run.generate, num_new_tokens, partial(mark, number))

    def saving(number: int) -> None:
        mark(number, Phase.FORWARD, 0)
        save()

    does = {
        StageName.EMA_UPDATE: update,
        StageName.EVALUATION: evaluation,
        StageName.GENERATION: generation,
        StageName.SAVING: saving,
    }
    for number, name in enumerate(names_of(run)):
        gc.collect()  # a library may leave cycles, which Python would free at some later time
        begin(name)
        step.set_seed(seed)
        does.get(name, train)(number)


def _averaged(step: Step, mark: Callable[[int, Phase, int], None]) -> AveragedModel:
    """Return averaged weights, as scripts make them: of the model on its device.

    Raises:
        UnsupportedError: the weights are codes, whose average is no average of the weights.
    """
    formats = {p.dtype for p in step.model.parameters() if not p.is_floating_point()}
    if formats:
        found = " and ".join(sorted(str(each).removeprefix("torch.") for each in formats))
        raise UnsupportedError(
            f"ema: the model has quantized weights ({found}), whose codes AveragedModel would "
            "average as numbers; use ema=False, or a base that is not quantized"
        )
    mark(-1, Phase.BUILD, EMA_COPY)
    made = AveragedModel(step.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    mark(-1, Phase.BUILD, 0)
    return made


# What each stage of a run holds, from the trace of a run: measured and predicted alike.
#
# What stands at the peak of a stage is named by the rule of `memory/lifetimes.py`, and
# further:
#
#     made with the averaged weights                              EMA weights
#     allocated in an evaluation, kept beyond its batch           kept outputs
#     allocated in a generation, kept beyond its token            KV cache

KEPT: Mapping[str, str] = {StageName.EVALUATION: "kept outputs", StageName.GENERATION: "KV cache"}
EMA = "EMA weights"
MOST_INSTANTS = 2000  # of a timeline: one a pixel of the widest page


def rows_of_stages(trace: Trace, names: Sequence[str]) -> list[tuple[str, int, slice]]:
    """Return name, number and rows of each stage: of equal names both, and first of the build."""
    step = np.array([interval.step for interval in trace.intervals])[trace.interval]
    found = []
    for number, name in enumerate(names):
        rows = np.flatnonzero(step == number)
        if len(rows):
            found.append((name, number, slice(int(rows[0]), int(rows[-1]) + 1)))
    first = found[0][2].start if found else len(step)
    return [(str(StageName.BUILD), -1, slice(0, first)), *found] if first else found


def stage_costs(
    trace: Trace, names: Sequence[str], reserved: npt.NDArray[np.int64] | None
) -> tuple[StageCost, ...]:
    """Return what each stage holds. Of stages with one name the one that reaches highest counts.

    Args:
        trace: of the whole run, whose stages are its steps.
        names: of the stages after the build, by number.
        reserved: int64, (rows,), what the caching allocator holds; None where there is none.
    """
    live = np.cumsum(trace.nbytes)
    found: dict[str, StageCost] = {}
    for name, number, rows, peak in peaks_of_stages(trace, names, live):
        held = int(live[peak])
        if name in found and found[name].peak_allocated_bytes >= held:
            continue
        memory = step_memory(trace, max(number, 0))
        found[name] = StageCost(
            name=str(name),
            peak_allocated_bytes=held,
            peak_reserved_bytes=None if reserved is None else int(reserved[rows].max()),
            bytes_by_category=_standing(memory, name, peak),
            module=_module(trace, peak),
        )
    return tuple(found.values())


def peaks_of_stages(
    trace: Trace, names: Sequence[str], live: npt.NDArray[np.int64]
) -> Iterator[tuple[str, int, slice, int]]:
    """Yield name, number, rows and the row of the peak of each stage.

    Args:
        trace: of the whole run.
        names: of the stages after the build, by number.
        live: int64, (rows,), the bytes that are live after each row.
    """
    is_counted = ~_is_in_the_making(trace)
    for name, number, rows in rows_of_stages(trace, names):
        peak = rows.start + int(np.argmax(np.where(is_counted[rows], live[rows], -1)))
        # where a stage only frees, it begins with the most
        before = int(live[rows.start - 1]) if rows.start else 0
        yield name, number, rows, rows.start - 1 if before > live[peak] else peak


def timeline_of_run(trace: Trace, names: Sequence[str]) -> RunTimeline:
    """Return what is live over a whole run; the arguments are those of `peaks_of_stages`."""
    live = np.cumsum(trace.nbytes)
    peaks = list(peaks_of_stages(trace, names, live))
    rows = np.union1d(highest_of_each(live, MOST_INSTANTS), [row for _, _, _, row in peaks])
    starts = np.array([inside.start for _, _, inside, _ in peaks])
    stage = np.maximum(np.searchsorted(starts, rows, "right") - 1, 0)
    held = np.zeros((len(rows), len(CATEGORIES)), np.int64)
    for place, (_, number, _, _) in enumerate(peaks):
        here, blocks = stage == place, blocks_of_step(trace, max(number, 0))
        ends = np.minimum(blocks.deaths, len(live))  # of what is never freed, after the last row
        for column in np.unique(blocks.columns).tolist():
            own = blocks.columns == column
            sizes, change = trace.nbytes[blocks.births[own]], np.zeros(len(live) + 1, np.int64)
            np.add.at(change, blocks.births[own], sizes)
            np.subtract.at(change, ends[own], sizes)
            held[here, column] = np.cumsum(change)[rows[here]]
    names_there = tuple(str(name) for name, *_ in peaks)
    return RunTimeline(
        bytes_by_category=held, stage=stage, stages=names_there, operator=trace.operator[rows]
    )


def _is_in_the_making(trace: Trace) -> npt.NDArray[np.bool_]:
    """Return in which rows a batch is not complete yet.

    How a loader makes it is its own affair: it may have processes for that. Here a workload makes
    it, and on a CPU memlab copies it. A script that makes its batches itself holds what it makes.
    """
    is_data = np.array([
        interval.phase is Phase.DATA and interval.micro_batch >= 0 for interval in trace.intervals
    ])  # fmt: skip
    goes_on = np.append(trace.interval[1:] == trace.interval[:-1], False)
    found: npt.NDArray[np.bool_] = is_data[trace.interval] & goes_on
    return found


def _standing(memory: StepMemory, name: str, peak: int) -> dict[str, int]:
    """Return what is live at an event by what it is for; the largest first, nothing empty."""
    blocks, trace = memory.blocks, memory.trace
    alive = np.flatnonzero((blocks.births <= peak) & (peak < blocks.deaths))
    births = blocks.births[alive]
    of_interval = trace.interval[births]
    is_average = np.array([
        interval.step < 0 and interval.phase is Phase.BUILD and interval.micro_batch == EMA_COPY
        for interval in trace.intervals
    ])[of_interval]  # fmt: skip
    labels = np.array([str(category) for category in CATEGORIES], object)[blocks.columns[alive]]
    if name in KEPT:
        labels[labels == str(Category.ACTIVATIONS)] = KEPT[name]
    labels[is_average & (labels != str(Category.TEMPORARIES))] = EMA
    sums = {
        str(label): int(trace.nbytes[births[labels == label]].sum())
        for label in sorted(set(labels))
    }
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _module(trace: Trace, event: int) -> str:
    """Return the module that ran at an event; empty if none did."""
    index = int(trace.module[event])
    return trace.modules[index] if index >= 0 else ""


# Which stages of a run fit a limit: on a card by replay of the caching allocator at that
# limit.


def judged(
    stages: Sequence[StageCost],
    counted: Sequence[CountedPeak],
    limit_bytes: int | None,
    replayed: ReplayedRun | None = None,
) -> tuple[StageCost, ...]:
    """Return the stages with whether each fits.

    Args:
        stages: of a run.
        counted: the peak of each that counts against the limit.
        limit_bytes: None for no limit.
        replayed: the run at any limit; None if no allocator is replayed.
    """
    if limit_bytes is None:
        return tuple(stages)
    found = []
    for stage, peak in zip(stages, counted, strict=True):
        within = None if replayed is None else partial(replayed.fits, stage.name)
        found.append(
            replace(
                stage,
                fits=peak.fits(limit_bytes, within),
                close_to_limit=peak.is_close_to(limit_bytes, within),
            )
        )
    return tuple(found)


class ReplayedRun:
    """A run as the caching allocator serves it within a limit.

    Where a stage does not fit, it is left out and the run goes on, so that later stages are judged
    by themselves. The stages that leave something behind cannot be left out: then nothing after
    them fits.

    Attributes:
        trace: the run, with the sizes that it asks for.
        names: of its stages after the build, by number.
        settings: of the allocator.
    """

    def __init__(self, trace: Trace, names: Sequence[str], settings: AllocatorSettings) -> None:
        self.trace, self.names, self.settings = trace, names, settings
        self._known: dict[int, frozenset[str]] = {}

    def fits(self, name: str, limit_bytes: int) -> bool:
        """Return whether a stage runs within a limit."""
        if limit_bytes not in self._known:
            self._known[limit_bytes] = self._over(limit_bytes)
        return name not in self._known[limit_bytes]

    def _over(self, limit_bytes: int) -> frozenset[str]:
        """Return the stages that do not run within a limit."""
        trace, settings = self.trace, replace(self.settings, limit_bytes=limit_bytes)
        stages = rows_of_stages(trace, self.names)
        left = np.ones(len(trace.nbytes), bool)
        over: set[str] = set()
        while True:
            kept = np.flatnonzero(left)
            stream = None if trace.stream is None else trace.stream[kept]
            held = replay(trace.address[kept], trace.nbytes[kept], settings, stream=stream)
            if held.out_of_memory_at is None:
                return frozenset(over)
            event = int(kept[held.out_of_memory_at])
            at = max(place for place, (_, _, rows) in enumerate(stages) if rows.start <= event)
            name, _, rows = stages[at]
            over.add(name)
            if not _leaves_nothing(trace, rows):
                return frozenset(over | {later for later, _, _ in stages[at:]})
            left[rows] = False


def _leaves_nothing(trace: Trace, rows: slice) -> bool:
    """Return whether a stage frees all that it allocates, and nothing else."""
    address, nbytes = trace.address[rows], np.sign(trace.nbytes[rows])
    _, place = np.unique(address, return_inverse=True)
    return not np.bincount(place, weights=nbytes).any()
