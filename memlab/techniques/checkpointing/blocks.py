"""Find the repeated blocks of a model: the largest stack of them, or all stacks.

It is plain PyTorch, of which exported scripts contain what they call.
"""

import copy
import fnmatch
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from memlab.techniques.source import ScriptLines, inlined, together
from memlab.techniques.technique import Equivalence, Setup, Technique, switch

# Find modules that are inside of others, by their paths.
#
# It is plain PyTorch, of which exported scripts contain what they call.


def is_inside(path: str, others: Iterable[str]) -> bool:
    """Return whether a module is inside of one of the others, by its path."""
    return any(path.startswith(f"{other}.") for other in others)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model by path; empty if it has none.

    Blocks are the children of one class in any `ModuleList` or `Sequential`. In a model without
    such children they are modules whose class appears more than once and that have children of
    their own. Of several such classes the one with the most parameters is chosen, and of equals
    the one with the most blocks.
    """
    return next(iter(find_stacks(model)), {})


def find_stacks(model: nn.Module) -> list[dict[str, nn.Module]]:
    """Return every stack of repeated blocks by path, the one that `find_blocks` returns first.

    An encoder and a decoder may have blocks of two classes, and a UNet of more. After one stack the
    next is chosen in the same way, from what is neither inside its blocks nor around them.
    """
    stacks: list[dict[str, nn.Module]] = []
    for find in (_in_containers, _repeated):
        groups = find(model)
        for stack in stacks:
            groups = _apart(groups, stack)
        while stack := _largest(groups):
            stacks.append(stack)
            groups = _apart(groups, stack)

    return stacks


def _in_containers(model: nn.Module) -> dict[type, dict[str, nn.Module]]:
    groups: dict[type, dict[str, nn.Module]] = defaultdict(dict)
    found: set[nn.Module] = set()  # two containers may hold the same block
    for path, container in model.named_modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            for name, child in container.named_children():
                if is_block(child) and child not in found:
                    groups[type(child)][f"{path}.{name}".lstrip(".")] = child
                    found.add(child)

    return groups


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


def _apart(
    groups: dict[type, dict[str, nn.Module]], stack: dict[str, nn.Module]
) -> dict[type, dict[str, nn.Module]]:
    """Return the blocks that are not in a stack, nor inside its blocks, nor around them."""
    return {
        kind: {
            path: block
            for path, block in group.items()
            if path not in stack
            and not is_inside(path, stack)
            and not any(is_inside(other, (path,)) for other in stack)
        }
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


# Find the modules of a model that a text names.
#
# It is plain PyTorch, of which exported scripts contain what they call.


def find_named(model: nn.Module, which: str) -> dict[str, nn.Module]:
    """Return the modules of this class, or else those that match the pattern, by path.

    A module inside of another selected module is left out.
    """
    modules = {path: module for path, module in model.named_modules() if path}
    named = {path: m for path, m in modules.items() if type(m).__name__ == which}
    found = named or {p: m for p, m in modules.items() if fnmatch.fnmatchcase(p, which)}
    found = {p: m for p, m in found.items() if not isinstance(m, nn.ModuleList | nn.ModuleDict)}
    return {path: module for path, module in found.items() if not is_inside(path, found)}


# Switch off the cache of keys and values that a model fills while it trains.
#
# Decoders of transformers fill such a cache in each forward unless their config says
# `use_cache=False`. It is of no use in training, but the plain step leaves the model as it was
# built.
# A recompute would fill the cache a second time, so it is refused with `OFF` as the remedy.
# Left out:
# caches that a model's own code makes regardless of its config.

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
