"""What a card answers to code that asks for its processors, taken from the card's description.

Kernels that stay on a card until their work is done ("persistent") start as many programs as there
are processors, and choose their tiles by the shared memory:

    torch.cuda.get_device_properties(x.device).multi_processor_count
    triton.runtime.driver.active.utils.get_device_properties(0)["max_shared_mem"]

The number of processors and the memory stand in the table of cards. The rest follows from the
compute capability. Anything else that is asked for is refused by its name, since a wrong answer
could take another kernel.

Source: "Technical Specifications per Compute Capability" of the CUDA C++ Programming Guide, and
`get_device_properties` of Triton's third_party/nvidia/backend/driver.c.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from memlab._util.torch_private.tensors import has_kernel_for, names_of_all_operators
from memlab._util.units import KIB
from memlab.devices.cards import Card
from memlab.errors import UnsupportedError

WARP_SIZE = 32
REGISTERS = 64 * KIB  # of a processor, 32 bits each
SHARED_BY_DEFAULT = 48 * KIB  # of a block that does not ask for more
THREADS_OF_BLOCK = 1024
# KiB of shared memory: the most that one block may ask for, and those of a processor; then the
# threads that a processor holds at once
SPECIFICATIONS = {
    (6, 0): (48, 64, 2048), (6, 1): (48, 96, 2048), (7, 0): (96, 96, 2048), (7, 5): (64, 64, 1024),
    (8, 0): (163, 164, 2048), (8, 6): (99, 100, 1536), (8, 9): (99, 100, 1536),
    (9, 0): (227, 228, 2048), (10, 0): (227, 228, 2048), (12, 0): (99, 100, 1536),
}  # fmt: skip


class NotKnownError(UnsupportedError, AttributeError):
    """Says that what a card answers is not known; to code that asks, it is missing."""


def not_known(what: str) -> NotKnownError:
    """Return the error for a question to a card that memlab cannot answer."""
    return NotKnownError(
        f"{what} is asked for while the step is predicted, and what a card answers is not known "
        "here; use memlab.measure on the card"
    )


def properties(card: Card | None) -> Properties:
    """Return what `torch.cuda.get_device_properties` does.

    Raises:
        NotKnownError: memlab does not know how many processors this card has.

    >>> from memlab.devices import cards
    >>> properties(cards.find("a100-80")).multi_processor_count
    108
    """
    if card is None or card.num_multiprocessors is None or card.compute_capability is None:
        raise not_known("torch.cuda.get_device_properties")
    return Properties(card)


class Properties:
    """The properties of a card, under PyTorch's names."""

    def __init__(self, card: Card) -> None:
        assert card.compute_capability is not None
        self.name = card.title
        self.major, self.minor = card.compute_capability
        self.total_memory = card.memory_bytes
        self.multi_processor_count = card.num_multiprocessors
        self.warp_size = WARP_SIZE
        self.regs_per_multiprocessor = REGISTERS
        self.max_threads_per_block = THREADS_OF_BLOCK
        self.shared_memory_per_block = SHARED_BY_DEFAULT
        if card.compute_capability in SPECIFICATIONS:
            of_block, of_processor, threads = SPECIFICATIONS[card.compute_capability]
            self.shared_memory_per_block_optin = of_block * KIB
            self.shared_memory_per_multiprocessor = of_processor * KIB
            self.max_threads_per_multi_processor = threads

    def __getattr__(self, name: str) -> Any:
        raise not_known(f"torch.cuda.get_device_properties(...).{name}")


class Driver:
    """Triton's driver for a card: what kernels ask it for.

    Attributes:
        utils: has `get_device_properties`, as Triton's own.
    """

    def __init__(self, card: Card | None, device: torch.device) -> None:
        self._card, self._device = card, device
        self.utils = _Utilities(card)

    def get_current_device(self) -> int:
        """Return the number of the only card."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return the device that stands in for the card."""
        return self._device

    def __getattr__(self, name: str) -> Any:
        raise not_known(f"triton.runtime.driver.active.{name}")


class _Utilities:
    def __init__(self, card: Card | None) -> None:
        self._card = card

    def get_device_properties(self, device: int = 0) -> _KnownKeys:
        found = properties(self._card)
        return _KnownKeys(
            multiprocessor_count=found.multi_processor_count,
            max_shared_mem=found.shared_memory_per_block_optin,
            max_num_regs=REGISTERS,
            warpSize=WARP_SIZE,
        )

    def __getattr__(self, name: str) -> Any:
        raise not_known(f"triton.runtime.driver.active.utils.{name}")


class _KnownKeys(dict[str, Any]):
    """A dict that says in a sentence which of its keys is not known."""

    def __missing__(self, key: str) -> Any:
        raise not_known(f"{key!r} of Triton's get_device_properties")


# Which functions CUDA runs as one kernel, although PyTorch could also take them apart.
#
# PyTorch writes some functions in terms of others (`CompositeImplicitAutograd`). A device
# that has no kernel of its own for such a function takes it apart before autograd sees it.
# Forward then saves, and backward allocates, other tensors than with a kernel:
# `silu_backward` is one kernel on CUDA, and eight operators where it is taken apart.
#
# `native_functions.yaml` says which functions have a kernel for CUDA. PyTorch's own
# dispatcher is generated from this table, and PyTorch's wheels contain it, those without
# CUDA too:
#
#     - func: silu_backward(Tensor grad_output, Tensor self) -> Tensor structured_delegate:
# silu_backward.grad_input       <- has the kernels of that one, too dispatch:
# CompositeImplicitAutograd: math_silu_backward
#
#     - func: silu_backward.grad_input(Tensor grad_output, ...) -> Tensor(a!)
#       structured: True
#       dispatch:
#         CPU, CUDA: silu_backward_out
#
# Left out: what kernels do inside, see `memlab.cost_model.cuda_kernels`.

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
