"""Offloading to the host's memory: what refuses it, and what it says of itself.

`offloading.py` does it, and `weight_offloading.py` for parameters. Left out: offloading within a
compiled graph.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from memlab.arguments.units import format_bytes
from memlab.config import Precision, StepConfig
from memlab.techniques.compiling.compilation import asked_by, is_compiled, without
from memlab.techniques.loss.heads import find_head
from memlab.techniques.offload import offloading, weight_offloading, weight_reads
from memlab.techniques.offload.offloading import Offloader
from memlab.techniques.offload.weight_offloading import OffloadedWeights
from memlab.techniques.source import ScriptLines, together, whole
from memlab.techniques.technique import Control, Keeps, Refusal, Setup, Technique, switch

FIELDS = {
    "offload_activations": "activations",
    "offload_parameters": "parameters",
    "offload_optimizer": "optimizer state",
}


def apply(model: nn.Module, config: StepConfig, device: torch.device) -> OffloadedWeights:
    """Let the model's weights wait in the host's memory and put the rest on the device.

    The head of a loss in chunks stays: its weight is read when the loss is taken.
    """
    stay = find_head(model)[1].parameters() if config.loss_chunks > 1 else ()
    return OffloadedWeights(model, device, stay)


def make_offloader(
    model: nn.Module, config: StepConfig, weights: OffloadedWeights | None
) -> Offloader | None:
    """Return the context that a forward is run in, None if nothing of it is offloaded."""
    if config.offload_activations:
        return Offloader(model, config.offload_fraction, weights)
    return None if weights is None else Offloader(model, 0.0, weights)


def refusals(field: str, asked: Setup) -> Iterator[Refusal]:
    """Yield what refuses one of `FIELDS`: a CPU, a compiled step, weights that torchao replaces."""
    config = asked.config
    if not getattr(config, field):
        return
    stay = {field: False}
    if asked.device.type == "cpu":
        yield Refusal(
            why=f"{field}=True does nothing on a CPU, where the {FIELDS[field]} are in the host's "
            "memory already",
            remedies=(stay,),
            otherwise="memlab.predict for a card: device='h200'",
        )
    if field == "offload_optimizer":
        return
    if is_compiled(config):
        yield Refusal(
            why=f"{field}=True with {asked_by(config)} is not implemented: a compiled graph saves "
            "for backward by itself",
            remedies=(without(config), stay),
        )
    if field == "offload_parameters" and config.precision is Precision.FP8_MIXED:
        yield Refusal(
            why="offload_parameters=True with precision='fp8-mixed' is not implemented: torchao's "
            "layers replace their weights",
            remedies=({"precision": Precision.BF16_MIXED}, stay),
        )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state in the host's memory, numbers of steps left out."""
    values = (value for state in optimizer.state.values() for value in state.values())
    tensors = (value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0)
    return sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu")


def notes(config: StepConfig, host_bytes: int) -> list[str]:
    """Return what an offloaded step holds in the host's memory, by its name."""
    names = [what for field, what in FIELDS.items() if getattr(config, field)]
    if not names:
        return []
    held = f"{format_bytes(host_bytes)} of {' and '.join(names)} are held in the host's memory"
    if host_bytes:
        return [f"{held}, beside the allocated bytes of the device."]
    return [f"{held}: no tensor is as large as {format_bytes(offloading.SMALLEST_BYTES)}."]


def source(asked: Setup) -> ScriptLines:
    """Return what a person would add to a script, for all three of `FIELDS`."""
    config = asked.config
    if not any(getattr(config, field) for field in FIELDS):
        return ScriptLines()
    files = [offloading]
    place: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    given = ""
    if config.offload_parameters:
        files += [weight_reads, weight_offloading]
        stay = ", find_head(model)[1].parameters()" if config.loss_chunks > 1 else ""
        place = (f"weights = OffloadedWeights(model, device{stay})",)
        after, given = ("weights.restore()",), ", weights"
    fraction = config.offload_fraction if config.offload_activations else 0.0
    is_hooked = config.offload_activations or config.offload_parameters
    lines = ScriptLines(
        place=place,
        model=(f"offloader = Offloader(model, {fraction:g}{given})",) if is_hooked else (),
        contexts=("offloader",) if is_hooked else (),
        backward_contexts=("offloader.in_backward()",) if config.offload_parameters else (),
        after=after,
    )
    return together([whole(*files), lines])


def says(asked: Setup) -> str:
    """Return what all three of `FIELDS` do now."""
    config = asked.config
    names = [what for field, what in FIELDS.items() if getattr(config, field)]
    if not names:
        return ""
    waiting = " and ".join(names)
    if config.offload_activations and config.offload_fraction < 1.0:
        waiting = f"{config.offload_fraction:.0%} of the {waiting}"
    return f"{waiting} wait in the host's memory, as fast as the bus allows"


def offloaded(field: str) -> Control:
    """Return the control of one of `FIELDS`."""
    what = FIELDS[field]
    return switch(field, field.replace("_", " "), f"{what} offloaded", f"{what} not offloaded")


ACTIVATIONS = Technique(
    fields=("offload_activations", "offload_fraction"),
    keeps=Keeps.BITS,
    does="offloading",
    examples={
        "offload activations": {"offload_activations": True},
        "offload half": {"offload_fraction": 0.5, "offload_activations": True},
    },
    changes_plans=False,  # what waits in the host's memory is no less to recompute
    refusals=partial(refusals, "offload_activations"),
    source=source,  # of the others too
    controls=(
        offloaded("offload_activations"),
        Control(
            field="offload_fraction",
            label="of them",
            named=lambda share: f"{share:.0%} of the activations",
            offered=(1.0, 0.75, 0.5, 0.25),
            in_words=lambda share: f"{share:.0%}",
            only_with={"offload_activations": True},
        ),
    ),
    says=says,  # of the others too
)
PARAMETERS = Technique(
    fields=("offload_parameters",),
    keeps=Keeps.BITS,
    does="offloading",
    examples={"offload parameters": {"offload_parameters": True}},
    changes_plans=False,
    refusals=partial(refusals, "offload_parameters"),
    controls=(offloaded("offload_parameters"),),
)
OPTIMIZER_STATE = Technique(
    fields=("offload_optimizer",),
    keeps=Keeps.BITS,
    does="offloading",
    examples={"offload optimizer": {"offload_optimizer": True}},
    refusals=partial(refusals, "offload_optimizer"),
    controls=(offloaded("offload_optimizer"),),
)
