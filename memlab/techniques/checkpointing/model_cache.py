"""Switch off the cache of keys and values that a model fills while it trains.

Decoders of transformers fill such a cache in each forward unless their config says
`use_cache=False`. It is of no use in training, but the plain step leaves the model as it was built.
A recompute would fill the cache a second time, so it is refused with `OFF` as the remedy. Left out:
caches that a model's own code makes regardless of its config.
"""

import copy

import torch

from memlab.techniques.source import ScriptLines, inlined, together
from memlab.techniques.technique import Equivalence, Setup, Technique, switch

# Switch off the caches of keys and values in all parts of a model.
#
# It is plain PyTorch, of which exported scripts contain what they call.


def switch_caches_off(model: torch.nn.Module) -> None:
    """Set use_cache=False in copies of the configs of the model and of its parts."""
    copies: dict[int, object] = {}  # a part often shares its config with the model
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None:
            module.config = copy.deepcopy(config, copies)
            for each in (module.config, *vars(module.config).values()):
                if getattr(each, "use_cache", None) is True:
                    each.use_cache = False


OFF = "model_cache=False"
"""The setting that switches the cache off. The panel offers it if a refusal has these words."""


WHY = "# keys and values of earlier tokens are of use in generation alone"


def source(setup: Setup) -> ScriptLines:
    """Return the lines of a script that switch caches off."""
    if setup.config.model_cache:
        return ScriptLines()
    return together(
        [inlined(switch_caches_off), ScriptLines(built=(WHY, "switch_caches_off(model)"))]
    )


def says(setup: Setup) -> str:
    """Return what it does now."""
    return "" if setup.config.model_cache else "the model's cache of keys and values is off"


MODEL_CACHE = Technique(
    fields=("model_cache",),
    equivalence=Equivalence.NUMERICAL,
    source=source,
    controls=(
        switch(
            "model_cache",
            "key and value cache",
            "with the model's cache",
            "without the model's cache",
        ),
    ),
    says=says,
    may_be_faster=True,
)
