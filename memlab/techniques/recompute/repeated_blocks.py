"""Find the repeated blocks of a model.

This file imports nothing from memlab but `nesting`, because an exported script contains a copy of
it.
"""

from collections import defaultdict

import torch
from torch import nn

from memlab.techniques.recompute.nesting import is_inside


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model by path; empty if it has none.

    Blocks are the children of one class in any `ModuleList` or `Sequential`. In a model without
    such children they are modules whose class appears more than once and that have children of
    their own. Of several such classes the one with the most parameters is chosen, and of equals
    the one with the most blocks.
    """
    groups: dict[type, dict[str, nn.Module]] = defaultdict(dict)
    found: set[nn.Module] = set()  # two containers may hold the same block
    for path, container in model.named_modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            for name, child in container.named_children():
                if is_block(child) and child not in found:
                    groups[type(child)][f"{path}.{name}".lstrip(".")] = child
                    found.add(child)

    return _largest(groups) or _largest(_repeated(model))


def is_block(module: nn.Module) -> bool:
    """Return whether a module has children and a forward of its own."""
    has_children = next(module.children(), None) is not None
    return has_children and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _repeated(model: nn.Module) -> dict[type, dict[str, nn.Module]]:
    groups: dict[type, dict[str, nn.Module]] = defaultdict(dict)
    for path, module in model.named_modules():
        if path and is_block(module) and type(module) is not nn.Sequential:
            groups[type(module)][path] = module

    return {
        kind: {path: m for path, m in group.items() if not is_inside(path, group)}
        for kind, group in groups.items()
    }


def _largest(groups: dict[type, dict[str, nn.Module]]) -> dict[str, nn.Module]:
    return max(
        (blocks for blocks in groups.values() if len(blocks) > 1),
        key=lambda blocks: (_num_parameters(blocks), len(blocks)),
        default={},
    )


def _num_parameters(blocks: dict[str, torch.nn.Module]) -> int:
    return sum(p.numel() for p in {p for block in blocks.values() for p in block.parameters()})
