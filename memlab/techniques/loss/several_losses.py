"""Several losses in one step, each with its backward and its update: a GAN, actor and critic.

`compute_loss` returns them by the names of submodules, or in order:

    {"discriminator": loss_d, "generator": lambda: loss_of(model.discriminator(fake))}

A function is called after the update by the loss before it, as a generator's loss is computed with
the discriminator that has just been updated. The gradient of a loss goes to the parameters of its
submodule alone; that of a loss in a sequence goes to all. Left out: what repeats a part of the step
(the inner epochs of PPO) or draws samples between updates (GRPO).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from memlab._util.units import shown
from memlab.config import Precision, Sharding, StepConfig
from memlab.errors import UnsupportedError, WorkloadError
from memlab.techniques.compilation import asked_by, is_compiled, without
from memlab.techniques.technique import Refusal, refuse

STALE = "modified by an inplace operation"
FREED = "backward through the graph a second time"


def several_losses(
    returned: Any, config: StepConfig, of_loss: Mapping[str, torch.Tensor]
) -> list[tuple[str, Any]]:
    """Return the losses that `compute_loss` returned, with their names; "" in a sequence.

    Args:
        returned: by `compute_loss`.
        config: of the step.
        of_loss: parameters that the loss brings along, by name.

    Raises:
        WorkloadError: these are no losses.
        UnsupportedError: the config needs one loss.
    """
    is_mapping = isinstance(returned, Mapping)
    # a tuple is usually a loss with what belongs to it
    is_tuple = isinstance(returned, tuple)
    is_several = is_mapping or (isinstance(returned, Sequence) and not is_tuple)
    values = list(returned.values() if is_mapping else returned) if is_several else []
    names = list(returned) if is_mapping else [""] * len(values)
    is_loss = [v.numel() == 1 if isinstance(v, torch.Tensor) else callable(v) for v in values]
    if not values or not all(is_loss) or not all(isinstance(name, str) for name in names):
        what = shown(returned) if is_several else type(returned).__name__
        raise WorkloadError(
            f"compute_loss returned {what}; allowed is a scalar tensor, the mean over "
            "the samples, or several by the names of submodules or in a list, each a scalar tensor "
            "or a function that returns one: return the loss alone, such as output.loss"
        )
    refuse(_refusals(config))
    own = [path for path, parameter in of_loss.items() if parameter.requires_grad]
    if is_mapping and own:
        raise UnsupportedError(
            f"compute_loss returned losses by name, and {own[0]} is a parameter of its own, which "
            "no submodule has and nothing would train; make it a parameter of the model"
        )
    return list(zip(names, values, strict=True))


def _refusals(config: StepConfig) -> Iterator[Refusal]:
    """Refuse settings for which a step has one backward, or one update."""
    said = "with several losses"
    if config.accumulation_steps > 1:
        yield Refusal(
            why=f"accumulation_steps={config.accumulation_steps} {said}: the update by the first "
            "comes before the forward of the second, and would need all micro-batches",
            remedies=({"accumulation_steps": 1},),
        )
    if config.precision is Precision.FP16_MIXED:
        yield Refusal(
            why=f"precision='fp16-mixed' {said} is not implemented: one loss scaler would have to "
            "know which gradients each of them has",
            remedies=({"precision": Precision.BF16_MIXED},),
        )
    if config.optimizer_in_backward:
        yield Refusal(
            why=f"optimizer_in_backward=True {said} is not implemented: a parameter may get the "
            "gradients of several backwards",
            remedies=({"optimizer_in_backward": False},),
        )
    if config.sharding is not Sharding.NONE:
        yield Refusal(
            why=f"sharding={str(config.sharding)!r} {said} is not implemented: the ranks average "
            "the gradients of all parameters in each backward",
            remedies=({"sharding": Sharding.NONE, "world_size": 1},),
        )
    if is_compiled(config):
        yield Refusal(
            why=f"{asked_by(config)} {said} is not implemented: their submodules are called by "
            "themselves, and not the model that is compiled",
            remedies=(without(config),),
        )
    if config.inplace:
        yield Refusal(
            why=f"inplace=True {said} is not implemented: what may be written over is tried with "
            "one loss",
            remedies=({"inplace": False},),
        )
    if config.loss_reads_head:
        yield Refusal(
            why=f"loss_chunks or loss_kernel {said} is not implemented: one loss is computed in "
            "chunks",
            remedies=({"loss_chunks": 1, "loss_kernel": StepConfig().loss_kernel},),
        )


def trained_by(name: str, model: torch.nn.Module, optimizers: list[str]) -> list[torch.Tensor]:
    """Return the parameters that a loss trains: those of the submodule of its name."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        children = [child for child, _ in model.named_children()]
        raise WorkloadError(
            f"compute_loss returned a loss named {shown(name)}; allowed is the path of a submodule "
            f"({', '.join(map(repr, children[:8]))}) or of an optimizer of make_optimizer "
            f"({', '.join(map(repr, optimizers)) or 'it makes none by name'}): rename it, "
            "or return the loss alone"
        ) from None
    if trained := [p for p in module.parameters() if p.requires_grad]:
        return list(trained)
    raise WorkloadError(
        f"compute_loss returned a loss named {shown(name)}, and this submodule has no trainable "
        "parameter; allowed is one that has: leave this loss out"
    )


@contextlib.contextmanager
def afterwards(names: list[str], place: int) -> Iterator[None]:
    """Say of which loss it is, and what to return instead, if an earlier one was in its way."""
    try:
        yield
    except RuntimeError as error:
        if place == 0 or not any(said in str(error) for said in (STALE, FREED)):
            raise
        first, this = (names[i] or f"loss {i + 1}" for i in (place - 1, place))
        why = "has freed a part of the graph that both share"
        if STALE in str(error):
            why = "has changed weights that its backward needs"
        raise WorkloadError(
            f"compute_loss returned {this!r} as a tensor, and the update by {first!r} {why}; "
            "allowed is a tensor of a graph of its own, or a function: return lambda: ..., which "
            "computes it after that update"
        ) from error
