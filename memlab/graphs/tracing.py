"""Get the graph of a model by torch.fx.

`symbolic_trace` runs a model's Python once over stand-ins for values: its nodes are the modules of
PyTorch and the functions that the model calls, and the traced model trains like the model. It fails
where Python depends on values or shapes.
"""

from typing import Any

from torch import fx, nn

from memlab.arguments.quoting import printable
from memlab.errors import UnsupportedError
from memlab.torch_private.operators import OpOverload

MOST_SAID = 200  # characters of an error of a trace


def traced(model: nn.Module) -> fx.GraphModule:
    """Return a model as the graph of its modules and functions, with the same parameters.

    Raises:
        UnsupportedError: torch.fx cannot follow its forward; the message says why.

    >>> traced(nn.Sequential(nn.Linear(2, 3), nn.ReLU())).graph.find_nodes(op="placeholder")
    [input_1]
    """
    try:
        graph = fx.symbolic_trace(model)
    except Exception as error:  # a forward that is run over stand-ins may raise anything
        raise UnsupportedError(
            f"torch.fx.symbolic_trace cannot follow {type(model).__name__}: {first_line(error)}"
        ) from error

    for module in graph.modules():
        # modules that only hold others would be taken for blocks, but are never called
        if type(module) is nn.Module and next(module.children(), None) is not None:
            module.__class__ = nn.ModuleList
    return graph


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or what kind it is."""
    lines = printable(str(error)).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")[:MOST_SAID]


def values_at(nodes: list[fx.Node], end: int) -> list[fx.Node]:
    """Return the values that the nodes from `end` on read from those before it."""
    before = set(nodes[:end])
    read = {node for later in nodes[end:] for node in later.all_input_nodes if node in before}
    return [node for node in nodes[:end] if node in read]


def target_of(model: nn.Module, path: str) -> Any:
    """Return what a node of a graph refers to by a path: a module, a parameter or a buffer."""
    found: Any = model
    for name in path.split("."):
        found = getattr(found, name)
    return found


def name_of(node: fx.Node) -> str:
    """Return what a node calls, in words: the path of a module, or the name of a function."""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))
