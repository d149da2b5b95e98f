"""From the file to columns: every event, every block at the end, every stack once.

The format is that of `torch.cuda.memory._snapshot`, whose docstring lists it: "segments" with their
blocks (the state when the file was written) and "device_traces" with the events of each device.
Newer PyTorch adds keys ("allocator_settings", "external_annotations", "host_segments"), older
PyTorch lacks some, and the oldest wrote a list of segments alone. Keys that are not known are
passed over; keys that are missing are counted in `notes`.
"""

import os
import stat
from array import array
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memlab.arguments.quoting import shown
from memlab.arguments.units import format_bytes
from memlab.devices.here import available_memory_bytes
from memlab.errors import MemlabError
from memlab.snapshots.columns import (
    CODE,
    NO_ADDRESS,
    NOT_RECORDED,
    OOM,
    SNAPSHOT,
    Annotation,
    CardRecord,
    Events,
    FinalBlocks,
    Frame,
    Segment,
    SnapshotFile,
    Stack,
)
from memlab.snapshots.plain_pickle import (
    PROTO,
    CallsError,
    NotPlainError,
    PlainDict,
    PlainReader,
    TruncatedError,
)

ALLOCATED, AWAITING = "active_allocated", "active_"  # any other active state waits to be freed
USUAL = "are of a kind that memlab does not know"
UNSHOWN = {"annotate": "put a word on a tensor and change no memory"}  # from PyTorch 2.14 on
MEMORY_PER_BYTE = 4  # of the file; `benchmarks/snapshot.py` measures it
MOST_CARD_BYTES = 2**47  # as many as a process has addresses on x86-64
RECORD = "torch.cuda.memory._record_memory_history()"
WRITE = f"call {RECORD} before the training, and torch.cuda.memory._dump_snapshot(path) after it"


class RowNumber(int):
    """Which event of the columns stands for a dict that was read."""

    __slots__ = ()


def read_file(path: Path) -> SnapshotFile:
    """Return what a snapshot file holds.

    Raises:
        MemlabError: there is no such file, or it is no snapshot. The message names the file, what
            is wrong with it, and a remedy.
    """
    data = _bytes_of(path)
    columns = _Columns()
    columns.reader = PlainReader(data, columns.finish)
    num_bytes = len(data)
    try:
        if data[0] != PROTO:  # protocol 0 and 1, and files of other kinds
            raise NotPlainError("is no pickle that PyTorch writes")
        whole = columns.reader.read()
        # 1 GB of bytes and as many references to what they hold are not needed from here on
        del data
        columns.reader = None
        return _snapshot(whole, columns, num_bytes)
    except CallsError as error:
        raise _refused(
            path, f"{error}, and a snapshot holds plain data alone; memlab has run nothing of it. "
            "Do not open it with pickle.load either"
        ) from None  # fmt: skip
    except TruncatedError:
        raise _refused(
            path, f"ends in the middle, after {format_bytes(num_bytes)}: it was cut off while it "
            "was written or copied. Copy or write it again"
        ) from None  # fmt: skip
    except NotPlainError as error:
        raise _refused(path, f"{error}; allowed is a file that torch.cuda.memory._dump_snapshot "
                       "wrote") from error  # fmt: skip
    except MemoryError:
        raise _refused(path, "needs more memory than there is; record fewer events, with "
                       "_record_memory_history(max_entries=100_000)") from None  # fmt: skip


def _bytes_of(path: Path) -> bytes:
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for, a device has no end
            raise _refused(path, "is no regular file; pass one that "
                           "torch.cuda.memory._dump_snapshot wrote")  # fmt: skip
        size = found.st_size
        free = available_memory_bytes()
        if free is not None and size * MEMORY_PER_BYTE > free:
            raise _refused(
                path, f"has {format_bytes(size)}, and to read it takes up to "
                f"{format_bytes(size * MEMORY_PER_BYTE)}; this machine has {format_bytes(free)} "
                "free. Open it on a larger one, or record fewer events, with "
                "_record_memory_history(max_entries=100_000)"
            )  # fmt: skip
        data = path.read_bytes()
    except FileNotFoundError:
        raise _refused(path, f"does not exist; {WRITE}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise _refused(path, f"cannot be read: {why}; pass a file that "
                       "torch.cuda.memory._dump_snapshot wrote") from None  # fmt: skip
    if not data:
        raise _refused(path, f"is empty; {WRITE}")
    return data


def _refused(path: Path, why: str) -> MemlabError:
    return MemlabError(f"the snapshot {shown(str(path))} {why}")


