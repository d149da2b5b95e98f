"""What a process is set to: whatever a job leaves turned is found."""

import _thread
import os
import signal
import sys
import threading

import pytest

from memlab.runtime.unchanged import differences, process_state

linux = pytest.mark.skipif(sys.platform != "linux", reason="it is kept by Linux")


def found_after(change, undo):
    """Return what differs once `change` has run; `undo` puts it back."""
    process_state()
    before = process_state()
    change()
    try:
        return differences(before, process_state())
    finally:
        undo()


@pytest.mark.parametrize("timer", ["ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF"])
def test_a_timer_that_is_left_on_is_found(timer):
    which = getattr(signal, timer)
    changed = found_after(lambda: signal.setitimer(which, 1000), lambda: signal.setitimer(which, 0))
    assert changed == ["signals"]


def test_a_thread_that_threading_does_not_know_is_found():
    end, begun = threading.Event(), threading.Event()

    def wait():
        begun.set()
        end.wait()

    def leave_one():
        _thread.start_new_thread(wait, ())
        begun.wait()

    assert found_after(leave_one, end.set) == ["threads of _thread"]


def test_a_thread_that_has_ended_is_no_difference():
    def run_one():
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

    assert found_after(run_one, int) == []


@linux
def test_what_linux_keeps_of_a_process_is_compared():
    with open("/proc/self/timerslack_ns") as file:
        usual = file.read()

    def set_slack(value):
        with open("/proc/self/timerslack_ns", "w") as file:
            file.write(value)

    assert found_after(lambda: set_slack("7777777"), lambda: set_slack(usual)) == ["/proc/self"]


@linux
def test_another_policy_of_scheduling_is_found():
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("this process runs by another policy")
    batch, usual = (os.SCHED_BATCH, os.SCHED_OTHER)
    changed = found_after(
        lambda: os.sched_setscheduler(0, batch, os.sched_param(0)),
        lambda: os.sched_setscheduler(0, usual, os.sched_param(0)),
    )
    assert changed == ["os.sched_getscheduler"]
