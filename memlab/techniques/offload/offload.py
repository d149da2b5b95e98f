"""Offloading to host memory: the three techniques, with their refusals, notes and script lines.

`offloading.py` implements activations and optimizer state, `weight_offloading.py` parameters. Left
out: offloading inside a compiled graph.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from memlab.arguments.quoting import listed
from memlab.arguments.units import format_bytes
from memlab.config import Precision, Sharding, StepConfig
from memlab.techniques.compiling.compilation import asked_by, is_compiled, without
from memlab.techniques.loss.heads import find_head
from memlab.techniques.offload import offloading, weight_offloading, weight_reads
from memlab.techniques.offload.offloading import Offloader
from memlab.techniques.offload.weight_offloading import OffloadedWeights
from memlab.techniques.sharding.ranks import local
from memlab.techniques.source import ScriptLines, together, whole
from memlab.techniques.technique import Control, Keeps, Refusal, Saving, Setup, Technique, switch

FIELDS = {
    "offload_activations": "activations",
    "offload_parameters": "parameters",
    "offload_optimizer": "optimizer state",
}


def apply(model: nn.Module, config: StepConfig, device: torch.device) -> OffloadedWeights:
    """Offload the model's weights to host memory and move everything else to the device.

    The head's weight stays if the loss reads it outside of its module.
    """
    stay = find_head(model)[1].parameters() if config.loss_reads_head else ()
    return OffloadedWeights(model, device, stay)


def make_offloader(
    model: nn.Module, config: StepConfig, weights: OffloadedWeights | None
) -> Offloader | None:
    """Return the context of a forward; None if neither activations nor weights are offloaded."""
    if config.offload_activations:
        return Offloader(model, config.offload_fraction, weights)
    return None if weights is None else Offloader(model, 0.0, weights)


def refusals(field: str, asked: Setup) -> Iterator[Refusal]:
    """Refuse one of `FIELDS` on a CPU, in a compiled step, or for weights that torchao replaces."""
    config = asked.config
    if not getattr(config, field):
        return

    stay = {field: False}
    if asked.device.type == "cpu":
        yield Refusal(
            why=f"{field}=True does nothing on a CPU, where the {FIELDS[field]} "
            f"{_verb(FIELDS[field])} already in host memory",
            remedies=(stay,),
            otherwise="memlab.predict or memlab.export_script for a card: device='h200'",
        )

    if field == "offload_optimizer":
        return

    if is_compiled(config):
        yield Refusal(
            why=f"{field}=True with {asked_by(config)} is not implemented: a compiled graph "
            "decides itself what it saves for backward",
            remedies=(without(config), stay),
        )

    if field == "offload_parameters" and config.precision is Precision.FP8_MIXED:
        yield Refusal(
            why="offload_parameters=True with precision='fp8-mixed' is not implemented: torchao's "
            "layers replace their weights",
            remedies=({"precision": Precision.BF16_MIXED}, stay),
        )


def host_bytes(
    config: StepConfig, model: nn.Module, optimizer: Any, offloader: Offloader | None
) -> int:
    """Return the most bytes that a step held in host memory since its last new batch."""
    held = 0 if offloader is None else offloader.peak_host_bytes
    if offloader is not None and offloader.weights is not None:
        held += offloader.weights.nbytes
    if config.offloads_shards:
        held += shard_bytes(model)
    if config.offload_optimizer:
        held += state_bytes(optimizer)
    return held


def state_bytes(optimizer: Any) -> int:
    """Return the bytes of an optimizer's state in host memory, without the step counters.

    Of several ranks it is what this one keeps.
    """
    states = getattr(optimizer, "optim", optimizer).state.values()
    values = (value for state in states for value in state.values())
    tensors = (value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0)
    return sum(local(tensor).nbytes for tensor in tensors if tensor.device.type == "cpu")


def shard_bytes(model: nn.Module) -> int:
    """Return the bytes of this rank's parts of parameters and gradients, which are offloaded."""
    parts = [(local(p).nbytes, p.requires_grad) for p in model.parameters()]
    return sum(nbytes * (2 if is_trained else 1) for nbytes, is_trained in parts)


def notes(config: StepConfig, host_bytes: int) -> list[str]:
    """Return a note on how many bytes an offloaded step holds in host memory."""
    if not (names := _offloaded(config)):
        return []
    held = f"{format_bytes(host_bytes)} of {names} are held in host memory"
    if host_bytes:
        return [f"{held}, in addition to the allocated bytes of the device."]
    least = format_bytes(offloading.SMALLEST_BYTES)
    return [f"{held}: every tensor is smaller than {least}, the least that is offloaded."]


def _offloaded(config: StepConfig) -> str:
    """Return what is offloaded, in words; "" if nothing is."""
    names = [what for field, what in FIELDS.items() if getattr(config, field)]
    if config.offloads_shards:
        names.insert(-1, "gradients")
    return listed(names)


def _verb(offloaded: str) -> str:
    return "is" if offloaded == FIELDS["offload_optimizer"] else "are"


WEIGHTS_WHY = "# weights stay in host memory while other modules run"
SHARDS_WHY = "# the ranks' parts of the model stay in host memory, where they are updated"
HOOKS_WHY = "# what backward needs later waits in host memory"