class _Columns:
    """Takes each dict as it is read: events become rows of columns, frames become tuples."""

    def __init__(self) -> None:
        self.reader: PlainReader | None = None
        self.action, self.stack = array("b"), array("i")
        self.address, self.size, self.stream, self.time_us = (array("q") for _ in range(4))
        self.stacks: list[Stack] = []
        self.missing: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self._frames: dict[Frame, Frame] = {}
        self._number_of: dict[Stack, int] = {}
        self._known: dict[int, tuple[Any, int]] = {}  # by id, with what keeps the id its own

    def finish(self, table: PlainDict) -> Any:
        """Return what stands for a dict: a `RowNumber`, a `Frame`, or the dict itself."""
        if "action" in table:
            return self._event(table)
        if "filename" in table and "name" in table:
            frame = Frame(str(table["filename"]), int(table.get("line", 0)), str(table["name"]))
            return self._frames.setdefault(frame, frame)
        return table

    def number(self, frames: Any) -> int:
        """Return the number of a stack.

        Raises:
            NotPlainError: it is no list of frames.
        """
        if frames is None:
            return NOT_RECORDED
        known = self._known.get(id(frames))
        if known is not None:
            return known[1]
        stack = tuple(frames)
        if not all(type(frame) is Frame for frame in stack):
            raise NotPlainError("has a stack that is no list of frames")
        number = self._number_of.setdefault(stack, len(self.stacks))
        if number == len(self.stacks):
            self.stacks.append(stack)
        if type(frames) is tuple:  # the reader uses one for all lists of the same bytes
            self._known[id(frames)] = frames, number
        elif not frames and self.reader is not None:
            self.reader.replace(frames, ())
        return number

    def _event(self, table: PlainDict) -> RowNumber:
        get = table.get
        code = CODE.get(table["action"], -1)
        if code < 0:
            self.unknown[str(table["action"])[:40]] += 1
        elif "addr" not in table and code not in NO_ADDRESS:
            self.missing["addr"] += 1
            code = -1
        elif "size" not in table and code != SNAPSHOT:
            self.missing["size"] += 1
            code = -1
        number = self.number(get("frames"))
        address = get("addr", 0) if code != OOM else get("device_free", get("addr", -1))
        size = get("size", 0)
        _check_size(size)
        self.address.append(address)
        self.size.append(size)
        self.stream.append(get("stream", 0))
        self.time_us.append(get("time_us", 0))
        self.stack.append(number)
        self.action.append(code)
        return RowNumber(len(self.action) - 1)

    def events(self, rows: Any) -> Events:
        """Return the events of one device.

        Raises:
            NotPlainError: what should be its list of events is none.
        """
        if not all(type(row) is RowNumber for row in rows):
            raise NotPlainError("has a trace that is no list of events")
        numbers = np.fromiter(rows, np.int64, len(rows))
        which: npt.NDArray[np.int64] | slice = numbers
        if len(rows) and (np.diff(numbers) == 1).all():  # as PyTorch writes them: no copy
            which = slice(int(rows[0]), int(rows[-1]) + 1)
        return Events(
            action=np.frombuffer(self.action, np.int8)[which],
            address=np.frombuffer(self.address, np.int64)[which],
            size=np.frombuffer(self.size, np.int64)[which],
            stream=np.frombuffer(self.stream, np.int64)[which],
            time_us=np.frombuffer(self.time_us, np.int64)[which],
            stack=np.frombuffer(self.stack, np.int32)[which],
        )


def _snapshot(whole: Any, columns: _Columns, num_bytes: int) -> SnapshotFile:
    """Return the columns of what was read.

    Raises:
        NotPlainError: it is not of the form of a snapshot.
    """
    if isinstance(whole, list | tuple):  # PyTorch before 2.0: segments alone
        whole = {"segments": whole}
    if not isinstance(whole, dict) or not {"segments", "device_traces"} & set(whole):
        raise NotPlainError('is a pickle without "segments" and "device_traces"')

    notes = [f'The file has no "{key}".' for key in ("segments", "device_traces")
             if key not in whole]  # fmt: skip
    try:
        traces = whole.get("device_traces", ())
        if sum(map(len, traces)) > num_bytes:
            raise NotPlainError("refers to the same events again and again")
        segments = _by_device(whole.get("segments", ()))
        annotations = _annotations(whole.get("external_annotations", ()))
        devices = []
        for device in sorted({*segments, *(i for i, trace in enumerate(traces) if len(trace))}):
            trace = traces[device] if device < len(traces) else ()
            held, blocks = _final(segments.get(device, ()), columns, num_bytes)
            devices.append(
                CardRecord(
                    device=device,
                    events=columns.events(trace),
                    segments=held if "segments" in whole else None,
                    blocks=blocks,
                    annotations=tuple(annotations.get(device, ())),
                )
            )
        settings = {str(k): str(v) for k, v in dict(whole.get("allocator_settings", {})).items()}
    except KeyError as error:
        raise NotPlainError(f'is not of the form of a snapshot: something has no "{error.args[0]}"'
                            ) from error  # fmt: skip
    except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise NotPlainError(
            f"is not of the form of a snapshot ({type(error).__name__}: {shown(str(error))})"
        ) from error

    return SnapshotFile(
        devices=tuple(devices),
        stacks=tuple(columns.stacks),
        settings=settings,
        notes=(*notes, *_on_host(whole.get("host_segments")), *_left_out(columns)),
    )


