"""TorchDynamo and the partitioner of torch.compile.

They take seconds to import, so each is imported when a function here first needs it.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

# the module that compiling, and the first call of an optimizer, would import
DYNAMO = "torch._dynamo"


def partitioners() -> Any:
    """Return PyTorch's module that divides a joint graph into forward and backward.

    Public in it: `choose_saved_values_set`, `solve_min_cut`, `estimate_runtime`, `is_sym_node`,
    `reordering_to_mimic_autograd_engine`, `raise_getitems`.
    """
    return importlib.import_module("torch._functorch.partitioners")


def extract_graphs() -> Callable[..., Any]:
    """Return the partitioner's function that takes the two graphs out of a joint one."""
    extract: Callable[..., Any] = partitioners()._extract_fwd_bwd_modules
    return extract


def size_of(node: Any) -> int:
    """Return the bytes of a graph's node, as the partitioner counts them."""
    return int(partitioners()._size_of(node))


@contextlib.contextmanager
def partitioned_by(
    *, extract: Callable[..., Any] | None = None, **functions: Callable[..., Any]
) -> Iterator[None]:
    """Replace functions of the partitioner by name.

    Args:
        extract: replaces what `extract_graphs` returns.
        functions: replace the others.
    """
    if extract is not None:
        functions["_extract_fwd_bwd_modules"] = extract
    module = partitioners()
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def planned_with(**settings: Any) -> contextlib.AbstractContextManager[None]:
    """Return the context in which the partitioner has these settings, by name."""
    config = importlib.import_module("torch._functorch.config")
    patched: contextlib.AbstractContextManager[None] = config.patch(**settings)
    return patched


def compile_error() -> type[Exception]:
    """Return the base class of TorchDynamo's errors about code that it cannot compile."""
    error: type[Exception] = importlib.import_module(f"{DYNAMO}.exc").TorchDynamoException
    return error


def forget_compiled() -> None:
    """Drop all compiled code of this process."""
    importlib.import_module(DYNAMO).reset()
