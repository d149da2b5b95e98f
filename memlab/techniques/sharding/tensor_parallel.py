"""Tensor parallelism: the ranks of a group compute the same samples, each a part of each layer.

Which layers are divided is found out by `dividing.py`; how is said in `divided_layers.py`. What
cannot be divided is whole in every rank, which computes it from the same inputs, so its gradients
are the same in all of them without being sent. With zero2 and zero3 the ranks form rows and
columns: those of a row divide layers, those of a column divide the batch, and `fully_shard` shards
over the columns what the row has left of each weight.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memlab._util.units import format_bytes
from memlab.errors import UnsupportedError
from memlab.techniques.sharding import divided_layers
from memlab.techniques.sharding.divided_layers import LocalParts, Role
from memlab.techniques.sharding.dividing import TensorParallelPlan, divide, replicating
from memlab.techniques.sharding.ranks import local

MOST_NAMES = 12  # of layers in a note


def apply(
    model: nn.Module, mesh: DeviceMesh, loss_of_few: Callable[[], torch.Tensor]
) -> TensorParallelPlan:
    """Divide the layers of a model in place and return what was found out about them.

    Args:
        model: on its device.
        mesh: the ranks of this group, one dimension.
        loss_of_few: runs the forward on a few samples and returns the loss.

    Raises:
        UnsupportedError: no layer can be divided.
    """
    divided_layers.register_attention()
    found = divide(model, mesh, loss_of_few)
    if not found.layers.roles:
        whole = "".join(f"; {layers}: {why}" for layers, why in _by_reason(found.whole))
        raise UnsupportedError(
            f"no layer of {type(model).__name__} can be divided over {mesh.size()} ranks: "
            "linear layers and embeddings are, if they run by their own forward, share a weight "
            f"only with such layers, and one of their sizes divides by {mesh.size()}{whole}; "
            "use sharding='zero3', which divides any parameter"
        )
    return found


def in_micro_batch(
    also: Callable[[bool], contextlib.AbstractContextManager[None]],
    parts: LocalParts | None = None,
) -> Callable[[bool], contextlib.AbstractContextManager[None]]:
    """Return a function that gives the context of a micro-batch, within another one.

    Args:
        also: the other one.
        parts: the divided weights as the replicas of a model need them.
    """

    @contextlib.contextmanager
    def context(is_synced: bool) -> Iterator[None]:
        used = contextlib.nullcontext() if parts is None else parts.used()
        with also(is_synced), used, replicating():
            yield

    return context


def notes(found: TensorParallelPlan, before: int) -> tuple[str, ...]:
    """Say which layers are divided and how, and how much each rank keeps.

    Args:
        found: the layers.
        before: bytes of the whole model's parameters.
    """
    count = found.layers.mesh.size()
    kept = sum(local(p).nbytes for p in found.model.parameters())
    # a part of what is divided is missing in this rank: all but one of `count`
    share = (before - kept) / before * count / (count - 1)
    said = [
        f"{count} ranks divide layers with {share:.1%} of the parameters' {format_bytes(before)}; "
        "the rest is whole in each."
    ]
    pairs = found.names(Role.COLUMNS, Role.ROWS)
    if pairs:
        said.append(f"Divided together, output features and then input features: {_few(pairs)}.")
    if alone := found.names(Role.ALONE):
        said.append(f"Divided alone, so that the output is gathered at once: {_few(alone)}.")
    for layers, why in _by_reason(found.reasons):
        said.append(f"Not divided together with others: {layers} ({why}).")
    for layers, why in _by_reason(found.whole):
        said.append(f"Whole in every rank: {layers} ({why}).")
    return tuple(said)


def _by_reason(reasons: dict[str, str]) -> Iterator[tuple[str, str]]:
    for why in dict.fromkeys(reasons.values()):
        yield _few([path for path, reason in reasons.items() if reason == why]), why


def _few(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


# Divided layers by their paths: what a trial has found, for a script that makes no trial.

How = tuple[str, int | None]
"""The role of a layer, and the dimension along which its weight is divided."""


def layers_by_path(found: TensorParallelPlan) -> dict[str, How]:
    """Return how each layer is divided, by its path, in the order of the forward.

    Layers whose paths differ in numbers only, as those of repeated blocks do, are one entry with
    `*` for the numbers, if all modules with such a path are divided alike. Layers that share a
    weight are divided by the first of them, so each keeps its place.

    >>> as_pattern("model.layers.11.mlp.up")
    'model.layers.*.mlp.up'
    """
    layers = found.layers
    paths = {module: path for path, module in found.model.named_modules()}
    how = {module: (str(role), layers.dims[module]) for module, role in layers.roles.items()}
    alike: dict[str, set[How | None]] = defaultdict(set)
    for module, path in paths.items():
        alike[as_pattern(path)].add(None if module in found.shared else how.get(module))

    by_path: dict[str, How] = {}
    for module, own in how.items():
        pattern = as_pattern(paths[module])
        by_path[pattern if alike[pattern] == {own} else paths[module]] = own
    return by_path


def as_pattern(path: str) -> str:
    """Return a path with `*` in place of each number."""
    return ".".join("*" if name.isdigit() else name for name in path.split("."))
