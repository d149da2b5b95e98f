"""From the file to columns: every event, every block at the end, every stack once.

The format is that of `torch.cuda.memory._snapshot`, whose docstring lists it: "segments" with their
blocks (the state when the file was written) and "device_traces" with the events of each device.
Newer PyTorch adds keys ("allocator_settings", "external_annotations", "host_segments"), older
PyTorch lacks some, and the oldest wrote a list of segments alone. Keys that are not known are
passed over; keys that are missing are counted in `notes`.
"""

import gc
import os
import pickle
import re
import stat
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from memlab._util.units import format_bytes, shown
from memlab.devices.here import available_memory_bytes
from memlab.errors import ConfigError, MemlabError

# What a snapshot file holds, as columns: events, blocks, segments, stacks.

ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
    "segment_unmap", "snapshot", "oom",
)  # fmt: skip
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, \
    SNAPSHOT, OOM = range(len(ACTIONS))  # fmt: skip
CODE = {name: code for code, name in enumerate(ACTIONS)}
NOT_KNOWN = -1  # the action of an event that is left out
NOT_RECORDED = -1  # the stack of an event without one

Table: TypeAlias = Any
"""An `np.recarray`: columns of one length; a mask, a slice or indices choose rows of all of them.

A column of bytes is `size_bytes`, for `size` and `nbytes` are those of the array itself.
"""

EVENT = np.dtype(
    [
        ("action", np.int8),  # index into `ACTIONS`
        ("address", np.int64),  # of an "oom" the bytes that the device had free
        ("size_bytes", np.int64),
        ("stream", np.int64),
        ("time_us", np.int64),
        ("stack", np.int32),
    ]
)
FINAL_BLOCK = np.dtype(
    [
        ("address", np.int64),
        ("size_bytes", np.int64),
        ("requested", np.int64),
        ("is_allocated", np.bool_),  # else it waits until another stream is done with it
        ("stack", np.int32),
    ]
)


class Frame(NamedTuple):
    """One line of a stack."""

    filename: str
    line: int
    name: str

    def __str__(self) -> str:
        """Return for instance "train.py:12 main"; of C++ the name alone if no more is known."""
        if not self.line:
            return self.name
        return f"{self.filename.rpartition('/')[2]}:{self.line} {self.name}"


Stack = tuple[Frame, ...]  # the innermost frame first, as PyTorch writes them


class Segment(NamedTuple):
    """A range of device memory that the caching allocator holds."""

    start: int
    size: int
    stream: int
    kind: str  # "small" or "large"
    is_expandable: bool

    @property
    def end(self) -> int:
        """The address after its last byte."""
        return self.start + self.size


