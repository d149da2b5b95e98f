"""What the folded controls of loss, in-place activations and offloading mean, in words."""

from collections.abc import Mapping
from typing import Any

from memlab.config import StepConfig

OFFLOADED = {"offload_activations": "activations", "offload_optimizer": "optimizer state"}
NAMES = {
    "init_on_meta": "built on meta",
    "inplace": "in place",
    "expandable_segments": "in expandable segments",
} | {field: f"{what} offloaded" for field, what in OFFLOADED.items()}


def sentences(settings: Mapping[str, Any]) -> list[str]:
    """Return a clause for each of these settings that is on."""
    said = []
    if (chunks := settings["loss_chunks"]) > 1:
        said.append(
            f"the loss is taken of 1/{chunks} of the tokens at a time, so that logits are never "
            "whole; the head runs once more in backward"
        )
    if settings["init_on_meta"]:
        said.append("the model is built without memory and then made on the device")
    if settings["inplace"]:
        said.append("activations write over their input where nothing else reads it")
    if settings["expandable_segments"]:
        said.append("segments grow by pages, which lowers what is reserved, not what is allocated")
    if asked := offloaded(settings):
        names = " and ".join(OFFLOADED[field] for field in asked)
        said.append(f"{names} wait in the host's memory, as fast as the bus allows")
    return said


def offloaded(settings: Mapping[str, Any]) -> list[str]:
    """Return the fields of what is offloaded."""
    return [field for field in OFFLOADED if settings[field]]


def words(field: str, value: object) -> str | None:
    """Return one setting as the table of runs names it, None if it is none of these."""
    if field == "loss_chunks":
        return f"loss in {value} chunks" if value != 1 else "loss in one piece"
    if field in NAMES:
        return NAMES[field] if value else f"not {NAMES[field]}"
    return None


def others(config: StepConfig) -> list[str]:
    """Return in words which of these settings differ from the defaults."""
    default, fields = StepConfig(), ("loss_chunks", *NAMES)
    changed = [f for f in fields if getattr(config, f) != getattr(default, f)]
    return [said for f in changed if (said := words(f, getattr(config, f)))]
