"""Check that the micro-batches together give the gradient of the undivided batch.

The same step runs once more with the whole batch. If the gradients differ by more than fp32 rounds
when it sums in another order, both steps run again in fp64. A difference that vanishes in fp64 was
rounding. For instance, a bias before a norm has a gradient that consists of rounding only. Only the
first update is compared. Left out: differences that only show in later batches.
"""

import dataclasses

import torch

from memlab.config import Optimizer, StepConfig
from memlab.running import explain
from memlab.techniques.loss.loss_tensors import CopiedLoss
from memlab.torch_private import pytree
from memlab.torch_private.modules import convert
from memlab.verifying.differences import relative_errors
from memlab.verifying.updates import UpdatesRun, run_updates
from memlab.workload import Workload

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
