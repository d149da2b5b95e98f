"""The modules of a model that a text names.

An exported script holds this file as it stands, so it imports nothing of memlab
but `nesting`.
"""

import fnmatch

from torch import nn

from memlab.techniques.recompute.nesting import is_inside


def find_named(model: nn.Module, which: str) -> dict[str, nn.Module]:
    """Return modules by path, none inside another: of this class, else those a pattern means."""
    modules = {path: module for path, module in model.named_modules() if path}
    named = {path: m for path, m in modules.items() if type(m).__name__ == which}
    found = named or {p: m for p, m in modules.items() if fnmatch.fnmatchcase(p, which)}
    found = {p: m for p, m in found.items() if not isinstance(m, nn.ModuleList | nn.ModuleDict)}
    return {path: module for path, module in found.items() if not is_inside(path, found)}
