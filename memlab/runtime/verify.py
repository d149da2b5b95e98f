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
from typing import Any

import torch

from memlab._util.torch_private import pytree
from memlab._util.torch_private.tensors import convert
from memlab.config import Optimizer, Precision, Sharding, StepConfig
from memlab.devices.generators import preserved_random_state
from memlab.errors import UnsupportedError
from memlab.memory import cuda
from memlab.running import Progress, Report, explain
from memlab.runtime.updates import NUM_UPDATES, Tensors, Update, UpdatesRun, run_updates
from memlab.runtime.verify_report import VerifyReport
from memlab.techniques import registry
from memlab.techniques.checkpointing.mutable_state import Reachable, is_same
from memlab.techniques.checkpointing.recompute import of_a_model_off
from memlab.techniques.checkpointing.watched import put
from memlab.techniques.compilation import forget, is_compiled
from memlab.techniques.loss.loss_tensors import CopiedLoss
from memlab.techniques.technique import Equivalence, Plan
from memlab.workload import Workload

# Compare the updates of two runs, bit by bit or by relative errors.

RANDOM_STATE = "the random state"


def relative_errors(found: Tensors, expected: Tensors) -> tuple[str, float, float]:
    """Return the worst parameter, its relative error, and the error of all gradients together.

    The error of a parameter is relative to its own gradient. If that is nearly zero, the error is
    relative to 1e-3 of the average gradient.
    """
    norm = math.sqrt(sum(float(_double(g).square().sum()) for g in expected.values()))
    floor = 1e-3 * norm / math.sqrt(len(expected))
    worst, max_error, squares = "", -1.0, 0.0

    for name, reference in expected.items():
        difference = float((_double(found[name]) - _double(reference)).norm())
        squares += difference**2
        error = ratio(difference, max(float(_double(reference).norm()), floor))
        if math.isnan(error) or error > max_error:
            worst, max_error = name, error
        if math.isnan(error):
            break

    return worst, max_error, ratio(math.sqrt(squares), norm)


def ratio(difference: float, size: float) -> float:
    """Return a difference relative to a size; infinite if only the size is zero."""
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0.0 else math.inf


