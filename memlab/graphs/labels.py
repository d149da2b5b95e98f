"""Which operators of a forward belong to which node of a graph.

The traced model is recorded once more, with a module in the place of each node, so that the calls
of these modules tell which operators each node runs. A second recording, of the step that is asked
for, runs the same operators in the same order, perhaps with others among them (casts, collectives,
copies). So the operators of the two are matched one after the other: by name and shapes, and inside
of a module of PyTorch by its path too. If one is left over, the graph is not that of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from memlab.graphs.tracing import name_of, target_of, traced
from memlab.recording.recording import Operator, Recording
from memlab.trace import Phase

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


def labels_of(recording: Recording) -> list[Label]:
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


def matched(recording: Recording, labels: Sequence[Label], micro_batch: int) -> dict[int, int]:
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


def forward_of(recording: Recording, micro_batch: int) -> list[int]:
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
