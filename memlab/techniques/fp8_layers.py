"""Find the layers of a model that can multiply in fp8.

This file imports nothing from memlab, because an exported script contains a copy of it.
"""

import torch


def can_be_fp8(module: torch.nn.Module, _: str) -> bool:
    """Return whether a module is a linear layer of sizes that fp8 products allow."""
    if type(module) is not torch.nn.Linear:
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0
