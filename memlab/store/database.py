"""The file of the store: where it lies, how it is opened, its schema, and its problems in words.

It is one SQLite file in WAL mode, so several processes read while one writes, and a process that is
killed during a write leaves the file as it was before that write. The schema has a version
(`PRAGMA user_version`); an older file is brought up to date when it is opened for writing.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from memlab.arguments.quoting import is_a, shown
from memlab.costs.cost_store import cache_folder
from memlab.errors import MemlabError, StoreError

FILE = "results.sqlite3"
VARIABLE = "MEMLAB_STORE"
WAIT_SECONDS = 10.0  # for another process that writes; one write takes milliseconds
ELSEWHERE = f"or set {VARIABLE} to another file"

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE result ("
        "id INTEGER PRIMARY KEY AUTOINCREMENT, "
        "stored_at REAL NOT NULL, "  # seconds since 1970
        "workload_name TEXT NOT NULL, "
        "workload_key TEXT, "  # of identity.py; NULL if the workload has none
        "setting TEXT, "  # the same; NULL if a sweep may not use the result
        "source TEXT NOT NULL, "
        "device TEXT NOT NULL, "
        "outcome TEXT NOT NULL, "
        "config TEXT NOT NULL, "  # JSON, as are versions, asked and result
        "versions TEXT NOT NULL, "
        "asked TEXT NOT NULL, "  # seed, repeats, limit, time limit
        "peak_allocated_bytes INTEGER, "
        "peak_reserved_bytes INTEGER, "
        "step_seconds REAL, "
        "result TEXT NOT NULL)",  # all of the result, its timeline compressed
        "CREATE INDEX result_by_setting ON result (setting)",
        "CREATE INDEX result_by_workload ON result (workload_name, device)",
    ),
    (  # for sweeps: who is running which setting
        "CREATE TABLE claim ("
        "setting TEXT PRIMARY KEY, owner TEXT NOT NULL, claimed_at REAL NOT NULL) WITHOUT ROWID",
    ),
    (  # a sweep replaces a row that failed only if a sweep has written it
        "ALTER TABLE result ADD COLUMN by_sweep INTEGER NOT NULL DEFAULT 0",
    ),
)
"""What brings the schema from each version to the next; the first makes version 1 of nothing."""


def store_path(path: str | os.PathLike[str] | None = None) -> Path:
    """Return the file of the store: `path`, else `MEMLAB_STORE`, else one in the cache folder.

    Raises:
        MemlabError: it names no file.
    """
    name, given = ("path", path) if path is not None else (VARIABLE, os.environ.get(VARIABLE))
    if given is None or (path is None and not given):
        return cache_folder() / FILE

    try:
        if not is_a(given, str) and not is_a(given, os.PathLike):
            raise TypeError("it is no text and no path")
        found = Path(os.fsdecode(given)).expanduser()
        if not str(found).encode() or "\0" in str(found):  # lone surrogates cannot be encoded
            raise ValueError("it is empty, or holds a null character")
        is_folder = found.is_dir()
    except Exception as error:  # a person's own class may raise anything
        raise MemlabError(
            f"{name}={shown(given)} names no file ({type(error).__name__}); allowed is the path of "
            "a file, such as 'results.sqlite3'"
        ) from None

    if is_folder:
        raise MemlabError(f"{name}={shown(str(found))} is a folder; add the name of a file to it")
    return found


@contextlib.contextmanager
def writing(path: Path, *, wait_seconds: float = WAIT_SECONDS) -> Iterator[sqlite3.Connection]:
    """Open the store for one transaction: all of it is written at the end, or nothing.

    Raises:
        StoreError: the store cannot be used; the message says why and what to do.
    """
    with _in_words(path), contextlib.closing(_connected(path, wait_seconds)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        try:
            _bring_up_to_date(connection, path)
            yield connection
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk has ended it already
                connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection | None]:
    """Open the store to read it; None if there is no such file, or nothing was written to it.

    Raises:
        StoreError: as for `writing`.
    """
    with _in_words(path):
        if not path.exists():
            yield None
            return
        with contextlib.closing(_connected_to_read(path)) as connection:
            version = _version(connection, path)
            yield connection if version else None


def _connected(path: Path, wait_seconds: float) -> sqlite3.Connection:
    """Return a connection in which transactions are begun and ended by hand."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=wait_seconds, isolation_level=None)
    try:
        # the system writes it to the disk when it likes: a killed process loses nothing, and a
        # machine without power the last results at most
        connection.execute("PRAGMA synchronous = NORMAL")
        _version(connection, path)  # the file of another program stays as it is
        # another process may be switching the mode at this moment, or hold the file
        with contextlib.suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode = WAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _connected_to_read(path: Path) -> sqlite3.Connection:
    address = path.absolute().as_uri()
    for mode in ("mode=ro", "immutable=1"):  # the second where nothing can be written beside it
        connection = sqlite3.connect(f"{address}?{mode}", uri=True, timeout=WAIT_SECONDS)
        try:
            connection.execute("PRAGMA user_version").fetchone()
        except sqlite3.OperationalError as error:
            connection.close()
            is_whole = not _size(Path(f"{path}-wal"))  # else the newest rows are not in the file
            if mode == "immutable=1" or not is_whole or "locked" in str(error):
                raise
            continue
        except BaseException:
            connection.close()
            raise
        return connection

    raise AssertionError("one of both modes returns or raises")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _bring_up_to_date(connection: sqlite3.Connection, path: Path) -> None:
    version = _version(connection, path)
    for statement in (line for step in MIGRATIONS[version:] for line in step):
        connection.execute(statement)
    if version < len(MIGRATIONS):
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the version of the schema, 0 for an empty file.

    Raises:
        StoreError: a newer memlab has written the file, or another program.
    """
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > len(MIGRATIONS):
        raise StoreError(
            f"the store {path} was written by a newer version of memlab (its schema is {version}; "
            f"this one knows 1 to {len(MIGRATIONS)}); update memlab, {ELSEWHERE}"
        )

    num_tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if version < 0 or (version == 0 and num_tables):
        raise StoreError(
            f"{path} is a database of another program and is left as it is; {ELSEWHERE}"
        )
    return version


@contextlib.contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """Turn what SQLite and the system raise into a `StoreError` with a remedy."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"the store {path} {_why(error)}") from error


def _why(error: Exception) -> str:
    """Return why a store cannot be used, and the remedy."""
    said = str(error)
    text = said.lower()
    if "locked" in text or "busy" in text:
        return (
            "is locked by another program; close what holds it open (a database browser, for "
            f"instance), {ELSEWHERE}"
        )
    if "full" in text or "no space" in text or "quota" in text:
        return f"cannot be written, because its disk is full ({said}); free some space, {ELSEWHERE}"
    if "readonly" in text or "unable to open" in text or isinstance(error, OSError):
        return (
            f"cannot be opened or written ({said}); make the file and its folder writable for "
            f"you, {ELSEWHERE}"
        )
    if "not a database" in text or "malformed" in text or "no such" in text:
        return f"is damaged or no store ({said}); move it away, and a new one is made, {ELSEWHERE}"
    return f"cannot be used ({said}); look at the file and its disk, {ELSEWHERE}"
