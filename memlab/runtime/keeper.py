"""The process between a caller and its worker, which makes sure that no process is left over.

    caller (a notebook) --> keeper --> worker --> processes that a model starts

A caller that is killed cannot clean up, and a worker may be in a C loop that no thread of its own
can interrupt. So a third process, which runs no code of a person's, starts the worker. It kills the
worker and all its descendants when the caller asks for it, when the caller is gone, and when the
worker has ended. On Linux it adopts processes that a model detaches (`setsid`, a double fork), and
so finds them too. On other systems it kills the worker's process group.

The keeper also reads what the worker prints and keeps the last part. So a model can print as much
as it likes without waiting for a reader.

It runs as a file in a plain interpreter, `python -I -S keeper.py CALLER SOCKET COMMAND...`, and
imports little, because it has to start quickly. Its standard input and output are a line to the
caller, who closes it to end the keeper. The keeper writes "started PID", and once the worker has
ended, "ended CODE LENGTH", each on a line. Then follow the last LENGTH bytes that were printed.
"""

import contextlib
import os
import select
import signal
import sys
import time

CONTROL = 0
KEPT_BYTES = 2**16  # of what the worker prints
PIPE_BYTES = 2**20  # the most that a pipe holds
ALIVE_MILLISECONDS = 500  # between two checks that the caller is alive
SWEEP_SECONDS = 10.0
PAUSE_SECONDS = 0.005
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


class Output:
    """The end of what the worker prints.

    Attributes:
        descriptor: of the pipe that it prints to.
        kept: the last bytes.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.kept = b""

    def read(self) -> bool:
        """Read what is available now; return whether there may be more."""
        try:
            found = os.read(self.descriptor, KEPT_BYTES)
        except BlockingIOError:
            return False
        self.kept = (self.kept + found)[-KEPT_BYTES:]
        return bool(found)

    def drain(self) -> None:
        """Read the rest, but at most a full pipe, because another process may go on printing."""
        for _ in range(PIPE_BYTES // KEPT_BYTES):
            if not self.read():
                return


def main() -> None:
    """Start the worker, and wait until it or the caller is gone."""
    caller, socket = int(sys.argv[1]), int(sys.argv[2])
    signals, alarm = os.pipe()
    for descriptor in (signals, alarm):
        os.set_blocking(descriptor, False)

    signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler no signal is reported

    worker, output = start(sys.argv[3:], socket)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # the keeper ends only after the caller

    adopt_orphans()
    tell(b"started %d\n" % worker)

    code = watch(caller, worker, output, signals)
    if code is not None:
        output.drain()
        tell(b"ended %d %d\n" % (code, len(output.kept)) + output.kept)

    sweep(worker)
    os._exit(0)


def start(command: list[str], socket: int) -> tuple[int, Output]:
    """Start the worker in a session of its own; return its process id and what it prints."""
    ours, theirs = os.pipe()
    keeper = os.getpid()
    worker = os.fork()

    if worker == 0:
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # input() fails at once, does not wait
            os.dup2(theirs, 1)
            os.dup2(theirs, 2)
            os.set_inheritable(socket, True)
            os.execv(command[0], [*command, str(keeper)])
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(127)

    os.close(theirs)
    os.close(socket)
    return worker, Output(ours)


def watch(caller: int, worker: int, output: Output, signals: int) -> int | None:
    """Wait until the worker ends and return its exit status; None if the caller ends it."""
    poll = select.poll()
    for descriptor in (CONTROL, output.descriptor, signals):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(ALIVE_MILLISECONDS)}
        if output.descriptor in ready and not output.read():
            poll.unregister(output.descriptor)  # no process is left that could print
        # after a fork in C another process may hold the caller's end of the line, so check the
        # parent process as well
        if CONTROL in ready or os.getppid() != caller:
            return None

        if signals in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(signals, KEPT_BYTES)
            ended = reap()
            if worker in ended:
                return ended[worker]


def reap() -> dict[int, int]:
    """Return the exit status of each child that has ended.

    Raises:
        ChildProcessError: there was none, and is none.
    """
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            if ended:
                return ended
            raise

        if pid == 0:
            return ended

        ended[pid] = os.waitstatus_to_exitcode(status)


def sweep(worker: int) -> None:
    """Kill every process below this one and wait until all are gone."""
    with contextlib.suppress(OSError):
        os.killpg(worker, signal.SIGKILL)

    deadline = time.monotonic() + SWEEP_SECONDS  # a process may hang in the system itself
    while time.monotonic() < deadline:
        for pid in descendants():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

        try:
            reap()
        except ChildProcessError:
            return

        time.sleep(PAUSE_SECONDS)


def descendants() -> list[int]:
    """Return all descendants of this process that the system lists."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and (parent := parent_of(name)) is not None:
                children.setdefault(parent, []).append(int(name))

    found: list[int] = []
    level = [os.getpid()]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found += level

    return found


def parent_of(pid: str) -> int | None:
    """Return the process id of a process's parent; None if it is gone."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return None

    try:
        # "PID (name) state parent ...", and the name may hold anything
        return int(os.read(descriptor, 4096).rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None
    finally:
        os.close(descriptor)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends; Linux only."""
    import ctypes  # late: the worker is starting meanwhile

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def tell(text: bytes) -> None:
    """Write to the caller, unless it is gone."""
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(CONTROL, text) :]


if __name__ == "__main__":
    main()
