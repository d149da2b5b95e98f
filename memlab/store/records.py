"""Records: measurements of real devices, as lines of JSON in files that only grow.

A line is one object with its schema, its kind, and the data of that kind. Every line is complete by
itself, so a file that was cut off or damaged is valid up to that line. Timelines and holdings are
compressed text.
"""

import base64
import contextlib
import dataclasses
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from memlab._util.units import GIB, format_bytes
from memlab.cost_model.cost_store import cost_from_row, is_whole
from memlab.devices.operators import OperatorCost, Signature, from_text, to_text
from memlab.errors import MemlabError
from memlab.result import Source, StepResult
from memlab.techniques.technique import Plan, Region
from memlab.trace import CATEGORIES, Timeline

# A `StepResult` as short JSON: its timeline and its holdings are compressed text.
#
# They are restored to the byte. The timeline of one step, a hundred kilobytes as lists of
# numbers, takes two.

MOST_UNPACKED_BYTES = 2**28  # of one timeline or list, since a few bytes can unpack to gigabytes
INT = "<i8"  # of packed arrays, whatever the machine


def result_to_packed(result: StepResult) -> dict[str, Any]:
    """Return a result as plain JSON types; `result_from_packed` gives it back."""
    bare = dataclasses.replace(result, timeline=None, peak_holdings=(), ranks=())
    holdings = [holding.to_dict() for holding in result.peak_holdings]
    timeline = result.timeline
    return {
        "result": bare.to_dict(),
        "packed": {
            "holdings": pack(json.dumps(holdings, separators=(",", ":")).encode()),
            "timeline": None if timeline is None else pack(_deltas(timeline)),
        },
        "ranks": [result_to_packed(rank) for rank in result.ranks],
    }


def result_from_packed(data: Mapping[str, Any]) -> StepResult:
    """Return the result that `result_to_packed` wrote.

    Raises:
        MemlabError, ValueError, LookupError or TypeError: the data is damaged.
    """
    packed = data["packed"]
    holdings = from_json(unpacked(packed["holdings"]))
    result = StepResult.from_dict({**data["result"], "peak_holdings": holdings})
    ranks = tuple(result_from_packed(rank) for rank in data.get("ranks", ()))
    result = dataclasses.replace(result, ranks=ranks)
    if packed["timeline"] is None:
        return result
    return dataclasses.replace(result, timeline=_timeline(unpacked(packed["timeline"])))


def from_json(text: str | bytes) -> Any:
    """Return what a JSON text holds.

    Raises:
        ValueError: it is none, names a key twice, or holds NaN or an infinity.
    """

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not a number")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key is there twice")
        return found

    return json.loads(text, parse_constant=refuse, object_pairs_hook=once)


