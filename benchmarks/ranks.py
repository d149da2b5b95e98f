"""Ranks that several settings of a benchmark share, since starting them takes seconds."""

import contextlib
import os
import sys
import time
from typing import Any

import torch

from memlab import StepConfig, StepResult, VerifyReport, Workload
from memlab.result import Source
from memlab.runtime.rank_group import RankGroup, measure_in, updates_in
from memlab.runtime.verify import verify_in_process
from memlab.runtime.wire import Job

CALL_SECONDS = 240.0  # of one setting


class Ranks:
    """Starts ranks when they are asked for, and new ones after a pair that has ended them."""

    def __init__(self) -> None:
        self.group: RankGroup | None = None
        self.opened = contextlib.ExitStack()

    def of(self, world_size: int) -> RankGroup:
        """Return a group of this many ranks that takes calls."""
        if self.group is None or self.group.world_size != world_size or self.group.has_ended:
            self.end()
            deadline = time.monotonic() + CALL_SECONDS
            job = Job(
                function="", arguments=b"", path=list(sys.path), folder=os.getcwd(),
                own_files={}, own_values={}, environment={}, threads=1,
            )  # fmt: skip
            group = RankGroup(job, world_size, "cpu", deadline, lambda progress: None)
            self.group = self.opened.enter_context(group)
        self.group.deadline = time.monotonic() + CALL_SECONDS
        return self.group

    def measured(self, workload: Workload, config: StepConfig, **options: Any) -> StepResult:
        """Return what `memlab.measure` of one repeat would, without starting ranks."""
        asked = {
            "workload": workload, "config": config, "device_type": "cpu", "repeats": 1,
            "warmup": 0, "seed": 0, "memory_limit": None, **options,
        }  # fmt: skip
        about = {
            "source": Source.MEASURED, "device": "cpu", "config": config,
            "workload_name": workload.name, "memory_limit_bytes": asked["memory_limit"],
        }  # fmt: skip
        return measure_in(self.of(config.world_size), asked, about)

    def verified(self, workload: Workload, config: StepConfig, **options: Any) -> VerifyReport:
        """Return what `memlab.verify` would, without starting ranks."""
        return verify_in_process(
            workload, config, torch.device("cpu"), seed=0, report=lambda progress: None,
            run_in_ranks=updates_in(lambda: self.of(config.world_size)), **options,
        )  # fmt: skip

    def end(self) -> None:
        """End the ranks."""
        self.group = None
        self.opened.close()
