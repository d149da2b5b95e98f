"""The rows of a step's graph: what the operators of each hold and take, added up."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from memlab.arguments.collectives import Call
from memlab.costs.targets import Kernels, seconds_of_intervals
from memlab.graphs.graph_rows import GraphRow, NodeKind
from memlab.graphs.labels import LAST_STEP, forward_of
from memlab.meters.lifetimes import step_memory
from memlab.operators.collectives import call_of_collective
from memlab.recording.program import Program
from memlab.recording.recording import Operator, Recording
from memlab.trace import CATEGORIES, PHASES, Category, Phase, Trace

Key = tuple[NodeKind, str]
"""A row: its kind and its name."""

OPTIMIZER: Key = (NodeKind.OPTIMIZER, "optimizer")
GRADIENTS: Key = (NodeKind.GRADIENTS, "sums of gradients")
BATCH: Key = (NodeKind.BATCH, "batch")
OF_LOSS: Key = (NodeKind.LOSS, "loss")
COPIES: Key = (NodeKind.OTHER, "copies that kernels wait for")
BEFORE: Key = (NodeKind.OTHER, "before the first operator")


@dataclass(slots=True)
class RowParts:
    """A row while its parts are summed."""

    target: str = ""
    module: str = ""
    reads: tuple[int, ...] = ()
    kept: int = 0
    saved: int = 0
    forward: float = 0.0
    backward: float = 0.0
    ranks: int = 0
    group: str = ""
    payload: int = 0


@dataclass(slots=True)
class StepRows:
    """A step that is divided among rows.

    Attributes:
        rows: in order.
        of_operator: the row of each kernel of the last step, by its number.
    """

    rows: dict[Key, RowParts] = field(default_factory=dict)
    of_operator: dict[int, Key] = field(default_factory=dict)


def call_of(operator: Operator) -> Call | None:
    """Return what a collective sends; None for one that is not counted."""
    assert operator.signature is not None
    return call_of_collective(operator.signature, len(operator.ranks))


def add_copies(divided: StepRows, program: Program, kernels: Kernels, num_parts: int) -> None:
    """Add by how much copies beside the kernels take longer than these."""
    whole = step_seconds(program, kernels, num_parts)
    if whole is not None:
        rest = whole - sum(row.forward + row.backward for row in divided.rows.values())
        if any(operator.beside for operator in program.recording.operators):
            divided.rows[COPIES] = RowParts(target="copies", backward=max(rest, 0.0))


def add_bytes(divided: StepRows, program: Program, trace: Trace, num_parts: int) -> None:
    """Add what the first forward of the last step allocates and holds."""
    slices = program.operator_slices()
    parts = program.parts(num_parts)
    recorded = np.concatenate([np.arange(*slices[part.recorded]) for part in parts])
    number = np.append(recorded, -1)[trace.operator - 1]  # of the last operator at each event

    memory = step_memory(trace, LAST_STEP)
    blocks, timeline = memory.blocks, memory.timeline
    is_forward = timeline.phase == PHASES.index(Phase.FORWARD)
    is_forward &= timeline.micro_batch == 0
    is_forward[0] = False  # what was there when the step began
    events = memory.events[is_forward]
    column = CATEGORIES.index(Category.ACTIVATIONS)
    for block in np.flatnonzero(np.isin(blocks.births, events)).tolist():
        birth, death = int(blocks.births[block]), int(blocks.deaths[block])
        index, nbytes = int(number[birth]), int(trace.nbytes[birth])
        row = divided.rows.setdefault(divided.of_operator.get(index, BEFORE), RowParts())
        if death >= len(number) or number[death] > _last_of(divided, index):
            row.kept += nbytes
        if death > int(events[-1]) and blocks.columns[block] == column:
            row.saved += nbytes


def _last_of(divided: StepRows, index: int) -> int:
    """Return the last operator of the call of the node that runs this one."""
    key = divided.of_operator.get(index)
    while key is not None and divided.of_operator.get(index + 1) == key:
        index += 1
    return index


def add_seconds(divided: StepRows, program: Program, kernels: Kernels, num_parts: int) -> None:
    """Add the times of kernels, and the bytes of collectives, in all micro-batches of the step."""
    recording, seconds = program.recording, kernels.seconds
    times = Counter(part.recorded for part in program.parts(num_parts))
    for index, key in divided.of_operator.items():
        operator, row = recording.operators[index], divided.rows[key]
        count = times[operator.interval]
        if operator.ranks and (call := call_of(operator)) is not None:
            row.payload += call.payload_bytes * count
        if seconds is not None and not operator.beside:
            took = float(seconds[index]) * count
            if recording.intervals[operator.interval].phase is Phase.FORWARD:
                row.forward += took
            else:
                row.backward += took


def step_seconds(program: Program, kernels: Kernels, num_parts: int) -> float | None:
    """Return the time of a step with this many micro-batches, as a forecast sums it."""
    seconds = seconds_of_intervals(program.recording, kernels)
    if seconds is None:
        return None
    parts = program.parts(num_parts)
    return sum(float(seconds[p.recorded]) for p in parts if p.interval.step == LAST_STEP)


def _in_order(divided: StepRows, num_nodes: int) -> list[Key]:
    """Return the rows in the order in which they first run; a node without kernels stays put."""
    first: dict[Key, int] = {}
    for index in sorted(divided.of_operator):
        first.setdefault(divided.of_operator[index], index)
    last, place = -1, {}
    for number, key in enumerate(divided.rows):
        if number < num_nodes:
            last = max(last, first.get(key, last))
            place[key] = last
        else:
            place[key] = first.get(key, -1)
    return sorted(divided.rows, key=place.__getitem__)  # stable


def _reads(divided: StepRows, recording: Recording) -> dict[Key, set[Key]]:
    """Return which rows a row reads the results of, by the blocks of the first forward."""
    found: dict[Key, set[Key]] = {}
    for index in forward_of(recording, 0):
        key = divided.of_operator[index]
        for block in recording.operators[index].reads:
            made_by = divided.of_operator.get(recording.blocks[block].operator)
            if made_by is not None and made_by != key:
                found.setdefault(key, set()).add(made_by)
    return found


def finished(
    divided: StepRows, recording: Recording, num_nodes: int, kernels: Kernels
) -> tuple[GraphRow, ...]:
    """Return the rows in the order in which they first run."""
    keys, order = list(divided.rows), _in_order(divided, num_nodes)
    index = {key: number for number, key in enumerate(order)}
    nodes, by_blocks = set(keys[:num_nodes]), _reads(divided, recording)
    rows = []
    for key in order:
        (kind, name), row = key, divided.rows[key]
        reads = by_blocks.get(key, set())
        if key in nodes:
            reads = {keys[number] for number in row.reads}
        # without a cluster, nobody knows what connects the ranks
        is_known = kind is not NodeKind.COLLECTIVE or kernels.overlap is not None
        is_known = is_known and kernels.seconds is not None
        rows.append(
            GraphRow(
                name=name,
                kind=kind,
                target=row.target,
                module=row.module,
                reads=tuple(sorted(index[other] for other in reads)),
                kept_bytes=row.kept,
                saved_bytes=row.saved,
                forward_seconds=row.forward if is_known else None,
                backward_seconds=row.backward if is_known else None,
                ranks=row.ranks,
                group=row.group,
                payload_bytes=row.payload,
            )
        )
    return tuple(rows)