def source(asked: Setup) -> ScriptLines:
    """Return the lines of a script for all three of `FIELDS`."""
    config = asked.config
    if not any(getattr(config, field) for field in FIELDS):
        return ScriptLines()

    if config.sharding is not Sharding.NONE:
        return _in_ranks(config)

    files = [offloading]
    place: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    given = ""

    if config.offload_parameters:
        files += [weight_reads, weight_offloading]
        stay = ", find_head(model)[1].parameters()" if config.loss_reads_head else ""
        place = (
            WEIGHTS_WHY,
            f"weights = OffloadedWeights(model, device{stay})",
        )
        after, given = ("weights.restore()",), ", weights"

    fraction = config.offload_fraction if config.offload_activations else 0.0
    is_hooked = config.offload_activations or config.offload_parameters
    hooks = (HOOKS_WHY, f"offloader = Offloader(model, {fraction!r}{given})")
    lines = ScriptLines(
        place=place,
        model=hooks if is_hooked else (),
        contexts=("offloader",) if is_hooked else (),
        backward_contexts=("offloader.in_backward()",) if config.offload_parameters else (),
        after=after,
    )
    return together([whole(*files), lines])


def _in_ranks(config: StepConfig) -> ScriptLines:
    """Return the lines of a script of several ranks; `fully_shard` offloads parameters by itself.

    The optimizer's lines come after the model is sharded, so activations are hooked there.
    """
    hooks = (HOOKS_WHY, f"offloader = Offloader(model, {config.offload_fraction!r})")
    is_hooked = config.offload_activations
    lines = ScriptLines(
        place=(SHARDS_WHY,) if config.offloads_shards else (),
        optimizer=hooks if is_hooked else (),
        contexts=("offloader",) if is_hooked else (),
    )
    is_needed = is_hooked or not config.offloads_shards
    return together([*([whole(offloading)] if is_needed else []), lines])


def says(asked: Setup) -> str:
    """Return what all three of `FIELDS` do now."""
    config = asked.config
    if not (offloaded := _offloaded(config)):
        return ""

    verb = _verb(offloaded)
    if config.offload_activations and config.offload_fraction < 1.0:
        offloaded = f"{config.offload_fraction:.0%} of the {offloaded}"
    return f"{offloaded} {verb} kept in host memory; the copies take time on the bus"


def offload_control(field: str) -> Control:
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
    changes_plans=False,  # offloading an activation does not change what recomputing it would cost
    refusals=partial(refusals, "offload_activations"),
    source=source,  # for the other two techniques as well
    controls=(
        offload_control("offload_activations"),
        Control(
            field="offload_fraction",
            label="Share of activations",
            named=lambda share: f"{share:.0%} of the activations",
            offered=(1.0, 0.75, 0.5, 0.25),
            in_words=lambda share: f"{share:.0%}",
            only_with={"offload_activations": True},
        ),
    ),
    says=says,  # for the other two techniques as well
    searches=({"offload_activations": True},),
    savings=(
        Saving(
            setting="`offload_activations=True`",
            saves=(
                "all that is saved for backward in tensors of 256 KiB and more, but for two that "
                "are leaving and one that is coming back"
            ),
            costs=(
                "two copies of each over the bus, hidden behind kernels where it is fast enough; "
                "pinned memory of the host, stated in `notes`"
            ),
            not_for="a CPU; `torch.compile`",
        ),
        Saving(
            setting="`offload_fraction=0.5`",
            saves="with `offload_activations`: that share of it, spread over the forward",
            costs="that share of the copies, which may all be hidden",
        ),
    ),
)
PARAMETERS = Technique(
    fields=("offload_parameters",),
    keeps=Keeps.BITS,
    does="offloading",
    examples={"offload parameters": {"offload_parameters": True}},
    changes_plans=False,
    refusals=partial(refusals, "offload_parameters"),
    controls=(offload_control("offload_parameters"),),
    searches=(
        {"offload_parameters": True},
        {"offload_parameters": True, "offload_optimizer": True},  # of ranks, only together
    ),
    frees_states=True,
    savings=(
        Saving(
            setting="`offload_parameters=True`",
            saves=(
                "the weights, except those of the running module and of the next; small ones, "
                "an RNN's, shared memory and the head of a loss in chunks stay"
            ),
            costs=(
                "each weight over the bus in every forward and backward, and both ways in the "
                "update, which nothing hides"
            ),
            not_for="a CPU; `torch.compile`; fp8; many micro-batches",
        ),
    ),
)
OPTIMIZER_STATE = Technique(
    fields=("offload_optimizer",),
    keeps=Keeps.BITS,
    does="offloading",
    examples={"offload optimizer": {"offload_optimizer": True}},
    refusals=partial(refusals, "offload_optimizer"),
    controls=(offload_control("offload_optimizer"),),
    searches=({"offload_optimizer": True},),
    frees_states=True,
    savings=(
        Saving(
            setting="`offload_optimizer=True`",
            saves="the optimizer's state, but for one parameter's",
            costs="two copies of the state in each update",
            not_for="a CPU; small models",
        ),
    ),
)
