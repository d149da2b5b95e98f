"""`open_snapshot`: from a file to a `Snapshot`.

The file is read as plain data (`reading.py`); nothing in it is run.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memlab.arguments.checks import checked
from memlab.arguments.quoting import shown
from memlab.arguments.units import format_bytes
from memlab.errors import ConfigError, MemlabError
from memlab.snapshots.columns import (
    ALLOC,
    NOT_RECORDED,
    CardRecord,
    SnapshotFile,
)
from memlab.snapshots.fragmentation import at_end, out_of_memory_moments
from memlab.snapshots.growth import LEAST_GROWTHS, SKIPPED_STEPS, leaks
from memlab.snapshots.holders import holders
from memlab.snapshots.lifetimes import BlockLives, block_lives, reserved_bytes
from memlab.snapshots.phases import COLUMNS, UNKNOWN, Phases, RunPhase, columns_of, phases
from memlab.snapshots.reading import (
    RECORD,
    WRITE,
    read_file,
)
from memlab.snapshots.recent import recent_blocks
from memlab.snapshots.snapshot import Snapshot, SnapshotTimeline

MOST_INSTANTS = 2**18  # of a timeline; more are thinned to the highest of equal runs


def _path(name: str, value: Any) -> str:
    """Return a path as a text, with "~" for the person's home."""
    try:
        return os.path.expanduser(str.__str__(os.fsdecode(value)))
    except Exception:  # a person's own class may raise anything
        raise ConfigError(
            f"{name}={shown(value)} is no path; pass the path of a file that "
            "torch.cuda.memory._dump_snapshot wrote"
        ) from None


@checked(path=_path)
def open_snapshot(path: str | os.PathLike[str], *, device: int | None = None) -> Snapshot:
    """Return what a memory snapshot shows: timeline, who holds the peak, fragmentation, leaks.

    Args:
        path: a file that `torch.cuda.memory._dump_snapshot` wrote, after
            `torch.cuda.memory._record_memory_history()`. It is read as plain data: a file that
            would call something is refused and nothing of it is run.
        device: index of the card to show; by default that with most events.

    Raises:
        MemlabError: there is no such file, it is no snapshot, it is empty, or it holds nothing of
            this device. The message names the file and a remedy.

    >>> import pickle, tempfile, memlab
    >>> frame = {"filename": "/torch/nn/functional.py", "line": 7, "name": "linear"}
    >>> event = {"action": "alloc", "addr": 4096, "size": 1000, "stream": 0, "frames": [frame]}
    >>> file = tempfile.NamedTemporaryFile(suffix=".pickle")
    >>> pickle.dump({"segments": [], "device_traces": [[event]]}, file, protocol=4)
    >>> file.flush()
    >>> snapshot = memlab.open_snapshot(file.name)
    >>> snapshot.peak_allocated_bytes, snapshot.peak_by_category["activations"]
    (1024, 1024)
    """
    content = read_file(Path(path))
    record = _chosen(content, path, device)
    lives, phased = block_lives(record), phases(record, content.stacks)
    columns = columns_of(lives, phased)
    total, reserved = lives.live_bytes(len(record.events)), reserved_bytes(record)
    peak = int(total.argmax())
    timeline = _timeline(record, lives, columns, phased, total, reserved)
    return Snapshot(
        path=str(path),
        device=record.device,
        other_devices=tuple(d.device for d in content.devices if d is not record),
        num_events=len(record.events),
        num_steps=len(phased.step_ends),
        steps_by=phased.steps_by,
        peak_allocated_bytes=int(total[peak]),
        peak_reserved_bytes=None if reserved is None else int(reserved.max()),
        end_allocated_bytes=int(total[-1]),
        peak_by_category=timeline.peak_by_category,
        peak_holdings=holders(lives, columns, content.stacks, lives.live_at(peak)),
        timeline=timeline,
        leaks=leaks(lives, phased.step_ends, content.stacks),
        out_of_memory=out_of_memory_moments(record, lives),
        fragmentation=at_end(record, lives),
        recent=recent_blocks(record, lives, phased, columns, content.stacks),
        settings=content.settings,
        notes=(*content.notes, *_notes(content, record, lives, phased, timeline)),
    )


