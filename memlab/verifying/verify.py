"""Verify that a technique does not change the training: run three updates of two steps and compare.

The reference step has the same workload, batch, seed, micro-batches and optimizer, in the formats
that the model was built in. Every other field of its config is at its default, and the model's own
use of `torch.utils.checkpoint` is off as well. Gradients are taken before clipping and before the
optimizer, divided by the loss scale. Each update starts from the weights, buffers and optimizer
state of the reference, so that each comparison covers exactly one update.

Left out: whether training converges to the same loss, and errors that both steps share, such as
those of a recompute that a model implements by itself.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from memlab.config import Precision, Sharding, StepConfig
from memlab.devices.generators import preserved_random_state
from memlab.errors import UnsupportedError
from memlab.meters import cuda
from memlab.plan import Plan
from memlab.running import Progress, Report, explain
from memlab.techniques import every
from memlab.techniques.compiling.compilation import forget, is_compiled
from memlab.techniques.recompute.recompute import of_a_model_off
from memlab.techniques.technique import Keeps
from memlab.verifying.differences import (
    RANDOM_STATE,
    first_difference,
    first_unequal_buffer,
    misplaced,
    relative_errors,
)
from memlab.verifying.full_batch import MOST_ROUNDING, in_fp64, judge_full_batch
from memlab.verifying.kept_state import KeptState
from memlab.verifying.report import VerifyReport
from memlab.verifying.updates import NUM_UPDATES, UpdatesRun, run_updates
from memlab.workload import Workload

CARRIED = tuple(every.fields_that_keep(Keeps.REFERENCE))
"""Fields of the config that the reference step shares; all others are at their defaults."""

EXACT = every.fields_that_keep(Keeps.BITS)
"""Fields that may change no bit, each with what it does. They are compared bit by bit."""

# all other fields may round differently or draw other random numbers, and have tolerances
FP32_TOLERANCE = 1e-5
FP64_TOLERANCE = 1e-8  # far above rounding in fp64, far below the effect of another computation
COMPILED_TOLERANCE = 1e-4  # fused kernels sum in another order, as a bias before BatchNorm shows
ROUNDING_TOLERANCE = {
    Precision.TF32: 1e-2,
    Precision.FP16_MIXED: 1e-2,
    Precision.FP16: 1e-2,
    Precision.BF16_MIXED: 5e-2,
    Precision.BF16: 5e-2,
    Precision.BF16_MASTER: 5e-2,
    Precision.BF16_STOCHASTIC: 5e-2,
    Precision.FP8_MIXED: 0.25,
}
"""The error that rounding in a narrower format may cause: ten times the error of GPT-2 and ViT; for
fp8 four times the error that its emulation causes in an MLP.

It applies to the error of all gradients together, because rounding can change most of a single
small gradient.
"""

NARROW = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The error that rounding may cause if the model was built in this format."""

UPDATE_TOLERANCE = 0.05
"""The error allowed in weights and optimizer states, as a share of the size of the update."""

RECOMPUTE_TOLERANCE = {
    Precision.FP16_MIXED: torch.finfo(torch.float16).eps,
    Precision.FP16: torch.finfo(torch.float16).eps,
    Precision.BF16_MIXED: torch.finfo(torch.bfloat16).eps,
    Precision.BF16: torch.finfo(torch.bfloat16).eps,
    Precision.BF16_MASTER: torch.finfo(torch.bfloat16).eps,
    Precision.BF16_STOCHASTIC: torch.finfo(torch.bfloat16).eps,
    Precision.FP8_MIXED: torch.finfo(torch.bfloat16).eps,
}
"""The error allowed to an exact technique if the step without it does not repeat its own bits.

Some kernels sum in any order, which shows in the last digit of the format. Other precisions have
FP32_TOLERANCE. If the step without the technique gives the same bits twice, no error is allowed.
"""


