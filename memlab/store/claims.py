"""Who runs which setting, so that two sweeps into one store run none twice.

A sweep claims a setting before it runs it, in the same transaction that looks for a finished
result. The claim names its owner. An owner is a lock on a small file of its own, which the system
releases however a process ends; so a claim of a process that was killed counts no more, and no
number of a process has to be compared: it is in the owner's name for people to read. The lock is
that of SQLite, the only one that Python's standard library has on every system.
"""

import contextlib
import os
import platform
import re
import sqlite3
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memlab.errors import StoreError
from memlab.result import Outcome
from memlab.store.database import writing
from memlab.store.rows import StoredRun, insert, row_of, select

# what a later sweep does not run again. What was unsupported, has failed or crashed may have had a
# cause elsewhere: a package or a file that was not there, another program
FINISHED = (Outcome.OK, Outcome.OUT_OF_MEMORY)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Who is to run a setting.

    Attributes:
        owner: names the machine and the process, and is of one sweep alone.
        claimed_at: when it was claimed, in seconds since 1970.
    """

    owner: str
    claimed_at: float


@contextlib.contextmanager
def owner(path: Path) -> Iterator[str]:
    """Give a name to claim settings of a store with, until the end of the context.

    Raises:
        StoreError, OSError or sqlite3.Error: the folder of the store cannot be written.
    """
    machine = re.sub(r"[^\w.-]", "_", platform.node()) or "machine"
    name = f"{machine}-process-{os.getpid()}-{uuid.uuid4().hex[:12]}"
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


def claim(path: Path, setting: str, owner: str, timeout_seconds: float) -> StoredRun | Claim:
    """Return the finished run of a setting, else the claim of who is to run it.

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

        claims = connection.execute(
            "SELECT owner, claimed_at FROM claim WHERE setting = ?", (setting,)
        )
        for other, claimed_at in claims.fetchall():
            if other != owner and is_held(_lock_of(path, other)):
                return Claim(owner=other, claimed_at=claimed_at)

        mine = Claim(owner=owner, claimed_at=time.time())
        connection.execute(
            "INSERT OR REPLACE INTO claim VALUES (?, ?, ?)", (setting, owner, mine.claimed_at)
        )
        return mine


def release(path: Path, setting: str, owner: str) -> None:
    """Give up the claim of a setting that was not run.

    Raises:
        StoreError: the store cannot be written.
    """
    with writing(path) as connection:
        _delete(connection, setting, owner)


def finish(path: Path, run: StoredRun, owner: str) -> None:
    """Write a run and give up the claim of its setting, both or neither.

    An earlier run of the setting that was not finished is replaced, if a sweep has written it.

    Raises:
        StoreError: the store cannot be written.
    """
    row = {**row_of(run), "by_sweep": True}
    marks = ", ".join("?" * len(FINISHED))
    with writing(path) as connection:
        connection.execute(
            f"DELETE FROM result WHERE setting = ? AND by_sweep AND outcome NOT IN ({marks})",
            (run.setting, *map(str, FINISHED)),
        )
        insert(connection, row)
        _delete(connection, run.setting, owner)


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


def _delete(connection: sqlite3.Connection, setting: str | None, owner: str) -> None:
    connection.execute("DELETE FROM claim WHERE setting = ? AND owner = ?", (setting, owner))


def _forget_dead(connection: sqlite3.Connection, path: Path) -> None:
    """Delete the claims and locks of owners that are no more."""
    for (name,) in connection.execute("SELECT DISTINCT owner FROM claim").fetchall():
        if not is_held(_lock_of(path, name)):
            connection.execute("DELETE FROM claim WHERE owner = ?", (name,))
            with contextlib.suppress(OSError):
                _lock_of(path, name).unlink(missing_ok=True)


def _lock_of(path: Path, owner: str) -> Path:
    return path.with_name(f"{path.name}-sweep-{owner}.lock")
