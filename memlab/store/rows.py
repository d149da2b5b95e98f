"""`StoredRun`: a result with what was asked for to get it, as a row of the store."""

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from memlab.errors import MemlabError
from memlab.records.packing import pack, result_from_packed, result_to_packed
from memlab.records.records import DAMAGE
from memlab.result import StepResult

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
