"""The worker as its caller holds it: how it is started, fed, killed, and how it ended.

It does not decide when: that is `_isolation.py`.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from memlab._sources import is_library
from memlab.memory.devices import out_of_memory_kills
from memlab.result import Outcome
from memlab.worker import Job

STARTING, TAKING = "starting", "taking the job"
ABORTS = ("bad_alloc", "Thread creation failed")  # what native code says as it ends the process


class Ended(Exception):
    """A job ended without a result; `outcome` and the message say how."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class WorkerProcess:
    """A running worker process, or the shell of one that has ended."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        package_folder = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH")]))
        self.kills_before = out_of_memory_kills()
        self.process = subprocess.Popen(
            # -P: a file of the caller's folder must not stand in for one of Python's own
            [sys.executable, "-P", "-m", "memlab.worker", str(theirs.fileno())],
            stdin=subprocess.PIPE,  # closes with this process, and the worker ends then
            stdout=self.log,
            stderr=self.log,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # an interrupt of the kernel is not one of the worker
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.doing = STARTING
        self.log_begin = 0

    def send(self, job: Job) -> None:
        """Hand the job over; what is written to the log from now on is this job's."""
        self.doing, self.log_begin = TAKING, os.fstat(self.log.fileno()).st_size
        with contextlib.suppress(OSError):  # a worker that is gone is noticed by the next read
            self.connection.send(job)

    def kill(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        if self.process.stdin:
            self.process.stdin.close()
        self.log.close()

    def ending(self) -> Ended:
        """Return how the process ended by itself, in a sentence."""
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            return Ended(Outcome.CRASHED, f"the worker closed its socket while {self.doing}")
        said = self._said()
        aborts = [line.strip() for line in said.splitlines() if any(s in line for s in ABORTS)]
        if aborts:
            return Ended(Outcome.OUT_OF_MEMORY, f"out of memory while {self.doing}: {aborts[-1]}")
        if code == -signal.SIGKILL and out_of_memory_kills() > self.kills_before:
            return Ended(
                Outcome.OUT_OF_MEMORY,
                f"the system killed the worker while {self.doing}: this machine has no memory left",
            )
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        where = _innermost_frame(said)
        if self.doing == STARTING and said.strip():
            where = f", saying {said.strip().splitlines()[-1]!r}"
        return Ended(
            Outcome.CRASHED,
            f"the worker {how} while {self.doing}{where}; the notebook is not affected, and the "
            "next run starts a new worker",
        )

    def _said(self) -> str:
        self.log.seek(self.log_begin)
        return self.log.read()[-20_000:]


def _innermost_frame(said: str) -> str:
    """Return where a native crash happened, in a person's own code if it was called from there.

    Read from faulthandler's report; "" if it wrote none.
    """
    _, _, stack = said.partition("Current thread")
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', stack)
    own = [frame for frame in frames if not is_library(frame[0])]
    for file, line, function in own[:1] or frames[:1]:
        return f", in {function} ({file}, line {line})"
    return ""
