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
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memlab._util.functions import is_library
from memlab._util.units import GIB
from memlab.devices.here import machine_memory_bytes, out_of_memory_kills
from memlab.errors import MemlabError
from memlab.result import Outcome
from memlab.running import Ended, Progress, out_of_memory
from memlab.runtime import keeper as keeping
from memlab.runtime import start
from memlab.runtime.sending import Stamp, for_worker
from memlab.runtime.wire import (
    GIVE_UP,
    KINDS,
    LOST_STATUS,
    Channel,
    Check,
    Garbage,
    Job,
    beginning,
    bridged,
)

# A process with a keeper, seen from its caller: start it, watch it, kill it with descendants.
#
# A keeper forks. Where there is no `os.fork`, as on Windows, a process has none.

KILL_SECONDS = 12.0  # a keeper gives up before that
START_SECONDS = 30.0
READ_SECONDS = 1.0  # another process may go on printing
PAUSE_SECONDS = 0.002
STARTED = re.compile(rb"started (\d+)\n")
ENDED = re.compile(rb"ended (-?\d+) (\d+)\n")  # and as many bytes


class KeptProcess:
    """A process and its keeper, which started it and kills it with all its descendants."""

    def __init__(
        self, command: Sequence[str], descriptor: int, environment: Mapping[str, str]
    ) -> None:
        """Start a process that inherits one descriptor, and its keeper.

        Args:
            command: a Python with its arguments; the keeper's process id is added to them.
            descriptor: what the process inherits.
            environment: its variables.
        """
        self._line, theirs = socket.socketpair()
        self._line.setblocking(False)
        self._lock = threading.Lock()
        self._heard = b""
        self._is_silent = False  # the keeper has ended
        keeper = [command[0], "-I", "-S", keeping.__file__, str(os.getpid()), str(descriptor)]

        with theirs:
            self._keeper = subprocess.Popen(
                [*keeper, *command],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=theirs.fileno(),  # for an interpreter that cannot even start
                pass_fds=[descriptor],
                env=dict(environment),
                start_new_session=True,  # an interrupt of the caller must not reach them
            )

    @property
    def pid(self) -> int:
        """The id of the process; waits until the process has started.

        Raises:
            MemlabError: it could not be started.
        """
        deadline = time.monotonic() + START_SECONDS
        while not (found := STARTED.match(self._hear())):
            if self._is_silent or time.monotonic() > deadline:
                raise MemlabError(f"the worker could not be started: {self.said() or 'no answer'}")
            time.sleep(PAUSE_SECONDS)
        return int(found[1])

    def poll(self) -> int | None:
        """Return the exit code, with the meaning that `subprocess` gives it; None while it runs."""
        heard = self._hear()
        found = ENDED.search(heard)
        if found and len(heard) >= found.end() + int(found[2]):
            return int(found[1])
        return self._keeper.wait() if self._is_silent else None

    def wait(self, seconds: float) -> int | None:
        """Return the same as `poll`, after waiting this long for the end of the process."""
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(PAUSE_SECONDS)
        return code

    def said(self) -> str:
        """Return the last output of an ended process, or of its keeper if that failed."""
        heard = self._hear()
        found = ENDED.search(heard) or STARTED.match(heard)
        return heard[found.end() if found else 0 :].decode(errors="replace")

    def kill(self) -> None:
        """End the process and all that it started, and wait until they are gone."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)
        try:
            self._keeper.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

        if self._is_orphaned():
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

        self._line.close()

    def forget(self) -> None:
        """Let go of the processes in a forked child of the caller; they belong to the parent."""
        self._line.close()
        self._keeper.returncode = 0  # not a child of this process, so it cannot be waited for
        self._lock = threading.Lock()

    def _is_orphaned(self) -> bool:
        """Return whether the keeper was killed before it could kill the worker."""
        return self._keeper.returncode != 0 and STARTED.match(self._hear()) is not None

    def _hear(self) -> bytes:
        """Return all that the keeper has written."""
        with self._lock:
            while not self._is_silent:
                try:
                    found = self._line.recv(keeping.KEPT_BYTES)
                except BlockingIOError:
                    break
                except OSError:  # closed, after a kill
                    found = b""

                self._heard += found
                self._is_silent = not found

            return self._heard


class SpawnedProcess:
    """A process without a keeper, which is reached through its standard input and output.

    It ends by itself once its caller is gone. What it has started itself is not found, and may be
    left over when it is killed.

    Attributes:
        pid: its id.
        line: a socket to it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a process; the arguments are those of `KeptProcess`."""
        self._process = subprocess.Popen(
            [*command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            # an interrupt of the caller must not reach it
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        reads, writes, self._prints = (
            self._process.stdout,
            self._process.stdin,
            self._process.stderr,
        )
        assert reads is not None
        assert writes is not None
        self.pid = self._process.pid
        self.line = bridged(reads, writes, lambda: None)  # type: ignore[arg-type]
        self._said = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Return the same as `poll`, after waiting this long for the end of the process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.poll()

    def said(self) -> str:
        """Return the last output of an ended process."""
        self._reader.join(READ_SECONDS)
        return self._said.decode(errors="replace")

    def kill(self) -> None:
        """End the process and wait until it is gone."""
        with contextlib.suppress(OSError):
            self._process.terminate()
        self.wait(KILL_SECONDS)

    def forget(self) -> None:
        """Nothing to do: such a system has no forked children of the caller."""

    def _read(self) -> None:
        prints: Any = self._prints
        with contextlib.suppress(OSError, ValueError), prints:
            while piece := prints.read1(keeping.KEPT_BYTES):
                self._said = (self._said + piece)[-keeping.KEPT_BYTES :]


def interpreter() -> str:
    """Return a Python like this one.

    Raises:
        MemlabError: none is found, as in a program that only embeds Python.
    """
    name = f"python{sysconfig.get_python_version()}"
    folders = (sys.prefix, sys.base_prefix)
    candidates = [sys.executable, *(str(Path(folder) / "bin" / name) for folder in folders)]
    for candidate in filter(None, candidates):
        if os.access(candidate, os.X_OK) and Path(candidate).is_file():
            return candidate

    raise MemlabError(
        f"sys.executable={sys.executable!r} is not a Python that a worker could run in; set it to "
        "the path of one that has memlab's dependencies, or measure with isolate=False"
    )


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
        with contextlib.suppress(OSError, EOFError):  # who is gone is noticed by the next read
            self.channel.send_checked(self.number, pickle.dumps(job), check, self.has_ended)

    def give_up(self, check: Check) -> None:
        """Ask the worker to answer now, without a result; `check` as for `send`."""
        with contextlib.suppress(OSError, EOFError):
            self.channel.send_checked(self.number, GIVE_UP, check, self.has_ended)

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

        how = f"was ended by {signal_name(-code)}" if code < 0 else f"exited with {code}"
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


def signal_name(number: int) -> str:
    """Return what the system calls a signal, such as SIGSEGV."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _innermost_frame(said: str) -> str:
    """Return where a native crash happened, in a person's own code if it was called from there.

    Read from faulthandler's report; "" if it wrote none.
    """
    return innermost(said.partition("Current thread")[2])


