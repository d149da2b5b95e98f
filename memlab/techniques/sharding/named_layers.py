"""Divided layers by their paths: what a trial has found, for a script that makes no trial."""

from collections import defaultdict

from memlab.techniques.sharding.dividing import Division

How = tuple[str, int | None]
"""The role of a layer, and the dimension along which its weight is divided."""


def layers_by_path(found: Division) -> dict[str, How]:
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
