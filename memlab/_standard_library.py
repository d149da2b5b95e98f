"""Python's own modules found before files of their names that stand in a person's folders."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class StandardLibrary:
    """Finds modules of the standard library, wherever its folders stand in `sys.path`.

    A notebook has imported most of them by the time its folder gets onto the path, and a worker
    imports them when it needs them: `queue.py` beside a notebook harms the one no more than the
    other.

    Attributes:
        folders: of the standard library.
        shadowed: names by which the caller itself has imported a person's own file; that is found.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = list(folders)
        self.shadowed: frozenset[str] = frozenset()

    def install(self) -> None:
        """Be asked just before the path is searched."""
        place = sys.meta_path.index(PathFinder)
        sys.meta_path.insert(place, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is, None if it is not one of the standard library."""
        is_standard = path is None and name in sys.stdlib_module_names
        if not is_standard or name in self.shadowed:
            return None
        return PathFinder.find_spec(name, self.folders, target)
