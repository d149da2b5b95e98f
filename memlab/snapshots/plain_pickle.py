"""Read a pickle that holds nothing but dicts, lists, tuples, texts, numbers, bools and None.

`pickle.load` runs what a file tells it to run, and even with `find_class` refused a file of nine
bytes can make it fill 32 GiB (`LONG_BINPUT` with a large index, for which CPython grows its memo).
So this is a reader of its own. It knows the opcodes of plain containers alone, as `pickle` writes
them from protocol 2 on; each of them takes memory in proportion to the bytes of the file.

A snapshot of 1 GB has tens of millions of small dicts, most of them equal. So each dict that is
complete is given to a function, whose answer stands for it from then on, and two patterns are
recognised as bytes and read once: a list of earlier objects (a stack of known frames), and a dict
of earlier objects and small numbers (a frame whose texts are known).
"""

import re
import struct
from collections.abc import Callable
from typing import Any

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
