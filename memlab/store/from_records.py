"""Copy records of devices into the store, so that one table holds them and one's own runs."""

import os
import sqlite3
from collections.abc import Iterable
from datetime import datetime

from memlab._util.checks import anything, checked
from memlab.result import Source
from memlab.store.database import (
    RunArguments,
    StoredRun,
    insert,
    reading,
    row_of,
    store_path,
    writing,
)
from memlab.store.identity import setting_key
from memlab.store.recorded import DeviceRecord, recordings


@checked(path=anything)
def store_records(
    records: Iterable[DeviceRecord] | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
) -> int:
    """Copy the runs of records into the store, and return how many were new.

    The records stay as they are. A run that is in the store already is not copied again.

    Args:
        records: what `memlab.recordings` returned, or a part of it; None is all of it.
        path: of another store.

    Raises:
        MemlabError: an argument is not allowed, or the store cannot be written.

    >>> store_records([])
    0
    """
    every = recordings() if records is None else tuple(records)
    file = store_path(path)
    with reading(file) as connection:
        present = set() if connection is None else _present(connection)

    # packing takes seconds, in which others may write
    runs = (run for record in every for run in _runs_of(record))
    rows = {run.setting: row_of(run) for run in runs if run.setting not in present}
    with writing(file) as connection:
        new = rows.keys() - _present(connection)  # another process may have copied them meanwhile
        for setting, row in rows.items():
            if setting in new:
                insert(connection, row)

    return len(new)


def _present(connection: sqlite3.Connection) -> set[str | None]:
    """Return the settings of the recorded runs that are in the store."""
    rows = connection.execute(
        "SELECT setting FROM result WHERE source = ?", (str(Source.RECORDED),)
    )
    return {setting for (setting,) in rows}


def _runs_of(record: DeviceRecord) -> list[StoredRun]:
    found = []
    for number, run in enumerate(record.runs):
        # a repetition is a run of its own, so its place in the record counts
        key = setting_key(record.name, run.result.config, visit=run.visit, number=number)
        asked = RunArguments(seed=run.seed, memory_limit_bytes=run.result.memory_limit_bytes)
        stored_at = _seconds(run.visit)
        found.append(StoredRun(stored_at=stored_at, result=run.result, asked=asked, setting=key))
    return found


def _seconds(visit: str) -> float:
    """Return when a visit began; 0 if its name is no date, as in a record made by hand."""
    try:
        return datetime.fromisoformat(visit).timestamp()
    except ValueError:
        return 0.0
