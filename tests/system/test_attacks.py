"""The benchmark of killed processes: what it takes for gone, and what it has a model do."""

import os
import subprocess
import time

import pytest

from benchmarks import attacks


def test_a_process_is_gone_once_it_has_ended_whether_it_was_counted_or_not(monkeypatch):
    monkeypatch.setattr(attacks, "WAIT_SECONDS", 0.1)
    with subprocess.Popen(attacks.SLEEP) as process:
        assert attacks.is_there(process.pid)
        assert attacks.seconds_until_gone([process.pid]) is None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert attacks.seconds_until_gone([process.pid]) is not None
    assert not attacks.is_there(process.pid)


@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded, says Python 3.12 of a fork
def test_every_kind_of_process_that_is_left_notes_itself(monkeypatch, tmp_path):
    monkeypatch.setenv(attacks.FOLDER, str(tmp_path))
    try:
        for name, leave in attacks.LEAVERS.items():
            if name != "fork":  # this process has threads
                leave()
        while len(found := attacks.noted(tmp_path)) < attacks.NUM_LEFT - 1:
            time.sleep(0.01)
        assert all(map(attacks.is_there, found))
    finally:
        attacks.held.clear()  # ends the loader's workers
        for pid in attacks.noted(tmp_path):
            if attacks.is_there(pid):
                os.kill(pid, 9)
