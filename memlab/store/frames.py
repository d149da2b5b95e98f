"""Results as tables: `to_frame` of some, `results` of what the store holds."""

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from memlab.arguments.checks import anything, checked
from memlab.arguments.quoting import is_a, shown
from memlab.errors import ConfigError
from memlab.result import Source, StepResult
from memlab.store.database import reading, store_path
from memlab.store.identity import workload_key
from memlab.store.rows import StoredRun, select
from memlab.workload import Workload

if TYPE_CHECKING:
    import pandas as pd


@checked()
def to_frame(results: Iterable[StepResult]) -> "pd.DataFrame":
    """Return a pandas DataFrame with one row per result: config, outcome and costs, no timeline.

    Columns that end in `_bytes` are bytes, in `_seconds` seconds.

    Raises:
        MemlabError: something in `results` is no `StepResult`.

    >>> import memlab
    >>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
    >>> result = memlab.recorded(workload, memlab.StepConfig(batch_size=4), "amd-epyc")
    >>> to_frame([result])[["batch_size", "peak_allocated_bytes", "peak_activations_bytes"]]
       batch_size  peak_allocated_bytes  peak_activations_bytes
    0           4              38325928                13656628
    """
    import pandas as pd

    rows = []
    for result in results:
        row = result.to_dict()
        del row["timeline"], row["step_seconds_all"], row["versions"], row["peak_holdings"]
        del row["parameter_formats"], row["printed"], row["ranks"], row["communication"]
        config, categories = row.pop("config"), row.pop("peak_by_category") or {}
        place = result.peak_place
        rows.append(
            {"workload_name": row.pop("workload_name"), "number_format": result.number_format}
            | config
            | row
            | {"peak_place": str(place) if place else None, "notes": " ".join(result.notes)}
            | {"sent_bytes": result.sent_bytes}
            | {f"peak_{name}_bytes": size for name, size in categories.items()}
        )

    return pd.DataFrame(rows)


@checked(path=anything)
def results(
    *,
    workload: Workload | str | None = None,
    device: str | None = None,
    source: Source | None = None,
    path: str | os.PathLike[str] | None = None,
) -> "pd.DataFrame":
    """Return what the store holds, one row a result, the newest last.

    `memlab.measure` and `memlab.sweep` write each result to the store before they return it. It is
    the file `results.sqlite3` in memlab's cache folder (`MEMLAB_CACHE`), or the file that the
    environment variable `MEMLAB_STORE` names. The columns are those of `to_frame`, with the date,
    the seed and the numbers of steps; `frame.to_csv(...)` and `frame.to_json(...)` write files.

    Args:
        workload: only results of this workload: a name, or a `Workload`, which is recognised by its
            code, so that an earlier version of it under the same name is left out.
        device: only results of this device, as `StepResult.device` names it.
        source: only "measured", "predicted" or "recorded" ones.
        path: of another store.

    Raises:
        MemlabError: an argument is not allowed, or the store cannot be read; the message says what
            to do.

    >>> import memlab, pathlib, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> len(memlab.results(path=pathlib.Path(folder.name) / "mine.sqlite3"))
    0
    """
    import pandas as pd

    given = {"workload": workload, "device": device, "source": source}
    runs = stored_runs(given, path, is_whole=False)
    told = pd.DataFrame(
        {
            "stored_at": pd.to_datetime([run.stored_at for run in runs], unit="s", utc=True),
            "seed": [run.asked.seed for run in runs],
            "repeats": [run.asked.repeats for run in runs],
            "warmup": [run.asked.warmup for run in runs],
        }
    )
    return told.join(to_frame(run.result for run in runs))


@checked(path=anything)
def stored_results(
    *,
    workload: Workload | str | None = None,
    device: str | None = None,
    source: Source | None = None,
    path: str | os.PathLike[str] | None = None,
) -> list[StepResult]:
    """Return what the store holds as full results with their timelines, the newest last.

    Args:
        workload: as for `results`.
        device: as for `results`.
        source: as for `results`.
        path: as for `results`.

    Raises:
        MemlabError: as for `results`.

    >>> import memlab, pathlib, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> memlab.stored_results(path=pathlib.Path(folder.name) / "mine.sqlite3")
    []
    """
    given = {"workload": workload, "device": device, "source": source}
    runs = stored_runs(given, path, is_whole=True)
    return [run.result for run in runs]


def stored_runs(
    given: Mapping[str, Any], path: str | os.PathLike[str] | None, *, is_whole: bool
) -> list[StoredRun]:
    """Return rows of the store, oldest first; damaged ones are left out with a warning.

    Args:
        given: workload, device and source, as for `results`.
        path: of the store.
        is_whole: see `select`.
    """
    workload, source = given["workload"], given["source"]
    where: dict[str, Any] = {"device": given["device"], "source": source and str(source)}
    if is_a(workload, Workload):
        where["workload_key"] = workload_key(workload)
        if where["workload_key"] is None:
            raise ConfigError(
                f"workload={shown(workload)} cannot be pickled, so its results cannot be told from "
                "those of others; pass its name"
            )
    else:
        where["workload_name"] = workload

    file = store_path(path)
    with reading(file) as connection:
        if connection is None:
            return []
        known = {name: value for name, value in where.items() if value is not None}
        found, damaged = select(connection, known, is_whole=is_whole)

    if damaged:
        warnings.warn(
            f"{len(damaged)} damaged rows of {file} are left out; the first is number {damaged[0]}",
            stacklevel=4,  # of the person who called `results`
        )
    return found
