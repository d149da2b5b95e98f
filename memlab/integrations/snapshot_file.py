"""From the file to columns: every event, every block at the end, every stack once.

The format is that of `torch.cuda.memory._snapshot`, whose docstring lists it: "segments" with their
blocks (the state when the file was written) and "device_traces" with the events of each device.
Newer PyTorch adds keys ("allocator_settings", "external_annotations", "host_segments"), older
PyTorch lacks some, and the oldest wrote a list of segments alone. Keys that are not known are
passed over; keys that are missing are counted in `notes`.
"""

import os
import re
import stat
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memlab._util.units import format_bytes, shown
from memlab.devices.here import available_memory_bytes
from memlab.errors import MemlabError

# Read a pickle that holds nothing but dicts, lists, tuples, texts, numbers, bools and None.
#
# `pickle.load` runs what a file tells it to run, and even with `find_class` refused a file
# of nine bytes can make it fill 32 GiB (`LONG_BINPUT` with a large index, for which CPython
# grows its memo). So this is a reader of its own. It knows the opcodes of plain containers
# alone, as `pickle` writes them from protocol 2 on; each of them takes memory in proportion
# to the bytes of the file.
#
# A snapshot of 1 GB has tens of millions of small dicts, most of them equal. So each dict
# that is complete is given to a function, whose answer stands for it from then on, and two
# patterns are recognised as bytes and read once: a list of earlier objects (a stack of
# known frames), and a dict of earlier objects and small numbers (a frame whose texts are
# known).

# Opcodes, as `pickletools` names them.
PROTO, FRAME, STOP, MARK = 0x80, 0x95, 0x2E, 0x28
EMPTY_DICT, EMPTY_LIST, EMPTY_TUPLE, TUPLE = 0x7D, 0x5D, 0x29, 0x74
TUPLE1, TUPLE2, TUPLE3 = 0x85, 0x86, 0x87
APPEND, APPENDS, SETITEM, SETITEMS = 0x61, 0x65, 0x73, 0x75
BINPUT, LONG_BINPUT, MEMOIZE, BINGET, LONG_BINGET = 0x71, 0x72, 0x94, 0x68, 0x6A
BININT, BININT1, BININT2, LONG1, BINFLOAT = 0x4A, 0x4B, 0x4D, 0x8A, 0x47
NONE, NEWTRUE, NEWFALSE = 0x4E, 0x88, 0x89
SHORT_BINUNICODE, BINUNICODE, BINUNICODE8 = 0x8C, 0x58, 0x8D
# GLOBAL, STACK_GLOBAL, REDUCE, BUILD, INST, OBJ, NEWOBJ, NEWOBJ_EX, PERSID, BINPERSID, EXT1 to EXT4
CALLS = frozenset(b"c\x93Rbio\x81\x92PQ\x82\x83\x84")

LONGEST_INT = 9  # bytes: an address of 64 bits and its sign
BYTES_PER_CONTAINER = 12  # a snapshot has fewer dicts, lists and tuples that stay; see `_count`
FEW_CONTAINERS = 100_000
DEEPEST = 1000  # a snapshot nests less than 20 deep, and each level takes 72 bytes for one
RECENT = 8  # objects of the memo among which a list that was just read is looked for

_PUT, _GET = rb"(\x94|q.|r.{4})?", rb"(?:h.|j.{4})"
# What follows the list must not be able to add to it: pickle writes 1000 items at a time, and
# between any two opcodes it may begin a new frame of the file (\x95).
_KNOWN_LIST = re.compile(
    _PUT + rb"(?:\(((?:" + _GET + rb")*+)e|(" + _GET + rb")a)(?![(}\]\x95]|" + _GET + rb"a)", re.S
)
_KNOWN_DICT = re.compile(
    _PUT + rb"\(((?:" + _GET + rb"(?:" + _GET + rb"|K.|M..|N)){2,8}+)u(?!\()", re.S
)
_TOKEN = re.compile(rb"h.|j.{4}|K.|M..|N", re.S)

_U16, _U32, _U64 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_I32, _F64 = struct.Struct("<i"), struct.Struct(">d")


class NotPlainError(Exception):
    """The bytes are no pickle of plain containers; the message continues "the file ..."."""


class CallsError(NotPlainError):
    """The pickle would call something or import something."""


class TruncatedError(NotPlainError):
    """The bytes end before the pickle does."""


class PlainDict(dict[Any, Any]):
    """A dict that knows where in the memo it lies, so that another object can take its place."""

    __slots__ = ("index",)

    index: int


