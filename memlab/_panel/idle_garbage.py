"""`IdleGarbage`: looks for garbage while the panel is left alone. No widgets.

A picture is made of thousands of objects that refer to one another. After some pictures Python
passes over all objects of the kernel to find those that nobody needs, which takes 0.1 to 0.4 s with
PyTorch loaded, and that is in the middle of the next picture. Done while nothing moves, it is not
due then.
"""

import gc
import time
from collections.abc import Callable

from memlab._panel.job import Latest

REST_SECONDS = 0.4  # after the last picture
MOST_PICTURES = 6  # without looking; Python itself looks after about twenty


class IdleGarbage:
    """Collects garbage once the panel rests, if pictures were drawn since the last time.

    Left out: a kernel whose garbage collector was switched off by its person, and whether a cell is
    running, which pauses meanwhile, as it does whenever Python itself looks.
    """

    def __init__(self, collect: Callable[[], object] = gc.collect) -> None:
        self._collect = collect
        self._pictures = self._looked_at = 0
        self._rest = Latest(self._collect_after_rest)

    def note(self, num_pictures: int) -> None:
        """Take note of how many pictures have been drawn so far."""
        if num_pictures != self._pictures:
            self._pictures = num_pictures
            self._rest()

    def close(self) -> None:
        """Collect nothing more."""
        self._rest.close()

    def _collect_after_rest(self, _: object) -> None:
        before = self._pictures
        time.sleep(REST_SECONDS)
        is_due = before - self._looked_at >= MOST_PICTURES
        if self._pictures == before and is_due and gc.isenabled():
            self._looked_at = before
            self._collect()
