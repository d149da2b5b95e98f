"""Caches of keys and values that a model fills while it trains: switched off where that is asked.

Decoders of transformers make one in each forward unless their config says `use_cache=False`. It is
of no use in training; the plain step keeps it all the same, as a person wrote it. A recompute would
fill it once more, so that it is refused with `OFF` for a remedy. Left out: caches that a model's
own code makes whatever its config says.
"""

import copy

import torch

from memlab.techniques.source import ScriptLines, text_of
from memlab.techniques.technique import Keeps, Saving, Setup, Technique, switch

OFF = "model_cache=False"
"""The argument that switches a cache off: the panel offers it where a refusal has these words."""


def switch_caches_off(model: torch.nn.Module) -> None:
    """Let every config of the model and of its parts say use_cache=False, in copies of them."""
    copies: dict[int, object] = {}  # the configs of parts are often those within the model's
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None:
            module.config = copy.deepcopy(config, copies)
            for each in (module.config, *vars(module.config).values()):
                if getattr(each, "use_cache", None) is True:
                    each.use_cache = False


def source(asked: Setup) -> ScriptLines:
    """Return the function of a script, and its call."""
    if asked.config.model_cache:
        return ScriptLines()
    return ScriptLines(
        imports=("import copy",),
        functions=(text_of(switch_caches_off),),
        built=("switch_caches_off(model)",),
    )


def says(asked: Setup) -> str:
    """Return what it does now."""
    return "" if asked.config.model_cache else "the model fills no cache of keys and values"


MODEL_CACHE = Technique(
    fields=("model_cache",),
    keeps=Keeps.ROUNDED,
    source=source,
    controls=(
        switch(
            "model_cache", "model's cache", "with the model's cache", "without the model's cache"
        ),
    ),
    says=says,
    savings=(
        Saving(
            setting="`model_cache=False`",
            saves=(
                "the keys and values that transformers' decoders put into a cache in each forward; "
                "without it a budget and checkpointing work, which refuse a cache"
            ),
            costs="`use_cache=False` in copies of the model's configs",
            not_for="models whose own code makes a cache whatever their config says",
        ),
    ),
)
