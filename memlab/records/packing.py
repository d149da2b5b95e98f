"""A `StepResult` as short JSON: its timeline and its holdings are compressed text.

They are restored to the byte. The timeline of one step, a hundred kilobytes as lists of numbers,
takes two.
"""

import base64
import dataclasses
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from memlab.arguments.units import format_bytes
from memlab.result import StepResult
from memlab.trace import CATEGORIES, Timeline

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
