"""Divide a predicted step among the nodes of its graph.

Everything comes from the recording that `memlab.predict` makes: the bytes are those of its blocks,
the seconds those of its kernels. So the sums over all rows are the numbers of the prediction.

- A kernel of forward is its node's (`labels.py`).
- A kernel of backward is that of the node whose forward kernel autograd refers to. A kernel that
  backward recomputes is that of the kernel of forward with its name, shapes and module.
- What is no node's has rows of its own: each collective, the loss, what techniques add in one
  module, sums of gradients, the update.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memlab.arguments.collectives import Collective
from memlab.costs.targets import Kernels, seconds_of_intervals
from memlab.graphs.graph_rows import GraphRow, NodeKind
from memlab.graphs.labels import (
    LAST_STEP,
    LOSS,
    Label,
    NodeFacts,
    forward_of,
    matched,
    shapes_of,
)
from memlab.meters.lifetimes import step_memory
from memlab.operators.signatures import tensors_of
from memlab.recording.program import Program
from memlab.recording.recording import Operator, Recording
from memlab.trace import CATEGORIES, PHASES, Category, Phase, Trace

Key = tuple[NodeKind, str]
"""A row: its kind and its name."""

COLLECTIVES = {
    "allgather": Collective.ALL_GATHER,
    "reducescatter": Collective.REDUCE_SCATTER,
    "allreduce": Collective.ALL_REDUCE,
    "broadcast": Collective.BROADCAST,
    "alltoall": Collective.ALL_TO_ALL,
}
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
    payload: int = 0


@dataclass(slots=True)
class Divided:
    """A step that is divided among rows.

    Attributes:
        rows: in order.
        of_operator: the row of each kernel of the last step, by its number.
    """

    rows: dict[Key, RowParts] = field(default_factory=dict)
    of_operator: dict[int, Key] = field(default_factory=dict)


def rows_of(
    program: Program,
    kernels: Kernels,
    trace: Trace,
    num_parts: int,
    nodes: Sequence[NodeFacts],
    labels: Sequence[Label],
) -> tuple[GraphRow, ...] | None:
    """Return the rows of a step's graph.

    Args:
        program: of the step, whose micro-batches are of equal size.
        kernels: what is known of its kernels.
        trace: of the whole run.
        num_parts: number of micro-batches.
        nodes: of the graph; none for a graph of operators.
        labels: the kernels of the nodes, in order.

    Returns None if the step does not run the operators of these nodes.
    """
    divided = Divided()
    for number, node in enumerate(nodes):
        divided.rows[_key_of(node)] = RowParts(
            target=node.target, module=node.module, reads=node.reads
        )
        assert len(divided.rows) == number + 1  # torch.fx gives each node a name of its own

    recording = program.recording
    for micro_batch in range(program.num_recorded):
        numbers = forward_of(recording, micro_batch)
        found = matched(recording, labels, micro_batch) if nodes else {}
        if nodes and not found:
            return None
        _divide_forward(divided, recording, numbers, found, nodes)
    _divide_rest(divided, recording)
    _give_views(divided, recording)
    _add_bytes(divided, program, trace, num_parts)
    _add_seconds(divided, program, kernels, num_parts)
    if not any(operator.ranks for operator in recording.operators):
        _add_copies(divided, program, kernels, num_parts)
    return _finished(divided, recording, len(nodes), has_times=kernels.seconds is not None)


def _key_of(node: NodeFacts) -> Key:
    return (NodeKind.MODULE if node.op == "call_module" else NodeKind.FUNCTION, node.name)


def _divide_forward(
    divided: Divided,
    recording: Recording,
    numbers: list[int],
    found: dict[int, int],
    nodes: Sequence[NodeFacts],
) -> None:
    """Give each kernel of a forward its row; the same one in every micro-batch."""
    count = Counter[str]()
    for index in numbers:
        operator = recording.operators[index]
        if index in found:
            node = found[index]
            key = OF_LOSS if node == LOSS else _key_of(nodes[node])
        elif operator.ranks:
            key = _collective(divided, recording, operator, "forward", count)
        elif nodes:
            key = _other(divided, recording, operator, "forward")
        else:
            count[operator.name] += 1
            key = (NodeKind.OPERATOR, f"{operator.name} {count[operator.name]}")
            _row(divided, key, recording, operator, target=operator.name)
        divided.rows.setdefault(key, RowParts())
        divided.of_operator[index] = key


def _divide_rest(divided: Divided, recording: Recording) -> None:
    """Give each kernel of a backward, of an update and of a batch its row."""
    again = _forward_by_place(divided, recording)
    seen = Counter[tuple[object, ...]]()
    counts: dict[int, Counter[str]] = {}
    for index, operator in enumerate(recording.operators):
        interval = recording.intervals[operator.interval]
        if operator.signature is None or interval.step != LAST_STEP or index in divided.of_operator:
            continue
        count = counts.setdefault(interval.micro_batch, Counter())
        phase = str(interval.phase)
        if operator.ranks:
            key = _collective(divided, recording, operator, phase, count)
        elif interval.phase is Phase.OPTIMIZER:
            key = OPTIMIZER
        elif interval.phase is not Phase.BACKWARD:
            key = BATCH
        elif operator.forward in divided.of_operator:
            key = divided.of_operator[operator.forward]
        elif (same := again.get(_place(recording, operator))) and operator.forward < 0:
            at = _place(recording, operator)
            key = same[seen[at] % len(same)]
            seen[at] += 1
        else:
            key = GRADIENTS
        divided.rows.setdefault(key, RowParts(target=key[1]))
        divided.of_operator[index] = key


def _forward_by_place(
    divided: Divided, recording: Recording
) -> dict[tuple[object, ...], list[Key]]:
    """Return the rows of the first forward's kernels, by what a recompute of them has in common."""
    found: dict[tuple[object, ...], list[Key]] = {}
    if recording.recomputed or _has_calls_in_backward(recording):
        for index in forward_of(recording, 0):
            place = _place(recording, recording.operators[index])
            found.setdefault(place, []).append(divided.of_operator[index])
    return found


