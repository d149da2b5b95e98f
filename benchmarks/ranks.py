"""Ranks that several settings of a benchmark share, since starting them takes seconds."""

import contextlib
import os
import sys
import time

from memlab.worker.job import Job
from memlab.worker.ranks.group import RankGroup

GROUP_SECONDS = 3600.0


class Ranks:
    """Starts ranks when they are asked for, and new ones after a pair that has ended them."""

    def __init__(self) -> None:
        self.group: RankGroup | None = None
        self.opened = contextlib.ExitStack()

    def of(self, world_size: int) -> RankGroup:
        """Return a group of this many ranks that takes calls."""
        if self.group is None or self.group.world_size != world_size or self.group.has_ended:
            self.end()
            deadline = time.monotonic() + GROUP_SECONDS
            job = Job(
                function="", arguments=b"", path=list(sys.path), folder=os.getcwd(),
                own_files={}, own_values={}, environment={}, threads=world_size,
            )  # fmt: skip
            group = RankGroup(job, world_size, "cpu", deadline, lambda progress: None)
            self.group = self.opened.enter_context(group)
        return self.group

    def end(self) -> None:
        """End the ranks."""
        self.group = None
        self.opened.close()
