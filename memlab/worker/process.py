"""The worker process seen from its caller: start it, send jobs, kill it, find out how it ended.

`isolation.py` decides when to do these things.
"""

import contextlib
import json
import os
import pickle
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from memlab.arguments.libraries import is_library
from memlab.devices.here import out_of_memory_kills
from memlab.result import Outcome
from memlab.running import Ended, Progress, out_of_memory
from memlab.sending.environment import for_worker
from memlab.sending.sources import Stamp
from memlab.worker import start
from memlab.worker.job import KINDS, LOST_STATUS, Job, beginning
from memlab.worker.kept import KeptProcess, SpawnedProcess, interpreter
from memlab.worker.wire import Channel, Check, Garbage

STARTING, TAKING = "starting", "taking the job"
# printed by native code that aborts; the last one by std::thread, which got no memory or no thread
ABORTS = ("bad_alloc", "Thread creation failed", "Resource temporarily unavailable")
# these control how an interpreter starts, and may have been set for another interpreter
HIDDEN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONINSPECT")
ENDING_SECONDS = 2.0  # for a process to end whose socket is closed


class WorkerProcess:
    """A worker process, running or ended.

    Attributes:
        process: the process with its descendants.
        channel: for messages to and from it.
        doing: what it is doing, in words.
        number: of the last job that it was given; messages of other jobs are ignored.
    """

    def __init__(self) -> None:
        self.kills_before = out_of_memory_kills()
        hidden = {k: os.environ[k] for k in HIDDEN_VARIABLES if k in os.environ}
        settings: dict[str, Any] = {
            "path": [folder for folder in sys.path if isinstance(folder, str)],
            "environment": hidden,
        }
        # -P: a file in the caller's folder must not replace one of Python's own modules
        command = [interpreter(), "-P", str(Path(start.__file__))]
        environment = {k: value for k, value in for_worker(os.environ).items() if k not in hidden}
        self.process: KeptProcess | SpawnedProcess
        if hasattr(os, "fork"):
            ours, theirs = socket.socketpair()
            with theirs:
                settings["socket"] = theirs.fileno()
                self.process = KeptProcess(
                    [*command, json.dumps(settings)], theirs.fileno(), environment
                )
        else:
            settings["socket"] = None
            self.process = SpawnedProcess([*command, json.dumps(settings)], environment)
            ours = self.process.line

        self.channel = Channel(ours, blocks=False)
        self.doing = STARTING
        self.number = 0
        self.stamps: dict[str, Stamp | None] = {}  # of files that it has imported or read

    def assign(self, *, is_predicting: bool) -> None:
        """Tell the worker which kind of jobs will come, so that it can prepare for them."""
        with contextlib.suppress(OSError):  # as in `send`
            self.channel.send(0, pickle.dumps(is_predicting))

    def send(self, job: Job, check: Check) -> None:
        """Send the job; `check` is called repeatedly meanwhile and may raise."""
        self.number += 1
        self.doing = TAKING
        with contextlib.suppress(OSError):  # a worker that is gone is noticed by the next read
            self.channel.send_checked(self.number, pickle.dumps(job), check, self.has_ended)

    def receive(self, check: Check) -> tuple[str, Any]:
        """Return the next message of the job; `check` is called meanwhile, and may raise.

        Raises:
            Ended: the worker has ended, or what it sent is not a message.
        """
        while True:
            try:
                number, content = self.channel.receive_checked(check, self.has_ended)
            except Garbage as error:
                raise self._unreadable(error) from None
            except (EOFError, OSError):
                raise self.ending() from None

            if number == self.number:  # a thread of an earlier job may still send messages
                break

        try:
            kind, value = pickle.loads(content)
            if str(kind) not in KINDS or (kind == "progress") != isinstance(value, Progress):
                raise Garbage(f"{kind!r} is not a kind of message")
        except Exception as error:  # bytes that mean nothing can raise anything
            raise self._unreadable(error) from error

        if kind == "progress":
            self.doing = value.text

        return kind, value

    def is_ready(self) -> bool:
        """Return whether the worker has reported that it is ready, in a message not yet read."""
        return self.channel.has_unread()

    def is_spent(self) -> bool:
        """Return whether the worker has ended, or has reported that it takes no more jobs."""
        return self.has_ended() or (self.doing != STARTING and self.channel.has_unread())

    def has_ended(self) -> bool:
        """Return whether the process is gone."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """End the process and all that it started."""
        self.process.kill()
        self.channel.close()

    def forget(self) -> None:
        """Let go of the worker in a forked child of the caller; it belongs to the parent."""
        self.channel.close()
        self.process.forget()

    def ending(self) -> Ended:
        """Return how the process ended by itself, in a sentence."""
        code = self.process.wait(ENDING_SECONDS)
        if code is None or code == LOST_STATUS:
            self.kill()
            return Ended(
                Outcome.CRASHED,
                f"the worker's socket was closed while {self.doing}; does the workload close file "
                "descriptors that it did not open (os.closerange)?",
            )

        # some libraries abort the process when they run out of memory, after a line on stderr
        said = self._said()
        aborts = [line.strip() for line in said.splitlines() if any(s in line for s in ABORTS)]
        if aborts:
            said = out_of_memory(f"while {self.doing}", aborts[-1])
            return Ended(Outcome.OUT_OF_MEMORY, said)

        # SIGKILL alone may have come from anyone; the system's own count shows who sent it
        if out_of_memory_kills() > self.kills_before and code == -signal.SIGKILL:
            why = "the system killed the worker, because this machine has no memory left"
            return Ended(Outcome.OUT_OF_MEMORY, out_of_memory(f"while {self.doing}", why))

        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"exited with {code}"
        where = _innermost_frame(said)
        if self.doing == STARTING and said.strip():
            where = f", saying {said.strip().splitlines()[-1]!r}"

        return Ended(
            Outcome.CRASHED,
            f"the worker {how} while {self.doing}{where}; this does not affect the notebook, and "
            "the next run starts a new worker",
        )

    def _unreadable(self, error: Exception) -> Ended:
        return Ended(
            Outcome.CRASHED,
            f"a message of the worker while {self.doing} cannot be read ({type(error).__name__}: "
            f"{error}); does the workload write to file descriptors that it did not open?",
        )

    def _said(self) -> str:
        """Return the last that was printed since the job began."""
        _, mark, since = self.process.said().rpartition(beginning(self.number))
        return since if mark or self.doing != TAKING else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


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