class PlainReader:
    """Reads one pickle. Each dict that is complete is replaced by what `finish` returns for it.

    Attributes:
        memo: the objects that later bytes can refer to.
    """

    def __init__(
        self, data: bytes, finish: Callable[[PlainDict], Any] = lambda table: table
    ) -> None:
        """Prepare to read.

        Args:
            data: the pickle.
            finish: gets each dict with its items; returns the dict, or what stands for it. A tuple
                that it returns may be used for every dict that is written in the same bytes.
        """
        self._data, self._finish = data, finish
        self.memo: list[Any] = []
        self._texts: dict[str, str] = {}
        self._tuples: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._lists: dict[bytes, tuple[Any, ...]] = {}
        self._dicts: dict[bytes, tuple[Any, ...]] = {}
        self._left = FEW_CONTAINERS + len(data) // BYTES_PER_CONTAINER

    def read(self) -> Any:
        """Return what the pickle holds. A list that repeats earlier objects comes as a tuple.

        Raises:
            NotPlainError: it holds anything else, or is damaged.
        """
        try:
            return self._read()
        except (IndexError, struct.error):
            raise TruncatedError("ends in the middle") from None
        except (TypeError, ValueError, AttributeError, UnicodeDecodeError, OverflowError) as error:
            raise NotPlainError(f"is damaged ({type(error).__name__})") from error

    def _read(self) -> Any:
        data, memo, pos = self._data, self.memo, 0
        stack: list[Any] = []
        below: list[list[Any]] = []  # one stack for each mark
        u16, u32, i32 = _U16.unpack_from, _U32.unpack_from, _I32.unpack_from
        known_list, known_dict = _KNOWN_LIST.match, _KNOWN_DICT.match
        from_bytes = int.from_bytes

        while True:
            op = data[pos]
            pos += 1
            if op == BINGET:
                stack.append(memo[data[pos]])
                pos += 1
            elif op == LONG_BINGET:
                stack.append(memo[u32(data, pos)[0]])
                pos += 4
            elif op == LONG1:
                size = data[pos]
                if size > LONGEST_INT:
                    raise NotPlainError(f"has a number of {size} bytes")
                pos += 1 + size
                stack.append(from_bytes(data[pos - size : pos], "little", signed=True))
            elif op == BININT:
                stack.append(i32(data, pos)[0])
                pos += 4
            elif op == BININT1:
                stack.append(data[pos])
                pos += 1
            elif op == BININT2:
                stack.append(u16(data, pos)[0])
                pos += 2
            elif op == EMPTY_DICT:
                found = known_dict(data, pos)
                if found is None:
                    self._count()
                    stack.append(PlainDict())
                else:
                    stack.append(self._known_dict(found))
                    pos = found.end()
            elif op == MEMOIZE:
                self._put(stack[-1], len(memo))
            elif op == MARK:
                if len(below) == DEEPEST:
                    raise NotPlainError(f"nests data more than {DEEPEST} deep (byte {pos - 1})")
                below.append(stack)
                stack = []
            elif op == SETITEMS:
                items, stack = stack, below.pop()
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
                stack[-1] = self._finished(stack[-1])
            elif op == EMPTY_LIST:
                found = known_list(data, pos)
                if found is None:
                    self._count()
                    stack.append([])
                else:
                    stack.append(self._known_list(found))
                    pos = found.end()
            elif op == APPENDS:
                items, stack = stack, below.pop()
                stack[-1].extend(items)
            elif op == SHORT_BINUNICODE:
                size = data[pos]
                pos = self._text(stack, pos + 1, size)
            elif op == TUPLE2:
                stack[-2:] = [self._tuple((stack[-2], stack[-1]))]
            elif op == FRAME:
                pos += 8
            elif op == NONE:
                stack.append(None)
            elif op in (NEWTRUE, NEWFALSE):
                stack.append(op == NEWTRUE)
            elif op == BINPUT:
                self._put(stack[-1], data[pos])
                pos += 1
            elif op == LONG_BINPUT:
                self._put(stack[-1], u32(data, pos)[0])
                pos += 4
            elif op == APPEND:
                item = stack.pop()
                stack[-1].append(item)
            elif op == SETITEM:
                value, key = stack.pop(), stack.pop()
                stack[-1][key] = value
                stack[-1] = self._finished(stack[-1])
            elif op == BINUNICODE:
                pos = self._text(stack, pos + 4, u32(data, pos)[0])
            elif op == BINUNICODE8:
                pos = self._text(stack, pos + 8, _U64.unpack_from(data, pos)[0])
            elif op == BINFLOAT:
                stack.append(_F64.unpack_from(data, pos)[0])
                pos += 8
            elif op == TUPLE1:
                stack[-1] = self._tuple((stack[-1],))
            elif op == TUPLE3:
                stack[-3:] = [self._tuple((stack[-3], stack[-2], stack[-1]))]
            elif op == EMPTY_TUPLE:
                stack.append(())
            elif op == TUPLE:
                items, stack = stack, below.pop()
                stack.append(self._tuple(tuple(items)))
            elif op == PROTO:
                pos += 1
            elif op == STOP:
                return stack[-1]
            elif op in CALLS:
                raise CallsError(f"would call or import something (byte {pos - 1})")
            else:
                raise NotPlainError(f"has an opcode that plain data does not need (byte {pos - 1})")

    def replace(self, old: PlainDict | list[Any], new: Any) -> None:
        """Let later bytes that refer to a dict, or to a list just read, find another object."""
        if isinstance(old, PlainDict):
            if hasattr(old, "index"):
                self.memo[old.index] = new
        else:
            recent = range(len(self.memo) - 1, max(len(self.memo) - RECENT, 0) - 1, -1)
            at = next((i for i in recent if self.memo[i] is old), None)
            if at is not None:
                self.memo[at] = new
        self._left += 1

    def _finished(self, table: PlainDict) -> Any:
        result = self._finish(table)
        if result is not table:
            self.replace(table, result)
        return result

    def _put(self, value: Any, index: int) -> None:
        """Keep an object for later bytes. pickle numbers them in order, and so nothing is lost."""
        if index != len(self.memo):
            raise NotPlainError(f"numbers an object {index} where {len(self.memo)} is next")
        if type(value) is PlainDict:
            value.index = index
        self.memo.append(value)

    def _put_as(self, opcode: bytes | None, value: Any) -> None:
        if opcode is not None:
            number = opcode[1:]
            self._put(value, int.from_bytes(number, "little") if number else len(self.memo))

    def _known_list(self, found: re.Match[bytes]) -> tuple[Any, ...]:
        raw = found[2] if found[3] is None else found[3]
        items = self._lists.get(raw)
        if items is None:
            items = self._lists[raw] = tuple(map(self._token, _TOKEN.findall(raw)))
        self._put_as(found[1], items)
        return items

    def _known_dict(self, found: re.Match[bytes]) -> Any:
        raw = found[2]
        result: Any = self._dicts.get(raw)
        if result is None:
            values = list(map(self._token, _TOKEN.findall(raw)))
            table = PlainDict(zip(values[::2], values[1::2], strict=True))
            result = self._finish(table)
            if isinstance(result, tuple):
                self._dicts[raw] = result
            elif result is table:
                self._count()
        self._put_as(found[1], result)
        return result

    def _token(self, token: bytes) -> Any:
        op, number = token[0], int.from_bytes(token[1:], "little")
        if op == NONE:
            return None
        return self.memo[number] if op in (BINGET, LONG_BINGET) else number

    def _text(self, stack: list[Any], start: int, size: int) -> int:
        end = start + size
        if end > len(self._data):
            raise TruncatedError("ends in the middle of a text")
        text = self._data[start:end].decode("utf-8", "surrogatepass")
        stack.append(self._texts.setdefault(text, text))
        return end

    def _tuple(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        if all(type(item) is int for item in items):
            return self._tuples.setdefault(items, items)
        self._count()
        return items

    def _count(self) -> None:
        """Count a container that may stay in memory, so that a file cannot be all containers."""
        self._left -= 1
        if self._left < 0:
            raise NotPlainError("has more containers than a snapshot of its size can have")


# What a snapshot file holds, as columns: events, blocks, segments, stacks.

ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
    "segment_unmap", "snapshot", "oom",
)  # fmt: skip
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, \
    SNAPSHOT, OOM = range(len(ACTIONS))  # fmt: skip
