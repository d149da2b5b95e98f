"""What became of each tool: errors, what was wrongly said to fit or not, and seconds an answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.field.rows import Row

Answers = Mapping[int, Mapping[str, Any]]
"""What a tool said of each row, by the row's place among all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rows that a line of the table is about.

    Attributes:
        title: in the table.
        places: of its rows among all.
        of_time: whether its errors are those of times.
    """

    title: str
    places: tuple[int, ...]
    of_time: bool = False


SHARES = {"median %": 0.5, "p90 %": 0.9, "max %": 1.0}
FINE_TUNING = ("litgpt_table", "litgpt_hub", "peft_table")


def groups(rows: Sequence[Row]) -> list[Group]:
    """Return the groups that rows fall into; a row is in several."""
    tables = [row.setting["table"] for row in rows]
    is_peak = [row.truth.bytes is not None or not row.truth.fits for row in rows]

    def peaks(title: str, chosen: Sequence[bool]) -> Group:
        places = tuple(i for i, (a, b) in enumerate(zip(is_peak, chosen, strict=True)) if a and b)
        return Group(title=title, places=places)

    is_image = [row.setting["image"] is not None for row in rows]
    timed = tuple(i for i, row in enumerate(rows) if row.truth.seconds is not None)
    found = [
        peaks("all peaks of training", [table != "kernel_peaks" for table in tables]),
        peaks("of these, all is known", [
            row.is_known and row.setting["table"] != "kernel_peaks" for row in rows
        ]),
        peaks("fine-tuning", [table in FINE_TUNING for table in tables]),
        peaks("language models, from the start", [
            row.setting["table"] == "gpu_peaks" and row.setting["image"] is None for row in rows
        ]),
        peaks("convnets", is_image),
        peaks("several cards", [table == "torchtitan" for table in tables]),
        peaks("single kernels", [table == "kernel_peaks" for table in tables]),
        Group(title="time of an update", places=timed, of_time=True),
    ]  # fmt: skip
    return [group for group in found if group.places]


def error(row: Row, said: Mapping[str, Any], *, of_time: bool) -> float | None:
    """Return the relative error of an answer, signed; None without one or the other."""
    measured = row.truth.seconds if of_time else row.truth.bytes
    given = said.get("step_seconds" if of_time else "bytes")
    return None if measured is None or given is None else given / measured - 1


def errors(group: Group, rows: Sequence[Row], answers: Answers) -> list[float]:
    """Return the errors of a tool's answers to a group, signed."""
    found = [error(rows[i], answers.get(i, {}), of_time=group.of_time) for i in group.places]
    return [each for each in found if each is not None]


def says_it_fits(row: Row, said: Mapping[str, Any]) -> bool | None:
    """Return whether an answer says that a run fits its card; its number decides without a word."""
    if (own := said.get("fits")) is not None:
        return bool(own)
    given = said.get("bytes")
    return None if given is None else bool(given <= row.setting["card"]["bytes"])


def line(tool: str, group: Group, rows: Sequence[Row], answers: Answers) -> dict[str, Any]:
    """Return one line of the table: of a tool, on a group of rows."""
    here = [(rows[i], answers.get(i, {})) for i in group.places]
    far = np.abs(errors(group, rows, answers))
    answered = [said for _, said in here if "cannot" not in said and said]
    found: dict[str, Any] = {
        "tool": tool, "rows": len(here), "answered": len(answered),
        **{name: 100 * float(np.quantile(far, share)) if len(far) else None
           for name, share in SHARES.items()},
    }  # fmt: skip
    if not group.of_time:
        fits = [(row.truth.fits, says_it_fits(row, said)) for row, said in here if said]
        found["false fits"] = sum(said is True and not true for true, said in fits)
        found["false does not fit"] = sum(said is False and true for true, said in fits)
    seconds = [said["seconds"] for said in answered if "seconds" in said]
    found["s an answer"] = float(np.median(seconds)) if seconds else None
    return found


def published(rows: Sequence[Row]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return what was published of the rows by authors of tools that are not run here."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for place, row in enumerate(rows):
        for tool, size in row.truth.published.items():
            found.setdefault(f"{tool}, published", {})[place] = {"bytes": size}
    return found
