"""Collections of garbage that look only at what a run has made.

A collection walks through every object that Python tracks; PyTorch and its libraries make about a
million of them, which takes a tenth of a second. `gc.freeze` takes them out of the walk.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def older_objects_frozen() -> Iterator[None]:
    """Let collections inside the block pass over all that exists at its beginning.

    Afterwards they look at everything again, unless the process had frozen objects before: then it
    keeps its libraries frozen, as a worker does, and thaws everything when it looks for garbage.
    """
    keeps_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not keeps_frozen:
            gc.unfreeze()


def collect_and_freeze(look: Callable[[], None] = lambda: None) -> None:
    """Collect the garbage of the whole process, then freeze what is left.

    Args:
        look: called between the two, while every object that Python tracks can be found.
    """
    gc.unfreeze()
    gc.collect()
    look()
    gc.freeze()
