"""Whether micro-batches together give the gradient of the whole batch: decided once for a workload.

A few samples are trained in micro-batches and at once, as `verify.py` compares them for
`verify`: several batches, since in one of them all samples may have as many labels. A sample count
that the micro-batches do not divide shows a sum that was taken for a mean. Random numbers of
modules are off meanwhile, so that what the loss does is seen beside them.

What is too large to run is left to
`per_sample.py`, which looks at shapes.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from memlab._util.torch_private.tensors import Dropout
from memlab._util.units import MIB, format_bytes
from memlab.config import Optimizer, Precision, StepConfig
from memlab.devices.generators import preserved_random_state
from memlab.errors import MemlabError, UnsupportedError
from memlab.running import Progress, Report, explain
from memlab.runtime.inspect import build_cheaply
from memlab.runtime.updates import run_updates
from memlab.runtime.verify import KeptState, judge_full_batch
from memlab.techniques import precision
from memlab.techniques.accumulation import random_modules, sample_mixing_modules
from memlab.techniques.step import set_seed
from memlab.workload import Workload

CASES = ((6, 2), (6, 3), (5, 2), (4, 4), (32, 4), (64, 2))
"""Samples and micro-batches; the last ones only of what is small."""

SHORT = 16  # of sequences whose length a workload can change
SURE = 4  # cases that every workload has to pass
SEEDS = 2  # batches of each case
MOST_BYTES = 32 * MIB  # of parameters; a run holds about six times as much
UNCOUNTED_BYTES = MIB  # the same, where operations cannot be counted
MOST_OPERATIONS = 2e9  # of one case: a fraction of a second of a processor
PASSES = 6  # forward and backward, in micro-batches and at once


@dataclass(frozen=True, kw_only=True, slots=True)
class AccumulationEffect:
    """What micro-batches do to the gradient of a workload.

    Attributes:
        same: "yes", "no" or "unknown": whether they give the gradient of the whole batch. "refused"
            of a step that has no micro-batches, as with several losses.
        why: a sentence without its full stop, which names the module or what was seen.
        draws: of a "no", whether random numbers are the reason, or hide whether there is another.
    """

    same: str
    why: str
    draws: bool = False

    def __str__(self) -> str:
        """Return what to know before the batch is divided; empty if nothing changes."""
        if self.same == "yes":
            return ""
        if self.same == "no":
            return f"micro-batches give another gradient: {self.why}"
        if self.same == "refused":
            return f"micro-batches are refused: {self.why}"
        return (
            f"it is not known whether micro-batches give the same gradient: {self.why}; "
            "memlab.verify of a config with accumulation_steps=2 tells"
        )


def shortened(workload: Workload) -> Workload:
    """Return the workload with small samples, if it can be made with such: by its caller only."""
    own = workload.sample_size
    if own is None or own.varies:
        return workload
    for size in (*((SHORT,) if own.dimensions == 1 else ()), *own.offered[:1]):
        try:
            if size < own.value:
                return workload.resized(size)
        except MemlabError:
            continue
    return workload


def accumulation_in_process(workload: Workload, *, report: Report) -> AccumulationEffect:
    """Return what micro-batches do, from runs of a few samples where these are cheap."""
    report(Progress(text="whether micro-batches give the same gradient", fraction=0.0))
    workload = dataclasses.replace(workload, make_optimizer=None)  # no gradient depends on it
    with preserved_random_state(torch.device("cpu")):
        set_seed(0)
        model = build_cheaply(workload).train()
        if (mixed := mixing(model)) is not None:
            return mixed
        random, nbytes = random_modules(model), precision.bytes_of(model, Precision.AS_BUILT)
        del model
        if nbytes > MOST_BYTES:
            return _too_large(f"its parameters take {format_bytes(nbytes)}")
        operations = _operations(workload)
        if operations is None and nbytes > UNCOUNTED_BYTES:
            return _too_large("its operations could not be counted")
        found = _observed(_without_draws(workload), operations or 0.0)
    if found.same == "yes" and random:
        return drawing(random[0])
    return found


def mixing(model: torch.nn.Module) -> AccumulationEffect | None:
    """Return the effect of a module that normalises over samples; None if there is none."""
    paths = sample_mixing_modules(model)
    why = f"{paths[0]} normalises over the samples of a micro-batch" if paths else ""
    return AccumulationEffect(same="no", why=why) if why else None


def _too_large(why: str) -> AccumulationEffect:
    return AccumulationEffect(same="unknown", why=f"the model was not run to see, since {why}")


def _observed(workload: Workload, operations: float) -> AccumulationEffect:
    """Return what a few samples show, if these operations for each of them are not too many."""
    kept, workload = KeptState(workload.compute_loss), _built_once(workload)
    unknown, is_seen = "", False
    for number, (samples, steps) in enumerate(CASES):
        cost = PASSES * samples * operations
        if cost > MOST_OPERATIONS and number < SURE:
            return _too_large(f"a sample takes {operations:.0e} operations")
        if cost > MOST_OPERATIONS:
            break
        config = StepConfig(batch_size=samples, accumulation_steps=steps, optimizer=Optimizer.SGD)
        for seed in range(SEEDS):
            kept.put_back()
            same, why, has_gradient, draws = _one(workload, config, seed, kept)
            if same == "no":
                what = f"of {samples} samples in {steps} micro-batches, {why}"
                return AccumulationEffect(same="no", why=what, draws=draws)
            if same == "refused":
                return AccumulationEffect(same=same, why=why)
            if same == "unknown" and number < SURE:
                unknown = unknown or why
            is_seen |= same == "yes" and has_gradient
    if unknown:
        return AccumulationEffect(same="unknown", why=unknown)
    if not is_seen:
        return AccumulationEffect(
            same="unknown", why="the gradient of a few samples is zero, which shows nothing"
        )
    return AccumulationEffect(same="yes", why="micro-batches of a few samples give the same")


def _one(
    workload: Workload, config: StepConfig, seed: int, kept: KeptState
) -> tuple[str, str, bool, bool]:
    """Return "yes", "no", "refused" or "unknown", why, whether there is a gradient or a draw."""
    device = torch.device("cpu")
    try:
        divided = run_updates(workload, config, device, seed, num_updates=1)
        gradients = divided.updates[0].gradients.values()
        kept.put_back()
        same, why = judge_full_batch(workload, config, device, seed, divided)
    except (Exception, SystemExit) as error:  # of a person's own functions
        if is_refusal(error):
            return "refused", str(error), False, False
        outcome, message = explain(error, "a few samples")
        return (
            "unknown",
            f"{config.batch_size} samples could not be run ({outcome}): {message}",
            False,
            False,
        )
    if not all(bool(g.isfinite().all()) for g in gradients):
        return "unknown", "the gradient of a few samples is not finite", False, divided.draws
    return same, why, any(bool(g.any()) for g in gradients), divided.draws


def _operations(workload: Workload) -> float | None:
    """Return the operations of products in the forward of a sample; None if it cannot be run."""
    # late: `import memlab` need not wait for it
    from memlab.tracing.fake_workload import tried_over_fakes

    def look(fake: Workload, model: torch.nn.Module) -> float:
        batch = fake.make_batch(2)
        with FlopCounterMode(display=False) as counter:
            fake.compute_loss(model, batch)
        return float(counter.get_total_flops()) / 2

    with contextlib.suppress(Exception):  # fake tensors raise many kinds of errors
        return tried_over_fakes(workload, look)
    return None


def _built_once(workload: Workload) -> Workload:
    """Return the workload with a model that is copied, which is faster than to build it again."""
    set_seed(0)
    try:
        built = workload.build_model()
        copy.deepcopy(built)
    except Exception:  # some models cannot be copied
        return workload
    return dataclasses.replace(workload, build_model=lambda: copy.deepcopy(built))


def _without_draws(workload: Workload) -> Workload:
    """Return the workload with a model whose modules draw no random numbers."""
    build: Callable[[], torch.nn.Module] = workload.build_model

    def built() -> torch.nn.Module:
        model = build()
        silence(model.train())
        return model

    return dataclasses.replace(workload, build_model=built)


def silence(model: torch.nn.Module) -> list[str]:
    """Let the modules of a model draw no random numbers, and return the paths of those that did."""
    modules, paths = dict(model.named_modules()), random_modules(model)
    for path in paths:
        module: Any = modules[path]
        if isinstance(module, Dropout):
            module.p = 0.0
        elif hasattr(module, "dropout"):
            module.dropout = 0.0
        else:
            module.eval()
    return paths


def is_refusal(error: BaseException) -> bool:
    """Return whether an error says that this step has no micro-batches."""
    return isinstance(error, UnsupportedError) and {"accumulation_steps": 1} in error.remedies


def drawing(what: str) -> AccumulationEffect:
    """Return the effect of random numbers."""
    why = f"{what} draws random numbers, so micro-batches draw others than the whole batch"
    return AccumulationEffect(same="no", why=why, draws=True)
