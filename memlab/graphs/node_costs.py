"""Divide a predicted step among the nodes of its graph.

Everything comes from the recording that `memlab.predict` makes: the bytes are those of its blocks,
the seconds those of its kernels. So the sums over all rows are the numbers of the prediction.

- A kernel of forward is its node's (`labels.py`).
- A kernel of backward is that of the node whose forward kernel autograd refers to. A kernel that
  backward recomputes is that of the kernel of forward with its name, shapes and module.
- What is no node's has rows of its own: each collective, the loss, what techniques add in one
  module, sums of gradients, the update.

`row_sums.py` then adds up what the operators of each row hold and take.
"""

from collections import Counter
from collections.abc import Sequence

from memlab.arguments.collectives import named_ranks
from memlab.costs.targets import Kernels
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
from memlab.graphs.row_sums import (
    BATCH,
    GRADIENTS,
    OF_LOSS,
    OPTIMIZER,
    Key,
    RowParts,
    StepRows,
    add_bytes,
    add_copies,
    add_seconds,
    call_of,
    finished,
)
from memlab.recording.program import Program
from memlab.recording.recording import Operator, Recording
from memlab.trace import Phase, Trace


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
    divided = StepRows()
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
    add_bytes(divided, program, trace, num_parts)
    add_seconds(divided, program, kernels, num_parts)
    if not any(operator.ranks for operator in recording.operators):
        add_copies(divided, program, kernels, num_parts)
    return finished(divided, recording, len(nodes), kernels)


def _key_of(node: NodeFacts) -> Key:
    return (NodeKind.MODULE if node.op == "call_module" else NodeKind.FUNCTION, node.name)


def _divide_forward(
    divided: StepRows,
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
        divided.rows.setdefault(key, RowParts(target="compute_loss"))
        divided.of_operator[index] = key


def _divide_rest(divided: StepRows, recording: Recording) -> None:
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
    divided: StepRows, recording: Recording
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
    divided: StepRows, recording: Recording, operator: Operator, phase: str, count: Counter[str]
) -> Key:
    """Return the row of a collective: the same one in every micro-batch."""
    call = call_of(operator)
    name = operator.name if call is None else str(call.collective)
    count[f"{name} of {phase}"] += 1
    key = (NodeKind.COLLECTIVE, f"{name} {count[f'{name} of {phase}']} of {phase}")
    row = _row(divided, key, recording, operator, target=name)
    row.ranks, row.group = len(operator.ranks), named_ranks(operator.ranks)
    return key


def _other(divided: StepRows, recording: Recording, operator: Operator, phase: str) -> Key:
    """Return the row of what a technique adds in a module."""
    module = _path(recording, operator)
    key = (NodeKind.OTHER, f"added to {phase} of {module or 'the model'}")
    row = _row(divided, key, recording, operator, target="")
    if operator.name not in row.target:
        row.target = f"{row.target}, {operator.name}".removeprefix(", ")
    return key


def _row(
    divided: StepRows, key: Key, recording: Recording, operator: Operator, *, target: str
) -> RowParts:
    module = _path(recording, operator)
    return divided.rows.setdefault(key, RowParts(target=target, module=module))


def _path(recording: Recording, operator: Operator) -> str:
    path = list(recording.modules)[operator.module] if operator.module >= 0 else ""
    return "" if path == recording.root else path


def _give_views(divided: StepRows, recording: Recording) -> None:
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
