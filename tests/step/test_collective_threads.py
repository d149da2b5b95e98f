"""Blocks that threads of collectives free outside of a profile."""

import os

import pytest

from memlab import StepConfig
from memlab.devices.here import resolve_device
from memlab.runtime import measure
from memlab.runtime.measure import paused_for
from tests.models import linear


def test_each_rank_keeps_the_pass_of_which_it_has_seen_all_frees(monkeypatch):
    own_pass, unseen, agreements = measure._memory_pass, iter([9000, 0, 4000]), []

    def memory_pass(*args):
        facts, _ = own_pass(*args)
        left = next(unseen)
        peak = facts["peak_allocated_bytes"] + left
        return facts | {"peak_allocated_bytes": peak}, left

    def agreed(is_done: bool) -> bool:
        agreements.append(is_done)
        return len(agreements) >= 3  # another rank has seen all of its own in the third pass only

    def measured(agreed=bool) -> int:
        result = measure.measure_in_process(
            linear(), StepConfig(), resolve_device("cpu"), repeats=1, warmup=0, seed=0,
            memory_limit=None, report=lambda _: None, agreed=agreed,
        )  # fmt: skip
        assert result.outcome == "ok"
        return result.peak_allocated_bytes

    own = measured()
    monkeypatch.setattr(measure, "_memory_pass", memory_pass)
    assert measured(agreed) == own
    assert agreements[:3] == [False, True, True]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a scheduling policy of Linux")
def test_the_scheduling_policy_is_as_it_was_after_a_metered_step():
    own = os.sched_getscheduler(0)
    with paused_for():
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == own


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has SCHED_BATCH")
def test_a_sandbox_that_forbids_another_scheduler_does_not_end_the_step(monkeypatch):
    def forbidden(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    reached = []
    with paused_for():
        reached.append("step")
    assert reached == ["step"]
