"""The graph of a step in this process, a job of the worker for predictions."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import fx, nn

from memlab._util.collectives import Call, named_ranks
from memlab.config import Optimizer, Sharding, StepConfig
from memlab.cost_model.targets import Kernels, seconds_of_intervals
from memlab.cost_model.traced_step import Failure, TracedStep, from_traced_step
from memlab.devices.cards import Target
from memlab.devices.operators import call_of_collective
from memlab.memory.lifetimes import step_memory
from memlab.prediction.graph_table import GraphRow, GraphTable, NodeKind
from memlab.prediction.predict import MOST_UNKNOWN, trace_of_step
from memlab.result import Outcome
from memlab.running import Report
from memlab.techniques.checkpointing.graph_segments import name_of, target_of, traced
from memlab.techniques.technique import Plan
from memlab.trace import CATEGORIES, PHASES, Category, Phase, Trace
from memlab.tracing.program import Program
from memlab.tracing.recording import Operator, OpTrace
from memlab.workload import Workload

# Which operators of a forward belong to which node of a graph.
#
# The traced model is recorded once more, with a module in the place of each node, so that
# the calls of these modules tell which operators each node runs. A second recording, of the
# step that is asked for, runs the same operators in the same order, perhaps with others
# among them (casts, collectives, copies). So the operators of the two are matched one after
# the other: by name and shapes, and inside of a module of PyTorch by its path too. If one
# is left over, the graph is not that of the step.

PREFIX = "node_of_graph_"
LOSS = -1  # in place of the number of a node
LAST_STEP = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """A node of torch.fx: its name, operation, target in words, module, and the nodes it reads."""

    name: str
    op: str
    target: str
    module: str
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Label:
    """An operator of a node's forward: what it is matched by, and the node's number."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    module: str | None  # None: of any module
    node: int

    def is_of(self, operator: Operator, module: str) -> bool:
        """Return whether an operator of another recording, in this module, is this one."""
        return (
            self.name == operator.name
            and self.shapes == shapes_of(operator)
            and self.module in (None, module)
        )


class NodeCall(nn.Module):
    """Does what a node of a graph does; a module, so that its calls are seen."""

    def __init__(self, kind: str, target: Any) -> None:
        super().__init__()
        self.kind, self._target = kind, (target,)  # a module in it is not a part of this one

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, the function or the method."""
        if self.kind == "call_method":
            owner, *rest = args
            return getattr(owner, self._target[0])(*rest, **kwargs)
        return self._target[0](*args, **kwargs)


def facts_of(graph: fx.Graph) -> list[NodeFacts]:
    """Return the nodes of a graph in order; the output is none."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    number = {node: index for index, node in enumerate(nodes)}
    return [
        NodeFacts(
            name=node.name,
            op=node.op,
            target=name_of(node),
            module=_module_of(node),
            reads=tuple(number[read] for read in node.all_input_nodes),
        )
        for node in nodes
    ]


def with_a_module_for_each_node(model: nn.Module, noted: list[NodeFacts]) -> fx.GraphModule:
    """Return a traced model that calls a module for each node, and note the nodes.

    Raises:
        UnsupportedError: torch.fx cannot follow the model.
    """
    graph = traced(model)
    noted[:] = facts_of(graph.graph)
    for number, node in enumerate(list(graph.graph.nodes)):
        if not node.op.startswith("call_"):
            continue
        target = node.target
        if node.op == "call_module":
            target = target_of(graph, str(target))
        graph.add_submodule(f"{PREFIX}{number}", NodeCall(node.op, target))
        node.op, node.target = "call_module", f"{PREFIX}{number}"
    graph.recompile()
    return graph


def labels_of(recording: OpTrace) -> list[Label]:
    """Return the kernels of the last forward of such a model in order, and whose they are."""
    paths = list(recording.modules)
    node_of = [LOSS] * len(recording.operators)
    for call in recording.calls:
        if paths[call.module].startswith(PREFIX):
            number = int(paths[call.module].removeprefix(PREFIX))
            node_of[call.first : call.end] = [number] * (call.end - call.first)

    found = []
    for index in forward_of(recording, 0):
        operator = recording.operators[index]
        module = paths[operator.module] if operator.module >= 0 else ""
        is_named = bool(module) and not module.startswith(PREFIX) and node_of[index] != LOSS
        found.append(
            Label(operator.name, shapes_of(operator), module if is_named else None, node_of[index])
        )
    return found


