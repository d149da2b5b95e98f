"""Finding a CUDA card by name, by the driver's name or by memory, and the target to predict for.

`card_table.py` has the cards themselves, `clusters.py` what connects several of them.
"""

import dataclasses
import difflib
import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch

from memlab._util.checks import checked
from memlab._util.units import GIB, format_bytes, parse_bytes, shown
from memlab.devices.card_table import CUBLAS_WORKSPACE_BYTES, TABLE, Card
from memlab.devices.clusters import NAMED, Cluster, cluster_of, named, numbers_in
from memlab.devices.here import resolve_device
from memlab.devices.operators import KnownCosts
from memlab.errors import ConfigError, DeviceError

__all__ = ["CUBLAS_WORKSPACE_BYTES", "Card", "Target", "card", "cluster", "find", "names",
           "of_device", "resolve"]  # fmt: skip

SMALLEST_CARD_BYTES = GIB  # nobody means a size in bytes by "4090" or "24"
VENDOR = {"nvidia", "geforce", "tesla", "gpu", "sxm", "sxm2", "sxm4", "sxm5", "hbm3"}
FORMS = ("pcie", "laptop")  # of another speed than the card that is called the same without it
MOST_DRIFT = 0.1  # of memory, as a share, between drivers and systems
MOST_NEAREST = 3  # names in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The device that a prediction is made for.

    Attributes:
        kind: whose semantics hold.
        card: None on a CPU, and for "cuda" without a card: no memory limit, no times.
        name: what `StepResult.device` shows.
        costs: of operators, as a record has them; None to find them here, or by the datasheet.
        cluster: that the card is one of; None for a card by itself.
        launch_seconds: that the host of a cluster's card takes from one kernel to the next, where
            that is known.
    """

    kind: Literal["cpu", "cuda"]
    card: Card | None
    name: str
    costs: KnownCosts | None = None
    cluster: Cluster | None = None
    launch_seconds: float | None = None


_OTHER_SPELLINGS = {
    "H100 80GB": "h100",
    "H100 80GB PCIe": "h100-pcie",
    "H200 141GB": "h200",
    "B200 180GB": "b200",
    "A100 40GB": "a100-40",
    "A100 80GB": "a100-80",
    "P100 PCIe": "p100",
    "RTX 3060 12GB": "rtx-3060",
    "RTX 3080 10GB": "rtx-3080",
}


def _key(text: str) -> str:
    """Return a name without vendor, case and separators, its form last.

    "NVIDIA L4" becomes "l4", and "NVIDIA A100-PCIE-40GB" and "a100 40 pcie" both "a10040pcie". The
    cards on an SXM board are called by the bare name, so that this form is left out.
    """
    words = re.findall(r"[a-z0-9]+", text.lower())
    key = "".join(word.removesuffix("gb") for word in words if word not in VENDOR)
    for form in FORMS:
        if form in key:
            key = key.replace(form, "") + form

    return key


_SHARED_TITLES = {title for title, number in Counter(c.title for c in TABLE).items() if number > 1}
_BY_KEY = {_key(card.title): card for card in TABLE if card.title not in _SHARED_TITLES}
_BY_KEY |= {_key(card.name): card for card in TABLE}
_BY_KEY |= {key.removeprefix("rtx"): card for key, card in _BY_KEY.items()}
_BY_KEY |= {_key(text): card for text, name in _OTHER_SPELLINGS.items() for card in TABLE
            if card.name == name}  # fmt: skip


def names() -> tuple[str, ...]:
    """Return the names of all cards that memlab knows."""
    return tuple(card.name for card in TABLE)


def nearest(text: object) -> tuple[str, ...]:
    """Return the names of the cards that are spelled most like a text, the nearest first.

    >>> nearest("rtx 3080 laptop")
    ('rtx-3080-laptop-8', 'rtx-3080-laptop-16', 'rtx-5080-laptop')
    """
    keys = difflib.get_close_matches(_key(str(text)), _BY_KEY, n=2 * MOST_NEAREST)
    return tuple(dict.fromkeys(_BY_KEY[key].name for key in keys))[:MOST_NEAREST]


def find(text: str) -> Card | None:
    """Return the card of this name or memory; None if memlab does not know it.

    Known are the names, in any case and with any separators, the driver's names, and sizes from
    1 GiB up, which stand for a card of that memory whose speed is unknown.

    >>> find("NVIDIA GeForce RTX 4090").name
    'rtx-4090'
    >>> find("24 GiB").memory_bytes // GIB
    24
    """
    return _BY_KEY.get(_key(text)) or _of_size(text)


def cluster(text: str) -> Cluster | None:
    """Return the cluster of this name; None if it names none.

    Known are numbers of nodes and of cards with the name of a card, in any case and with any
    separators, and the names of `cluster_table.NAMED`.

    Raises:
        DeviceError: there are no such machines.

    >>> cluster("64 x 8 H100").name, cluster("8x-h100").num_devices
    ('64x8-h100', 8)
    """
    own_name = named(text)
    if own_name is not None:
        num_nodes, per_node, name, gigabits = NAMED[own_name]
        made = cluster_of(num_nodes, per_node, _BY_KEY[_key(name)], gigabits)
        return dataclasses.replace(made, name=own_name)

    for num_nodes, per_node, name in numbers_in(text):
        known = _BY_KEY.get(_key(name))
        if known is not None:
            return cluster_of(num_nodes, per_node, known)
    return None


@checked()
def card(name: str) -> Card:
    """Return what is known of a CUDA card, which need not be in this machine.

    Args:
        name: as `memlab.predict` takes it: "h200", "rtx-4090", a memory such as "24GiB", or "cuda"
            and "cuda:1" for a card of this machine.

    Returns:
        Its memory in bytes (`memory_bytes`, and `usable_bytes`, which PyTorch's allocator can
        reserve), its peak rates in bytes and FLOPs a second, and which generation it is of. None is
        what is not known.

    Raises:
        MemlabError: memlab knows no such card, or it is not here; the message lists the cards.

    >>> card("T4").name, card("t4").has_bf16
    ('t4', False)
    >>> card("24GiB").memory_bytes == 24 * 2**30
    True
    """
    found = resolve(name).card
    if found is None:
        known = ", ".join(map(repr, names()))
        raise DeviceError(
            f"name={shown(name)} is not a CUDA card; allowed is one of {known}, or a memory such "
            "as '24GiB'"
        )
    return found


def _of_nearest(text: object) -> str:
    """Return the part of a message that offers the nearest names; "" if none is near."""
    near = nearest(text)
    return f" The nearest: {', '.join(map(repr, near))}." if near else ""


def _of_size(text: str) -> Card | None:
    try:
        size = parse_bytes(text)
    except ConfigError:
        return None

    if size < SMALLEST_CARD_BYTES:
        return None
    name = f"{size // GIB}GiB" if size % GIB == 0 else format_bytes(size).replace(" ", "")
    return Card(name=name, title=f"a card of {format_bytes(size)}", memory_bytes=size)


def of_device(device: torch.device) -> Card:
    """Return the card in this machine: its real memory, with the speed of that known model."""
    properties = torch.cuda.get_device_properties(device)
    known = _of_driver(properties.name, properties.total_memory)
    multiprocessors = getattr(properties, "multi_processor_count", None)
    if known is not None and multiprocessors in (None, known.num_multiprocessors):
        return dataclasses.replace(
            known, title=properties.name, memory_bytes=properties.total_memory
        )

    return Card(
        name="-".join(re.findall(r"[a-z0-9]+", properties.name.lower())),
        title=properties.name,
        memory_bytes=properties.total_memory,
        compute_capability=(properties.major, properties.minor),
        num_multiprocessors=multiprocessors,
    )


def _of_driver(title: str, memory_bytes: int) -> Card | None:
    """Return the known card of a driver's name and of about this memory.

    Two cards may have one name: there are RTX 3080 laptops of 8 and of 16 GB, and an RTX 3060 of
    8 GB with a narrower bus than the one in the table.
    """
    named = [_BY_KEY.get(_key(title)), *(card for card in TABLE if card.title == title)]
    for card in named:
        if card and abs(memory_bytes / card.memory_bytes - 1) < MOST_DRIFT:
            return card
    return None


def resolve(device: str | torch.device | None) -> Target:
    """Return the target for a device of this machine, any card by name or memory, or a cluster.

    None is the device that `measure` would choose. "cuda" on a machine without a card is any CUDA
    card, without a limit.

    Raises:
        DeviceError: it is neither a device of this machine nor a known card; the message lists
            the cards.

    >>> resolve("RTX 4090").name
    'rtx-4090'
    """
    if device is None or re.fullmatch(r"(cpu|cuda)(:\d+)?", str(device)):
        if str(device) == "cuda" and not torch.cuda.is_available():
            return Target(kind="cuda", card=None, name="cuda")
        here = resolve_device(device)
        if here.type == "cpu":
            return Target(kind="cpu", card=None, name="cpu")
        return Target(kind="cuda", card=of_device(here), name=str(here))

    card = find(device) if isinstance(device, str) else None
    if card is None:
        found = cluster(device) if isinstance(device, str) else None
        if found is not None:
            return Target(kind="cuda", card=found.card, name=found.name, cluster=found)
        raise DeviceError(
            f"device={shown(device)} is not a card that memlab knows.{_of_nearest(device)} Allowed "
            f"are 'cpu', 'cuda', {', '.join(map(repr, names()))}, the memory of any other card, "
            f"such as '24GiB', or several cards: '8x-h100' is one machine, '64x8-h100' are 64, "
            f"'4x1-rtx-4090' are four PCs with a card each, {' and '.join(map(repr, NAMED))} two"
        )

    return Target(kind="cuda", card=card, name=card.name)