CODE = {name: code for code, name in enumerate(ACTIONS)}
NO_ADDRESS = (SNAPSHOT, OOM)
NOT_RECORDED = -1  # the stack of an event without one


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
class Events:
    """The events of one device in order, as columns (events,)."""

    action: npt.NDArray[np.int8]  # index into `ACTIONS`; -1 for one that is not known
    address: npt.NDArray[np.int64]  # of an "oom" the bytes that the device had free
    size: npt.NDArray[np.int64]
    stream: npt.NDArray[np.int64]
    time_us: npt.NDArray[np.int64]
    stack: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FinalBlocks:
    """The blocks in use when the file was written, as columns (blocks,)."""

    address: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    requested: npt.NDArray[np.int64]
    is_allocated: npt.NDArray[np.bool_]  # else it waits until another stream is done with it
    stack: npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CardRecord:
    """What a file holds of one device.

    Attributes:
        device: its index.
        events: in order; of length 0 if no history was recorded.
        segments: at the end; None if the file does not say.
        blocks: in use at the end.
        annotations: in the order of time.
    """

    device: int
    events: Events
    segments: tuple[Segment, ...] | None
    blocks: FinalBlocks
    annotations: tuple[Annotation, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SnapshotFile:
    """What a file holds.

    Attributes:
        devices: those with an event or a segment.
        stacks: that events and blocks index.
        settings: of the allocator, as texts; empty if the file does not say.
        notes: what was missing or passed over, as sentences.
    """

    devices: tuple[CardRecord, ...]
    stacks: tuple[Stack, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


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
