"""How a worker, or a rank that it starts, begins: `python -P start.py SETTINGS KEEPER`.

It runs as a file and imports memlab from the folder above its own. It does not use an entry of
`sys.path` for this: other files in that folder could replace Python's own modules, and a ":" in its
name would split the entry. SETTINGS is JSON: the caller's `sys.path`, environment variables that
must not reach the interpreter itself, and the descriptor of the socket, or for a rank the folder
of its group. With null for it, messages go through standard input and output. KEEPER is the process
id of the keeper, or of the worker that started a rank: this process has to end with it.
"""

import importlib.util
import json
import os
import signal
import sys
from typing import Any

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    """Prepare the process, then serve jobs."""
    settings, keeper = json.loads(sys.argv[1]), int(sys.argv[2])
    if "socket" in settings and settings["socket"] is None:
        settings["socket"] = take_pipes()
    else:
        end_with(keeper)
    os.environ.update(settings["environment"])
    finder = load("memlab.runtime.standard_library", "runtime", "standard_library.py")
    standard_library = finder.StandardLibrary([f for f in sys.path if f in standard_folders()])
    standard_library.install()
    # leave out "", which would mean the folder that the caller happened to be in
    callers = [folder for folder in settings["path"] if os.path.isabs(folder)]
    sys.path[:] = [*callers, *(folder for folder in sys.path if folder not in callers)]

    load("memlab", "__init__.py", search=[PACKAGE])
    if "rank_folder" in settings:
        from memlab.runtime.rank import serve_rank

        serve_rank(settings["rank_folder"], standard_library)
        return

    from memlab.runtime.serving import serve

    serve(settings["socket"], standard_library)


def standard_folders() -> set[str]:
    """Return the folders of the standard library, as they appear in `sys.path`."""
    library = os.path.dirname(os.__file__)
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    dynamic = os.path.join(library, "lib-dynload")
    beside = os.path.dirname(library)
    return {library, dynamic, os.path.join(beside, zipped), os.path.join(beside, "DLLs")}


def load(name: str, *path: str, search: list[str] | None = None) -> Any:
    """Import a file of memlab, by its path in the package."""
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(PACKAGE, *path), submodule_search_locations=search
    )
    assert spec
    assert spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def take_pipes() -> list[int]:
    """Return what was standard input and output; nothing that prints or asks may reach them."""
    pipes = [os.dup(0), os.dup(1)]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return pipes


def end_with(keeper: int) -> None:
    """Make the system kill this process when its keeper ends; Linux only."""
    import ctypes

    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError, TypeError):
        return

    if os.getppid() != keeper:  # the keeper ended before the call
        os._exit(0)


if __name__ == "__main__":
    main()