def _double(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.double()


def misplaced(ours: Update, theirs: Update, begin: Tensors, tolerance: float) -> str | None:
    """Return whether weights or which optimizer states differ after an update; None if none do.

    Only weights whose gradients agree are compared: if a gradient is nothing but rounding, Adam
    makes a full step in either direction. Tensors in different formats are not compared.
    """
    squares = size = 0.0
    for name, reference in theirs.after.weights.items():
        weight, gradient = ours.after.weights[name], theirs.gradients.get(name)
        if gradient is None or weight.dtype != reference.dtype:
            continue

        agrees = (ours.gradients[name] - gradient).abs() <= 0.01 * gradient.abs()
        # a small update of a large weight is lost in the weight's own rounding
        rounding = 2 * torch.finfo(weight.dtype).eps * reference.abs()
        excess = ((weight - reference).abs() - rounding).clamp(min=0) * agrees
        squares += float(excess.double().square().sum())
        size += float(((reference - begin[name]).abs() * agrees).double().square().sum())

    if not ratio(math.sqrt(squares), math.sqrt(size)) <= tolerance:
        return "weights"

    # states are summed over all parameters by kind ("exp_avg"), since single ones may be near zero
    kinds: dict[str, list[float]] = {}
    for place, reference in theirs.after.states.items():
        state = ours.after.states.get(place)
        if state is None or state.dtype != reference.dtype or state.shape != reference.shape:
            continue

        if reference.is_floating_point() or reference.is_complex():
            sums = kinds.setdefault(place.rpartition(": ")[2], [0.0, 0.0])
            sums[0] += float((state.to_dense() - reference.to_dense()).norm()) ** 2
            sums[1] += float(reference.to_dense().norm()) ** 2

    far = (
        kind
        for kind, (apart, whole) in kinds.items()
        if not ratio(math.sqrt(apart), math.sqrt(whole)) <= tolerance
    )
    return next((f"the optimizer's {kind}" for kind in far), None)


def first_difference(
    found: UpdatesRun, kept: UpdatesRun, device: torch.device
) -> tuple[int, str] | None:
    """Return the first update (from 1) in which a bit differs, and what differs; None if none."""
    if device.type == "cpu":  # a model that is built on a card draws other initial weights
        name = _first_unequal(found.begin.weights, kept.begin.weights)
        if name is not None:
            return 1, f"the first values of {name}"

    for number, (ours, theirs) in enumerate(zip(found.updates, kept.updates, strict=True), 1):
        if not torch.equal(ours.random_state, theirs.random_state):
            return number, RANDOM_STATE
        if ours.hooks != theirs.hooks:
            return number, "the hooks of " + min(ours.hooks.items() ^ theirs.hooks.items())[0]
        if ours.loss != theirs.loss and not math.isnan(theirs.loss):
            return number, "the loss"

        pairs = {
            "the gradient of": (ours.gradients, theirs.gradients),
            "buffer": (ours.buffers, theirs.buffers),
            "weight": (ours.after.weights, theirs.after.weights),
            "buffer ": (ours.after.buffers, theirs.after.buffers),
            "the optimizer state of": (ours.after.states, theirs.after.states),
        }
        for kind, pair in pairs.items():
            name = _first_unequal(*pair)
            if name is not None:
                return number, f"{kind.strip()} {name}"

    return None


def _first_unequal(ours: Tensors, theirs: Tensors) -> str | None:
    if ours.keys() != theirs.keys():
        return min(ours.keys() ^ theirs.keys())
    return next((name for name in theirs if not _is_equal(ours[name], theirs[name])), None)


def _is_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    ours, theirs = ours.to_dense(), theirs.to_dense()  # a momentum of sparse gradients is sparse
    return torch.equal(ours, theirs) or (
        theirs.is_floating_point() and torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    )


def first_unequal_buffer(found: Tensors, expected: Tensors, tolerance: float) -> str | None:
    """Return a buffer that differs by more than a relative tolerance; None if none does."""
    for name, reference in expected.items():
        buffer = found.get(name)
        if buffer is None or buffer.shape != reference.shape:
            return name
        if not torch.allclose(buffer.double(), reference.double(), rtol=tolerance, atol=tolerance):
            return name

    return None


# Check that the micro-batches together give the gradient of the undivided batch.
#
# The same step runs once more with the whole batch. If the gradients differ by more than
# fp32 rounds when it sums in another order, both steps run again in fp64. A difference that
# vanishes in fp64 was rounding. For instance, a bias before a norm has a gradient that
# consists of rounding only. Only the first update is compared. Left out: differences that
# only show in later batches.

TOLERANCE = 1e-5  # for fp32 gradients that are summed in another order
CERTAIN = 1e-2  # fp32 rounding cannot change all gradients together by this much
FP64_ROUNDING = 1e-10  # as a share of all gradients
MOST_ROUNDING = 5e-2  # of bf16; a larger difference from fp64 is another computation
ROUNDING_FACTOR = 4.0  # two sums may round in opposite directions, and in several places


def judge_full_batch(
    workload: Workload, reference: StepConfig, device: torch.device, seed: int, divided: UpdatesRun
) -> tuple[str, str]:
    """Return "yes", "no" or "unknown", and why.

    Args:
        workload: what is trained.
        reference: the config of `divided`.
        device: where it is trained.
        seed: of model, batch and step.
        divided: the updates with micro-batches.
    """
    if reference.accumulation_steps == 1:
        return "yes", "the batch is not split"

    if divided.mixing:
        return "no", (
            f"{divided.mixing[0]} normalises over {reference.micro_batch_size} samples, "
            f"not {reference.batch_size}"
        )

    if divided.random:
        return "no", f"{divided.random[0]} draws other random numbers for each micro-batch"

    # the optimizer does not matter for gradients, and SGD is the cheapest
    workload = dataclasses.replace(workload, make_optimizer=None)
    parts = dataclasses.replace(reference, optimizer=Optimizer.SGD)
    whole = dataclasses.replace(parts, accumulation_steps=1)
    try:
        full = run_updates(workload, whole, device, seed, num_updates=1)
    except Exception as error:  # the undivided batch may not fit into memory
        outcome, _ = explain(error, "the undivided batch")
        return "unknown", f"the undivided batch could not be run ({outcome})"

    found, expected = divided.updates[0].gradients, full.updates[0].gradients
    worst, max_error, global_error = relative_errors(found, expected)
    number = reference.accumulation_steps
    if max_error <= TOLERANCE:
        return "yes", f"{number} micro-batches give the gradient of the whole batch"

    differs = f"the gradient of {worst} differs by {max_error:.1e} from that of the whole batch"
    reason = _reason(workload, divided, full)
    if full.draws:  # fp64 would draw other numbers, so it cannot decide
        return "no", f"{differs}: {reason}"

    try:
        exact = in_fp64(workload)
        in_parts = run_updates(exact, parts, device, seed, num_updates=1).updates[0].gradients
        at_once = run_updates(exact, whole, device, seed, num_updates=1).updates[0].gradients
    except Exception as error:  # some models run in one format only
        if global_error > CERTAIN:
            return "no", f"{differs}: {reason}"
        _, message = explain(error, "the step in fp64")
        return "unknown", (
            f"{differs}. Only fp64 would show whether this is rounding, and the model does not run "
            f"in fp64: {message}"
        )

    if is_rounding(in_parts, at_once, expected):
        return "yes", (
            f"{number} micro-batches give the gradient of the whole batch: {differs}, which is "
            "rounding, since it vanishes in fp64"
        )

    return "no", f"{differs}: {reason}"


def in_fp64(workload: Workload) -> Workload:
    """Return the workload with a model, batches and tensors of the loss in fp64."""

    def double(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    return dataclasses.replace(
        workload,
        build_model=lambda: convert(workload.build_model(), double),
        compute_loss=CopiedLoss(
            workload.compute_loss, lambda tensor, device: double(tensor).to(device, copy=True)
        ),
        make_batch=lambda n: pytree.tree_map_only(torch.Tensor, double, workload.make_batch(n)),
    )


def is_rounding(
    in_parts: dict[str, torch.Tensor],
    at_once: dict[str, torch.Tensor],
    narrow: dict[str, torch.Tensor],
) -> bool:
    """Return whether two gradients in fp64 differ by no more than rounding explains.

    Args:
        in_parts: of the micro-batches, in fp64.
        at_once: of the undivided batch, in fp64.
        narrow: of the undivided batch, in the model's own format. Its distance from `at_once` shows
            how much rounding changes it. A model that always computes in fp32 rounds in this way
            even when it is given fp64.
    """
    size = sum(float(gradient.norm()) ** 2 for gradient in at_once.values()) ** 0.5
    _, _, apart = relative_errors(narrow, at_once)
    factor = ROUNDING_FACTOR if apart <= MOST_ROUNDING else 0.0

    for name, exact in at_once.items():
        difference = float((in_parts[name] - exact).norm())
        rounding = float((narrow[name] - exact).norm())
        if not difference <= factor * rounding + FP64_ROUNDING * size:
            return False

    return True


def _reason(workload: Workload, divided: UpdatesRun, full: UpdatesRun) -> str:
    """Return why micro-batches give another gradient, as far as the runs show it."""
    if full.draws:
        return "the model draws random numbers in its forward, different ones in each micro-batch"

    before, after = full.begin.buffers, full.updates[0].buffers
    changed = [n for n in before if n in after and not torch.equal(before[n], after[n])]
    if changed:
        return f"the model changes its buffer {changed[0]} in forward, which micro-batches share"

    losses = f"{full.updates[0].loss:.7g} whole, {divided.updates[0].loss:.7g} in micro-batches"
    if workload.num_loss_terms is not None:
        return (
            f"the loss ({losses}) is not a mean over the terms that num_loss_terms counts, or a "
            "term depends on the rest of its batch"
        )

    return (
        f"the loss ({losses}) is not a mean over the samples, or a sample's loss depends on the "
        "rest of its batch; if it is a mean over another number of terms, give the workload "
        "num_loss_terms"
    )


# Record what a function keeps from one call to the next, so that each run starts from the
# same.
#
# A loss may count its calls or hold a teacher model in its closure. Two runs of one step
# would then differ for a reason that has nothing to do with the checked config.


class KeptState:
    """The state that a function can reach, as it is now.

    Args:
        function: the walk starts there. Iterators cannot be restored and are left as they are.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        found = Reachable([(getattr(function, "__name__", "it"), function)])
        self._places = [(place, place.read()) for place in found.places if not place.fixed]
        self._tensors = [
            (tensor, tensor.detach().to("cpu", copy=True)) for _, tensor in found.tensors
        ]

    def put_back(self) -> None:
        """Restore this state."""
        for place, contents in self._places:
            if not is_same(contents, place.read()):
                place.write(contents)
        for tensor, values in self._tensors:
            put(tensor, values)


CARRIED = tuple(registry.fields_of_equivalence(Equivalence.NOT_COMPARED))
"""Fields of the config that the reference step shares; all others are at their defaults."""

EXACT = registry.fields_of_equivalence(Equivalence.BITWISE)
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
