"""Count what the forward and backward graphs of a compiled model hold, without running them.

A storage lives from the operator that makes it to the last operator that reads it or a view of it,
because then the code that `torch.fx` generates drops it. Saved tensors live from forward to
backward. What kernels allocate for themselves is not known. But equal calls allocate equally, so
two plans can be compared by what is live while each of these calls runs. Left out: tensors that a
code generator fuses away (Inductor, on CUDA), and a model that is called more than once before its
backward.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from memlab.torch_private import pytree
from memlab.torch_private.tensors import storage_key

WITH_WORKSPACE = ("convolution", "max_pool", "rnn", "lstm", "gru")
"""Parts of the names of operators whose kernels allocate at least as much as their results. On a
CPU with torch 2.13 a convolution allocates up to 60 times as much (in single small calls), pooling
6 times. Matrix products and attention of a GPT and a ViT in fp32 allocate nothing of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes beyond the inputs of the forward graph (parameters and batch).

    Attributes:
        peak_bytes: the most that is live, in forward or in backward.
        held_bytes: live when forward has ended: its outputs, and what is saved for backward.
        at_calls: the most that is live while a call with workspace runs, by operator and shapes.
    """

    peak_bytes: int
    held_bytes: int
    at_calls: Mapping[str, int]

    def is_within(self, other: "Footprint") -> bool:
        """Return whether every number is at most the other's.

        Then this plan peaks no higher, whatever the kernels of its calls allocate.
        """
        calls = all(nbytes <= other.at_calls.get(at, -1) for at, nbytes in self.at_calls.items())
        return calls and self.peak_bytes <= other.peak_bytes and self.held_bytes <= other.held_bytes


def footprint(forward: torch.fx.Graph, backward: torch.fx.Graph) -> Footprint:
    """Return what two graphs hold, whose nodes have `meta["val"]`; backward reads forward's."""
    inputs = forward.find_nodes(op="placeholder")
    names = {node.name for node in inputs}
    # inputs from outside are held anyway; backward may drop everything else that it is given
    kept = [node for node in backward.find_nodes(op="placeholder") if node.name in names]
    at_calls: dict[str, int] = {}
    forward_peak, held = _peak_and_end(forward, inputs, at_calls)
    backward_peak, _ = _peak_and_end(backward, kept, at_calls)
    return Footprint(
        peak_bytes=max(forward_peak, backward_peak), held_bytes=held, at_calls=at_calls
    )


def _peak_and_end(
    graph: torch.fx.Graph, always_held: Collection[torch.fx.Node], at_calls: dict[str, int]
) -> tuple[int, int]:
    """Return the most bytes that are live at once and those at the end, without `always_held`.

    What is live during calls with workspace is added to `at_calls`.
    """
    outside = {key for node in always_held for key, _ in _storages(node)}
    dying = _dying(graph)
    holders: Counter[int] = Counter()
    sizes: dict[int, int] = {}
    live = peak = 0

    def make(node: torch.fx.Node) -> None:
        nonlocal live, peak
        for key, nbytes in _storages(node):
            if not holders[key] and key not in outside:
                live += nbytes
            sizes[key] = nbytes
            holders[key] += 1

        peak = max(peak, live)

    def drop(node: torch.fx.Node) -> None:
        nonlocal live
        for key, _ in _storages(node):
            holders[key] -= 1
            if not holders[key] and key not in outside:
                live -= sizes[key]

    for node in graph.find_nodes(op="placeholder"):
        make(node)
    for node in graph.nodes:
        if node.op == "output":
            break

        if node.op != "placeholder":
            make(node)
            if any(name in str(node.target) for name in WITH_WORKSPACE):
                call = _signature(node)
                at_calls[call] = max(live, at_calls.get(call, 0))

        for dead in dying[node]:
            drop(dead)

    return peak, live


def _dying(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Return for each node the nodes that it is the last to read; itself if no node reads it."""
    last: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        last |= dict.fromkeys(node.all_input_nodes, node)

    dying: dict[torch.fx.Node, list[torch.fx.Node]] = defaultdict(list)
    for node, reader in last.items():
        dying[reader].append(node)
    return dying


def _signature(node: torch.fx.Node) -> str:
    """Return an operator with the shapes, strides and formats of its inputs, and its settings."""

    def text(argument: object) -> str:
        value = argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument
        if not isinstance(value, torch.Tensor):
            return str(value)
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}"

    read = pytree.tree_map(text, (node.args, node.kwargs))
    return f"{node.target}{read}"


def _storages(node: torch.fx.Node) -> Iterator[tuple[int, int]]:
    """Yield the address and the bytes of each storage that a node's value holds."""
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            yield storage_key(storage), _hint(storage.nbytes())


def _hint(size: int | torch.SymInt) -> int:
    """Return a size; for a symbolic size the value that it was traced with."""
    return size if isinstance(size, int) else int(size.node.hint or 0)