class Annotation(NamedTuple):
    """Where a `record_function` began or ended."""

    time_us: int
    name: str
    stage: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CardRecord:
    """What a file holds of one device.

    Attributes:
        device: its index.
        events: in order, with the columns of `EVENT`; of length 0 if no history was recorded.
        segments: at the end; None if the file does not say.
        blocks: in use at the end, with the columns of `FINAL_BLOCK`.
        annotations: in the order of time.
        stacks: of the whole file, which events and blocks index.
        settings: of the allocator, as texts; empty if the file does not say.
        notes: what was missing in the file or passed over, as sentences.
        other_devices: those that the file also holds.
    """

    device: int
    events: Table
    segments: tuple[Segment, ...] | None
    blocks: Table
    annotations: tuple[Annotation, ...]
    stacks: tuple[Stack, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    other_devices: tuple[int, ...] = ()


# Read a pickle that holds nothing but dicts, lists, tuples, texts, numbers, bools and None.
#
# `pickle.load` runs what a file tells it to run, and even with `find_class` refused a file
# of nine bytes can make it fill 32 GiB (`LONG_BINPUT` with a large index, for which CPython
# grows its memo). So `_check_plain` goes through the opcodes first and makes nothing. It
# allows those of plain containers alone, as `pickle` writes them from protocol 2 on, so what
# is loaded then takes memory in proportion to the bytes of the file.

_NUMBER = rb"(?:K.|M..|J.{4}|\x8a(?:" + b"|".join(b"%c.{%d}" % (n, n) for n in range(10)) + b"))"
# Opcodes that `pickletools` lists as references, numbers and the like: whole, with their operands.
# A tuple counts among them if it holds numbers alone, as those of PyTorch do.
_SIMPLE = re.compile(
    rb"(?:[hq\x80].|j.{4}|[\x94Neuas\x88\x89]|[G\x95].{8}"
    rb"|" + _NUMBER + rb"(?:\x85|" + _NUMBER + rb"(?:\x86|" + _NUMBER + rb"\x87))"
    rb"|" + _NUMBER + rb"|\((?:" + _NUMBER + rb"*+t)?|\))*+",
    re.S,
)
_SIMPLE_OPCODES = b"hq\x80jG\x95KMJ\x8ar"
CONTAINERS, TUPLES, LONG_BINPUT, STOP = b"}]", b"\x85\x86\x87t", 0x72, 0x2E
TEXTS = {0x8C: 1, 0x58: 4, 0x8D: 8}  # the bytes of their length
LONGEST = 11  # bytes of a simple opcode
# GLOBAL, STACK_GLOBAL, REDUCE, BUILD, INST, OBJ, NEWOBJ, NEWOBJ_EX, PERSID, BINPERSID, EXT1 to EXT4
CALLS = b"c\x93Rbio\x81\x92PQ\x82\x83\x84"

BYTES_PER_CONTAINER = 12  # of a file, at least; an empty dict takes 72 of memory for one
FEW_CONTAINERS = 100_000
MOST_TUPLES = 16  # that hold tuples: those of n levels may take 2**n steps as a key of a dict
MEMORY_PER_CONTAINER, MEMORY_PER_BYTE = 350, 3  # what a file takes; `benchmarks/snapshot.py`
MOST_CARD_BYTES = 2**47  # as many as a process has addresses on x86-64

RECORD = "torch.cuda.memory._record_memory_history()"
WRITE = f"call {RECORD} before the training, and torch.cuda.memory._dump_snapshot(path) after it"
ALLOWED = "; allowed is a file that torch.cuda.memory._dump_snapshot wrote"
FEWER = "record fewer events, with _record_memory_history(max_entries=100_000)"


class NotASnapshotError(Exception):
    """Why a file cannot be read and what to do; continues "the snapshot ..."."""


def read_file(path: Path, device: int | None) -> CardRecord:
    """Return what a snapshot file holds of a device, by default of that with most events.

    Raises:
        MemlabError: there is no such file, it is no snapshot, or it holds nothing of this device.
            The message names the file, what is wrong with it, and a remedy.
    """
    collects = gc.isenabled()
    gc.disable()  # each collection would walk through millions of dicts, and none is garbage
    try:
        data = _bytes_of(path)
        num_bytes, whole = len(data), _loaded(data)
        del data  # of a large file they are worth to be given back
        return _chosen(_records(whole, num_bytes), path, device)
    except NotASnapshotError as error:
        raise MemlabError(f"the snapshot {shown(str(path))} {error}") from error
    except MemoryError:
        raise MemlabError(
            f"the snapshot {shown(str(path))} needs more memory than there is; {FEWER}"
        ) from None
    finally:
        if collects:
            gc.enable()


def _chosen(records: list[CardRecord], path: Path, device: int | None) -> CardRecord:
    if not records:
        raise NotASnapshotError(
            "holds no event and no segment: nothing had been recorded or allocated when it was "
            f"written; {WRITE}"
        )
    devices = [each.device for each in records]
    if device is None:
        found = max(records, key=lambda each: (len(each.events), len(each.blocks)))
    elif device in devices:
        found = records[devices.index(device)]
    else:
        raise ConfigError(
            f"device={device} is not in the snapshot {shown(str(path))}; it holds device "
            f"{', '.join(map(str, devices))}"
        )
    others = tuple(each for each in devices if each != found.device)
    return replace(found, other_devices=others)


def _bytes_of(path: Path) -> bytes:
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for, a device has no end
            raise NotASnapshotError(f"is no regular file{ALLOWED}")
        _check_memory(found.st_size, found.st_size * MEMORY_PER_BYTE)
        data = path.read_bytes()
    except FileNotFoundError:
        raise NotASnapshotError(f"does not exist; {WRITE}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise NotASnapshotError(f"cannot be read: {why}{ALLOWED}") from None
    if not data:
        raise NotASnapshotError(f"is empty; {WRITE}")
    return data


def _check_memory(num_bytes: int, needed: int) -> None:
    free = available_memory_bytes()
    if free is not None and needed > free:
        raise NotASnapshotError(
            f"has {format_bytes(num_bytes)}, and to read it takes up to {format_bytes(needed)}; "
            f"this machine has {format_bytes(free)} free. Open it on a larger one, or {FEWER}"
        )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise NotASnapshotError(f"would import {shown(f'{module}.{name}')}{ALLOWED}")


def _loaded(data: bytes) -> Any:
    """Return what a pickle of plain data holds."""
    if data[0] != 0x80:  # protocol 0 and 1, and files of other kinds
        raise NotASnapshotError(f"is no pickle that PyTorch writes{ALLOWED}")
    num_containers = _check_plain(data)
    _check_memory(len(data), len(data) * MEMORY_PER_BYTE + num_containers * MEMORY_PER_CONTAINER)
    try:
        return _Unpickler(BufferedReader(BytesIO(data), 2**20)).load()
    except (MemoryError, NotASnapshotError):
        raise
    except Exception as error:  # bytes in a wrong order may do anything to a dict or a list
        raise NotASnapshotError(f"is damaged ({type(error).__name__}){ALLOWED}") from error


def _check_plain(data: bytes) -> int:
    """Return how many containers a pickle makes; refuse one that is not of plain data."""
    pos = num_containers = num_tuples = 0
    left = FEW_CONTAINERS + len(data) // BYTES_PER_CONTAINER
    simple = _SIMPLE.match
    while True:
        found = simple(data, pos) if pos < len(data) else None  # a length may point anywhere
        pos = found.end() if found else pos
        if pos >= len(data):
            raise _truncated(data)
        opcode = data[pos]
        if opcode in CONTAINERS:
            num_containers += 1
            pos += 1
        elif opcode in TEXTS:
            start = pos + 1 + TEXTS[opcode]
            pos = start + int.from_bytes(data[pos + 1 : start], "little")
        elif opcode in TUPLES:
            num_tuples += 1
            pos += 1
        elif opcode == LONG_BINPUT and int.from_bytes(data[pos + 1 : pos + 5], "little") <= pos:
            pos += 5
        elif opcode == STOP:
            return num_containers
        else:
            raise _not_plain(data, pos)
        if num_containers > left or num_tuples > MOST_TUPLES:
            raise NotASnapshotError(
                f"has more containers than a snapshot of its size can have{ALLOWED}"
            )


def _truncated(data: bytes) -> NotASnapshotError:
    return NotASnapshotError(
        f"ends in the middle, after {format_bytes(len(data))}: it was cut off while it was written "
        "or copied. Copy or write it again"
    )


def _not_plain(data: bytes, pos: int) -> NotASnapshotError:
    """Return what is wrong with an opcode."""
    if data[pos] in CALLS:
        return NotASnapshotError(
            f"would call or import something (byte {pos}), and a snapshot holds plain data alone; "
            "memlab has run nothing of it. Do not open it with pickle.load either"
        )
    if data[pos] in _SIMPLE_OPCODES and len(data) - pos < LONGEST:
        return _truncated(data)
    return NotASnapshotError(f"has an opcode that plain data does not need (byte {pos}){ALLOWED}")


# From what was loaded to columns.

ALLOCATED, AWAITING = "active_allocated", "active_"  # any other active state waits to be freed
USUAL = "are of a kind that memlab does not know"
UNSHOWN = {"annotate": "put a word on a tensor and change no memory"}  # from PyTorch 2.14 on
MOST_KNOWN = 2**16  # lists of frames; a writer that shares no frames has one for each event


class _Stacks:
    """Every stack once, and the number of each list of frames."""

    def __init__(self) -> None:
        self.numbers: dict[Stack, int] = {}
        self._known: dict[tuple[int, ...], int] = {}  # by the ids of frames, which all stay

    def number(self, frames: Any) -> int:
        if frames is None:
            return NOT_RECORDED
        key = tuple(map(id, frames))
        number = self._known.get(key)
        if number is None:
            number = self.numbers.setdefault(tuple(map(_frame, frames)), len(self.numbers))
            if len(self._known) < MOST_KNOWN:
                self._known[key] = number
        return number


def _frame(frame: Any) -> Frame:
    try:
        filename, name, line = frame["filename"], frame["name"], frame.get("line", 0)
    except (KeyError, TypeError, AttributeError):
        raise NotASnapshotError(f"has a stack that is no list of frames{ALLOWED}") from None
    return Frame(_text(filename), int(line), _text(name))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


def _records(whole: Any, num_bytes: int) -> list[CardRecord]:
    """Return the columns of each device; refuse what is not of the form of a snapshot."""
    if isinstance(whole, list | tuple):  # PyTorch before 2.0: segments alone
        whole = {"segments": whole}
    if not isinstance(whole, dict) or not {"segments", "device_traces"} & set(whole):
        raise NotASnapshotError(f'is a pickle without "segments" and "device_traces"{ALLOWED}')
    try:
        return _columns(whole, num_bytes)
    except KeyError as error:
        why = f'something has no "{error.args[0]}"'
    except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        why = f"{type(error).__name__}: {shown(str(error))}"
    raise NotASnapshotError(f"is not of the form of a snapshot ({why}){ALLOWED}")


def _columns(whole: Mapping[str, Any], num_bytes: int) -> list[CardRecord]:
    traces = whole.get("device_traces", ())
    if sum(map(len, traces)) > num_bytes:
        raise NotASnapshotError(f"refers to the same events again and again{ALLOWED}")
    segments = _by_device(whole.get("segments", ()))
    annotations = _by_device(whole.get("external_annotations", ()))
    stacks, left_out = _Stacks(), Counter[str]()
    events = [_events(trace, stacks, left_out) for trace in traces]
    records = []
    for device in sorted({*segments, *(i for i, trace in enumerate(events) if len(trace))}):
        held, blocks = _final(segments.get(device, ()), stacks, num_bytes)
        records.append(
            CardRecord(
                device=device,
                events=events[device] if device < len(events) else np.recarray(0, EVENT),
                segments=held if "segments" in whole else None,
                blocks=blocks,
                annotations=tuple(sorted(map(_annotation, annotations.get(device, ())))),
            )
        )
    settings = dict(whole.get("allocator_settings", {}))
    notes = [f'The file has no "{key}".' for key in ("segments", "device_traces")
             if key not in whole]  # fmt: skip
    notes += _on_host(whole.get("host_segments"))
    notes += [f"{count:,} events {why}" for why, count in left_out.items()]
    common: dict[str, Any] = {
        "stacks": tuple(stacks.numbers),
        "settings": {_text(key): _text(value) for key, value in settings.items()},
        "notes": tuple(notes),
    }
    return [replace(record, **common) for record in records]


def _by_device(entries: Any) -> dict[int, list[Mapping[str, Any]]]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for entry in entries:
        found.setdefault(int(entry.get("device", 0)), []).append(entry)
    return found


def _annotation(entry: Mapping[str, Any]) -> Annotation:
    return Annotation(
        int(entry["time_us"]), _text(entry.get("name", "")), _text(entry.get("stage", ""))
    )


def _events(trace: Sequence[dict[str, Any]], stacks: _Stacks, left_out: Counter[str]) -> Table:
    """Return the events of one device, and count why some are left out."""
    if not all(type(event) is dict and "action" in event for event in trace):
        raise NotASnapshotError(f"has a trace that is no list of events{ALLOWED}")
    events: Table = np.recarray(len(trace), EVENT)
    events.action = [CODE.get(event["action"], NOT_KNOWN) for event in trace]
    unknown = np.flatnonzero(events.action == NOT_KNOWN)
    for key, without in (("addr", (NOT_KNOWN, SNAPSHOT, OOM)), ("size", (NOT_KNOWN, SNAPSHOT))):
        lacks = np.array([key not in event for event in trace], bool)
        lacks &= ~np.isin(events.action, without)
        events.action[lacks] = NOT_KNOWN
        if lacks.any():
            left_out[f'have no "{key}" and are left out.'] += int(lacks.sum())
    for number in unknown.tolist():
        name = _text(trace[number]["action"])[:40]
        left_out[f"{shown(name)} {UNSHOWN.get(name, USUAL)}; they are left out."] += 1

    addresses = array("q", [event.get("addr", 0) for event in trace])  # of whole numbers alone
    for number in np.flatnonzero(events.action == OOM).tolist():
        event = trace[number]
        addresses[number] = event.get("device_free", event.get("addr", -1))
    events.address = addresses
    for column, key in (("size_bytes", "size"), ("stream", "stream"), ("time_us", "time_us")):
        events[column] = array("q", [event.get(key, 0) for event in trace])
    events.stack = [stacks.number(event.get("frames")) for event in trace]
    for size in (events.size_bytes.min(initial=0), events.size_bytes.max(initial=0)):
        _check_size(int(size))
    return events


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


def _final(
    segments: Sequence[Mapping[str, Any]], stacks: _Stacks, num_bytes: int
) -> tuple[tuple[Segment, ...], Table]:
    """Return the segments of a device and their blocks in use."""
    held, rows = [], []
    seen = whole = 0
    for segment in segments:
        seen += 1 + len(segment["blocks"])
        if seen > num_bytes:
            raise NotASnapshotError(f"refers to the same blocks again and again{ALLOWED}")
        at = start = int(segment.get("address") or 0)
        size = _check_size(int(segment["total_size"]))
        whole = _check_size(whole + size)
        kind, is_expandable = segment.get("segment_type", "large"), segment.get("is_expandable")
        stream = int(segment.get("stream", 0))
        held.append(Segment(start, size, stream, _text(kind), bool(is_expandable)))
        for block in segment["blocks"]:
            size, state = _check_size(int(block["size"])), _text(block["state"])
            at = int(block.get("address", at))
            if state.startswith(AWAITING):
                # PyTorch 1 kept requests in "history"
                last = (block.get("history") or [None])[0]
                asked, key = (last, "real_size") if last else (block, "requested_size")
                requested, stack = int(asked.get(key, size)), stacks.number(asked.get("frames"))
                rows.append((at, size, requested, state == ALLOCATED, stack))
            at += size
    return tuple(sorted(held)), np.array(rows, FINAL_BLOCK).view(np.recarray)


def _check_size(size: int) -> int:
    """Return bytes, and refuse those that no card has."""
    if not 0 <= size <= MOST_CARD_BYTES:
        raise NotASnapshotError(f"has a size of {shown(size)} bytes, which no card has{ALLOWED}")
    return size
