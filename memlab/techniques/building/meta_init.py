"""Initialisation on the meta device: a model is built without memory, then made on its device.

While `build_model` runs, its tensors have shapes and no bytes, and every operator on them is noted;
then the notes are replayed on the device, in the same order from the same seed. So nothing stays
uninitialised that a plain build initialises (buffers, tied weights and a constructor's own changes
come out too, which `to_empty` and `reset_parameters` would lose), and on a CPU the values are those
of a plain build, bit by bit. A card draws other random numbers than a CPU.

The tensors are fake ones, of the meta device but for what they say: where a tensor says "meta",
torch.nn.init and transformers leave it uninitialised without a word (torch 2.13, transformers 5).
Left out: a prediction's own tensors, which need no memory as they are.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch._guards import detect_fake_mode

from memlab.errors import UnsupportedError
from memlab.techniques.building import deferred
from memlab.techniques.source import ScriptLines, together, whole
from memlab.techniques.technique import Keeps, Setup, Technique, switch


def build(build_model: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """Return the model, built on the meta device and then made on this one.

    Raises:
        UnsupportedError: its constructors read or draw numbers in a way that cannot be replayed.
    """
    if detect_fake_mode() is not None:
        return build_model()
    try:
        return deferred.build_on_meta(build_model, device)
    except deferred.CannotDefer as error:
        instead = f", or {error.instead}" if error.instead else ""
        raise UnsupportedError(
            f"init_on_meta=True cannot build this model without memory ({error}); use "
            f"init_on_meta=False{instead}"
        ) from error


def notes(asked: Setup) -> list[str]:
    """Return what the initial values are, and that a CPU saves nothing."""
    if not asked.config.init_on_meta:
        return []
    if asked.device.type == "cpu" or asked.config.offload_parameters:
        return [
            "init_on_meta saves nothing where the model is in the host's memory in any case; its "
            "initial values are those of a plain build on a CPU, bit by bit."
        ]
    return [
        "The initial values are drawn on the card, whose random numbers are others than a CPU's."
    ]


def source(asked: Setup) -> ScriptLines:
    """Return what a person would add to a script."""
    config = asked.config
    if not config.init_on_meta:
        return ScriptLines()
    # weights that wait in the host's memory are made there
    where = 'torch.device("cpu")' if config.offload_parameters else "device"
    before = f"build_model = functools.partial(build_on_meta, build_model, {where})"
    return together([whole(deferred), ScriptLines(imports=("import functools",), before=(before,))])


def says(asked: Setup) -> str:
    """Return what it does now."""
    if not asked.config.init_on_meta:
        return ""
    return "the model is built without memory and then made on the device"


BUILT_ON_META = Technique(
    fields=("init_on_meta",),
    keeps=Keeps.ROUNDED,
    examples={"built on meta": {"init_on_meta": True}},
    source=source,
    notes=notes,
    controls=(switch("init_on_meta", "build on meta", "built on meta", "not built on meta"),),
    says=says,
)