def reference_of(config: StepConfig) -> StepConfig:
    """Return the config of the reference step: fields that it does not share are at defaults.

    Of a sharded step it is one process that computes the micro-batches of all ranks.
    """
    shared = {name: getattr(config, name) for name in CARRIED}
    steps = config.accumulation_steps * config.data_parallel_size
    return StepConfig(**{**shared, "accumulation_steps": steps})


def without_exact(config: StepConfig) -> tuple[StepConfig, list[str]]:
    """Return the config without the techniques that may change no bit, and what these do."""
    default = StepConfig()
    changed = [name for name in EXACT if getattr(config, name) != getattr(default, name)]
    plain = dataclasses.replace(config, **{name: getattr(default, name) for name in EXACT})
    return plain, list(dict.fromkeys(EXACT[name] for name in changed))


def verify_in_process(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    *,
    seed: int,
    plan: Plan | None = None,
    report: Report,
    run_in_ranks: Callable[..., UpdatesRun] | None = None,
) -> VerifyReport:
    """Return the comparison with the reference step. Errors of a step are outcomes, not raised.

    A sharded step is run by `run_in_ranks`, which takes the arguments of `run_updates` and whether
    the model's own checkpointing is on.
    """
    reference, (plain, does) = reference_of(config), without_exact(config)
    kept_state, num_parts = KeptState(workload.compute_loss), config.data_parallel_size
    run = _Runs(workload, device, seed, kept_state, num_parts, run_in_ranks)
    try:
        with preserved_random_state(device), contextlib.ExitStack() as without_own:
            own = without_own.enter_context(of_a_model_off())
            report(Progress(text=f"{NUM_UPDATES} updates of the reference step", fraction=0.0))
            expected = run(reference)
            if is_compiled(config) and expected.random:
                raise UnsupportedError(
                    f"the steps cannot be compared: under torch.compile {expected.random[0]} "
                    "draws other random numbers than in the reference step; set its dropout to 0"
                )

            does = list(dict.fromkeys([*does, "recomputing"])) if own else does
            kept = None
            if does and not is_compiled(config):
                report(Progress(text=f"updates without {' and '.join(does)}", fraction=0.3))
                kept = expected if plain == reference else run(plain, like=expected)

            report(Progress(text="gradients of the whole batch", fraction=0.5))
            run.kept.put_back()
            same, why = judge_full_batch(workload, reference, device, seed, expected)
            without_own.close()

            report(Progress(text="updates of this step", fraction=0.7))
            is_reference = config == reference and not own
            found = expected
            if not is_reference:
                found = run(config, plan, like=expected, with_own=True)
            compared = _compare(config, found, expected)
            if not compared.ok:
                compared = _judged_in_fp64(run, config, plan, expected, compared)
            if kept is not None:
                place = first_difference(found, kept, device)
                repeats = None
                if place is not None:
                    with of_a_model_off():
                        repeats = first_difference(run(plain, like=expected), kept, device) is None
                compared = _exactness(config, compared, found, kept, does, place, repeats)

            if not compared.ok:
                compared = _judged_by_repeating(run, reference, expected, compared)
            if own:
                why = f"the model's own checkpointing is off in the reference step; {why}"
    except (Exception, SystemExit) as error:  # an error of a person's model is an outcome
        outcome, message = explain(error, "the step to verify")
        return VerifyReport(ok=False, outcome=outcome, why=message, device=str(device))
    finally:
        if is_compiled(config):
            forget()
        cuda.release(device)

    return dataclasses.replace(
        compared,
        same_as_full_batch=same,
        why=f"{compared.why}; {why}",
        num_updates=NUM_UPDATES,
        device=str(device),
    )


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs the updates of any config with the same workload, device and seed.

    Attributes:
        num_parts: for how many data parallel ranks the reference stands.
        run_in_ranks: runs the updates of a sharded config.
    """

    workload: Workload
    device: torch.device
    seed: int
    kept: KeptState
    num_parts: int = 1
    run_in_ranks: Callable[..., UpdatesRun] | None = None

    def __call__(
        self,
        config: StepConfig,
        plan: Plan | None = None,
        like: UpdatesRun | None = None,
        *,
        with_own: bool = False,
    ) -> UpdatesRun:
        self.kept.put_back()
        asked = self.workload, config, self.device, self.seed, plan
        if config.sharding is Sharding.NONE:
            return run_updates(*asked, like=like, num_parts=self.num_parts)
        assert self.run_in_ranks is not None
        return self.run_in_ranks(*asked, like=like, with_own=with_own)


def _compare(config: StepConfig, found: UpdatesRun, expected: UpdatesRun) -> VerifyReport:
    """Compare updates with those of the reference, which started from the same values."""
    tolerance, is_narrow = _tolerance(config, expected)
    worst, max_error, global_error = "", -1.0, 0.0
    faults: list[tuple[int, str]] = []
    buffers_equal = True

    for number, (ours, theirs) in enumerate(zip(found.updates, expected.updates, strict=True), 1):
        one, own_max, own_global = relative_errors(ours.gradients, theirs.gradients)
        # NaN compares as False, so it is asked for separately
        if math.isnan(own_max) or own_max > max_error:
            worst, max_error = one, own_max

        global_error = own_global if math.isnan(own_global) else max(global_error, own_global)
        if not (own_global if is_narrow else own_max) <= tolerance:
            faults.append((number, ""))

        unequal = first_unequal_buffer(ours.buffers, theirs.buffers, tolerance)
        buffers_equal &= unequal is None
        if unequal is not None:
            faults.append((number, f"buffer {unequal} differs from the reference step"))
        if abs(ours.loss - theirs.loss) > tolerance * max(abs(theirs.loss), 1.0):
            said = f"the loss is {ours.loss:g}, but {theirs.loss:g} in the reference step"
            faults.append((number, said))

        # every update starts from the values that the reference had at this point
        begin = expected.begin if number == 1 else expected.updates[number - 2].after
        moved = misplaced(ours, theirs, begin.weights, max(UPDATE_TOLERANCE, 4 * tolerance))
        if moved is not None:
            faults.append((number, f"after the update the reference step differs in {moved}"))

    text = f"relative error {global_error:.1e}"
    if not is_narrow:
        text = f"largest relative error {max_error:.1e} in {worst}"

    text += f" (allowed in {config.precision}{' compiled' * is_compiled(config)}: {tolerance:.0e})"
    if not math.isfinite(global_error):
        text = f"the gradients are not finite, first in {worst}"

    first = min((number for number, _ in faults), default=None)
    found_faults = [f"{what} (update {number})" for number, what in faults if what]
    return VerifyReport(
        ok=not faults,
        why="; ".join([text, *found_faults[:2]]),
        max_relative_error=max_error,
        global_relative_error=global_error,
        worst_parameter=worst,
        tolerance=tolerance,
        buffers_equal=buffers_equal,
        first_different_update=first,
    )


def _judged_in_fp64(
    run: _Runs, config: StepConfig, plan: Plan | None, expected: UpdatesRun, compared: VerifyReport
) -> VerifyReport:
    """Return the comparison in fp64 if it shows that a difference in fp32 is rounding.

    The last digit can decide whether a unit at the edge of its nonlinearity is on or off, and with
    it a part of the gradient. In fp64 it is the same in both steps, unless they compute different
    things.
    """
    _, is_narrow = _tolerance(config, expected)
    error = compared.global_relative_error
    if is_narrow or is_compiled(config) or error is None or not error <= MOST_ROUNDING:
        return compared

    built = dataclasses.replace(config, precision=Precision.AS_BUILT)
    exact = dataclasses.replace(run, workload=in_fp64(run.workload))
    try:
        with of_a_model_off():
            reference = exact(reference_of(config))
        found = exact(built, plan, like=reference, with_own=True)
        in_fp64_too = _compare(built, found, reference)
    except Exception:  # some models run in one format only, and then the result in fp32 stands
        return compared

    largest = in_fp64_too.max_relative_error
    if not in_fp64_too.ok or largest is None or not largest <= FP64_TOLERANCE:
        return compared

    return dataclasses.replace(
        in_fp64_too,
        why=f"{compared.why}, which is rounding: in fp64 the largest error is {largest:.1e}",
        tolerance=compared.tolerance,
    )


def _judged_by_repeating(
    run: _Runs, reference: StepConfig, expected: UpdatesRun, compared: VerifyReport
) -> VerifyReport:
    """Return the comparison, or say that it proves nothing if the reference does not repeat."""
    with of_a_model_off():
        again = _compare(reference, run(reference, like=expected), expected)
    if again.ok:
        return compared

    return dataclasses.replace(
        compared,
        bitwise=None,
        why="this config cannot be checked, because the reference step itself gives another result "
        f"when it runs again: {again.why}; it depends on something outside of the model, such as "
        "a cache of a module or a file: reset that in build_model()",
    )


def _tolerance(config: StepConfig, expected: UpdatesRun) -> tuple[float, bool]:
    """Return the allowed error, and whether a format is narrower than fp32."""
    exact = COMPILED_TOLERANCE if is_compiled(config) else FP32_TOLERANCE
    built = [NARROW[dtype] for dtype in expected.formats if dtype in NARROW]
    narrow = [*built, ROUNDING_TOLERANCE.get(config.precision, 0.0)]
    return max(exact, *narrow), any(narrow)


def _exactness(
    config: StepConfig,
    compared: VerifyReport,
    found: UpdatesRun,
    kept: UpdatesRun,
    does: list[str],
    place: tuple[int, str] | None,
    repeats: bool | None,
) -> VerifyReport:
    """Return the report with the changes made by techniques that may change no bit."""
    what, ending = " and ".join(does), "" if len(does) > 1 else "s"
    if place is None:
        said = f"{what} change{ending} no bit in {NUM_UPDATES} updates"
        return dataclasses.replace(compared, bitwise=True, why=f"{compared.why}; {said}")

    number, where = place
    said = f"{what} change{ending} bits, first in {where} of update {number}"
    if where == RANDOM_STATE:
        said = f"{what} leave{ending} another random state to the next step (update {number})"

    # if the step without the technique does not repeat itself, equal bits cannot be expected
    ok = False
    if not repeats and where != RANDOM_STATE:
        is_close, text = _within_rounding(config, found, kept)
        ok = compared.ok and is_close
        said += f", but the step without it also differs from run to run: {text}"
    earlier = compared.first_different_update or number
    return dataclasses.replace(
        compared,
        ok=ok,
        bitwise=False,
        why=f"{compared.why}; {said}",
        first_different_update=None if ok else min(number, earlier),
    )


def _within_rounding(config: StepConfig, found: UpdatesRun, kept: UpdatesRun) -> tuple[bool, str]:
    """Return whether two runs of one precision differ only by its rounding, and a text."""
    _, is_narrow = _tolerance(config, kept)
    built = [torch.finfo(dtype).eps for dtype in kept.formats if dtype in NARROW]
    tolerance = max(RECOMPUTE_TOLERANCE.get(config.precision, FP32_TOLERANCE), *built, 0.0)
    largest = 0.0
    for ours, theirs in zip(found.updates, kept.updates, strict=True):
        _, max_error, global_error = relative_errors(ours.gradients, theirs.gradients)
        largest = max(largest, global_error if is_narrow else max_error)
        unequal = first_unequal_buffer(ours.buffers, theirs.buffers, tolerance)
        if unequal is not None:
            return False, f"buffer {unequal} differs"
        if ours.hooks != theirs.hooks:
            return False, "hooks differ"
    return largest <= tolerance, f"relative error {largest:.1e} (allowed: {tolerance:.0e})"
