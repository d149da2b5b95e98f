"""Initialisation on the meta device: a model is built without memory, then created on its device.

While `build_model` runs, its tensors have shapes but no bytes, and every operator on them is
recorded. Then the operators are replayed on the device, in the same order and from the same seed.
So everything that a plain build initialises is initialised: buffers, tied weights and a
constructor's own changes too, which `to_empty` and `reset_parameters` would lose. On a CPU the
values equal those of a plain build bit by bit. A card draws other random numbers than a CPU.

The tensors are fake tensors that report the real device. If a tensor reported "meta",
torch.nn.init and transformers would silently skip its initialisation (torch 2.13, transformers 5).

A model whose parameters are sharded stays without memory until `fully_shard` has divided it, and is
then filled one parameter at a time (`shards.py`): no rank ever holds the whole model. Left out:
predictions of other models, whose tensors need no memory anyway.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from memlab.arguments.units import format_bytes
from memlab.config import StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques.building import deferred
from memlab.techniques.building.shards import Unfilled
from memlab.techniques.sharding.ranks import FULLY_SHARDED, is_tensor_parallel
from memlab.techniques.source import ScriptLines, together, whole
from memlab.techniques.technique import Keeps, Saving, Setup, Technique, switch
from memlab.torch_private.dispatch import without_modes
from memlab.torch_private.fakes import detect_fake_mode

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A model as it was built.

    Attributes:
        model: on the meta device if its values come later.
        unfilled: its values, if they come later.
    """

    model: nn.Module
    unfilled: Unfilled | None = None

    def fill(self, device: torch.device, home: torch.device) -> None:
        """Make the values that were to come later, once the model is sharded.

        Args:
            device: where they are made.
            home: where parts of parameters stay: the device, or the host if they are offloaded.
        """
        if self.unfilled is not None:
            self.unfilled.fill(device, home)


def _comes_later(config: StepConfig) -> bool:
    """Return whether values are made when the model is sharded; dividing its layers needs them."""
    return config.sharding in FULLY_SHARDED and not is_tensor_parallel(config)


def built(build_model: Callable[[], nn.Module], device: torch.device, config: StepConfig) -> Built:
    """Return the model as a config asks for it: plainly, or without memory.

    Raises:
        UnsupportedError: as for `build`.
    """
    if not config.init_on_meta:
        return Built(model=build_model())
    if not _comes_later(config):
        return Built(model=build(build_model, device))

    with without_modes():  # a prediction sees how the values are made, not how they are noted
        unfilled = _refused_by_name(lambda: Unfilled(*deferred.noted_build(build_model)))
    return Built(model=unfilled.model, unfilled=unfilled)


def build(build_model: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """Return the model, built without memory and then created on this device.

    Raises:
        UnsupportedError: its constructors read or draw numbers in a way that cannot be replayed.
    """
    if detect_fake_mode() is not None:
        return build_model()

    return _refused_by_name(lambda: deferred.build_on_meta(build_model, device))


def _refused_by_name(make: Callable[[], Made]) -> Made:
    try:
        return make()
    except deferred.CannotDefer as error:
        instead = f", or {error.instead}" if error.instead else ""
        raise UnsupportedError(
            f"init_on_meta=True cannot build this model without memory ({error}); use "
            f"init_on_meta=False{instead}"
        ) from error


def notes(asked: Setup) -> list[str]:
    """Say where the initial values come from, and where nothing is saved."""
    if not asked.config.init_on_meta:
        return []

    if _comes_later(asked.config):
        return [
            "Each rank was built with its part of the model and one whole parameter at a time, "
            "never with the whole model."
        ]
    if asked.device.type == "cpu" or asked.config.offload_parameters:
        return [
            "init_on_meta saves nothing here, because the model's weights are in host memory "
            "anyway. The initial values equal those of a plain build on a CPU bit by bit."
        ]

    return [
        "The initial values are drawn on the card, which draws other random numbers than a CPU."
    ]


def peak_notes(config: StepConfig, peak_bytes: int) -> list[str]:
    """Say what a rank with a part of the model held while it was built."""
    if not _comes_later(config):
        return []
    return [f"While the model was built, this rank held at most {format_bytes(peak_bytes)}."]


WHY = "# built without memory first, so that weights are created where they stay"


def source(asked: Setup) -> ScriptLines:
    """Return the lines of a script that build the model."""
    config = asked.config
    if not config.init_on_meta:
        return ScriptLines()

    # offloaded weights are created in host memory
    where = 'torch.device("cpu")' if config.offload_parameters else "device"
    before = f"build_model = functools.partial(build_on_meta, build_model, {where})"
    return together(
        [whole(deferred), ScriptLines(imports=("import functools",), before=(WHY, before))]
    )


def says(asked: Setup) -> str:
    """Return what it does now."""
    if not asked.config.init_on_meta:
        return ""
    return "the model is built without memory, then its weights are created on the device"


BUILT_ON_META = Technique(
    fields=("init_on_meta",),
    keeps=Keeps.ROUNDED,
    examples={"built on meta": {"init_on_meta": True}},
    source=source,
    notes=notes,
    controls=(
        switch(
            "init_on_meta",
            "build on the meta device",
            "built on the meta device",
            "built with its weights",
        ),
    ),
    says=says,
    savings=(
        Saving(
            setting="`init_on_meta=True`",
            saves=(
                "the host's memory while a model is built for a card: shapes take the place of "
                "weights"
            ),
            costs="a fraction of a second; on a card, other random numbers than a CPU's",
            not_for=(
                "a CPU, which holds the model in any case (allowed there, with a note); "
                "constructors that read random values or seed torch, which are refused"
            ),
        ),
    ),
)
