"""`switch_caches_off`: no cache of keys and values, in any part of a model.

An exported script holds this file as it stands, so it imports nothing of memlab.
"""

import copy

import torch


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
