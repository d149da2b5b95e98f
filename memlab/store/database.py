"""The file of the store: where it lies, how it is opened, its schema, and its problems in words.

It is one SQLite file in WAL mode, so several processes read while one writes, and a process that is
killed during a write leaves the file as it was before that write. The schema has a version
(`PRAGMA user_version`); an older file is brought up to date when it is opened for writing.
"""

import contextlib
import dataclasses
import json
import os
import platform
import re
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from memlab._util.units import is_a, shown
from memlab.config import StepConfig
from memlab.cost_model.cost_store import cache_folder
from memlab.devices.here import describe, versions_here
from memlab.errors import MemlabError, StoreError
from memlab.result import Outcome, Source, StepResult
from memlab.store.identity import setting_key, workload_key
from memlab.store.records import DAMAGE, pack, result_from_packed, result_to_packed
from memlab.workload import Workload

FILE = "results.sqlite3"
VARIABLE = "MEMLAB_STORE"
WAIT_SECONDS = 10.0  # for another process that writes; one write takes milliseconds
ELSEWHERE = f"or set {VARIABLE} to another file"

_SCHEMA = Path(__file__).with_name("schema.sql").read_text("utf-8")
MIGRATIONS = tuple(
    tuple(statement for statement in version.split(";") if statement.strip())
    for version in re.split(r"-- version .*\n", _SCHEMA)[1:]
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


# `StoredRun`: a result with what was asked for to get it, as a row of the store.

COLUMNS = "id, stored_at, workload_key, setting, asked, result"
NOTHING = pack(b"[]")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunArguments:
    """What a result depends on besides its workload, config and device.

    Attributes:
        seed: set before the model, the batch and each step; None if it is not known.
        repeats: timed steps; None for a prediction.
        warmup: untimed steps before them; None for a prediction.
        memory_limit_bytes: that the step may hold, or None.
        timeout_seconds: after which the run ends; None if it is not known.
    """

    seed: int | None = None
    repeats: int | None = None
    warmup: int | None = None
    memory_limit_bytes: int | None = None
    timeout_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRun:
    """One row of the store.

    Attributes:
        stored_at: when, in seconds since 1970.
        result: what the run cost.
        asked: what was asked for to get it.
        workload_key: see `identity.py`; None if the workload has no identity.
        setting: the identity of the setting, by which a sweep finds it; None if it may not.
        number: of the row; None before it is written.
    """

    stored_at: float
    result: StepResult
    asked: RunArguments
    workload_key: str | None = None
    setting: str | None = None
    number: int | None = None


def row_of(run: StoredRun) -> dict[str, Any]:
    """Return a run as a row to insert; packing it takes time, so do it before locking the store."""
    result = run.result
    return {
        "stored_at": run.stored_at,
        "workload_name": result.workload_name,
        "workload_key": run.workload_key,
        "setting": run.setting,
        "source": str(result.source),
        "device": result.device,
        "outcome": str(result.outcome),
        "config": json.dumps(result.config.to_dict()),
        "versions": json.dumps(dict(result.versions)),
        "asked": json.dumps(asdict(run.asked)),
        "peak_allocated_bytes": result.peak_allocated_bytes,
        "peak_reserved_bytes": result.peak_reserved_bytes,
        "step_seconds": result.step_seconds,
        "result": json.dumps(result_to_packed(result)),
    }


def insert(connection: sqlite3.Connection, row: Mapping[str, Any]) -> None:
    """Write a row that `row_of` returned."""
    marks = ", ".join("?" * len(row))
    connection.execute(
        f"INSERT INTO result ({', '.join(row)}) VALUES ({marks})", tuple(row.values())
    )


def select(
    connection: sqlite3.Connection, where: Mapping[str, Any], *, is_whole: bool = True
) -> tuple[list[StoredRun], list[int]]:
    """Return the rows whose columns have these values, oldest first, and numbers of damaged ones.

    Args:
        connection: to the store.
        where: values by the names of columns.
        is_whole: with timelines and holdings, which take most of the time.
    """
    condition = " AND ".join(f"{name} = ?" for name in where) or "1"
    rows = connection.execute(
        f"SELECT {COLUMNS} FROM result WHERE {condition} ORDER BY stored_at, id",
        tuple(where.values()),
    )

    found, damaged = [], []
    for row in rows:
        try:
            found.append(_run_of(row, is_whole=is_whole))
        except (MemlabError, *DAMAGE):
            damaged.append(int(row[0]))

    return found, damaged


def _run_of(row: tuple[Any, ...], *, is_whole: bool) -> StoredRun:
    number, stored_at, workload_key, setting, asked, text = row
    result = json.loads(text)
    if not is_whole:
        result["packed"] = {"holdings": NOTHING, "timeline": None}
    names = {field.name for field in fields(RunArguments)}  # a later version may have written more
    known = {name: value for name, value in json.loads(asked).items() if name in names}
    return StoredRun(
        number=int(number),
        stored_at=float(stored_at),
        workload_key=workload_key,
        setting=setting,
        asked=RunArguments(**known),
        result=result_from_packed(result),
    )


# Who runs which setting, so that two sweeps into one store run none twice.
#
# A sweep claims a setting before it runs it, in the same transaction that looks for a
# finished result. The claim names its owner. An owner is a lock on a small file of its own,
# which the system releases however a process ends; so a claim of a process that was killed
# counts no more, and no number of a process has to be compared: it is in the owner's name
# for people to read. The lock is that of SQLite, the only one that Python's standard
# library has on every system.

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


# Write results before they are shown. What was measured is returned whatever the store does.

SHORT_WAIT_SECONDS = 5.0  # of a single measurement, for a program that holds the store


def kept(
    result: StepResult,
    workload: Workload,
    asked: RunArguments,
    *,
    is_isolated: bool,
    device: torch.device,
) -> StepResult:
    """Write what `measure` found, and return it, with a note if it could not be written.

    A run that was cancelled is not written, since it found nothing.

    Args:
        result: of the run.
        workload: that ran.
        asked: the arguments of the run.
        is_isolated: whether a worker ran it. A sweep does not use what this process ran, whose
            modules may be other than their files.
        device: that it ran on.
    """
    if result.outcome is Outcome.CANCELLED:
        return result

    try:
        key = workload_key(workload)
        hardware = hardware_of(device)
        setting = setting_of(key, result.config, asked, Source.MEASURED, str(device), hardware)
        run = StoredRun(
            stored_at=time.time(),
            result=result,
            asked=asked,
            workload_key=key,
            setting=setting if is_isolated else None,
        )
        problem = write(run, wait_seconds=SHORT_WAIT_SECONDS)
    except Exception as error:  # whatever it is, what was measured is returned
        problem = not_stored(error)
    return result if problem is None else with_note(result, problem)


def write(run: StoredRun, path: str | os.PathLike[str] | None = None, **options: Any) -> str | None:
    """Write a run to the store; return a sentence that says why it could not be, or None."""
    row = row_of(run)
    try:
        with writing(store_path(path), **options) as connection:
            insert(connection, row)
    except MemlabError as error:
        return not_stored(error)
    return None


def not_stored(error: Exception) -> str:
    """Return the note of a result that could not be written."""
    if isinstance(error, MemlabError):
        return f"This result is not in the store: {error}."
    return f"This result is not in the store ({type(error).__name__}: {error})."


def with_note(result: StepResult, note: str) -> StepResult:
    """Return a result with one more note."""
    return dataclasses.replace(result, notes=(*result.notes, note))


def setting_of(
    workload_key: str | None,
    config: StepConfig,
    asked: RunArguments,
    source: Source,
    device: str,
    hardware: dict[str, str],
) -> str | None:
    """Return the identity of a setting: two runs of the same one find the same numbers.

    The time limit is not part of it: a run that ended in time does not depend on it.
    """
    decisive = dataclasses.asdict(asked)
    del decisive["timeout_seconds"]
    versions = versions_here()
    return setting_key(
        workload_key,
        config,
        source=str(source),
        device=device,
        **decisive,
        versions=versions | hardware,
    )


def hardware_of(device: torch.device) -> dict[str, str]:
    """Return what the numbers of a device of this machine depend on: its name, and threads."""
    return {"device_name": describe(device), "threads": str(torch.get_num_threads())}
