"""Which files are a person's own, and which are part of Python or of an installed package."""

import functools
import os
import site
import sysconfig
import traceback
from pathlib import Path

LIBRARY_FOLDERS = tuple(
    os.path.realpath(folder) + os.sep
    for folder in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)
# where installers put packages; those of another environment can be on the path as well
PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})
OWN_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


@functools.cache
def is_library(file: str) -> bool:
    """Return whether a file is part of Python or of an installed package, of any environment."""
    path = os.path.realpath(file)
    return path.startswith(LIBRARY_FOLDERS) or not PACKAGE_FOLDERS.isdisjoint(path.split(os.sep))


def own_line(error: BaseException) -> str:
    """Return the innermost line of a person's own code that an error passed through; "" if none.

    >>> try:
    ...     exec(compile("1 / 0", "/home/me/model.py", "exec"))
    ... except ZeroDivisionError as error:
    ...     own_line(error)
    'model.py, line 1'
    """
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if "ipykernel_" in file or file.startswith("<ipython-input"):
            found = f"a cell of the notebook, line {line} of {frame.f_code.co_name}"
        elif not (file.startswith(("<", OWN_PACKAGE)) or is_library(file)):
            found = f"{os.path.basename(file)}, line {line}"
    return found
