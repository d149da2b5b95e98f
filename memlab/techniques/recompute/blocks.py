"""Select the modules to checkpoint: the repeated blocks of a model, or modules by name."""

import difflib
import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from memlab.errors import UnsupportedError

AUTO = "auto"
EVERY = re.compile(r"every 0*([1-9]\d*)")


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
                if _is_block(child) and child not in found:
                    groups[type(child)][f"{path}.{name}".lstrip(".")] = child
                    found.add(child)

    return _largest(groups) or _largest(_repeated(model))


def select(model: nn.Module, which: str) -> dict[str, nn.Module]:
    """Return the modules to checkpoint by path, none inside another.

    Args:
        model: as built.
        which: "auto" for the repeated blocks, "every 3" for the first of every three blocks, the
            name of a class, or a pattern of paths as `fnmatch` reads it: "encoder.layers.*".

    Raises:
        UnsupportedError: no module matches; the message says which there are.
    """
    every = EVERY.fullmatch(which)
    if which == AUTO or every:
        blocks = find_blocks(model)
        if not blocks:
            raise UnsupportedError(
                f"checkpointing='blocks' found no repeated blocks in {type(model).__name__}; "
                "select modules with checkpoint_modules (a class or a pattern of paths), or use "
                "accumulation_steps to save activations"
            )

        step = int(every[1]) if every else 1
        return dict(list(blocks.items())[::step])

    named = find_named(model, which)
    if not named:
        raise UnsupportedError(_nothing_meant(model, which))

    return named


def find_named(model: nn.Module, which: str) -> dict[str, nn.Module]:
    """Return the modules of this class, or else those that match the pattern, by path.

    A module inside of another selected module is left out.
    """
    modules = {path: module for path, module in model.named_modules() if path}
    named = {path: m for path, m in modules.items() if type(m).__name__ == which}
    found = named or {p: m for p, m in modules.items() if fnmatch.fnmatchcase(p, which)}
    found = {p: m for p, m in found.items() if not isinstance(m, nn.ModuleList | nn.ModuleDict)}
    return {path: module for path, module in found.items() if not _is_inside(path, found)}


def _nothing_meant(model: nn.Module, which: str) -> str:
    modules = {path: module for path, module in model.named_modules() if path}
    classes = {type(m).__name__ for m in modules.values() if _is_block(m)}
    near = difflib.get_close_matches(which, [*classes, *modules], n=1, cutoff=0.5)
    suggestion = f"did you mean {near[0]!r}? " if near else ""

    return (
        f"checkpoint_modules={which!r} matches no module of {type(model).__name__}: {suggestion}"
        "allowed are 'auto', 'every 2', a class "
        f"({', '.join(sorted(classes)[:4]) or 'it has none with children'}) or a pattern of paths "
        f"('{next(iter(modules), '')}')"
    )


def _is_block(module: nn.Module) -> bool:
    """Return whether a module has children and a forward of its own."""
    has_children = next(module.children(), None) is not None
    return has_children and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _repeated(model: nn.Module) -> dict[type, dict[str, nn.Module]]:
    groups: dict[type, dict[str, nn.Module]] = defaultdict(dict)
    for path, module in model.named_modules():
        if path and _is_block(module) and type(module) is not nn.Sequential:
            groups[type(module)][path] = module

    return {
        kind: {path: m for path, m in group.items() if not _is_inside(path, group)}
        for kind, group in groups.items()
    }


def _largest(groups: dict[type, dict[str, nn.Module]]) -> dict[str, nn.Module]:
    return max(
        (blocks for blocks in groups.values() if len(blocks) > 1),
        key=lambda blocks: (_num_parameters(blocks), len(blocks)),
        default={},
    )


def _is_inside(path: str, others: Iterable[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)


def _num_parameters(blocks: dict[str, torch.nn.Module]) -> int:
    return sum(p.numel() for p in {p for block in blocks.values() for p in block.parameters()})