def matched(recording: OpTrace, labels: Sequence[Label], micro_batch: int) -> dict[int, int]:
    """Return the node of each kernel of a forward, by the number of the operator.

    Kernels that are no node's are left out. If some label finds no operator, nothing is returned.
    """
    paths, found, at = list(recording.modules), {}, 0
    for index in forward_of(recording, micro_batch):
        operator = recording.operators[index]
        module = paths[operator.module] if operator.module >= 0 else ""
        if at < len(labels) and not operator.ranks and labels[at].is_of(operator, module):
            found[index] = labels[at].node
            at += 1
    return found if at == len(labels) else {}


def forward_of(recording: OpTrace, micro_batch: int) -> list[int]:
    """Return the kernels of a forward of the last step, by number."""
    wanted = {
        index
        for index, interval in enumerate(recording.intervals)
        if interval.step == LAST_STEP
        and interval.phase is Phase.FORWARD
        and interval.micro_batch == micro_batch
    }
    return [
        number
        for number, operator in enumerate(recording.operators)
        if operator.interval in wanted and operator.signature is not None
    ]


def shapes_of(operator: Operator) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of an operator's results."""
    return tuple(output.shape for output in operator.outputs)


def _module_of(node: fx.Node) -> str:
    """Return the path of the module whose forward has the node, as torch.fx noted it."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if node.op == "call_module":
        return str(node.target)
    return str(stack[-1][0]) if stack else ""


# The rows of a step's graph: what the operators of each hold and take, added up.

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
    """Return the time of a step with this many micro-batches, as a size model sums it."""
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


def _reads(divided: StepRows, recording: OpTrace) -> dict[Key, set[Key]]:
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
    divided: StepRows, recording: OpTrace, num_nodes: int, kernels: Kernels
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


# Divide a predicted step among the nodes of its graph.
#
# Everything comes from the recording that `memlab.predict` makes: the bytes are those of
# its blocks, the seconds those of its kernels. So the sums over all rows are the numbers of
# the prediction.
#
# - A kernel of forward is its node's.
# - A kernel of backward is that of the node whose forward kernel autograd refers to. A
#   kernel that backward recomputes is that of the kernel of forward with its name, shapes
#   and module.
# - What is no node's has rows of its own: each collective, the loss, what techniques add in
#   one module, sums of gradients, the update.
#
# Then what the operators of each row hold and take is added up.


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
    recording: OpTrace,
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


def _divide_rest(divided: StepRows, recording: OpTrace) -> None:
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


def _forward_by_place(divided: StepRows, recording: OpTrace) -> dict[tuple[object, ...], list[Key]]:
    """Return the rows of the first forward's kernels, by what a recompute of them has in common."""
    found: dict[tuple[object, ...], list[Key]] = {}
    if recording.recomputed or _has_calls_in_backward(recording):
        for index in forward_of(recording, 0):
            place = _place(recording, recording.operators[index])
            found.setdefault(place, []).append(divided.of_operator[index])
    return found


def _has_calls_in_backward(recording: OpTrace) -> bool:
    """Return whether backward runs modules, as PyTorch's own checkpoint does."""
    return any(
        recording.intervals[recording.operators[call.first].interval].phase is Phase.BACKWARD
        for call in recording.calls
        if call.first < len(recording.operators)
    )


def _place(recording: OpTrace, operator: Operator) -> tuple[object, ...]:
    return (operator.name, shapes_of(operator), operator.module)


def _collective(
    divided: StepRows, recording: OpTrace, operator: Operator, phase: str, count: Counter[str]
) -> Key:
    """Return the row of a collective: the same one in every micro-batch."""
    call = call_of(operator)
    name = operator.name if call is None else str(call.collective)
    count[f"{name} of {phase}"] += 1
    key = (NodeKind.COLLECTIVE, f"{name} {count[f'{name} of {phase}']} of {phase}")
    row = _row(divided, key, recording, operator, target=name)
    row.ranks, row.group = len(operator.ranks), named_ranks(operator.ranks)
    return key


def _other(divided: StepRows, recording: OpTrace, operator: Operator, phase: str) -> Key:
    """Return the row of what a technique adds in a module."""
    module = _path(recording, operator)
    key = (NodeKind.OTHER, f"added to {phase} of {module or 'the model'}")
    row = _row(divided, key, recording, operator, target="")
    if operator.name not in row.target:
        row.target = f"{row.target}, {operator.name}".removeprefix(", ")
    return key


