"""Do the micro-batches together give the gradient of the undivided batch?

The same step is run once more without dividing. Where the gradients differ by more than fp32 rounds
when it adds in another order, both are run again in fp64: a difference that vanishes there was
rounding, as that of a bias before a norm, whose gradient is zero but for rounding. Only the first
update is compared. Left out: what only shows in later batches.
"""

import dataclasses

import torch

from memlab.config import Optimizer, StepConfig
from memlab.running import explain
from memlab.torch_private import pytree
from memlab.torch_private.modules import convert
from memlab.verifying.differences import relative_errors
from memlab.verifying.updates import UpdatesRun, run_updates
from memlab.workload import Workload

TOLERANCE = 1e-5  # fp32 gradients that are added in another order
CERTAIN = 1e-2  # no rounding of fp32 changes all gradients together by so much
FP64_ROUNDING = 1e-10  # as a share of all gradients
MOST_ROUNDING = 5e-2  # of bf16; whatever is farther from fp64 does something else there
ROUNDING_FACTOR = 4.0  # two sums may err to opposite sides, and in more than one place


def judge_full_batch(
    workload: Workload, reference: StepConfig, device: torch.device, seed: int, divided: UpdatesRun
) -> tuple[str, str]:
    """Return "yes", "no" or "unknown", and why.

    Args:
        workload: what is trained.
        reference: the step of `divided`.
        device: where.
        seed: of model, batch and step.
        divided: what its micro-batches gave.
    """
    if reference.accumulation_steps == 1:
        return "yes", "the batch is not divided"
    if divided.mixing:
        return "no", (
            f"{divided.mixing[0]} normalises over {reference.micro_batch_size} samples, "
            f"not {reference.batch_size}"
        )
    if divided.random:
        return "no", f"{divided.random[0]} draws other random numbers for each micro-batch"

    parts = dataclasses.replace(reference, optimizer=Optimizer.SGD)  # of which nothing is read
    whole = dataclasses.replace(parts, accumulation_steps=1)
    try:
        full = run_updates(workload, whole, device, seed, num_updates=1)
    except Exception as error:  # the undivided batch may not fit; then nobody knows
        outcome, _ = explain(error, "the undivided batch")
        return "unknown", f"the undivided batch could not be run ({outcome})"
    found, expected = divided.updates[0].gradients, full.updates[0].gradients
    worst, max_error, global_error = relative_errors(found, expected)
    number = reference.accumulation_steps
    if max_error <= TOLERANCE:
        return "yes", f"{number} micro-batches give the undivided gradient"

    differs = f"{worst} is {max_error:.1e} from the undivided batch"
    reason = _reason(workload, divided, full)
    if full.draws:  # in fp64 it draws others
        return "no", f"{differs}: {reason}"
    try:
        exact = in_fp64(workload)
        in_parts = run_updates(exact, parts, device, seed, num_updates=1).updates[0].gradients
        at_once = run_updates(exact, whole, device, seed, num_updates=1).updates[0].gradients
    except Exception as error:  # a model may know one format alone
        if global_error > CERTAIN:
            return "no", f"{differs}: {reason}"
        _, message = explain(error, "the step in fp64")
        return "unknown", (
            f"{differs}, and whether that is rounding only fp64 would show, in which the model "
            f"does not run: {message}"
        )
    if is_rounding(in_parts, at_once, expected):
        return "yes", (
            f"{number} micro-batches give the undivided gradient: {differs} in its own format, "
            "which is rounding, since it vanishes in fp64"
        )
    return "no", f"{differs}: {reason}"


def in_fp64(workload: Workload) -> Workload:
    """Return the workload with a model and batches of fp64."""

    def double(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    return dataclasses.replace(
        workload,
        build_model=lambda: convert(workload.build_model(), double),
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
        narrow: the same as it was computed in the model's own format: how far it is from `at_once`
            is what rounding does to it. A model that computes in fp32 whatever it is given rounds
            in fp64 too, though not by more.
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
    """Return why micro-batches give another gradient, as far as a run tells."""
    if full.draws:
        return "the model draws random numbers in its forward, others for each micro-batch"
    before, after = full.begin.buffers, full.updates[0].buffers
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    if changed:
        return f"the model changes its buffer {changed[0]} in forward, which micro-batches share"
    losses = f"{full.updates[0].loss:.7g} at once, {divided.updates[0].loss:.7g} in parts"
    if workload.num_loss_terms is not None:
        return (
            f"the loss ({losses}) is not a mean over the terms that num_loss_terms counts, each "
            "apart from the rest of its batch"
        )
    return (
        f"the loss ({losses}) is not a mean over the samples, each apart from the rest of its "
        "batch; if it is a mean over another number of terms, give the workload num_loss_terms"
    )
