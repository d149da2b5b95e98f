"""What the folded controls of loss, in-place activations and offloading mean, in words."""

from collections.abc import Mapping
from typing import Any

from memlab.config import BudgetEngine, StepConfig

OFFLOADED = {
    "offload_activations": "activations",
    "offload_parameters": "parameters",
    "offload_optimizer": "optimizer state",
}
EAGER_ONLY: dict[str, tuple[object, str, str]] = {
    "loss_chunks": (1, "torch.compile cannot take the loss in chunks", "in one piece"),
    "inplace": (
        False,
        "torch.compile reuses memory by itself",
        "not in place",
    ),
    "offload_activations": (
        False,
        "torch.compile saves for backward by itself, which cannot be offloaded",
        "no offloading",
    ),
    "offload_parameters": (
        False,
        "torch.compile takes the weights where they are",
        "parameters stay",
    ),
}
"""What a compiled step cannot have, by field: the value without, why not, and that in words."""

NAMES = {
    "init_on_meta": "built on meta",
    "model_cache": "with the model's cache",
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
    if not settings["model_cache"]:
        said.append("the model fills no cache of keys and values")
    if settings["inplace"]:
        said.append("activations write over their input where nothing else reads it")
    if settings["expandable_segments"]:
        said.append("segments grow by pages, which lowers what is reserved, not what is allocated")
    if asked := offloaded(settings):
        share = settings["offload_fraction"]
        names = " and ".join(OFFLOADED[field] for field in asked)
        if "offload_activations" in asked and share < 1.0:
            names = f"{share:.0%} of the {names}"
        said.append(f"{names} wait in the host's memory, as fast as the bus allows")
    return said


def clash(settings: Mapping[str, Any]) -> tuple[str, tuple[str, dict[str, object]]] | None:
    """Return why two settings cannot be together, and what to do; None if all of them can."""
    planned = settings["budget_engine"] == BudgetEngine.COMPILE and settings["memory_budget"] < 1.0
    if settings["compile"] or planned:
        for field, (off, why, remedy) in EAGER_ONLY.items():
            if settings[field] != off:
                return f"not possible: {why}", (remedy, {field: off})
    return None


def offloaded(settings: Mapping[str, Any]) -> list[str]:
    """Return the fields of what is offloaded."""
    return [field for field in OFFLOADED if settings[field]]


def words(field: str, value: Any) -> str | None:
    """Return one setting as the table of runs names it, None if it is none of these."""
    if field == "loss_chunks":
        return f"loss in {value} chunks" if value != 1 else "loss in one piece"
    if field == "offload_fraction":
        return f"{value:.0%} of the activations"
    if field in NAMES:
        if field == "model_cache" and not value:
            return "without the model's cache"
        return NAMES[field] if value else f"not {NAMES[field]}"
    return None


def others(config: StepConfig) -> list[str]:
    """Return in words which of these settings differ from the defaults."""
    default, fields = StepConfig(), ("loss_chunks", *NAMES, "offload_fraction")
    changed = [f for f in fields if getattr(config, f) != getattr(default, f)]
    return [said for f in changed if (said := words(f, getattr(config, f)))]
