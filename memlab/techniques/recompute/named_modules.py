"""Find the modules of a model that a text names.

This file imports nothing from memlab but `nesting`, because an exported script contains a copy of
it.
"""

import fnmatch

from torch import nn

from memlab.techniques.recompute.nesting import is_inside


def find_named(model: nn.Module, which: str) -> dict[str, nn.Module]:
    """Return the modules of this class, or else those that match the pattern, by path.

    A module inside of another selected module is left out.
    """
    modules = {path: module for path, module in model.named_modules() if path}
    named = {path: m for path, m in modules.items() if type(m).__name__ == which}
    found = named or {p: m for p, m in modules.items() if fnmatch.fnmatchcase(p, which)}
    found = {p: m for p, m in found.items() if not isinstance(m, nn.ModuleList | nn.ModuleDict)}
    return {path: module for path, module in found.items() if not is_inside(path, found)}
