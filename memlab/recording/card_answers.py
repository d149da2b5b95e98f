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

from typing import Any

import torch

from memlab.arguments.units import KIB
from memlab.devices.card import Card
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


def properties(card: Card | None) -> "Properties":
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

    def get_device_properties(self, device: int = 0) -> "_KnownKeys":
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