def _has_calls_in_backward(recording: Recording) -> bool:
    """Return whether backward runs modules, as PyTorch's own checkpoint does."""
    return any(
        recording.intervals[recording.operators[call.first].interval].phase is Phase.BACKWARD
        for call in recording.calls
        if call.first < len(recording.operators)
    )


def _place(recording: Recording, operator: Operator) -> tuple[object, ...]:
    return (operator.name, shapes_of(operator), operator.module)


def _collective(
    divided: Divided, recording: Recording, operator: Operator, phase: str, count: Counter[str]
) -> Key:
    """Return the row of a collective: the same one in every micro-batch."""
    plain = operator.name.partition("::")[2].replace("_", "")
    kind = next((c for name, c in COLLECTIVES.items() if name in plain), None)
    name = str(kind) if kind else operator.name
    count[f"{name} of {phase}"] += 1
    key = (NodeKind.COLLECTIVE, f"{name} {count[f'{name} of {phase}']} of {phase}")
    row = _row(divided, key, recording, operator, target=name)
    row.ranks = len(operator.ranks)
    return key


def _other(divided: Divided, recording: Recording, operator: Operator, phase: str) -> Key:
    """Return the row of what a technique adds in a module."""
    module = _path(recording, operator)
    key = (NodeKind.OTHER, f"added to {phase} of {module or 'the model'}")
    row = _row(divided, key, recording, operator, target="")
    if operator.name not in row.target:
        row.target = f"{row.target}, {operator.name}".removeprefix(", ")
    return key


def _row(
    divided: Divided, key: Key, recording: Recording, operator: Operator, *, target: str
) -> RowParts:
    module = _path(recording, operator)
    return divided.rows.setdefault(key, RowParts(target=target, module=module))


def _path(recording: Recording, operator: Operator) -> str:
    path = list(recording.modules)[operator.module] if operator.module >= 0 else ""
    return "" if path == recording.root else path


def payload_bytes(operator: Operator) -> int:
    """Return the bytes of a collective's whole tensor, before or after it is divided."""
    assert operator.signature is not None
    given = [_bytes_in(argument) for argument in operator.signature[1]]
    return max([*given, sum(output.nbytes for output in operator.outputs)])


