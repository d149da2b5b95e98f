"""`EVERY`: all techniques, in the order in which they apply, and questions to all of them."""

from collections.abc import Iterator

import torch

from memlab.config import StepConfig
from memlab.devices.cards import Card
from memlab.techniques import (
    accumulation,
    attention,
    clipping,
    compilation,
    expandable_segments,
    inplace,
    layout,
    meta_init,
    precision,
)
from memlab.techniques.checkpointing import blocks, checkpointing
from memlab.techniques.loss import chunked_loss, fused_loss
from memlab.techniques.offload import offload
from memlab.techniques.optimizers import optimizer_in_backward, optimizers
from memlab.techniques.sharding import sharding
from memlab.techniques.source import ScriptLines, together
from memlab.techniques.technique import Control, Equivalence, Refusal, Setup, Technique, refuse
from memlab.workload import Workload

EVERY: tuple[Technique, ...] = (
    accumulation.BATCH,
    expandable_segments.SEGMENTS,
    meta_init.BUILT_ON_META,
    blocks.MODEL_CACHE,
    attention.ATTENTION,
    precision.PRECISION,
    layout.CHANNELS_LAST,
    chunked_loss.CHUNKED_LOSS,
    fused_loss.FUSED_LOSS,
    checkpointing.CHECKPOINTING,
    checkpointing.BUDGET,
    inplace.IN_PLACE,
    optimizers.OPTIMIZER,
    optimizers.IMPLEMENTATION,
    optimizer_in_backward.IN_BACKWARD,
    clipping.CLIPPING,
    offload.ACTIVATIONS,
    offload.PARAMETERS,
    offload.OPTIMIZER_STATE,
    compilation.COMPILED,
    compilation.COMPILED_BUDGET,
    sharding.SHARDING,
)


CONTROLS: dict[str, Control] = {c.field: c for technique in EVERY for c in technique.controls}
"""The controls of the panel by field, in the order of `EVERY`."""


def refusals(setup: Setup) -> Iterator[Refusal]:
    """Yield every reason to refuse these settings that can be found without the model."""
    for technique in EVERY:
        yield from technique.refusals(setup)


def is_refused(config: StepConfig, kind: str, *, own_optimizer: bool = False) -> bool:
    """Return whether settings are refused on a kind of device ("cpu", "cuda"), with any model.

    `own_optimizer`: of a workload with make_optimizer.
    """
    device = torch.device(kind)
    return any(refusals(Setup(config=config, device=device, own_optimizer=own_optimizer)))


def check(
    config: StepConfig,
    device: torch.device,
    card: Card | None = None,
    workload: Workload | None = None,
) -> None:
    """Raise UnsupportedError if settings cannot be combined, or not used on this device."""
    refuse(refusals(Setup(config=config, device=device, card=card, workload=workload)))


def source(setup: Setup) -> ScriptLines:
    """Return the lines that all techniques add to an exported script."""
    return together([technique.source(setup) for technique in EVERY])


def notes(setup: Setup) -> list[str]:
    """Return what a reader of the step's numbers must know about its techniques."""
    return [note for technique in EVERY for note in technique.notes(setup)]


def fields_of_equivalence(equivalence: Equivalence) -> dict[str, str]:
    """Return the fields of all techniques that keep numbers this equal, with what each does."""
    found = [technique for technique in EVERY if technique.equivalence is equivalence]
    return {name: technique.does for technique in found for name in technique.fields}
