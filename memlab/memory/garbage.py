"""Collections of garbage that look only at what a run has made.

A collection walks through every object that Python tracks; PyTorch and its libraries make about a
million of them, which takes half a second. `gc.freeze` takes them out of the walk.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator

_is_kept_frozen = False  # whether this process keeps what it has frozen, as a worker does


@contextlib.contextmanager
def older_objects_frozen() -> Iterator[None]:
    """Let collections inside the block pass over all that exists at its beginning.

    Afterwards they look at everything again, unless the process had frozen objects before: then it
    keeps its libraries frozen, as a worker does, and thaws everything when it looks for garbage.
    """
    # counting walks through all that is frozen, a tenth of a second for a million objects
    keeps_frozen = _is_kept_frozen or gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not keeps_frozen:
            gc.unfreeze()


def keep_frozen() -> None:
    """Freeze all that exists, in a process that keeps its libraries frozen from now on."""
    global _is_kept_frozen
    _is_kept_frozen = True
    gc.freeze()


def collect_new_and_freeze() -> None:
    """Collect the garbage of what is not frozen, then keep what is left frozen."""
    gc.collect()
    keep_frozen()


def collect_and_freeze(look: Callable[[], None] = lambda: None) -> None:
    """Collect the garbage of the whole process, then keep what is left frozen.

    Args:
        look: called between the two, while every object that Python tracks can be found.
    """
    gc.unfreeze()
    gc.collect()
    look()
    keep_frozen()
