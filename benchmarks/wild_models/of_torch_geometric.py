"""PyTorch Geometric: its models, and two layers of each of its convolutions, on random graphs.

A sample is a graph: features of its nodes and its edges. The loss joins the graphs of a batch into
one, as the package's loader does.
"""

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.wild_models.recipe import Recipe, arguments, tensors

NODES, EDGES, WIDTH = 12, 30, 16
BY_NAME = {
    "x": "x", "x_0": "x", "edge_index": "edges", "adj_t": "edges", "adj": "edges", "batch": "graph",
    "edge_attr": "edge_features", "edge_weight": "edge_weight", "edge_type": "edge_type",
    "z": "kind", "pos": "place", "index": "graph", "node_type": "node_type", "h": "x",
}  # fmt: skip


def names() -> list[str]:
    """Return "models/class" and "conv/class"."""
    from torch_geometric.nn import conv, models

    return [f"models/{name}" for name in _classes(models)] + [
        f"conv/{name}" for name in _classes(conv)
    ]


def recipes(name: str) -> Iterator[Recipe]:
    """Yield it over nodes alone, then with features of the edges, then with those by kind."""
    from torch_geometric.nn import conv, models

    folder, class_name = name.split("/")
    layer = getattr(models if folder == "models" else conv, class_name)
    given = arguments(layer, _rules())
    for optional in ((), ("edge_attr",), ("edge_weight",), ("edge_type",), ("batch",)):
        loss = partial(_loss, optional)
        yield Recipe(build=partial(_build, layer, given), batch=_batch, loss=loss)


def _classes(package: Any) -> list[str]:
    every = {name: getattr(package, name) for name in package.__all__}
    return [n for n, v in every.items() if inspect.isclass(v) and issubclass(v, nn.Module)]


def _rules() -> dict[str, Any]:
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return {
        "in_channels": WIDTH, "out_channels": WIDTH, "hidden_channels": WIDTH, "num_layers": 2,
        "channels": WIDTH, "edge_dim": WIDTH, "num_relations": 3, "heads": 2, "K": 2, "nn": inner,
        "kernel_size": 3, "dim": 2, "deg": torch.ones(8, dtype=torch.long), "num_nodes": NODES,
        "aggregators": ["mean", "max"], "scalers": ["identity"], "depth": 2, "num_timesteps": 2,
        "local_nn": None, "global_nn": None, "num_types": 3, "num_heads": 2, "num_filters": 16,
        "num_blocks": 1, "int_emb_size": 8, "basis_emb_size": 4, "out_emb_channels": 16,
        "num_spherical": 3, "num_radial": 3, "num_bilinear": 4, "iterations": 2, "num_segments": 2,
        "shortcut": nn.Identity(), "hidden_node_channels": WIDTH, "hidden_edge_channels": WIDTH,
        "hidden_dim": WIDTH, "num_node_types": 3, "num_edge_types": 3, "edge_type_emb_dim": 8,
        "edge_attr_emb_dim": 8, "cutoff": 5.0, "k": 3, "act": "relu", "num_interactions": 2,
        "in_feats": WIDTH, "max_num_neighbors": 8, "edge_channels": WIDTH, "dropout": 0.1,
    }  # fmt: skip


def _build(layer: type[nn.Module], given: dict[str, Any]) -> nn.Module:
    import copy

    return layer(**copy.deepcopy(given))


def _batch(n: int) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(n, NODES, WIDTH),
        "edges": torch.randint(NODES, (n, EDGES, 2)),
        "edge_features": torch.randn(n, EDGES, WIDTH),
        "edge_weight": torch.rand(n, EDGES),
        "edge_type": torch.randint(3, (n, EDGES)),
        "node_type": torch.randint(3, (n, NODES)),
        "kind": torch.randint(1, 9, (n, NODES)),
        "place": torch.randn(n, NODES, 3),
    }


def _loss(optional: tuple[str, ...], model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    """Return how large the outputs are for the graphs of a batch, joined into one."""
    n = batch["x"].shape[0]
    joined = {name: value.flatten(0, 1) for name, value in batch.items()}
    device = batch["x"].device
    shift = (torch.arange(n, device=device) * NODES).view(n, 1, 1)
    joined["edges"] = (batch["edges"] + shift).flatten(0, 1).t().contiguous()
    joined["graph"] = torch.arange(n, device=device).repeat_interleave(NODES)

    parameters = inspect.signature(model.forward).parameters
    given = {
        name: joined[BY_NAME[name]]
        for name, parameter in parameters.items()
        if name in BY_NAME and (parameter.default is parameter.empty or name in optional)
    }
    outputs = [t for t in tensors(model(**given)) if t.requires_grad]
    return torch.stack([t.square().mean() for t in outputs]).sum()