def _bytes_in(argument: Any) -> int:
    """Return the bytes of the tensors in one argument."""
    return sum(spec.nbytes for spec in tensors_of(("", (argument,), ())))


def _give_views(divided: Divided, recording: Recording) -> None:
    """Give an operator that only looks at memory in another way the row of the kernel after it."""
    after: dict[int, Key] = {}  # by interval
    for index in range(len(recording.operators) - 1, -1, -1):
        interval = recording.operators[index].interval
        if index in divided.of_operator:
            after[interval] = divided.of_operator[index]
        elif recording.intervals[interval].step == LAST_STEP:
            phase = recording.intervals[interval].phase
            without = OPTIMIZER if phase is Phase.OPTIMIZER else GRADIENTS
            key = after.get(interval, OF_LOSS if phase is Phase.FORWARD else without)
            divided.rows.setdefault(key, RowParts())
            divided.of_operator[index] = key


def _add_copies(divided: Divided, program: Program, kernels: Kernels, num_parts: int) -> None:
    """Add by how much copies beside the kernels take longer than these."""
    whole = step_seconds(program, kernels, num_parts)
    if whole is not None:
        rest = whole - sum(row.forward + row.backward for row in divided.rows.values())
        if any(operator.beside for operator in program.recording.operators):
            divided.rows[COPIES] = RowParts(target="copies", backward=max(rest, 0.0))


def _add_bytes(divided: Divided, program: Program, trace: Trace, num_parts: int) -> None:
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


def _last_of(divided: Divided, index: int) -> int:
    """Return the last operator of the call of the node that runs this one."""
    key = divided.of_operator.get(index)
    while key is not None and divided.of_operator.get(index + 1) == key:
        index += 1
    return index


def _add_seconds(divided: Divided, program: Program, kernels: Kernels, num_parts: int) -> None:
    """Add the times of kernels, and the bytes of collectives, in all micro-batches of the step."""
    recording, seconds = program.recording, kernels.seconds
    times = Counter(part.recorded for part in program.parts(num_parts))
    for index, key in divided.of_operator.items():
        operator, row = recording.operators[index], divided.rows[key]
        count = times[operator.interval]
        if operator.ranks:
            row.payload += payload_bytes(operator) * count
        elif seconds is not None and not operator.beside:
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


def _in_order(divided: Divided, recording: Recording, num_nodes: int) -> list[Key]:
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


def _reads(divided: Divided, recording: Recording) -> dict[Key, set[Key]]:
    """Return which rows a row reads the results of, by the blocks of the first forward."""
    found: dict[Key, set[Key]] = {}
    for index in forward_of(recording, 0):
        key = divided.of_operator[index]
        for block in recording.operators[index].reads:
            made_by = divided.of_operator.get(recording.blocks[block].operator)
            if made_by is not None and made_by != key:
                found.setdefault(key, set()).add(made_by)
    return found


def _finished(
    divided: Divided, recording: Recording, num_nodes: int, *, has_times: bool
) -> tuple[GraphRow, ...]:
    keys, order = list(divided.rows), _in_order(divided, recording, num_nodes)
    index = {key: number for number, key in enumerate(order)}
    by_blocks = _reads(divided, recording)
    rows = []
    for kind, name in order:
        key, row = (kind, name), divided.rows[kind, name]
        read = (
            [keys[number] for number in row.reads]
            if keys.index(key) < num_nodes
            else by_blocks.get(key, ())
        )
        is_known = has_times and kind is not NodeKind.COLLECTIVE
        rows.append(
            GraphRow(
                name=name,
                kind=kind,
                target=row.target,
                module=row.module,
                reads=tuple(sorted(index[other] for other in read)),
                kept_bytes=row.kept,
                saved_bytes=row.saved,
                forward_seconds=row.forward if is_known else None,
                backward_seconds=row.backward if is_known else None,
                ranks=row.ranks,
                payload_bytes=row.payload,
            )
        )
    return tuple(rows)
