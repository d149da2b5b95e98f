"""What `package.module:name` means, imported as Python would from the current folder."""

import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from memlab.arguments.libraries import own_line
from memlab.arguments.quoting import printable
from memlab.errors import MemlabError

NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
IMPORT_PATH = re.compile(f"{NAME}:{NAME}")


@contextmanager
def to_stderr() -> Iterator[None]:
    """Send what a person's code prints to stderr, also by a library in C or a child process.

    Stdout holds the answer alone.
    """
    with redirect_stdout(sys.stderr):
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def imported(path: str) -> Any:
    """Return what an import path names.

    Raises:
        MemlabError: it cannot be imported; the message has the cause.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:  # a console script has its own folder first
        sys.path.insert(0, folder)
    module, _, name = path.partition(":")
    try:
        with to_stderr():
            found: Any = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a person's file may raise anything, SystemExit too
        raise MemlabError(f"{module} of {path} cannot be imported: {cause(error)}") from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise MemlabError(f"{path}: {module} has no {name}") from None
    return found


def cause(error: BaseException) -> str:
    """Return an error in a clause, with the line of the person's file that it came from."""
    line = own_line(error)
    said = printable(" ".join(str(error).split()))
    return f"{type(error).__name__}: {said}{f' ({line})' if line else ''}"
