"""Caches of keys and values that a model fills while it trains: switched off where that is asked.

Decoders of transformers make one in each forward unless their config says `use_cache=False`. It is
of no use in training; the plain step keeps it all the same, as a person wrote it. A recompute would
fill it once more, so that it is refused with `OFF` for a remedy. Left out: caches that a model's
own code makes whatever its config says.
"""

from memlab.techniques.recompute import caches
from memlab.techniques.source import ScriptLines, together, whole
from memlab.techniques.technique import Keeps, Setup, Technique, switch

OFF = "model_cache=False"
"""The argument that switches a cache off: the panel offers it where a refusal has these words."""


def source(asked: Setup) -> ScriptLines:
    """Return the function of a script, and its call."""
    if asked.config.model_cache:
        return ScriptLines()
    return together([whole(caches), ScriptLines(built=("switch_caches_off(model)",))])


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
)