def pack(data: bytes) -> str:
    """Return bytes as compressed text."""
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def unpacked(text: str | None) -> bytes:
    """Return what was packed.

    Raises:
        ValueError: it was not packed by `pack`, or unpacks to more than a record can hold.
    """
    if text is None:
        return b""

    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(base64.b64decode(text, validate=True), MOST_UNPACKED_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from None

    if not unpacking.eof:
        raise ValueError(f"it is cut, or unpacks to more than {format_bytes(MOST_UNPACKED_BYTES)}")

    return data


def _deltas(timeline: Timeline) -> bytes:
    """Return a timeline's columns, each as the differences between its rows: mostly zeros."""
    table = np.column_stack(
        (timeline.bytes_by_category, timeline.phase, timeline.micro_batch, timeline.operator)
    ).astype(np.int64)  # (instants, categories + 3)
    return np.ascontiguousarray(np.diff(table, axis=0, prepend=0).T).astype(INT).tobytes()


def _timeline(deltas: bytes) -> Timeline:
    columns = np.frombuffer(deltas, INT).reshape(len(CATEGORIES) + 3, -1)
    table = np.cumsum(columns.astype(np.int64), axis=1).T
    phase, micro_batch, operator = table[:, len(CATEGORIES) :].T

    return Timeline(
        bytes_by_category=np.ascontiguousarray(table[:, : len(CATEGORIES)]),
        phase=phase.astype(np.int8),
        micro_batch=micro_batch.astype(np.int32),
        operator=operator.astype(np.int32),
    )


SCHEMA = 1
SUFFIX = ".jsonl"
MOST_BYTES = GIB  # of a file
MOST_UNITS = 2**62  # bytes or seconds of a step
# errors that reading a damaged line may raise
DAMAGE = (AttributeError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError)


class Kind(StrEnum):
    """The kind of data in a line."""

    VISIT = "visit"
    RUN = "run"
    OPERATORS = "operators"
    BOUNDARY = "boundary"
    VERIFY = "verify"
    ALLOCATOR = "allocator"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """What a file of records holds.

    Attributes:
        path: of the file.
        content: one object a line, in order.
        kept_bytes: of the file, up to the end of the last good line.
        damage: a sentence on what could not be read; empty if all could.
    """

    path: Path
    content: tuple[dict[str, Any], ...] = field(repr=False)
    kept_bytes: int
    damage: str = ""

    def of(self, kind: Kind) -> list[dict[str, Any]]:
        """Return the lines of one kind."""
        return [line for line in self.content if line["kind"] == kind]


def read_lines(path: Path) -> Lines:
    """Return the lines of a file up to the first damaged one; none if the file does not exist.

    Raises:
        MemlabError: a line has a schema that this version of memlab does not know.
    """
    try:
        raw = _bytes_of(path)
    except OSError as error:
        said = f"{path} cannot be read ({error}); nothing of it is used."
        return Lines(path=path, content=(), kept_bytes=0, damage=said)

    content: list[dict[str, Any]] = []
    kept = 0
    *whole, rest = raw.split(b"\n")

    for number, text in enumerate(whole, 1):
        line = _parsed(text)
        if line is None:
            rest = text
            break

        if line["schema"] != SCHEMA:
            raise MemlabError(
                f"{path}, line {number}: schema={line['schema']!r}; allowed is {SCHEMA}: this file "
                "was written by another version of memlab, so read it with that one or a newer one"
            )

        content.append(line)
        kept += len(text) + 1

    damage = ""
    if rest:
        damage = (
            f"{path}, line {len(content) + 1} is damaged or cut short. Only the "
            f"{len(content)} lines before it are used, {kept} of {len(raw)} bytes."
        )

    return Lines(path=path, content=tuple(content), kept_bytes=kept, damage=damage)


def _bytes_of(path: Path) -> bytes:
    """Return the bytes of a file; no bytes if the file does not exist.

    Raises:
        OSError: it is no file, or larger than a record can be.
    """
    if not path.exists():
        return b""
    if not path.is_file():
        raise OSError("it is no file")
    if path.stat().st_size > MOST_BYTES:
        raise OSError(f"it is larger than {format_bytes(MOST_BYTES)}")
    return path.read_bytes()


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None if it is damaged or its packed data cannot be unpacked."""
    try:
        line = from_json(text)
        if not isinstance(line, dict) or not {"schema", "kind"} <= line.keys():
            return None
        for packed in line.get("packed", {}).values():
            unpacked(packed)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return None

    return line


def cut_damage(lines: Lines) -> None:
    """Move everything from the damage on to another file, so that lines can be appended again."""
    if not lines.damage:
        return
    raw = lines.path.read_bytes()
    aside = lines.path.with_suffix(".damaged")
    aside.write_bytes((aside.read_bytes() if aside.exists() else b"") + raw[lines.kept_bytes :])
    lines.path.write_bytes(raw[: lines.kept_bytes])


def append(path: Path, kind: Kind, content: Mapping[str, Any]) -> None:
    """Append one line and flush it to the disk, so an interruption loses at most what follows."""
    text = json.dumps({"schema": SCHEMA, "kind": str(kind), **content}, separators=(",", ":"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordedRun:
    """One recorded step.

    Attributes:
        visit: the visit during which it was recorded.
        group: the reason: "grid", "ladder", "recompute", "compile", or "again" for a repetition.
        workload: name in the zoo.
        options: of the zoo; `memlab.workloads.get(workload, **options)` rebuilds it.
        holdout: whether it is held out, so that no constant of memlab is fitted to it.
        seed: set before model, batch and each step.
        result: what it cost, `source` "recorded".
        plan: of the memory budget, as it was carried out; None without one.
        process_bytes: most that the driver said the process held; None where nobody says.
        wall_seconds: that the whole run took, building and metering included.
        before_reading: what was done before the peaks were read, in order.
    """

    visit: str
    group: str
    workload: str
    options: Mapping[str, Any]
    holdout: bool
    seed: int
    result: StepResult
    wall_seconds: float
    plan: Plan | None = None
    process_bytes: int | None = None
    before_reading: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        """Return one line."""
        return f"{self.visit}, {self.group}: {self.result}"

    def to_line(self) -> dict[str, Any]:
        """Return the run as plain JSON types; `from_line` gives it back."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return data | {
            "options": dict(self.options),
            "before_reading": list(self.before_reading),
            "plan": self.plan and _plan_to_dict(self.plan),
            **result_to_packed(self.result),
        }

    @classmethod
    def from_line(cls, line: Mapping[str, Any], device: str) -> "RecordedRun":
        """Return the run that `to_line` wrote, of a device of this name.

        Raises:
            Exception: one of `DAMAGE`, where the line is not what `to_line` wrote.
        """
        here = {"source": str(Source.RECORDED), "device": device}
        result = result_from_packed({**line, "result": line["result"] | here})
        _check_numbers(result)
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**{
            **{name: value for name, value in line.items() if name in names},
            "options": {name: _hashable(value) for name, value in line["options"].items()},
            "before_reading": tuple(line["before_reading"]),
            "plan": line["plan"] and _plan_from_dict(line["plan"]),
            "result": result,
        })  # fmt: skip