def _row(
    divided: StepRows, key: Key, recording: OpTrace, operator: Operator, *, target: str
) -> RowParts:
    module = _path(recording, operator)
    return divided.rows.setdefault(key, RowParts(target=target, module=module))


def _path(recording: OpTrace, operator: Operator) -> str:
    path = list(recording.modules)[operator.module] if operator.module >= 0 else ""
    return "" if path == recording.root else path


def _give_views(divided: StepRows, recording: OpTrace) -> None:
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


BY_FX, BY_OPERATORS = "torch.fx.symbolic_trace", "operators"
OTHER_GRAPH = "the step runs other operators than the graph of torch.fx.symbolic_trace"
NO_TIME = (
    "The time of collectives is not known, so the step has none; name a cluster, such as "
    "device='8x-h100'."
)
BESIDE = "Collectives run beside other operators, so the step takes less than all rows together."


def graph_in_process(
    workload: Workload,
    config: StepConfig,
    target: Target,
    *,
    seed: int,
    plan: Plan | None = None,
    report: Report,
) -> GraphTable:
    """Return the graph of a step with its costs; never raises for the step.

    Args:
        workload: what is trained.
        config: how, with micro-batches of equal size.
        target: a CPU, or a CUDA card that need not be there.
        seed: set before the model, the batch and each step.
        plan: of the config's memory budget.
        report: called as for a prediction; what it raises ends it.
    """
    asked: dict[str, Any] = {
        "device": target.name, "config": config, "workload_name": workload.name,
    }  # fmt: skip
    nodes: list[NodeFacts] = []
    labels, why = _labels(workload, config, target, seed, report, nodes), ""
    if isinstance(labels, Failure):
        why = labels.message
        nodes, labels = [], []

    found = from_traced_step(
        partial(_with_costs, nodes=nodes, labels=labels, why=why),
        workload, config, target, seed=seed, plan=plan, report=report, purpose="for its graph",
    )  # fmt: skip
    if isinstance(found, Failure):
        return GraphTable(**asked, outcome=found.outcome, message=found.message)
    return GraphTable(**asked, outcome=Outcome.OK, **found)


def _labels(
    workload: Workload,
    config: StepConfig,
    target: Target,
    seed: int,
    report: Report,
    nodes: list[NodeFacts],
) -> list[Label] | Failure:
    """Return which kernels the nodes run, in order, and fill in the nodes."""
    of_nodes = dataclasses.replace(
        workload,
        build_model=partial(_build_of_nodes, workload.build_model, nodes),
        sample_size=None,
        choices=None,
        make_optimizer=None,
    )
    plain = StepConfig(
        batch_size=config.micro_batch_size, precision=config.precision, optimizer=Optimizer.SGD
    )
    return from_traced_step(
        lambda step: labels_of(step.program.recording),
        of_nodes, plain, target, seed=seed, report=report, purpose="by torch.fx",
    )  # fmt: skip


def _build_of_nodes(build_model: Callable[[], nn.Module], nodes: list[NodeFacts]) -> fx.GraphModule:
    return with_a_module_for_each_node(build_model(), nodes)


def _with_costs(
    step: TracedStep, *, nodes: list[NodeFacts], labels: list[Label], why: str
) -> dict[str, Any]:
    """Return the fields of a table: of the nodes of torch.fx, or else of operators."""
    kernels = step.kernels()
    num_parts = step.config.accumulation_steps
    made = step.program, kernels, trace_of_step(step, kernels), num_parts
    rows = rows_of(*made, nodes, labels) if nodes else None
    if nodes and rows is None:
        why = OTHER_GRAPH
    traced_by = BY_FX if rows is not None else BY_OPERATORS
    if rows is None:
        rows = rows_of(*made, [], [])
        assert rows is not None  # any step is a graph of its operators

    notes = [f"The nodes are operators, because {why}."] if why else []
    seconds = None
    if step.config.sharding is not Sharding.NONE and kernels.overlap is None:
        notes.append(NO_TIME)
    elif kernels.unknown_share <= MOST_UNKNOWN:
        seconds = step_seconds(step.program, kernels, num_parts)
        notes += [BESIDE] if kernels.overlap is not None else []
    return {
        "message": "",
        "rows": rows,
        "traced_by": traced_by,
        "notes": (*notes, *step.program.recording.notes, *kernels.notes),
        "step_seconds": seconds,
    }
