"""The graph of a step in this process, a job of the worker for predictions.

The idea. Everything comes from the recording that `memlab.predict` makes: the bytes are those of
its blocks, the seconds those of its kernels. Each kernel gets a row, and what the kernels of a row
hold and take is added up. So the sums over all rows are the numbers of the prediction.

- A kernel of forward is its node's. Which node that is says a second recording, of the traced model
  with a module in the place of each node (`labels_of`, `matched`).
- A kernel of backward is that of the node whose forward kernel autograd refers to. A kernel that
  backward recomputes is that of the kernel of forward with its name, shapes and module.
- What is no node's has rows of its own: each collective, the loss, what techniques add in one
  module, sums of gradients, the update.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import fx, nn

from memlab._util.collectives import named_ranks
from memlab._util.torch_private.tensors import OpOverload
from memlab.config import Optimizer, Sharding, StepConfig
from memlab.cost_model.targets import LAST_STEP, Kernels, seconds_of_intervals
from memlab.cost_model.traced_step import Failure, TracedStep, from_traced_step
from memlab.devices.cards import Target
from memlab.devices.operators import call_of_collective
from memlab.memory.lifetimes import step_memory
from memlab.prediction.graph_table import GraphRow, GraphTable, NodeKind
from memlab.prediction.predict import MOST_UNKNOWN, trace_of_step
from memlab.result import Outcome
from memlab.running import Report
from memlab.techniques.checkpointing.graph_segments import traced
from memlab.techniques.technique import Plan
from memlab.trace import CATEGORIES, PHASES, Category, Phase
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


@dataclass(frozen=True, slots=True)
class Label:
    """An operator of a node's forward: what it is matched by, and the node's number."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    module: str | None  # None: of any module
    node: int


class NodeCall(nn.Module):
    """Does what a node of a graph does; a module, so that its calls are seen."""

    def __init__(self, run: fx.Interpreter, node: fx.Node) -> None:
        super().__init__()
        self._call = partial(getattr(run, node.op), node.target)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, the function or the method."""
        return self._call(args, kwargs)


def nodes_of(graph: fx.Graph) -> list[GraphRow]:
    """Return the nodes of a graph in order, as rows without numbers; the output is none."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    number = {node: index for index, node in enumerate(nodes)}
    return [
        GraphRow(
            name=node.name,
            kind=NodeKind.MODULE if node.op == "call_module" else NodeKind.FUNCTION,
            target=_called_by(node),
            module=_module_of(node),
            reads=tuple(number[read] for read in node.all_input_nodes),
        )
        for node in nodes
    ]


