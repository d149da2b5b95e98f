"""Results as tables: `table` for people, `to_frame` for pandas, `results` of the whole store."""

import dataclasses
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from memlab._util.checks import anything, checked
from memlab._util.tables import aligned, columns_table
from memlab._util.units import (
    format_bytes,
    format_percent,
    format_seconds,
    is_a,
    shown,
    signed_percent,
)
from memlab.config import StepConfig
from memlab.errors import ConfigError
from memlab.result import Outcome, Source, StepResult
from memlab.store.database import StoredRun, reading, select, store_path
from memlab.store.identity import workload_key
from memlab.trace import Category
from memlab.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

# how a column is shown, by the end of its name
UNITS: dict[str, Callable[[Any], str]] = {
    "_bytes": format_bytes,
    "_seconds": format_seconds,
    "_fraction": format_percent,
    "_error": signed_percent,
}
COSTS = ("outcome", "peak_allocated_bytes", "peak_reserved_bytes", "step_seconds", "fit", "message")
WHAT = ("workload_name", "source", "device")


@dataclasses.dataclass(frozen=True, slots=True)
class ResultTable:
    """A table for people: its cells are text, with units. `to_frame` has the numbers.

    Attributes:
        caption: what all rows have in common.
        heads: of the columns.
        rows: the cells, as text.
        notes: sentences that a reader of the rows must know, each once.
    """

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the table as lines of text."""
        lines = aligned([self.heads, *self.rows])
        return "\n".join([*filter(None, [self.caption]), *lines, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from html import escape  # 5 ms that `import memlab` need not wait for

        said = "".join(f"<p>{escape(text)}</p>" for text in self.notes)
        folded = f"<details><summary>Notes</summary>{said}</details>" if said else ""
        head = f"<p>{escape(self.caption)}</p>" if self.caption else ""
        return f"{head}{columns_table(self.heads, self.rows)}{folded}"


class ResultList(list[StepResult]):
    """A list of results that shows itself as a table."""

    def __repr__(self) -> str:
        """Return the table as text."""
        return str(table(self)) if self else "[]"

    def _repr_html_(self) -> str:
        return table(self)._repr_html_()


@checked(rows=anything, columns=anything)
def table(rows: Any, columns: Iterable[str] | None = None) -> ResultTable:
    """Return a table for people: what differs between the rows, and what they cost, in units.

    Args:
        rows: results, also by name: `{"plain": result, ...}`. Or a DataFrame, or rows as dicts,
            whose numbers are shown by the end of the name of their column: `_bytes`, `_seconds`,
            `_fraction`, or `_error` (a share with its sign).
        columns: of `to_frame`, or of the rows, to show; None for what differs and what it costs.

    Raises:
        ConfigError: something in `rows` is neither a result nor a dict, or there is no such column.

    >>> import memlab
    >>> workload = memlab.workloads.get("vit-digits")
    >>> small, large = (memlab.StepConfig(batch_size=size) for size in (8, 64))
    >>> found = [memlab.predict(workload, config, "t4") for config in (small, large)]
    >>> shown = table(found, ["peak_parameters_bytes", "peak_inputs_bytes"])
    >>> shown.heads[1:], shown.rows[1]
    (('parameters at the peak', 'inputs at the peak'), ('64', '10.3 MiB', '256 KiB'))
    """
    import pandas as pd

    if columns is not None:
        columns = _names(columns)
    if is_a(rows, pd.DataFrame):
        return _of_frame(rows, "", columns)

    names = [str(name) for name in rows] if is_a(rows, Mapping) else None
    try:
        given, wrong = _read(rows.values() if is_a(rows, Mapping) else rows, StepResult | Mapping)
    except Exception:  # of a person's own objects
        raise ConfigError(
            f"rows={shown(rows)} is no list; pass results, dicts or a DataFrame"
        ) from None

    of_results = all(is_a(row, StepResult) for row in given)
    if not wrong and not of_results:
        wrong = [row for row in given if not is_a(row, Mapping)]
    if wrong:
        raise ConfigError(f"rows hold {shown(wrong[0])}; pass StepResults only, or dicts only")
    if not of_results:
        return _of_frame(pd.DataFrame(given, index=names), "", columns)

    frame = to_frame(given)
    frame.index = frame.index if names is None else pd.Index(names)
    return _of_results(given, frame, columns)


def _read(values: Iterable[Any], kind: Any) -> tuple[list[Any], list[Any]]:
    """Return values of a kind, and the first of another: after it there may be a billion more."""
    found = list[Any]()
    for value in values:
        if not is_a(value, kind):
            return found, [value]
        found.append(value)
    return found, []


def _names(columns: Any) -> list[str]:
    try:
        names, wrong = _read([columns] if is_a(columns, str) else columns, str)
        if not wrong:
            return names
    except Exception:  # of a person's own objects
        pass
    raise ConfigError(
        f"columns={shown(columns)} is no list of names; pass names such as "
        "['peak_allocated_bytes', 'step_seconds'], or leave it out"
    )


def _of_results(
    given: list[StepResult], frame: "pd.DataFrame", columns: Iterable[str] | None
) -> ResultTable:
    """Return the table of results: caption, settings that differ, costs with their uncertainty."""
    if not given:
        return ResultTable("no results", (), ())

    # a step that did not run does not know in which format its model was built
    formats = [one.number_format if one.parameter_formats else None for one in given]
    if set(frame["precision"]) != {"as-built"} or len({*formats} - {None}) > 1:
        frame["precision"] = frame["number_format"]
    frame["message"] = [None if one.outcome is Outcome.OK else one.message for one in given]
    settings = [field.name for field in dataclasses.fields(StepConfig)]
    differing = [name for name in (*WHAT, *settings) if frame[name].map(str).nunique() > 1]
    one, changed = given[0], given[0].config
    equal = [str(getattr(one, name)) for name in WHAT if name not in differing]
    plain, default = changed.to_dict(), StepConfig().to_dict() | {"batch_size": None}
    same = [f"{name}={plain[name]}" for name in settings
            if name not in differing and plain[name] != default[name]]  # fmt: skip

    frame = frame.assign(
        **{
            name: [
                _cell(name, value) + one.spread(name)
                for one, value in zip(given, frame[name], strict=True)
            ]
            for name in ("peak_allocated_bytes", "peak_reserved_bytes", "step_seconds")
        }
    )
    if columns is None:
        columns = [name for name in COSTS if frame[name].map(bool).any()]
        if set(frame["outcome"]) == {"ok"}:
            columns.remove("outcome")
    found = _of_frame(frame, ", ".join([*equal, *same]), dict.fromkeys([*differing, *columns]))

    is_named = frame.index.dtype != np.int64
    rows = [str(name) if is_named else f"row {name + 1}" for name in frame.index]
    estimates = [
        (row, one.message)
        for row, one in zip(rows, given, strict=True)
        if one.message.startswith("interpolated")
    ]
    notes = [(row, note) for row, one in zip(rows, given, strict=True) for note in one.notes]
    return dataclasses.replace(found, notes=_once([*estimates, *notes]))


def _once(said: list[tuple[str, str]]) -> tuple[str, ...]:
    """Return each sentence once; of those that differ only in their numbers the last, by its row.

    Args:
        said: pairs of a row's name and a sentence.
    """
    alike: dict[str, dict[str, list[str]]] = {}
    for row, text in said:
        alike.setdefault(re.sub(r"[\d.,]+", "", text), {}).setdefault(text, []).append(row)
    notes = []
    for rows in alike.values():
        *others, text = rows
        if others:
            with_others = ", ".join(row for other in others for row in rows[other])
            text = f"{', '.join(rows[text])} (other numbers in {with_others}): {text}"
        notes.append(text)
    return tuple(notes)


def _of_frame(frame: "pd.DataFrame", caption: str, columns: Iterable[str] | None) -> ResultTable:
    columns = list(frame.columns if columns is None else columns)
    if unknown := [name for name in columns if name not in frame.columns]:
        raise ConfigError(
            f"columns hold {shown(unknown[0])}; allowed are {', '.join(map(str, frame.columns))}"
        )

    has_names = frame.index.dtype == object or frame.index.dtype == "string"
    heads = [""] * has_names + [_head(str(name)) for name in columns]
    cells = [[_cell(str(name), value) for value in frame[name]] for name in columns]
    named = [[str(name) for name in frame.index]] if has_names else []
    return ResultTable(caption, tuple(heads), tuple(zip(*named, *cells, strict=True)))


def _head(name: str) -> str:
    """Return the head of a column.

    >>> _head("peak_activations_bytes"), _head("step_seconds"), _head("peak_error")
    ('activations at the peak', 'step time', 'peak error')
    """
    plain = re.sub("_(bytes|seconds|fraction)$", "", name)
    category = re.fullmatch(r"peak_(\w+)_bytes", name)
    if category and category[1] in set(Category):
        return f"{category[1].replace('_', ' ')} at the peak"
    return f"{plain.replace('_', ' ')}{' time' * name.endswith('step_seconds')}"


def _cell(name: str, value: Any) -> str:
    """Return a value as a person reads it, by the end of the name of its column."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool | np.bool):
        return "yes" if value else "no"
    for end, shown_as in UNITS.items():
        if name.endswith(end):
            return shown_as(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
    return str(value)


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
) -> ResultList:
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
    return ResultList(run.result for run in runs)


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
