"""Results of tables, of JSON and CSV files, and of stores, as `compare` and the panel take them.

A file is recognised by its content, whatever its name: an SQLite file is a store, what begins with
a brace or a bracket is JSON, anything else is CSV. A table of `memlab.results()` has no repeats and
no versions. A run, which has stages, stands alone.
"""

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from memlab._util.checks import of_type
from memlab._util.units import is_a, shown
from memlab.config import StepConfig
from memlab.errors import ConfigError, MemlabError, StoreError
from memlab.prediction.run_result import RunResult
from memlab.result import Outcome, Source, StepResult
from memlab.store.frames import stored_runs

SQLITE = b"SQLite format 3\0"
EVERYTHING = {"workload": None, "device": None, "source": None}
ALLOWED = (
    "a StepResult, several of them, a RunResult, the table of memlab.results(), or the path of a "
    "JSON or CSV file or of a store"
)
A_RUN = "holds a run, which has stages; allowed is the result of a step"
NUMBERS = {"memory_limit_bytes": int, "peak_allocated_bytes": int, "peak_reserved_bytes": int,
           "step_seconds": float}  # fmt: skip
Result = TypeVar("Result", StepResult, RunResult)
TRUTHS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


def results_of(side: str, given: Any) -> list[StepResult] | RunResult:
    """Return the results of one side, in order, or the run that it is.

    Args:
        side: "old" or "new", for messages.
        given: what a person passed to `compare`.

    Raises:
        MemlabError: it holds no results; the message says what is allowed.
    """
    if is_a(given, str | os.PathLike):
        return _of_file(side, given)
    if is_a(given, StepResult):
        return [given]
    if is_a(given, RunResult):
        run: RunResult = given
        return run

    pandas = sys.modules.get("pandas")  # whoever has a DataFrame has imported it
    if pandas is not None and is_a(given, pandas.DataFrame):
        try:
            return [_of_row(row) for row in given.to_dict("records")]
        except MemlabError as error:
            raise type(error)(f"{side} {error}") from None
    try:
        results = of_type(side, given, Iterable[StepResult])
    except MemlabError as error:
        raise ConfigError(f"{error}; {side} is {ALLOWED}") from None
    return list(results)


def _of_file(side: str, given: str | os.PathLike[str]) -> list[StepResult] | RunResult:
    try:
        path = Path(os.fsdecode(given)).expanduser()
        data = path.read_bytes()
    except Exception as error:  # no such file, or a person's own class, which may raise anything
        why = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(
            f"{side}={shown(given)} cannot be read ({why}); {side} is {ALLOWED}"
        ) from None

    try:
        return _of_content(path, data)
    except StoreError as error:
        raise StoreError(f"{side}: {error}") from None
    except MemlabError as error:
        raise ConfigError(f"{side}={shown(given)} {error}") from None


def _of_content(path: Path, data: bytes) -> list[StepResult] | RunResult:
    if data.startswith(SQLITE):
        runs = stored_runs(EVERYTHING, path, is_whole=False)
        return [run.result for run in runs]
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"is no text and no store; allowed is {ALLOWED}") from None
    if text.lstrip()[:1] not in ("{", "["):
        return _of_csv(text)
    data = _json(text)
    if isinstance(data, dict) and "stages" in data:
        return _read(RunResult, data)
    return _listed(data)


def results_of_json(text: str) -> list[StepResult]:
    """Return what `--json` and `DataFrame.to_json(orient="records")` write, and lists of it.

    Raises:
        ConfigError: it is something else; the message says what it is, after a subject.
    """
    return _listed(_json(text))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is no JSON ({error}); write it with `--json`") from None


def _listed(data: Any) -> list[StepResult]:
    listed = data if isinstance(data, list) else data.get("results", [data])
    if not isinstance(listed, list):
        raise ConfigError("has no list of results; write it with `--json`")
    return [_of_object(each) for each in listed]


def _of_object(data: Any) -> StepResult:
    if not isinstance(data, dict) or "outcome" not in data:
        raise ConfigError(
            f"holds {shown(data)}, which is no result; write it with `--json` of `memlab predict`, "
            "`measure` or `sweep`"
        )
    if "config" not in data:
        return _of_row(data)
    if "stages" in data:
        raise ConfigError(A_RUN)
    return _read(StepResult, data)


def _read(kind: type[Result], data: dict[str, Any]) -> Result:
    try:
        return kind.from_dict(data)
    except MemlabError as error:
        raise ConfigError(f"holds a result that `--json` did not write: {error}") from None


def _of_csv(text: str) -> list[StepResult]:
    import csv

    try:
        return [_of_row(row) for row in csv.DictReader(text.splitlines())]
    except csv.Error as error:
        raise ConfigError(f"is no table ({error}); write it with memlab.results().to_csv") from None


def _of_row(row: Mapping[Any, Any]) -> StepResult:
    """Return the result that one row of `memlab.results()` says.

    Raises:
        ConfigError: it is a row of something else.
    """
    try:
        settings = {
            field.name: _setting(field.type, row[field.name])
            for field in fields(StepConfig)
            if field.name in row
        }
        fits = _known(row.get("fits"))
        return StepResult(
            workload_name=str(row["workload_name"]),
            device=str(row["device"]),
            source=Source(str(row["source"])),
            config=StepConfig(**settings),
            outcome=Outcome(str(row["outcome"])),
            message=str(_known(row.get("message")) or ""),
            fits=None if fits is None else TRUTHS[str(fits).lower()],
            **{name: _number(kind, row.get(name)) for name, kind in NUMBERS.items()},
        )
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        missing = "it has no " if isinstance(error, KeyError) else ""
        raise ConfigError(
            f"holds a row that is no result ({missing}{error}); write it with "
            "memlab.results().to_csv(...)"
        ) from None


def _setting(kind: Any, value: Any) -> Any:
    """Return the value of a setting as `StepConfig` takes it; a CSV file holds texts alone."""
    value = _known(value)
    if not isinstance(value, str):
        return value.item() if isinstance(value, np.generic) else value
    if kind is bool:
        return TRUTHS[value.lower()]
    if kind is int:
        return int(float(value))
    return float(value) if kind is float or kind == float | None else value


def _number(kind: type, value: Any) -> Any:
    value = _known(value)
    if value is None:
        return None
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{value} is not a number from 0")
    return kind(number)


def _known(value: Any) -> Any:
    """Return a value of a table; None for a cell that is empty."""
    is_empty = value is None or value == "" or (isinstance(value, float) and math.isnan(value))
    return None if is_empty else value
