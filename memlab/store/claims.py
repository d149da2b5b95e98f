"""Who runs which setting, so that two sweeps into one store run none twice.

A sweep claims a setting before it runs it, in the same transaction that looks for a finished
result. The claim names its owner. An owner is a lock on a small file of its own, which the system
releases however a process ends; so a claim of a process that was killed counts no more, and no
number of a process has to be compared. The lock is that of SQLite, the only one that Python's
standard library has on every system.
"""

import contextlib
import sqlite3
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from memlab.errors import StoreError
from memlab.result import Outcome
from memlab.store.database import writing
from memlab.store.rows import StoredRun, insert, select

# what a later sweep does not run again. What was unsupported, has failed or crashed may have had a
# cause elsewhere: a package or a file that was not there, another program
FINISHED = (Outcome.OK, Outcome.OUT_OF_MEMORY)


@contextlib.contextmanager
def owner(path: Path) -> Iterator[str]:
    """Give a name to claim settings of a store with, until the end of the context.

    Raises:
        StoreError, OSError or sqlite3.Error: the folder of the store cannot be written.
    """
    name = uuid.uuid4().hex
    with writing(path) as connection:
        _forget_dead(connection, path)

    try:
        with hold(_lock_of(path, name)):
            yield name
    finally:
        # if this fails, the claims count no more anyway, now that nobody holds the lock
        with contextlib.suppress(StoreError), writing(path) as connection:
            connection.execute("DELETE FROM claim WHERE owner = ?", (name,))
        with contextlib.suppress(OSError):
            _lock_of(path, name).unlink(missing_ok=True)


def claim(path: Path, setting: str, owner: str, timeout_seconds: float) -> StoredRun | bool:
    """Return the finished run of a setting, else whether the setting is the owner's to run.

    Args:
        path: of the store.
        setting: see `identity.py`.
        owner: who asks.
        timeout_seconds: a run that did not end within this time, or a longer one, is finished.

    Raises:
        StoreError: the store cannot be written.
    """
    with writing(path) as connection:
        run = _finished(connection, setting, timeout_seconds)
        if run is not None:
            return run

        others = connection.execute("SELECT owner FROM claim WHERE setting = ?", (setting,))
        if any(other != owner and is_held(_lock_of(path, other)) for (other,) in others.fetchall()):
            return False

        connection.execute(
            "INSERT OR REPLACE INTO claim VALUES (?, ?, ?)", (setting, owner, time.time())
        )
        return True


def finish(path: Path, run: StoredRun, owner: str) -> None:
    """Write a run and give up the claim of its setting, both or neither.

    An earlier run of the setting that was not finished is replaced.

    Raises:
        StoreError: the store cannot be written.
    """
    marks = ", ".join("?" * len(FINISHED))
    with writing(path) as connection:
        connection.execute(
            f"DELETE FROM result WHERE setting = ? AND outcome NOT IN ({marks})",
            (run.setting, *map(str, FINISHED)),
        )
        insert(connection, run)
        connection.execute(
            "DELETE FROM claim WHERE setting = ? AND owner = ?", (run.setting, owner)
        )


@contextlib.contextmanager
def hold(lock: Path, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold a lock until the end of the context, or of the process.

    Raises:
        OSError or sqlite3.Error: it cannot be held; see `is_locked`.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    # another thread may end what one has begun: the sweep of a notebook runs in a thread
    connection = sqlite3.connect(
        lock, timeout=wait_seconds, isolation_level=None, check_same_thread=False
    )
    with contextlib.closing(connection):
        connection.execute("BEGIN EXCLUSIVE")
        yield


def is_locked(error: Exception) -> bool:
    """Return whether `hold` has failed because another process, or thread, holds the lock."""
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def is_held(lock: Path) -> bool:
    """Return whether somebody holds a lock."""
    if not lock.exists():
        return False
    try:
        with hold(lock):
            return False
    except (OSError, sqlite3.Error) as error:
        return is_locked(error)


def _finished(
    connection: sqlite3.Connection, setting: str, timeout_seconds: float
) -> StoredRun | None:
    """Return the newest run of a setting that need not be run again."""
    runs, _ = select(connection, {"setting": setting})
    for run in reversed(runs):
        limit = run.asked.timeout_seconds
        is_too_slow = run.result.outcome is Outcome.TIMED_OUT and limit is not None
        if run.result.outcome in FINISHED or (is_too_slow and (limit or 0) >= timeout_seconds):
            return run
    return None


def _forget_dead(connection: sqlite3.Connection, path: Path) -> None:
    """Delete the claims and locks of owners that are no more."""
    for (name,) in connection.execute("SELECT DISTINCT owner FROM claim").fetchall():
        if not is_held(_lock_of(path, name)):
            connection.execute("DELETE FROM claim WHERE owner = ?", (name,))
            with contextlib.suppress(OSError):
                _lock_of(path, name).unlink(missing_ok=True)


def _lock_of(path: Path, owner: str) -> Path:
    return path.with_name(f"{path.name}-sweep-{owner}.lock")
