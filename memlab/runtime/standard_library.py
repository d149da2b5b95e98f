"""Find Python's own modules before files of the same names in a person's folders."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class StandardLibrary:
    """Finds modules of the standard library, whatever the order of `sys.path`.

    A notebook has imported most of them before its folder is added to the path, but a worker
    imports them when it needs them. So `queue.py` beside a notebook would break the worker only.

    Attributes:
        folders: the folders of the standard library.
        shadowed: names under which the caller has imported a person's own file, which is then
            found in the worker too.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = list(folders)
        self.shadowed: frozenset[str] = frozenset()

    def install(self) -> None:
        """Install this finder just before the one that searches the path."""
        sys.meta_path.insert(sys.meta_path.index(PathFinder), self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is; None if it is not in the standard library.

        Raises:
            ModuleNotFoundError: it belongs to the standard library of another system or build.
        """
        is_standard = path is None and name in sys.stdlib_module_names
        if not is_standard or name in self.shadowed:
            return None
        found = PathFinder.find_spec(name, self.folders, target)
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found
