"""Switch off the caches of keys and values in all parts of a model.

This file imports nothing from memlab, because an exported script contains a copy of it.
"""

import copy

import torch


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
