"""How a worker begins: `python -P _start.py SETTINGS KEEPER`.

It is run as a file, and takes memlab from the folder that the file is in: not by a path, on which
other files of that folder could stand in for Python's own modules, or which a ":" would cut in two.
SETTINGS is JSON: the caller's `sys.path`, variables of the environment that the interpreter itself
was not to see, and the descriptor of the socket. KEEPER is the process that has to live on.
"""

import importlib.util
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    """Prepare the process, then serve jobs."""
    settings, keeper = json.loads(sys.argv[1]), int(sys.argv[2])
    end_with(keeper)
    os.environ.update(settings["environment"])
    # what this interpreter found by itself comes first; then all is found in the caller's order
    own = [folder for folder in sys.path if folder in standard_folders()]
    callers = [folder for folder in settings["path"] if os.path.isabs(folder)]
    sys.path[:] = [*own, *(folder for folder in callers if folder not in own)]

    load_memlab()
    from memlab.worker import serve

    serve(settings["socket"], own)


def standard_folders() -> set[str]:
    """Return where an interpreter has its standard library, as `sys.path` has it."""
    library = os.path.dirname(os.__file__)
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    return {library, f"{library}/lib-dynload", os.path.join(os.path.dirname(library), zipped)}


def load_memlab() -> None:
    """Import the package that this file is part of."""
    folder = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.util.spec_from_file_location(
        "memlab", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec
    assert spec.loader
    sys.modules["memlab"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["memlab"])


def end_with(keeper: int) -> None:
    """Have the system kill this process when its keeper ends, whatever it does then; Linux only."""
    import ctypes

    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() != keeper:  # it ended before that
        os._exit(0)


if __name__ == "__main__":
    main()
