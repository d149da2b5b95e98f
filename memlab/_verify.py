"""Did a technique leave the gradients alone? Both steps are run, in this process, and compared.

The reference step has the same workload, batch, seed and micro-batch split, in the formats that the
model was built in, with every technique off, and what the model itself does through
`torch.utils.checkpoint` as well. Gradients are taken before any clipping or optimizer, with the
loss scale undone. Not covered: whether training converges to the same loss; and what is wrong in
both steps alike, such as a recompute that a model has written for itself.
"""

import contextlib
import dataclasses
import functools
import math
from dataclasses import dataclass

import torch

from memlab._measure import MAX_SKIPPED_UPDATES, preserved_random_state
from memlab._running import Progress, Report, explain
from memlab.config import CompileMode, Precision, StepConfig
from memlab.errors import UnsupportedError
from memlab.memory import cuda
from memlab.plan import Plan
from memlab.result import Outcome
from memlab.step import Step, build_step, set_seed
from memlab.techniques.accumulation import random_modules, sample_mixing_modules
from memlab.techniques.compilation import forget, is_compiled
from memlab.techniques.recompute import of_a_model_off
from memlab.workload import Workload

FP32_TOLERANCE = 1e-5
COMPILED_TOLERANCE = 1e-4  # fused sums are taken in another order; a bias before BatchNorm shows it
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
"""What a narrower format's rounding may change: ten times what it does to GPT-2 and ViT; fp8 four
times what its emulation does to an MLP.

Held against the error of all gradients together: of one parameter with a small gradient, rounding
can change most.
"""

