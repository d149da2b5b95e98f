"""Offloading to host memory: the three techniques, with their refusals, notes and script lines.

`offloading.py` implements them. Left
out: offloading inside a compiled graph.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from memlab._util.units import format_bytes, listed
from memlab.config import Checkpointing, Precision, Sharding, StepConfig
from memlab.techniques.compilation import asked_by, is_compiled, without
from memlab.techniques.loss.logits import find_head
from memlab.techniques.offload.offloading import (
    SMALLEST_BYTES,
    OffloadedWeights,
    Offloader,
    offload_state,
    update_one_by_one,
)
from memlab.techniques.sharding.ranks import local
from memlab.techniques.source import ScriptLines, inlined, together
from memlab.techniques.technique import Control, Equivalence, Refusal, Setup, Technique, switch
from memlab.trace import PHASES, Category, Phase, Timeline

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
LARGEST_ROUNDED = r"pinned_max_(?:round_threshold|cached_size)_mb:(\d+)"
USELESS = 0.1  # of the share that was asked for: less moved than that is not worth its copies
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


def refusals(field: str, setup: Setup) -> Iterator[Refusal]:
    """Refuse one of `FIELDS` on a CPU, in a compiled step, or for weights that torchao replaces."""
    config = setup.config
    if not getattr(config, field):
        return

    stay = {field: False}
    if setup.device.type == "cpu":
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


class HostMemory(NamedTuple):
    """What an offloaded step takes of host memory: the bytes it holds, and what is locked for them.

    PyTorch's allocator of pinned memory rounds each block up to a power of two, splits none and
    keeps what is freed (aten/src/ATen/core/CachingHostAllocator.h). What DeepSpeed locks is not
    known, and None.
    """

    asked_bytes: int = 0
    locked_bytes: int | None = 0
    activation_bytes: int = 0  # of `asked_bytes`


def host_memory(
    config: StepConfig, model: nn.Module, optimizer: Any, offloader: Offloader | None
) -> HostMemory:
    """Return the most that a step held in host memory since its last new batch."""
    asked, blocks = 0, Counter[int]()
    if offloader is not None:
        asked, blocks = offloader.peak_host_bytes, Counter(offloader.most_of_size)
    others: list[int] = []
    if offloader is not None and offloader.weights is not None:
        others += offloader.weights.sizes
    if config.offloads_shards:
        others += shard_sizes(model)
    if config.offload_optimizer:
        others += state_sizes(optimizer)
    blocks.update(others)
    locked = sum(locked_bytes(size) * number for size, number in blocks.items())
    return HostMemory(asked + sum(others), locked, asked)


def locked_bytes(nbytes: int) -> int:
    """Return the bytes that PyTorch locks for a block of pinned memory.

    Above `pinned_max_round_threshold_mb` or `pinned_max_cached_size_mb` of PYTORCH_ALLOC_CONF,
    which newer versions of PyTorch know, it rounds none.

    >>> locked_bytes(9 * 2**20) // 2**20
    16
    """
    said = ",".join(os.environ.get(name, "") for name in ALLOCATOR_SETTINGS)
    limits = [int(number) << 20 for number in re.findall(LARGEST_ROUNDED, said)]
    is_exact = nbytes == 0 or nbytes > min(limits, default=nbytes)
    return nbytes if is_exact else 1 << (nbytes - 1).bit_length()


def state_sizes(optimizer: Any) -> list[int]:
    """Return the bytes of each state of an optimizer in host memory, without the step counters.

    Of several ranks it is what this one keeps.
    """
    states = getattr(optimizer, "optim", optimizer).state.values()
    values = (value for state in states for value in state.values())
    tensors = (value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0)
    return [local(tensor).nbytes for tensor in tensors if tensor.device.type == "cpu"]


def shard_sizes(model: nn.Module) -> list[int]:
    """Return the bytes of this rank's parts of parameters and gradients, which are offloaded."""
    parts = [(local(p).nbytes, p.requires_grad) for p in model.parameters()]
    return [nbytes for nbytes, is_trained in parts for _ in range(2 if is_trained else 1)]


def facts(config: StepConfig, host: HostMemory) -> dict[str, int | None]:
    """Return the fields of a result that say what an offloaded step takes of host memory."""
    if not _offloaded(config):
        return {}
    return {"host_bytes": host.asked_bytes, "locked_host_bytes": host.locked_bytes}


