"""`memlab watch`: a person's script in this very process, under `memlab.watch`.

The script sees its own arguments and folder, as under `python`. Its exit code is that of the
command, and its traceback has no lines of memlab.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from types import TracebackType

from memlab.errors import MemlabError
from memlab.integrations.watch import watch


def main(arguments: Sequence[str]) -> int:
    """Run a script or a module; return 0, 1 after an error or 130 after Ctrl-C.

    Raises:
        SystemExit: the script's own, or status 2 for wrong use.
    """
    parser = argparse.ArgumentParser(
        prog="memlab watch", allow_abbrev=False,
        description="Run a training script and write down why memory runs out, or grows.",
    )  # fmt: skip
    parser.add_argument("--folder", default="memlab-watch", help="for the answers")
    parser.add_argument("--memory-limit", metavar="SIZE", help="bytes, or a size such as 8GiB")
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    given = parser.parse_args(arguments)
    if not given.is_module and not os.path.exists(given.script):
        parser.error(f"script={given.script!r} is no file")
    try:
        watched = watch(given.folder, memory_limit=given.memory_limit)
    except MemlabError as error:
        parser.error(str(error))

    sys.argv = [given.script, *given.arguments]
    sys.path[0:1] = [
        os.getcwd() if given.is_module else os.path.dirname(os.path.abspath(given.script))
    ]
    try:
        with watched:
            if given.is_module:
                runpy.run_module(given.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(given.script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = _of_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame that is neither of this file nor of runpy."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file not in (__file__, runpy.__file__) and not file.startswith("<frozen runpy"):
            break
        trace = trace.tb_next
    return trace