def innermost(stack: str) -> str:
    """Return the innermost frame of a stack of faulthandler, of a person's own code if any."""
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', stack)
    own = [frame for frame in frames if not is_library(frame[0])]
    for file, line, function in own[:1] or frames[:1]:
        return f", in {function} ({file}, line {line})"
    return ""


# A spare worker that has run nothing yet and can replace another worker at once.
#
# Starting a worker keeps a core busy for about two seconds. So the spare is started only
# after nothing has run for a moment. If a timed run begins meanwhile, the spare is paused
# until that run is over. Before a spare is started, workers that take no more jobs are
# replaced. A machine of little memory, such as Binder's 2 GB, gets none, and the worker that
# measures ends there when it has had no job for a while: one that waits holds 0.25 to 0.5 GiB
# (torch 2.13, Linux).

IDLE_SECONDS, LITTLE_MEMORY_IDLE_SECONDS = 1.0, 20.0
LITTLE_MEMORY_BYTES = 4 * GIB


def has_little_memory() -> bool:
    """Return whether no worker shall wait on this machine for a job that may never come."""
    return (machine_memory_bytes() or LITTLE_MEMORY_BYTES) < LITTLE_MEMORY_BYTES


class Spare:
    """The spare worker of this process, and when it is started.

    Attributes:
        before_start: ends or replaces workers, as `isolation` does; called while nothing runs.
        worker: None while there is none.
    """

    def __init__(self, before_start: Callable[[], None]) -> None:
        self.before_start = before_start
        self._lock = threading.RLock()
        self.worker: WorkerProcess | None = None
        self._timer: threading.Timer | None = None
        self._runs = 0
        self._timed_runs = 0

    def take(self) -> WorkerProcess | None:
        """Hand the spare worker over, which may still be starting; None if there is none."""
        with self._lock:
            worker, self.worker = self.worker, None
        if worker is None or worker.has_ended():
            return None
        _signal(worker, "SIGCONT")
        return worker

    @contextlib.contextmanager
    def waits(self, *, is_timed: bool) -> Iterator[None]:
        """Start none while a run lasts; one that is starting is stopped if the run is timed."""
        with self._lock:
            self._runs += 1
            self._timed_runs += is_timed
            self._forget_timer()
            if is_timed and self.worker is not None and not self.worker.is_ready():
                _signal(self.worker, "SIGSTOP")

        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                self._timed_runs -= is_timed
                if self.worker is not None and not self._timed_runs:
                    _signal(self.worker, "SIGCONT")
                if not self._runs:
                    idle = LITTLE_MEMORY_IDLE_SECONDS if has_little_memory() else IDLE_SECONDS
                    self._timer = threading.Timer(idle, self._start)
                    self._timer.daemon = True
                    self._timer.start()

    def _start(self) -> None:
        if self._runs:
            return
        with contextlib.suppress(OSError, MemlabError):  # then the next job waits for one
            self.before_start()
            if has_little_memory():
                return
            with self._lock:
                if self.worker is None and not self._runs:
                    self.worker = WorkerProcess()

    def end(self) -> None:
        """End it, and start none."""
        with self._lock:
            self._runs += 1
            self._forget_timer()
            if self.worker is not None:
                self.worker.kill()

    def forget(self) -> None:
        """In a forked child, forget the spare worker, because it belongs to the parent."""
        if self.worker is not None:
            self.worker.forget()
        self.__init__(self.before_start)  # type: ignore[misc]

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _signal(worker: WorkerProcess, name: str) -> None:
    number = getattr(signal, name, None)
    with contextlib.suppress(OSError, MemlabError):
        if number is not None:
            os.kill(worker.process.pid, number)
