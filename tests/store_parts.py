"""What the tests of the store and of sweeps share: results that nothing ran, and processes."""

import os
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable

from memlab import StepConfig, StepResult
from memlab.store.database import RunArguments, StoredRun
from tests import ROOT


def a_result(**fields) -> StepResult:
    """Return a result that nothing ran; `fields` replace its own."""
    return StepResult(
        **{
            "outcome": "ok",
            "message": "peak 1 KiB",
            "source": "measured",
            "device": "cpu",
            "config": StepConfig(),
            "workload_name": "mine",
            "versions": {"memlab": "0.1.0", "torch": "2.13.0"},
            "peak_allocated_bytes": 1024,
            "peak_by_category": {"parameters": 1024},
            "step_seconds": 0.5,
            "step_seconds_all": (0.5, 0.6),
            **fields,
        }
    )


def a_run(**fields) -> StoredRun:
    """Return a row for the store; `fields` replace its own."""
    return StoredRun(
        **{"stored_at": 1.0, "result": a_result(), "asked": RunArguments(seed=0), **fields}
    )


def python(code: str, *arguments: str) -> str:
    """Return what a new Python prints that imports what this one does; it must end well."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        text=True,
        capture_output=True,
        timeout=900,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Forked:
    """A process that runs a function; it begins at once, with all that this one has imported."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                function()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)

    def wait(self) -> int:
        """Return its exit status, below zero for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """End it as `kill -9` does."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL
