"""A process with a keeper, seen from its caller: start it, watch it, kill it with descendants.

A keeper forks. Where there is no `os.fork`, as on Windows, a process has none.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memlab.errors import MemlabError
from memlab.worker import keeper as keeping
from memlab.worker.wire import bridged

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