def notes(config: StepConfig, host: HostMemory, timeline: Timeline | None) -> list[str]:
    """Return notes on what an offloaded step holds in host memory, and what should have gone there.

    Args:
        config: of the step.
        host: what it holds there.
        timeline: of the step; None where it is not known.
    """
    found = _of_host(config, host)
    return found if timeline is None else [*found, *_useless(config, host, timeline)]


def _of_host(config: StepConfig, host: HostMemory) -> list[str]:
    if not (names := _offloaded(config)):
        return []
    held = f"{format_bytes(host.asked_bytes)} of {names} are held in host memory"
    if not host.asked_bytes:
        least = format_bytes(SMALLEST_BYTES)
        return [f"{held}: every tensor is smaller than {least}, the least that is offloaded."]
    held += ", in addition to the allocated bytes of the device"
    if host.locked_bytes is None or host.locked_bytes <= host.asked_bytes:
        return [f"{held}."]
    return [
        f"{held}; PyTorch locks {format_bytes(host.locked_bytes)} for them, since it rounds each "
        "block of pinned memory up to a power of two."
    ]


def _useless(config: StepConfig, host: HostMemory, timeline: Timeline) -> list[str]:
    """Return a note if hardly any activation has left the device since a policy keeps them."""
    in_forward = timeline.phase == PHASES.index(Phase.FORWARD)
    left = int(timeline.bytes_of(Category.ACTIVATIONS)[in_forward].max(initial=0))
    moved, policy = host.activation_bytes, config.checkpoint_policy
    is_plain = config.checkpointing is Checkpointing.NONE or policy == "recompute-all"
    least = USELESS * config.offload_fraction * (moved + left)
    if is_plain or not config.offload_activations or moved >= least:
        return []
    return [
        f"Of {format_bytes(moved + left)} of activations only {format_bytes(moved)} were "
        "offloaded: what a checkpoint policy keeps is not offered to the hooks that offload; use "
        "checkpoint_policy='recompute-all', or leave offload_activations out."
    ]


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


def source(setup: Setup) -> ScriptLines:
    """Return the lines of a script for all three of `FIELDS`."""
    config = setup.config
    if not any(getattr(config, field) for field in FIELDS):
        return ScriptLines()

    if config.sharding is not Sharding.NONE:
        return _in_ranks(config)

    called: list[Any] = []
    place: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    given = ""

    if config.offload_parameters:
        called += [OffloadedWeights, update_one_by_one, *[find_head] * config.loss_reads_head]
        stay = ", find_head(model)[1].parameters()" if config.loss_reads_head else ""
        place = (
            WEIGHTS_WHY,
            f"weights = OffloadedWeights(model, device{stay})",
        )
        after, given = ("weights.restore()",), ", weights"

    fraction = config.offload_fraction if config.offload_activations else 0.0
    is_hooked = config.offload_activations or config.offload_parameters
    called += [*[Offloader] * is_hooked, *[offload_state] * config.offload_optimizer]
    hooks = (HOOKS_WHY, f"offloader = Offloader(model, {fraction!r}{given})")
    lines = ScriptLines(
        place=place,
        model=hooks if is_hooked else (),
        contexts=("offloader",) if is_hooked else (),
        backward_contexts=("offloader.in_backward()",) if config.offload_parameters else (),
        after=after,
    )
    return together([inlined(*called), lines])


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
    offloads_state = config.offload_optimizer and not config.offloads_shards
    called = [*[Offloader] * is_hooked, *[offload_state] * offloads_state]
    return together([inlined(*called), lines])


def says(setup: Setup) -> str:
    """Return what all three of `FIELDS` do now."""
    config = setup.config
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
    equivalence=Equivalence.BITWISE,
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
)
PARAMETERS = Technique(
    fields=("offload_parameters",),
    equivalence=Equivalence.BITWISE,
    does="offloading",
    examples={"offload parameters": {"offload_parameters": True}},
    changes_plans=False,
    refusals=partial(refusals, "offload_parameters"),
    controls=(offload_control("offload_parameters"),),
    frees_states=True,
)
OPTIMIZER_STATE = Technique(
    fields=("offload_optimizer",),
    equivalence=Equivalence.BITWISE,
    does="offloading",
    examples={"offload optimizer": {"offload_optimizer": True}},
    refusals=partial(refusals, "offload_optimizer"),
    controls=(offload_control("offload_optimizer"),),
    frees_states=True,
)