def _on_host(segments: Any) -> list[str]:
    """Say how much pinned memory the file lists, which PyTorch 2.14 writes if asked to."""
    listed = segments if isinstance(segments, list | tuple) else ()
    sizes = [one.get("total_size") for one in listed if isinstance(one, Mapping)]
    total = sum(size for size in sizes if isinstance(size, int))
    if not total:
        return []
    return [
        f"The process held {format_bytes(total)} of pinned memory of the host too, which is no "
        "memory of the card and not shown."
    ]


def _left_out(columns: _Columns) -> list[str]:
    missing = [f'{count:,} events have no "{key}" and are left out.'
               for key, count in columns.missing.items()]  # fmt: skip
    unknown = [f"{count:,} events {shown(name)} {UNSHOWN.get(name, USUAL)}; they are left out."
               for name, count in columns.unknown.items()]  # fmt: skip
    return missing + unknown


def _by_device(segments: Any) -> dict[int, list[Mapping[str, Any]]]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for segment in segments:
        found.setdefault(int(segment.get("device", 0)), []).append(segment)
    return found


def _annotations(entries: Any) -> dict[int, list[Annotation]]:
    found: dict[int, list[Annotation]] = {}
    for entry in entries:
        made = Annotation(int(entry["time_us"]), str(entry.get("name", "")),
                          str(entry.get("stage", "")))  # fmt: skip
        found.setdefault(int(entry.get("device", 0)), []).append(made)
    return {device: sorted(those) for device, those in found.items()}


def _final(
    segments: Any, columns: _Columns, num_bytes: int
) -> tuple[tuple[Segment, ...], FinalBlocks]:
    """Return the segments of a device and their blocks in use.

    Raises:
        NotPlainError: there are more blocks than a file of so many bytes can list.
    """
    held, rows = [], []
    seen = whole = 0
    for segment in segments:
        seen += 1 + len(segment["blocks"])
        if seen > num_bytes:
            raise NotPlainError("refers to the same blocks again and again")
        at = start = int(segment.get("address") or 0)
        whole += int(segment["total_size"])
        _check_size(int(segment["total_size"]))
        _check_size(whole)
        held.append(
            Segment(start, int(segment["total_size"]), int(segment.get("stream", 0)),
                    str(segment.get("segment_type", "large")),
                    bool(segment.get("is_expandable", False)))
        )  # fmt: skip
        for block in segment["blocks"]:
            size, state = int(block["size"]), str(block["state"])
            at = int(block.get("address", at))
            _check_size(size)
            if state.startswith(AWAITING):
                requested, frames = _request(block)
                rows.append((at, size, requested, state == ALLOCATED, columns.number(frames)))
            at += size

    table = np.array(rows, np.int64).reshape(-1, 5)
    return tuple(sorted(held)), FinalBlocks(
        address=table[:, 0],
        size=table[:, 1],
        requested=table[:, 2],
        is_allocated=table[:, 3].astype(np.bool_),
        stack=table[:, 4].astype(np.int32),
    )


def _check_size(size: int) -> None:
    """Raise NotPlainError for bytes that no card has."""
    if not 0 <= size <= MOST_CARD_BYTES:
        raise NotPlainError(f"has a size of {shown(size)} bytes, which no card has")


def _request(block: Mapping[str, Any]) -> tuple[int, Any]:
    """Return the requested bytes of a block and its stack; PyTorch 1 kept them in "history"."""
    if block.get("history"):
        last = block["history"][0]
        return int(last.get("real_size", block["size"])), last.get("frames")
    return int(block.get("requested_size", block["size"])), block.get("frames")