def _called_by(node: fx.Node) -> str:
    """Return what a node calls, in words: the path of a module, or the name of a function."""
    if isinstance(node.target, str | OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def _module_of(node: fx.Node) -> str:
    """Return the path of the module whose forward has the node, as torch.fx noted it."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if node.op == "call_module":
        return str(node.target)
    return str(stack[-1][0]) if stack else ""


def with_a_module_for_each_node(
    build_model: Callable[[], nn.Module], noted: list[GraphRow]
) -> fx.GraphModule:
    """Return a traced model that calls a module for each node, and note the nodes.

    Raises:
        UnsupportedError: torch.fx cannot follow the model.
    """
    graph = traced(build_model())
    noted[:] = nodes_of(graph.graph)
    run = fx.Interpreter(graph)
    for number, node in enumerate(list(graph.graph.nodes)):
        if node.op.startswith("call_"):
            graph.add_submodule(f"{PREFIX}{number}", NodeCall(run, node))
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
        if at == len(labels) or operator.ranks or labels[at].module not in (None, module):
            continue
        if (labels[at].name, labels[at].shapes) == (operator.name, shapes_of(operator)):
            found[index] = labels[at].node
            at += 1
    return found if at == len(labels) else {}


def forward_of(recording: OpTrace, micro_batch: int) -> list[int]:
    """Return the kernels of a forward of the last step, by number."""
    found = []
    for number, operator in enumerate(recording.operators):
        interval = recording.intervals[operator.interval]
        is_asked = (interval.step, interval.micro_batch) == (LAST_STEP, micro_batch)
        if is_asked and interval.phase is Phase.FORWARD and operator.signature is not None:
            found.append(number)
    return found


def shapes_of(operator: Operator) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of an operator's results."""
    return tuple(output.shape for output in operator.outputs)


# Give each operator of the step its row.

Key = tuple[NodeKind, str]
"""A row: its kind and its name."""

OPTIMIZER: Key = (NodeKind.OPTIMIZER, "optimizer")
GRADIENTS: Key = (NodeKind.GRADIENTS, "sums of gradients")
BATCH: Key = (NodeKind.BATCH, "batch")
OF_LOSS: Key = (NodeKind.LOSS, "loss")
COPIES: Key = (NodeKind.OTHER, "copies that kernels wait for")
WAITING: Key = (NodeKind.OTHER, "the host that kernels wait for")
LEAST_REST = 1e-6  # of a step's time; less is left by rounding
BEFORE: Key = (NodeKind.OTHER, "before the first operator")


@dataclass(slots=True)
class StepRows:
    """A step that is divided among rows.

    Attributes:
        recording: of the step.
        rows: the nodes in order, then the others; without numbers.
        row_of: the row of each operator of the last step, by its number.
    """

    recording: OpTrace
    rows: dict[Key, GraphRow] = field(default_factory=dict)
    row_of: dict[int, Key] = field(default_factory=dict)

    def row(self, key: Key, target: str, module: str = "") -> GraphRow:
        """Return a row, which is added if it is new."""
        new = GraphRow(name=key[1], kind=key[0], target=target, module=module)
        return self.rows.setdefault(key, new)

    def module_of(self, operator: Operator) -> str:
        """Return the path of the module that runs an operator; empty for the model itself."""
        path = list(self.recording.modules)[operator.module] if operator.module >= 0 else ""
        return "" if path == self.recording.root else path


def divide(recording: OpTrace, nodes: Sequence[GraphRow], node_of: dict[int, int]) -> StepRows:
    """Return the rows of a step's operators.

    Args:
        recording: of the step.
        nodes: of the graph; none for a graph of operators.
        node_of: the node of each kernel of forward that is some node's, by its number.
    """
    divided = StepRows(recording, {(node.kind, node.name): node for node in nodes})
    assert len(divided.rows) == len(nodes)  # torch.fx gives each node a name of its own
    counts: dict[int, Counter[str]] = defaultdict(Counter)  # a micro-batch has the rows of another
    is_repeated = bool(recording.recomputed) or _has_calls_in_backward(recording)
    forward: dict[tuple[object, ...], list[Key]] = {}
    repeats = Counter[tuple[object, ...]]()
    for index, operator in enumerate(recording.operators):
        interval = recording.intervals[operator.interval]
        if operator.signature is None or interval.step != LAST_STEP:
            continue
        place = operator.name, shapes_of(operator), operator.module
        count, phase = counts[interval.micro_batch], interval.phase
        if index in node_of:
            node = nodes[node_of[index]]
            key = OF_LOSS if node_of[index] == LOSS else (node.kind, node.name)
        elif operator.ranks:
            key = _collective(divided, operator, phase, count)
        elif phase is Phase.FORWARD:
            key = _added(divided, operator) if nodes else _single(divided, operator, count)
        elif phase is Phase.OPTIMIZER:
            key = OPTIMIZER
        elif phase is not Phase.BACKWARD:
            key = BATCH
        elif operator.forward in divided.row_of:
            key = divided.row_of[operator.forward]
        elif operator.forward < 0 and place in forward:
            key = forward[place][repeats[place] % len(forward[place])]
            repeats[place] += 1
        else:
            key = GRADIENTS
        divided.row(key, "compute_loss" if key == OF_LOSS else key[1])
        divided.row_of[index] = key
        if is_repeated and phase is Phase.FORWARD and interval.micro_batch == 0:
            forward.setdefault(place, []).append(key)
    _give_views(divided)
    return divided


def _has_calls_in_backward(recording: OpTrace) -> bool:
    """Return whether backward runs modules, as PyTorch's own checkpoint does."""
    return any(
        recording.intervals[recording.operators[call.first].interval].phase is Phase.BACKWARD
        for call in recording.calls
        if call.first < len(recording.operators)
    )


def _collective(divided: StepRows, operator: Operator, phase: Phase, count: Counter[str]) -> Key:
    """Return the row of a collective: the same one in every micro-batch."""
    assert operator.signature is not None
    call = call_of_collective(operator.signature, len(operator.ranks))
    name = operator.name if call is None else str(call.collective)
    count[f"{name} of {phase}"] += 1
    key = (NodeKind.COLLECTIVE, f"{name} {count[f'{name} of {phase}']} of {phase}")
    row = divided.row(key, name, divided.module_of(operator))
    ranks, group = len(operator.ranks), named_ranks(operator.ranks)
    divided.rows[key] = dataclasses.replace(row, ranks=ranks, group=group)
    return key


def _added(divided: StepRows, operator: Operator) -> Key:
    """Return the row of what a technique adds to forward in a module."""
    module = divided.module_of(operator)
    key = (NodeKind.OTHER, f"added to forward of {module or 'the model'}")
    row = divided.row(key, "", module)
    if operator.name not in row.target:
        target = f"{row.target}, {operator.name}".removeprefix(", ")
        divided.rows[key] = dataclasses.replace(row, target=target)
    return key


def _single(divided: StepRows, operator: Operator, count: Counter[str]) -> Key:
    """Return the row of one call of an operator, in a graph of operators."""
    count[operator.name] += 1
    key = (NodeKind.OPERATOR, f"{operator.name} {count[operator.name]}")
    divided.row(key, operator.name, divided.module_of(operator))
    return key


def _give_views(divided: StepRows) -> None:
    """Give an operator that only looks at memory in another way the row of the kernel after it."""
    recording, after = divided.recording, dict[int, Key]()  # by interval
    for index in range(len(recording.operators) - 1, -1, -1):
        interval = recording.operators[index].interval
        if index in divided.row_of:
            after[interval] = divided.row_of[index]
        elif recording.intervals[interval].step == LAST_STEP:
            phase = recording.intervals[interval].phase
            without = OPTIMIZER if phase is Phase.OPTIMIZER else GRADIENTS
            key = after.get(interval, OF_LOSS if phase is Phase.FORWARD else without)
            divided.row(key, "")
            divided.row_of[index] = key


# Add up what the operators of each row hold and take.

Sums = dict[str, dict[Key, Any]]
"""By field of `GraphRow`, a number for each row."""


def bytes_of(divided: StepRows, step: TracedStep, kernels: Kernels) -> Sums:
    """Return what the first forward of the last step allocates and holds."""
    program, trace = step.program, trace_of_step(step, kernels)
    slices, parts = program.operator_slices(), program.parts(step.config.accumulation_steps)
    recorded = np.concatenate([np.arange(*slices[part.recorded]) for part in parts])
    number = np.append(recorded, -1)[trace.operator - 1]  # of the last operator at each event

    memory = step_memory(trace, LAST_STEP)
    blocks, timeline = memory.blocks, memory.timeline
    is_forward = timeline.phase == PHASES.index(Phase.FORWARD)
    is_forward &= timeline.micro_batch == 0
    is_forward[0] = False  # what was there when the step began
    events = memory.events[is_forward]
    column = CATEGORIES.index(Category.ACTIVATIONS)
    kept, saved = Counter[Key](), Counter[Key]()
    for block in np.flatnonzero(np.isin(blocks.births, events)).tolist():
        birth, death = int(blocks.births[block]), int(blocks.deaths[block])
        last, nbytes = int(number[birth]), int(trace.nbytes[birth])
        key = divided.row_of.get(last, BEFORE)
        while divided.row_of.get(last + 1) == key:  # to the end of the call of the node
            last += 1
        divided.row(key, "")
        if death >= len(number) or number[death] > last:
            kept[key] += nbytes
        if death > int(events[-1]) and blocks.columns[block] == column:
            saved[key] += nbytes
    return {"kept_bytes": kept, "saved_bytes": saved}


def seconds_of(divided: StepRows, step: TracedStep, kernels: Kernels) -> Sums:
    """Return the times of kernels, and the bytes of collectives, in all micro-batches of the step.

    Copies beside the kernels have a row for the time by which they take longer than these, and so
    has the host.
    """
    recording, seconds = divided.recording, kernels.seconds
    parts = step.program.parts(step.config.accumulation_steps)
    times = Counter(part.recorded for part in parts)
    forward, backward = defaultdict[Key, float](float), defaultdict[Key, float](float)
    payload = Counter[Key]()
    for index, key in divided.row_of.items():
        operator = recording.operators[index]
        count, signature = times[operator.interval], operator.signature
        if operator.ranks and signature is not None:
            call = call_of_collective(signature, len(operator.ranks))
            payload[key] += 0 if call is None else call.payload_bytes * count
        if seconds is not None and not operator.beside:
            is_forward = recording.intervals[operator.interval].phase is Phase.FORWARD
            (forward if is_forward else backward)[key] += float(seconds[index]) * count

    is_alone = not any(operator.ranks for operator in recording.operators)
    if kernels.overlap is not None:
        of_step = [part.recorded for part in parts if part.interval.step == LAST_STEP]
        working = float(kernels.overlap.least_seconds[0][of_step].sum())
        whole = float(kernels.overlap.interval_seconds[of_step].sum())
        of_rows = sum(forward[key] + backward[key] for key in divided.rows)
        copies = working - of_rows if is_alone else 0.0
        for key, rest in ((COPIES, copies), (WAITING, whole - working)):
            if rest > LEAST_REST * whole:
                divided.row(key, "waiting")
                backward[key] = rest
    return {"forward_seconds": forward, "backward_seconds": backward, "payload_bytes": payload}


def step_seconds(program: Program, kernels: Kernels, num_parts: int) -> float | None:
    """Return the time of a step with this many micro-batches, as the size model sums it."""
    seconds = seconds_of_intervals(program.recording, kernels)
    if seconds is None:
        return None
    parts = program.parts(num_parts)
    return sum(float(seconds[p.recorded]) for p in parts if p.interval.step == LAST_STEP)


def finished(divided: StepRows, num_nodes: int, sums: Sums, kernels: Kernels) -> list[GraphRow]:
    """Return the rows with their numbers, in the order in which they first run."""
    keys, order = list(divided.rows), _in_order(divided, num_nodes)
    index = {key: number for number, key in enumerate(order)}
    nodes, by_blocks = set(keys[:num_nodes]), _reads(divided)
    rows = []
    for key in order:
        row = divided.rows[key]
        reads = {keys[read] for read in row.reads} if key in nodes else by_blocks[key]
        # without a cluster, nobody knows what connects the ranks
        is_known = row.kind is not NodeKind.COLLECTIVE or kernels.is_connected
        is_known = is_known and kernels.seconds is not None
        numbers = {name: of_row[key] for name, of_row in sums.items()}
        if not is_known:
            numbers |= {"forward_seconds": None, "backward_seconds": None}
        reads_by_index = tuple(sorted(index[read] for read in reads))
        rows.append(dataclasses.replace(row, reads=reads_by_index, **numbers))
    return rows


def _in_order(divided: StepRows, num_nodes: int) -> list[Key]:
    """Return the rows in the order in which they first run; a node without kernels stays put."""
    first: dict[Key, int] = {}
    for index in sorted(divided.row_of):
        first.setdefault(divided.row_of[index], index)
    last = -1
    for number, key in enumerate(divided.rows):
        if number < num_nodes:
            last = first[key] = max(last, first.get(key, last))
    return sorted(divided.rows, key=lambda key: first.get(key, -1))  # stable


def _reads(divided: StepRows) -> dict[Key, set[Key]]:
    """Return which rows a row reads the results of, by the blocks of the first forward."""
    recording, found = divided.recording, defaultdict[Key, set[Key]](set)
    for index in forward_of(recording, 0):
        key = divided.row_of[index]
        for block in recording.operators[index].reads:
            made_by = divided.row_of.get(recording.blocks[block].operator)
            if made_by is not None and made_by != key:
                found[key].add(made_by)
    return found


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
    nodes: list[GraphRow] = []
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
    nodes: list[GraphRow],
) -> list[Label] | Failure:
    """Return which kernels the nodes run, in order, and fill in the nodes."""
    of_nodes = dataclasses.replace(
        workload,
        build_model=partial(with_a_module_for_each_node, workload.build_model, nodes),
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


def _with_costs(
    step: TracedStep, *, nodes: list[GraphRow], labels: list[Label], why: str
) -> dict[str, Any]:
    """Return the fields of a table: of the nodes of torch.fx, or else of operators."""
    recording, kernels = step.program.recording, step.kernels()
    forwards = [matched(recording, labels, at) for at in range(step.program.num_recorded)]
    if nodes and not all(forwards):
        why, nodes, forwards = OTHER_GRAPH, [], []
    node_of = {index: node for found in forwards for index, node in found.items()}
    divided = divide(recording, nodes, node_of)
    sums = bytes_of(divided, step, kernels) | seconds_of(divided, step, kernels)

    notes = [f"The nodes are operators, because {why}."] if why else []
    seconds = None
    if step.config.sharding is not Sharding.NONE and not kernels.is_connected:
        notes.append(NO_TIME)
    elif kernels.unknown_share <= MOST_UNKNOWN:
        seconds = step_seconds(step.program, kernels, step.config.accumulation_steps)
        if step.config.sharding is not Sharding.NONE:
            notes.append(BESIDE)
    return {
        "message": "",
        "rows": tuple(finished(divided, len(nodes), sums, kernels)),
        "traced_by": BY_FX if nodes else BY_OPERATORS,
        "notes": (*notes, *recording.notes, *kernels.notes),
        "step_seconds": seconds,
    }
