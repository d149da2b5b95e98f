"""Messages over a socket. Each carries the number of the job that it belongs to.

A message is a header and the number of bytes that the header states. Bytes that do not begin with
memlab's magic number raise `Garbage`. A message is returned only when it is complete.

The worker blocks in `receive` and `send`. A caller must be able to stop at any time, so its socket
does not block, and a check runs between any two pieces.
"""

import contextlib
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from os import fstat, getpid  # imported by name, because a model may replace os.fstat
from typing import BinaryIO

from memlab._util.units import GIB
from memlab.runtime.sending import Values

HEADER = struct.Struct("<8sQQ")
MAGIC = b"memlab\r\n"  # then the number of the job, and the length of what follows
MOST_BYTES = GIB  # of an answer
PIECE_BYTES = 2**18
POLL_SECONDS = 0.05
# select() itself knows no descriptor above 1023, except on Windows, which has no poll()
SELECTOR = getattr(selectors, "PollSelector", selectors.SelectSelector)
LOOPBACK = "127.0.0.1"
Check = Callable[[], None]
HasEnded = Callable[[], bool]


class Garbage(Exception):
    """The bytes that were read are not a message."""


class Channel:
    """One end of the line between a caller and its worker.

    Attributes:
        socket: the socket that is read and written.
        process: id of the process that owns it; a fork of that process may not use it.
        read: the received part of the next message.
    """

    def __init__(self, end: socket.socket, *, blocks: bool) -> None:
        end.setblocking(blocks)
        self.socket = end
        self.process = getpid()
        self.read = bytearray()
        self._lock = threading.Lock()
        self._identity = self._status()

    def is_own(self) -> bool:
        """Return whether this is the process and the socket that the channel was made for."""
        now = self._status()
        if now is None or self._identity is None:
            is_same = now is self._identity and self.socket.fileno() >= 0
        else:
            is_same = os.path.samestat(now, self._identity)
        return is_same and getpid() == self.process

    def _status(self) -> os.stat_result | None:
        """Return which file the socket is; None if it is none: closed, or a socket of Windows."""
        try:
            return fstat(self.socket.fileno())
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Leave the line, in a fork too; to do so twice does no harm."""
        with contextlib.suppress(OSError):
            self.socket.close()

    def send(self, number: int, content: bytes) -> None:
        """Write a message, and wait as long as that takes.

        Raises:
            OSError: nobody is at the other end.
        """
        with self._lock:  # a thread of a model may report while another does
            self.socket.sendall(HEADER.pack(MAGIC, number, len(content)))
            self.socket.sendall(content)

    def send_checked(self, number: int, content: bytes, check: Check, ended: HasEnded) -> None:
        """Write a message piece by piece, and take what comes meanwhile.

        The other end may be writing too, and reads nothing before it is done: a worker that says
        at length what its last job has changed would else wait for the caller as the caller for it.

        Args:
            number: of the job.
            content: the message.
            check: called before each piece; it may raise.
            ended: whether the process at the other end has ended; another may hold its socket.

        Raises:
            OSError: nobody is at the other end.
            EOFError: it was closed while something was written.
        """
        for part in (HEADER.pack(MAGIC, number, len(content)), content):
            left = memoryview(part)
            while left:
                check()
                ready = self._ready(selectors.EVENT_READ | selectors.EVENT_WRITE)
                if not ready and ended():
                    raise BrokenPipeError
                with contextlib.suppress(BlockingIOError):
                    if ready & selectors.EVENT_READ:
                        self._take()
                    if ready & selectors.EVENT_WRITE:
                        left = left[self.socket.send(left[:PIECE_BYTES]) :]

    def receive(self) -> tuple[int, bytes]:
        """Wait for a message and return its job's number and its content.

        Raises:
            EOFError: nobody is at the other end.
            OSError: the socket is closed.
            Garbage: what came is not a message.
        """
        while True:
            if message := self._message(most_bytes=None):
                return message
            self._take()

    def receive_checked(self, check: Check, ended: HasEnded) -> tuple[int, bytes]:
        """Return the next message; the arguments are those of `send_checked`.

        Raises:
            EOFError: nobody is at the other end.
            Garbage: what came is not a message, or too large to be one.
        """
        while True:
            if message := self._message(most_bytes=MOST_BYTES):
                return message

            check()
            if self._ready(selectors.EVENT_READ):
                with contextlib.suppress(BlockingIOError):
                    self._take()
            # it may have answered just before
            elif ended() and not self._ready(selectors.EVENT_READ):
                raise EOFError

    def has_unread(self, within_seconds: float = 0.0) -> bool:
        """Return whether something has come, or comes in this time, or nothing more can."""
        return bool(self.read) or bool(self._ready(selectors.EVENT_READ, within_seconds))

    def _ready(self, events: int, wait_seconds: float = POLL_SECONDS) -> int:
        """Return which of the events of the `selectors` module there are; waits for the first."""
        with SELECTOR() as selector:
            selector.register(self.socket, events)
            return sum(there for _, there in selector.select(wait_seconds))

    def _take(self) -> None:
        piece = self.socket.recv(PIECE_BYTES)
        if not piece:
            raise EOFError
        self.read += piece

    def _message(self, most_bytes: int | None) -> tuple[int, bytes] | None:
        """Return the first message of what has been read; None if it is not all there."""
        begin = bytes(self.read[: len(MAGIC)])
        if begin != MAGIC[: len(begin)]:
            raise Garbage(f"{bytes(self.read[:16])!r} is not a message of memlab")
        if len(self.read) < HEADER.size:
            return None

        _, number, length = HEADER.unpack_from(self.read)
        if most_bytes is not None and length > most_bytes:
            raise Garbage(f"a message of {length} bytes; the most is {most_bytes}")

        end = HEADER.size + length
        if len(self.read) < end:
            return None

        with memoryview(self.read) as whole:
            content = bytes(whole[HEADER.size : end])

        del self.read[:end]
        return number, content


def bridged(reads: BinaryIO, writes: BinaryIO, when_over: Callable[[], None]) -> socket.socket:
    """Return a socket to the process at the other end of two pipes.

    For systems that hand no socket to another process. Two threads carry what is sent.

    Args:
        reads: what comes from there.
        writes: what goes there.
        when_over: called once the other process has closed its end.
    """
    with socket.create_server((LOOPBACK, 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, peer = server.accept()
    if peer != ours.getsockname():
        raise OSError("another program has connected to a socket of memlab's; try again")

    def fetch() -> None:
        with contextlib.suppress(OSError, ValueError):
            while piece := reads.read1(PIECE_BYTES):  # type: ignore[attr-defined]
                theirs.sendall(piece)
        with contextlib.suppress(OSError):
            theirs.shutdown(socket.SHUT_WR)
        when_over()

    def bring() -> None:
        with contextlib.suppress(OSError, ValueError), writes:
            while piece := theirs.recv(PIECE_BYTES):
                writes.write(piece)
                writes.flush()

    for carry in (fetch, bring):
        threading.Thread(target=carry, daemon=True).start()
    return ours


# What a worker and its caller agree on: the job, and the kinds of messages.

KINDS = frozenset({"ready", "progress", "sources", "stale", "result", "raised", "unloadable"})
"""Kinds of messages."""
GIVE_UP = b""  # what a caller sends that no longer wants the answer
LOST_STATUS = 76  # exit status of a worker that cannot answer, because its socket was closed
SCRIPT, SCRIPT_STEP = "predict_script", "script_step"
SCRIPTS = frozenset({SCRIPT, SCRIPT_STEP})  # a worker that has run a person's is not used again
PREDICTING = frozenset(
    {
        "predict",
        "plan",
        "layers",
        "operators",
        "graph",
        "per_sample",
        "loss",
        "predict_run",
        *SCRIPTS,
    }
)
"""Functions that run no real step."""

WITH_RANKS = frozenset({"measure_ranks", "verify_ranks"})  # functions that start processes


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a worker is asked to do.

    Attributes:
        function: name in `FUNCTIONS`.
        arguments: of that function, pickled by cloudpickle: unpickled only after `path` is set.
        path: the caller's `sys.path`.
        folder: the caller's working folder.
        own_files: files of the caller's own modules, by module name.
        own_values: values that are set on these modules, see `runtime/sending.py`.
        environment: the caller's environment variables.
        threads: the caller's number of threads for one operator.
        step: a key that identifies the step, see `runtime/same_step.py`; None if there is none.
        guard_bytes: most memory that the job may take before allocations fail; None is a share of
            the available memory.
    """

    function: str
    arguments: bytes
    path: list[str]
    folder: str
    own_files: dict[str, str]
    own_values: Values
    environment: dict[str, str]
    threads: int
    step: str | None = None
    guard_bytes: int | None = None


def beginning(number: int) -> str:
    """Return the line that separates a job's output from earlier output."""
    return f"\nmemlab begins job {number}\n"