RECOMPUTE_TOLERANCE = {
    Precision.FP16_MIXED: torch.finfo(torch.float16).eps,
    Precision.FP16: torch.finfo(torch.float16).eps,
    Precision.BF16_MIXED: torch.finfo(torch.bfloat16).eps,
    Precision.BF16: torch.finfo(torch.bfloat16).eps,
    Precision.BF16_MASTER: torch.finfo(torch.bfloat16).eps,
    Precision.BF16_STOCHASTIC: torch.finfo(torch.bfloat16).eps,
    Precision.FP8_MIXED: torch.finfo(torch.bfloat16).eps,
}
"""What recomputing may change, which is nothing where a device's kernels give the same bits twice.

Held against the step of the same precision that keeps every activation: some kernels add in any
order, and that is seen in the last digit of the format. fp32 and tf32 have FP32_TOLERANCE.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """How far a step's gradients are from those of the reference step.

    Attributes:
        ok: whether buffers and loss are equal and the error is within the tolerance: in fp32
            `max_relative_error`, in a narrower format `global_relative_error`. Where something is
            recomputed, the same is asked of it against the step that keeps every activation, at its
            own precision and within `RECOMPUTE_TOLERANCE`.
        outcome: `ok`, or why there was nothing to compare.
        max_relative_error: the largest ||g - g_ref|| / max(||g_ref||, 1e-3 ||G_ref|| / sqrt(P))
            over the P parameters, G_ref being all gradients; None without a comparison.
        global_relative_error: ||G - G_ref|| / ||G_ref||.
        worst_parameter: the parameter with that largest error.
        tolerance: what that error was held against: 1e-5 in fp32, 1e-4 compiled.
        bitwise: whether recomputing changes no bit of gradients and buffers, at the precision of
            the config; None if nothing is recomputed in eager mode.
        buffers_equal: whether running statistics and the like end up as in the reference step.
        same_as_full_batch: "yes", "no" or "unknown": whether the micro-batches together give the
            gradient of the undivided batch, in fp32.
        why: one sentence.
    """

    ok: bool
    why: str
    outcome: Outcome = Outcome.OK
    max_relative_error: float | None = None
    global_relative_error: float | None = None
    worst_parameter: str | None = None
    tolerance: float | None = None
    bitwise: bool | None = None
    buffers_equal: bool | None = None
    same_as_full_batch: str = "unknown"

    def __str__(self) -> str:
        """Return one line."""
        verdict = "gradients same" if self.ok else "gradients differ"
        if self.outcome is not Outcome.OK:
            verdict = f"gradients not checked ({self.outcome})"
        return f"{verdict}: {self.why}"


@dataclass(frozen=True, slots=True)
class _Gradients:
    by_parameter: dict[str, torch.Tensor]  # fp64, on the CPU
    buffers: dict[str, torch.Tensor]
    mixing: list[str]
    random: list[str]
    loss: float
    random_state: torch.Tensor  # of the CPU, after backward


def verify_in_process(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    *,
    seed: int,
    plan: Plan | None = None,
    report: Report,
) -> VerifyReport:
    """Return the comparison with the reference step; never raises for the step."""
    plain = config.without_recompute()
    reference = dataclasses.replace(
        plain,
        precision=Precision.AS_BUILT,
        compile=False,
        compile_mode=CompileMode.DEFAULT,
        channels_last=False,
        # the same values on a CPU; a card draws others
        init_on_meta=config.init_on_meta
        and device.type != "cpu"
        and not config.offload_parameters,  # which builds on the CPU
        loss_chunks=1,
        inplace=False,
        offload_activations=False,
        offload_fraction=1.0,
        offload_parameters=False,
        offload_optimizer=False,
        expandable_segments=False,
        optimizer_in_backward=False,
    )
    try:
        with preserved_random_state(device), contextlib.ExitStack() as without_own:
            own = without_own.enter_context(of_a_model_off())
            report(Progress(text="gradients of the reference step", fraction=0.0))
            expected = _gradients(workload, reference, device, seed)
            if is_compiled(config) and expected.random:
                raise UnsupportedError(
                    f"cannot be compared: under torch.compile {expected.random[0]} draws other "
                    "random numbers than in the reference step; set its dropout to 0 to check"
                )
            kept = None
            if (config != plain or own) and not is_compiled(config):
                report(Progress(text="gradients without recomputing", fraction=0.3))
                kept = expected if plain == reference else _gradients(workload, plain, device, seed)
            report(Progress(text="gradients of the undivided batch", fraction=0.5))
            same, why = _same_as_full_batch(workload, reference, device, seed, expected)
            without_own.close()
            report(Progress(text="gradients of this step", fraction=0.7))
            found = expected
            if config != reference or own:
                found = _gradients(workload, config, device, seed, plan)
            if own:
                why = f"the model checkpoints itself, and is compared with itself without; {why}"
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever a person's model raises is an outcome of the check
        outcome, message = explain(error, "the step to verify")
        return VerifyReport(ok=False, outcome=outcome, why=message)
    finally:
        if is_compiled(config):
            forget()
        cuda.release(device)
    return dataclasses.replace(
        _compare(config, found, expected, kept, why), same_as_full_batch=same
    )


def _gradients(
    workload: Workload,
    config: StepConfig,
    device: torch.device,
    seed: int,
    plan: Plan | None = None,
) -> _Gradients:
    step = build_step(workload, config, device, plan=plan, seed=seed)
    mixing, drawing = sample_mixing_modules(step.model), random_modules(step.model)
    before = _buffers(step)
    used = _used_gradients(step) if config.optimizer_in_backward else None
    loss = 0.0
    for _ in range(MAX_SKIPPED_UPDATES):
        set_seed(seed)
        loss = float(step.accumulate())
        if step.scaler is None:
            break
        step.scaler.unscale_(step.optimizer)
        if all(p.grad.isfinite().all() for p in step.model.parameters() if p.grad is not None):
            break
        step.scaler.update()  # an overflow halves the scale; training would skip this update
        step.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in step.model.named_buffers():
                buffer.copy_(before[name])
    gradients = _by_parameter(step) | (used or {})
    random = torch.get_rng_state()
    return _Gradients(gradients, _buffers(step), mixing, drawing, loss, random)


def _used_gradients(step: Step) -> dict[str, torch.Tensor]:
    """Return what will hold each gradient as backward gives it, before an update uses and frees it.

    Hooks on the tensors themselves run before those that update, in the backward that is checked:
    a weight that was updated too early shows in the gradients that come after it.
    """
    used: dict[str, torch.Tensor] = {}

    def keep(name: str, gradient: torch.Tensor) -> None:
        used[name] = used.get(name, 0.0) + _as_double(gradient)

    for name, parameter in step.model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(functools.partial(keep, name))
    return used


def _by_parameter(step: Step) -> dict[str, torch.Tensor]:
    return {
        name: _as_double(torch.zeros_like(p) if p.grad is None else p.grad)
        for name, p in step.model.named_parameters()
        if p.requires_grad
    }


def _as_double(gradient: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return real.detach().to("cpu", torch.float64)


def _buffers(step: Step) -> dict[str, torch.Tensor]:
    """Return copies of the buffers, and of frozen parameters, which a forward may change too."""
    parameters = step.model.named_parameters()
    frozen = [(name, step.value_of(p)) for name, p in parameters if not p.requires_grad]
    every = [*step.model.named_buffers(), *frozen]
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in every}


def _is_same(found: _Gradients, expected: _Gradients) -> bool:
    """Return whether gradients and buffers are the same, bit by bit."""
    return all(
        ours.keys() == theirs.keys()
        and all(torch.equal(ours[name], theirs[name]) for name in theirs)
        for ours, theirs in (
            (found.by_parameter, expected.by_parameter),
            (found.buffers, expected.buffers),
        )
    )


def _compare(
    config: StepConfig,
    found: _Gradients,
    expected: _Gradients,
    kept: _Gradients | None,
    why: str,
) -> VerifyReport:
    worst, max_error, global_error = _errors(found.by_parameter, expected.by_parameter)
    exact = COMPILED_TOLERANCE if is_compiled(config) else FP32_TOLERANCE
    tolerance = ROUNDING_TOLERANCE.get(config.precision, exact)
    unequal = _first_unequal_buffer(found.buffers, expected.buffers, tolerance)
    error, text = _judged(config, worst, max_error, global_error)
    text += f" (allowed in {config.precision}{' compiled' * is_compiled(config)}: {tolerance:.0e})"
    if not math.isfinite(global_error):
        text = f"the gradients are not finite, first in {worst}"
    if unequal is not None:
        text += f"; buffer {unequal} differs from the reference step"
    is_far = abs(found.loss - expected.loss) > tolerance * max(abs(expected.loss), 1.0)
    if is_far:
        text += f"; the loss is {found.loss:g}, and {expected.loss:g} in the reference step"
    ok, bitwise = error <= tolerance and unequal is None and not is_far, None
    if kept is not None:
        bitwise = _is_same(found, kept)
        is_exact, said = _recompute_changes(config, found, kept, bitwise)
        ok, text = ok and is_exact, f"{text}; {said}"
    return VerifyReport(
        ok=ok,
        why=f"{text}; {why}",
        max_relative_error=max_error,
        global_relative_error=global_error,
        worst_parameter=worst,
        tolerance=tolerance,
        bitwise=bitwise,
        buffers_equal=unequal is None,
    )


def _judged(
    config: StepConfig, worst: str, max_error: float, global_error: float
) -> tuple[float, str]:
    """Return the error that a tolerance is held against, and what it is."""
    if config.precision in (Precision.AS_BUILT, Precision.FP32):
        return max_error, f"largest relative error {max_error:.1e} in {worst}"
    return global_error, f"relative error {global_error:.1e}"


def _recompute_changes(
    config: StepConfig, found: _Gradients, kept: _Gradients, bitwise: bool
) -> tuple[bool, str]:
    """Return whether recomputing changes little enough, and what it changes."""
    if not torch.equal(found.random_state, kept.random_state):
        return False, "recomputing leaves other random numbers to the next step"
    if bitwise:
        return True, "recomputing changes no bit"
    tolerance = RECOMPUTE_TOLERANCE.get(config.precision, FP32_TOLERANCE)
    unequal = _first_unequal_buffer(found.buffers, kept.buffers, tolerance)
    if unequal is not None:
        return False, f"recomputing changes buffer {unequal}"
    error, text = _judged(config, *_errors(found.by_parameter, kept.by_parameter))
    return error <= tolerance, f"recomputing changes bits: {text} (allowed: {tolerance:.0e})"


def _errors(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> tuple[str, float, float]:
    """Return the worst parameter, its relative error, and that of all gradients together."""
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    floor = 1e-3 * norm / math.sqrt(len(expected))
    worst, max_error, squares = "", -1.0, 0.0
    for name, reference in expected.items():
        difference = float((found[name] - reference).norm())
        squares += difference**2
        error = _ratio(difference, max(float(reference.norm()), floor))
        if math.isnan(error) or error > max_error:
            worst, max_error = name, error
        if math.isnan(error):
            break
    return worst, max_error, _ratio(math.sqrt(squares), norm)


def _ratio(difference: float, size: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0.0 else math.inf


def _first_unequal_buffer(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> str | None:
    for name, reference in expected.items():
        buffer = found.get(name)
        if buffer is None or buffer.shape != reference.shape:
            return name
        if not torch.allclose(buffer.double(), reference.double(), rtol=tolerance, atol=tolerance):
            return name
    return None


def _same_as_full_batch(
    workload: Workload,
    reference: StepConfig,
    device: torch.device,
    seed: int,
    accumulated: _Gradients,
) -> tuple[str, str]:
    """Return whether accumulation leaves the gradient of the whole batch, and why."""
    if reference.accumulation_steps == 1:
        return "yes", "the batch is not divided"
    if accumulated.mixing:
        return "no", (
            f"{accumulated.mixing[0]} normalises over {reference.micro_batch_size} samples, "
            f"not {reference.batch_size}"
        )
    if accumulated.random:
        return "no", f"{accumulated.random[0]} draws other random numbers for each micro-batch"
    whole = dataclasses.replace(reference, accumulation_steps=1)
    try:
        full = _gradients(workload, whole, device, seed)
    except Exception as error:  # the undivided batch may not fit; then nobody knows
        outcome, _ = explain(error, "the undivided batch")
        return "unknown", f"the undivided batch could not be run ({outcome})"
    worst, max_error, _ = _errors(accumulated.by_parameter, full.by_parameter)
    if max_error <= FP32_TOLERANCE:
        return "yes", f"{reference.accumulation_steps} micro-batches give the undivided gradient"
    return "no", (
        f"{worst} is {max_error:.1e} from the undivided batch: the loss is not a mean over the "
        "samples (give the workload num_loss_terms), or the model draws random numbers or changes "
        "a buffer in forward"
    )