def _chosen(content: SnapshotFile, path: str | os.PathLike[str], device: int | None) -> CardRecord:
    """Return what the file holds of a device, by default of that with most events.

    Raises:
        MemlabError: it holds nothing of it, or nothing at all.
    """
    if not content.devices:
        raise MemlabError(
            f"the snapshot {shown(str(path))} holds no event and no segment: nothing had been "
            f"recorded or allocated when it was written; {WRITE}"
        )
    if device is None:
        return max(content.devices, key=lambda each: (len(each.events), len(each.blocks.size)))
    found = next((each for each in content.devices if each.device == device), None)
    if found is None:
        has = ", ".join(str(each.device) for each in content.devices)
        raise ConfigError(
            f"device={device} is not in the snapshot {shown(str(path))}; it holds device {has}"
        )
    return found


def _timeline(
    record: CardRecord,
    lives: BlockLives,
    columns: npt.NDArray[np.int8],
    phased: Phases,
    total: npt.NDArray[np.int64],
    reserved: npt.NDArray[np.int64] | None,
) -> SnapshotTimeline:
    """Return the timeline, a long one thinned to the first highest instant of equal runs."""
    width = -(-len(total) // MOST_INSTANTS)
    padded = np.full(-(-len(total) // width) * width, -1)
    padded[: len(total)] = total
    rows = np.arange(0, len(padded), width) + padded.reshape(-1, width).argmax(axis=1)
    num_events = len(record.events)
    by_category = np.zeros((len(rows), len(COLUMNS)), np.int64)
    for column in np.unique(columns).tolist():
        chosen = np.flatnonzero(columns == column)
        by_category[:, column] = lives.live_bytes(num_events, chosen)[rows]
    none = np.int8(RunPhase.NONE)
    phase = np.r_[phased.of_event[:1] if num_events else none, phased.of_event][rows]
    return SnapshotTimeline(
        bytes_by_category=by_category,
        events=rows,
        phase=phase.astype(np.int8),
        reserved_bytes=None if reserved is None else reserved[rows],
        step_ends=phased.step_ends,
        num_events=num_events,
    )


def _notes(
    content: SnapshotFile,
    record: CardRecord,
    lives: BlockLives,
    phased: Phases,
    timeline: SnapshotTimeline,
) -> list[str]:
    notes = []
    events, before = record.events, lives.birth < 0
    if not len(events):
        notes.append(f"No history was recorded: this is the state at the end alone. Call {RECORD} "
                     "before the training.")  # fmt: skip
    elif lives.num_before:
        size = format_bytes(int(lives.size[before].sum()))
        notes.append(f"The trace begins late: {lives.num_before:,} blocks ({size}) were there "
                     "before it, as frees and the state at the end show.")  # fmt: skip
    if lives.num_contradicting:
        notes.append(f"{lives.num_contradicting:,} blocks are live by the trace and not in the "
                     "state at the end; they count as live.")  # fmt: skip
    bare = int(((events.action == ALLOC) & (events.stack == NOT_RECORDED)).sum())
    if bare:
        notes.append(f"{bare:,} allocations have no stack, so their category is unknown; record "
                     "with context='all'.")  # fmt: skip
    if phased.num_inferred:
        notes.append(f"{phased.num_inferred:,} allocations have an empty stack, as those on the "
                     "threads of autograd have; they are taken for backward.")  # fmt: skip
    if _says_unknown(timeline):
        notes.append("Categories follow from the files and functions in stacks and from lifetimes; "
                     "what no rule names is unknown. Buffers count as parameters.")  # fmt: skip
    if len(events) and 0 < len(phased.step_ends) <= SKIPPED_STEPS + LEAST_GROWTHS:
        notes.append("Too few steps to recognise a leak: it takes "
                     f"{SKIPPED_STEPS + LEAST_GROWTHS + 1}, and the trace has "
                     f"{len(phased.step_ends)}.")  # fmt: skip
    if len(timeline) < len(events) + 1:
        notes.append(f"The timeline is thinned to {len(timeline):,} of {len(events) + 1:,} "
                     "instants, the highest of each run; peaks are exact.")  # fmt: skip
    others = [each.device for each in content.devices if each is not record]
    if others:
        notes.append(f"The file also holds device {', '.join(map(str, others))}; pass device= to "
                     "see another.")  # fmt: skip
    return notes


def _says_unknown(timeline: SnapshotTimeline) -> bool:
    return bool(timeline.bytes_by_category[:, COLUMNS.index(UNKNOWN)].any())
