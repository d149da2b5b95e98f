"""What a snapshot file holds, as columns: events, blocks, segments, stacks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
