"""Python's own modules found before files of their names that stand in a person's folders."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class StandardLibrary:
    """Finds modules of the standard library, wherever its folders stand in `sys.path`.

    A notebook has imported most of them by the time its folder gets onto the path, and a worker
    imports them when it needs them: so `queue.py` beside a notebook would harm the worker alone.

    Attributes:
        folders: of the standard library.
        shadowed: names by which the caller itself has imported a person's own file; that is found.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = list(folders)
        self.shadowed: frozenset[str] = frozenset()

    def install(self) -> None:
        """Be asked just before the path is searched."""
        sys.meta_path.insert(sys.meta_path.index(PathFinder), self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is, None if it is not one of the standard library.

        Raises:
            ModuleNotFoundError: it is one, but of another system or of another build of Python.
        """
        is_standard = path is None and name in sys.stdlib_module_names
        if not is_standard or name in self.shadowed:
            return None
        found = PathFinder.find_spec(name, self.folders, target)
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found