def _check_numbers(result: StepResult) -> None:
    """Raise ValueError for a result with numbers that are not possible."""
    sizes = [
        result.peak_allocated_bytes,
        result.peak_reserved_bytes,
        result.first_step_peak_bytes,
        result.saving_peak_bytes,
        result.saving_host_bytes,
        result.memory_limit_bytes,
        *(result.peak_by_category or {}).values(),
        *(holding.nbytes for holding in result.peak_holdings),
    ]
    times = [result.step_seconds, result.samples_per_second, *result.step_seconds_all]
    share = result.others_share
    is_possible = (
        all(size is None or is_whole(size, 0, MOST_UNITS) for size in sizes)
        and all(time is None or _is_time(time) for time in times)
        and (share is None or 0 <= share <= 1)
        and _agrees(result)
    )
    if not is_possible:
        raise ValueError("a number is none, or two contradict each other")


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < MOST_UNITS


def _agrees(result: StepResult) -> bool:
    """Return whether a result's peak is the sum of its parts, and its time within its times."""
    peak, reserved = result.peak_allocated_bytes, result.peak_reserved_bytes
    if peak is not None:
        parts = result.peak_by_category
        if (parts and sum(parts.values()) != peak) or (reserved is not None and reserved < peak):
            return False

    seconds, every = result.step_seconds, result.step_seconds_all
    return seconds is None or not every or min(every) <= seconds <= max(every)


def costs_to_line(costs: Mapping[Signature, OperatorCost]) -> dict[str, Any]:
    """Return costs of operators as plain JSON types; `costs_from_line` reads them back."""
    rows = {
        to_text(signature): list(dataclasses.astuple(cost)) for signature, cost in costs.items()
    }
    packed = pack(json.dumps(rows, separators=(",", ":")).encode())
    return {"num_operators": len(rows), "packed": {"costs": packed}}


def costs_from_line(line: Mapping[str, Any]) -> dict[Signature, OperatorCost]:
    """Return the costs that `costs_to_line` wrote; damaged rows are left out.

    Raises:
        ValueError, LookupError or TypeError: the line is damaged.
    """
    rows: dict[str, list[Any]] = from_json(unpacked(line["packed"]["costs"]))
    found = {}
    for text, row in rows.items():
        with contextlib.suppress(*DAMAGE):
            found[from_text(text)] = cost_from_row(row)
    return found


def _plan_to_dict(plan: Plan) -> dict[str, Any]:
    data = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    regions = [{"path": r.path, "keep": sorted(map(list, r.keep))} for r in plan.regions]
    return data | {"regions": regions}


def _plan_from_dict(data: Mapping[str, Any]) -> Plan:
    regions = tuple(
        Region(path=r["path"], keep=frozenset((name, number) for name, number in r["keep"]))
        for r in data["regions"]
    )
    return Plan(**{**data, "regions": regions})


def _hashable(value: Any) -> Any:
    """Return a list as a tuple, since JSON knows no other."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
