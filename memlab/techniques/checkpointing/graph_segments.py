"""Insert checkpoints into the graph of a model: segments that are recomputed in backward.

The idea. A traced model is a list of nodes. Where only one value is passed on, the list can be cut
without keeping more than that value. So the graph is cut there, into parts of about as many nodes,
and each part but the last becomes one node, which runs its nodes under `torch.utils.checkpoint`:

    tokens -> embed -> block -> block -> block -> head          before
    tokens -> [segment_0] -> [segment_1] -> block -> head       after: two are recomputed

The last part is not recomputed, because backward begins with it (as in `checkpoint_sequential`).
Parameters keep their names, and random numbers are those of the forward
(`preserve_rng_state`). Refused: normalisation that keeps statistics of the batch, which a second
forward would update once more.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.utils.fuser_utils import fuse_as_graphmodule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memlab._util.checks import checked, count
from memlab._util.torch_private.tensors import NormWithStatistics
from memlab._util.units import printable
from memlab.errors import UnsupportedError
from memlab.techniques.checkpointing.recompute import with_its_end
from memlab.workload import Workload

# Get the graph of a model by torch.fx.
#
# `symbolic_trace` runs a model's Python once over stand-ins for values: its nodes are the
# modules of PyTorch and the functions that the model calls, and the traced model trains
# like the model. It fails where Python depends on values or shapes.

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


KEEPS_STATISTICS = (functional.batch_norm, functional.instance_norm, torch.batch_norm)
INSTEAD = "memory_budget below 1 or checkpointing='blocks', which restore what a forward changes"
ASSIGNED = ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "matmul", "and", "or", "xor")
MAKES_NEW = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class CheckpointedNodes(nn.Module):
    """Some nodes of a model's graph, recomputed in backward.

    Args:
        model: whose modules the nodes call; it is not a part of this one.
        nodes: as a graph of their own.
    """

    def __init__(self, model: fx.GraphModule, nodes: fx.GraphModule) -> None:
        super().__init__()
        # their code runs on the model itself, whose parameters may be replaced by others later
        self.graph = nodes.graph
        self._model, self._code = (model,), (nodes,)

    def forward(self, *values: torch.Tensor) -> Any:
        """Return the values that the rest of the graph reads."""
        run = partial(type(self._code[0]).forward, self._model[0])
        return checkpoint(partial(with_its_end, run), *values, use_reentrant=False)


@checked(segments=count(2))
def checkpoint_graph(workload: Workload, segments: int = 2) -> Workload:
    """Return the workload with checkpoints in the torch.fx graph of its model.

    The graph is cut where a single tensor is passed on, which in a network of blocks is between
    them, and all segments but the last are recomputed in backward. `measure`, `predict` and
    `verify` take the workload as any other; `verify` compares it with the same graph without
    recompute.

    Args:
        workload: what is trained; `torch.fx.symbolic_trace` must be able to follow its model.
        segments: into how many parts the graph is divided; the last one is not recomputed.

    Raises:
        ConfigError: `segments` is less than 2.
        UnsupportedError: when the model is built: it cannot be traced or cut, or a segment would
            update statistics of the batch twice.

    >>> import memlab
    >>> workload = memlab.workloads.get("plain-mlp", num_layers=4)
    >>> model = checkpoint_graph(workload, segments=2).build_model()
    >>> [node.target for node in model.graph.nodes if node.op == "call_module"]
    ['segment_0', '0.2.0', '0.2.1', '0.2.2', '0.3.0', '0.3.1', '0.3.2', '1']
    """
    return dataclasses.replace(
        workload,
        name=f"{workload.name}, {segments} segments",
        build_model=partial(_build, workload.build_model, segments),
        sample_size=None,
        choices=None,
    )


def _build(build_model: Callable[[], nn.Module], segments: int) -> fx.GraphModule:
    return with_checkpoints(traced(build_model()), segments)


def with_checkpoints(model: fx.GraphModule, segments: int) -> fx.GraphModule:
    """Return a traced model in which all of so many segments but the last are recomputed.

    Raises:
        UnsupportedError: as for `checkpoint_graph`.
    """
    nodes = [node for node in model.graph.nodes if node.op not in ("placeholder", "output")]
    ends = _cuts(nodes, segments)
    if len(ends) < segments - 1:
        raise UnsupportedError(
            f"segments={segments}: the graph of this model can be cut at {len(ends)} places only, "
            f"those where a single tensor is passed on; use segments={len(ends) + 1}"
            if ends
            else "the graph of this model has no place where a single tensor is passed on, so it "
            "cannot be cut into segments; use memory_budget below 1"
        )

    start = 0
    for number, end in enumerate(ends):
        _check_repeats(model, nodes[start:end])
        _replace(model, nodes[start:end], f"segment_{number}")
        start = end
    model.graph.lint()
    model.recompile()
    return model


def _cuts(nodes: Sequence[fx.Node], segments: int) -> list[int]:
    """Return where segments end: at places with one value, each nearest to an equal division."""
    possible = [
        end
        for end in range(1, len(nodes))
        if len(_passed_on(nodes, end)) == 1 and nodes[end].op != "get_attr"
    ]
    found: list[int] = []
    for number in range(1, segments):
        wanted = number * len(nodes) / segments
        left = [end for end in possible if not found or end > found[-1]]
        if not left:
            return possible if len(possible) < segments - 1 else found
        found.append(min(left, key=lambda end: abs(end - wanted)))
    return found


def _passed_on(nodes: Sequence[fx.Node], end: int) -> set[fx.Node]:
    """Return what is computed before a place and read after it; parameters are there anyway.

    What the model returns is read after every place.
    """
    later = set(nodes[end:])
    return {
        node
        for node in nodes[:end]
        if node.op != "get_attr"
        and any(user in later or user.op == "output" for user in node.users)
    }


def _check_repeats(model: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
    """Raise UnsupportedError for a node that must not run twice."""
    for node in nodes:
        found = model.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        name = str(node.target) if node.op == "call_module" else node.name
        keeps = isinstance(found, NormWithStatistics) and found.track_running_stats
        if keeps or found in KEEPS_STATISTICS:
            raise UnsupportedError(
                f"{name} keeps statistics of the batch, which torch.utils.checkpoint would update "
                f"a second time when it recomputes the segment; use {INSTEAD}"
            )

        first = node.args[0] if node.args else None
        if _writes(node, found) and not _is_new(model, first, nodes):
            raise UnsupportedError(
                f"{name} writes over its input, which torch.utils.checkpoint would read again when "
                f"it recomputes the segment; use inplace=False in the model, or {INSTEAD}"
            )


def _writes(node: fx.Node, found: Any) -> bool:
    """Return whether a node changes its first argument in place."""
    if node.op == "call_module":
        return getattr(found, "inplace", False) is True
    name = found if isinstance(found, str) else getattr(found, "__name__", "")
    is_written = name.endswith("_") and not name.endswith("__")
    is_assigned = name == "setitem" or (name[:1] == "i" and name[1:] in ASSIGNED)
    return is_written or is_assigned or node.kwargs.get("inplace") is True or "out" in node.kwargs


def _is_new(model: fx.GraphModule, value: Any, nodes: Sequence[fx.Node]) -> bool:
    """Return whether a value of the segment is memory of its own, made by a layer."""
    if not isinstance(value, fx.Node) or value not in nodes or value.op != "call_module":
        return False
    return isinstance(model.get_submodule(str(value.target)), MAKES_NEW)


def _replace(model: fx.GraphModule, nodes: Sequence[fx.Node], name: str) -> None:
    """Replace nodes of the model's graph by one that runs them as a segment."""
    own = [node for node in nodes if node.op != "get_attr"]  # parameters are read outside
    inside, inputs, (output,) = fuse_as_graphmodule(model, own, name)
    model.add_submodule(name, CheckpointedNodes(model, inside))
    with model.graph.inserting_after(nodes[-1]):
        segment = model.graph.call_module(name, inputs)
    output.replace_all_uses_with(segment, delete_user_cb=lambda user: user not in own)
    for node in reversed(own):
        model.graph.erase_node(node)
