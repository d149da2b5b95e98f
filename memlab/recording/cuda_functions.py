"""Which functions CUDA runs as one kernel, although PyTorch could also take them apart.

PyTorch writes some functions in terms of others (`CompositeImplicitAutograd`). A device that has
no kernel of its own for such a function takes it apart before autograd sees it. Forward then saves,
and backward allocates, other tensors than with a kernel: `silu_backward` is one kernel on CUDA, and
eight operators where it is taken apart.

`native_functions.yaml` says which functions have a kernel for CUDA. PyTorch's own dispatcher is
generated from this table, and PyTorch's wheels contain it, those without CUDA too:

    - func: silu_backward(Tensor grad_output, Tensor self) -> Tensor
      structured_delegate: silu_backward.grad_input       <- has the kernels of that one, too
      dispatch:
        CompositeImplicitAutograd: math_silu_backward

    - func: silu_backward.grad_input(Tensor grad_output, ...) -> Tensor(a!)
      structured: True
      dispatch:
        CPU, CUDA: silu_backward_out

Left out: what kernels do inside, see `memlab.costs.cuda_kernels`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from memlab.torch_private.operators import has_kernel_for, names_of_all_operators

TABLE = Path("packaged") / "ATen" / "native" / "native_functions.yaml"  # in the package torchgen
COMPOSITE = "CompositeImplicitAutograd"
ATEN = "aten::"
WITHOUT_TABLE = (
    "This PyTorch came without torchgen's table of CUDA kernels. Functions that can be taken apart "
    "are assumed to have a kernel on CUDA if they have one on the CPU."
)


@functools.cache
def fused() -> frozenset[str]:
    """Return the functions that CUDA does not take apart, as "silu_backward" or "name.overload"."""
    table = kernels_by_function()
    if table is None:
        return _fused_on_cpu()
    return frozenset(name for name, keys in table.items() if {COMPOSITE, "CUDA"} <= keys)


def notes() -> tuple[str, ...]:
    """Return what a prediction for a card has to say: nothing where PyTorch's table is found."""
    return (WITHOUT_TABLE,) if kernels_by_function() is None else ()


@functools.cache
def kernels_by_function() -> Mapping[str, frozenset[str]] | None:
    """Return the dispatch keys for which each function has a kernel; None without the table."""
    places = table_places()
    return parsed(places[0].read_text(encoding="utf-8")) if places else None


def table_places() -> list[Path]:
    """Return where PyTorch's table is; nothing if this PyTorch came without it."""
    found = importlib.util.find_spec("torchgen")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    return [Path(folder) / TABLE for folder in folders if (Path(folder) / TABLE).is_file()]


def parsed(text: str) -> dict[str, frozenset[str]]:
    r"""Return the dispatch keys of each function of a table.

    A function whose entry says nothing of them has the key `CompositeImplicitAutograd`.

    >>> table = "- func: f(Tensor x) -> Tensor\n  dispatch:\n    CPU, CUDA: f_kernel\n"
    >>> sorted(parsed(table)["f"])
    ['CPU', 'CUDA']
    """
    own: dict[str, set[str]] = {}
    delegates: dict[str, str] = {}
    silent: set[str] = set()
    function, in_dispatch = "", False
    for line in _without_comments(text):
        if line.startswith("- func:"):
            function = line.removeprefix("- func:").split("(")[0].strip()
            own[function] = set()
            silent.add(function)
            in_dispatch = False
        elif line.startswith("    ") and in_dispatch:
            keys = line.partition(":")[0]
            own[function] |= {key.strip() for key in keys.split(",")}
        else:
            field, _, value = line.strip().partition(":")
            in_dispatch = field == "dispatch"
            if field == "structured_delegate":
                delegates[function] = value.strip()
            if field in ("dispatch", "structured_delegate"):
                silent.discard(function)

    inherited = {name: own.get(delegate, set()) for name, delegate in delegates.items()}
    return {
        name: frozenset({COMPOSITE} if name in silent else keys | inherited.get(name, set()))
        for name, keys in own.items()
    }


def _without_comments(text: str) -> Iterator[str]:
    for line in text.splitlines():
        kept = line.partition("#")[0].rstrip()
        if kept:
            yield kept


def _fused_on_cpu() -> frozenset[str]:
    names = [name for name in names_of_all_operators() if name.startswith(ATEN)]
    return frozenset(
        name.removeprefix(ATEN)
        for name in names
        if has_kernel_for(name, COMPOSITE) and has_kernel_for(name, "CPU")
    )
