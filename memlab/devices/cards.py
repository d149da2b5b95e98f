"""CUDA cards: what is known of each, how one is found by a name, and the target to predict for.

`cards.toml` has the cards themselves, with their sources, and `clusters.py` what connects several
of them. To add a card, add a table to `cards.toml`.
"""

import dataclasses
import difflib
import functools
import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from memlab._util.checks import checked
from memlab._util.units import GIB, KIB, MIB, format_bytes, parse_bytes, shown
from memlab.devices.clusters import Cluster, cluster_of, named, named_clusters, numbers_in
from memlab.devices.here import resolve_device
from memlab.devices.operators import KnownCosts
from memlab.errors import ConfigError, DeviceError

# "non-PyTorch memory" of out-of-memory messages (in use, less allocated and cached), torch 2.x with
# lazy loading: T4 (40 multiprocessors) 100 MiB, RTX 4060 laptop (24) 115, RTX 4090 (128) 472 and
# 504, L40 (142) 507; an idle RTX 6000 Ada (142) 426 (unsloth-zoo pull request 1053).
CONTEXT_BASE_BYTES = 32 * MIB
CONTEXT_BYTES_PER_MULTIPROCESSOR = 7 * MIB // 2
CONTEXT_BYTES_UNKNOWN = 512 * MIB

# PyTorch's parseChosenWorkspaceSize (CublasHandlePool.cpp): ":4096:2:16:8", or 32 MiB on these
# architectures. Blackwell (10, 12) since pytorch pull request 175344; torch 2.11 has 9.0 alone.
CUBLAS_WORKSPACE_BYTES = 2 * (4096 * KIB) + 8 * (16 * KIB)
CUBLAS_WORKSPACE_BYTES_LARGE = 32 * MIB
LARGE_WORKSPACE_MAJORS = (9, 10, 12)

# The compute capability of the first cards with tensor cores for TF32 and bf16, and with kernels of
# flash_attn (its README: "Ampere, Ada, or Hopper GPUs").
AMPERE = (8, 0)
VOLTA, TURING = (7, 0), (7, 5)


# Results of fp64 a clock and multiprocessor as a share of those of fp32, by compute capability: the
# table "Throughput of Native Arithmetic Instructions" of the CUDA C++ Programming Guide.
FP64_SHARES = {(6, 0): 1 / 2, (7, 0): 1 / 2, (8, 0): 1 / 2, (9, 0): 1 / 2, (10, 0): 1 / 2,
               (6, 1): 1 / 32, (7, 5): 1 / 32}  # fmt: skip
FP64_SHARE_OF_OTHERS = 1 / 64

LEAST_POWER = 0.3  # of a board's, as a limit: what lower ones cost is not known
WITH_LIMIT = re.compile(r"(?P<device>.+?)\s*,\s*(?P<watts>\d+(\.\d+)?)\s*W(atts?)?", re.IGNORECASE)

SMALLEST_CARD_BYTES = GIB  # nobody means a size in bytes by "4090" or "24"
VENDOR = {"nvidia", "geforce", "tesla", "gpu", "sxm", "sxm2", "sxm4", "sxm5", "hbm3"}
FORMS = ("pcie", "laptop")  # of another speed than the card that is called the same without it
MOST_POWER = 2.0  # of a board's, as a limit: boards are sold that take more than the datasheet says
MOST_DRIFT = 0.1  # of memory, as a share, between drivers and systems
MOST_NEAREST = 3  # names in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """What the fastest kernels on a card's tensor cores reached when others timed them.

    Attributes:
        product_share: of the dense peak in bf16, by the fastest of many matrix products.
        product_shape: rows, columns and inner size of that product.
        num_multiprocessors: of the card that it was timed on.
        attention_share: of the dense peak, by the forward of PyTorch's flash attention.
        attention_backward_share: the same of its backward.
    """

    product_share: float
    product_shape: tuple[int, int, int]
    num_multiprocessors: int
    attention_share: float
    attention_backward_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What is known about a card. None means not known, or for a number format not supported.

    Attributes:
        name: as `memlab.predict` takes it, for instance "rtx-4090" or "24GiB".
        title: as the driver names it, or the name where there is none.
        memory_bytes: all that CUDA can give, the context included.
        memory_bytes_per_second: datasheet peak of the card's memory, not of its caches.
        fp32_flops_per_second: on the CUDA cores.
        tf32_flops_per_second: on the tensor cores, as are bf16 and fp16. A card without them takes
            as long for matrix products in fp16 as in fp32, since PyTorch sums them in fp32.
        bf16_flops_per_second: summed in fp32.
        fp16_flops_per_second: summed in fp32.
        compute_capability: major and minor.
        num_multiprocessors: as `multi_processor_count` of PyTorch.
        boost_mhz: their clock, by the datasheet.
        host_bytes_per_second: of the bus to the host, in one direction; PCIe 4.0 where not known.
        board_watts: the most that the board may take; cards with little of it for their peak run
            below their boost clock when they work.
        limit_watts: a lower limit that somebody set; None for none.
        ecc_in_memory: whether error correction is on and takes a share of memory and bandwidth.
        reached: the most that was timed on tensor cores of this kind; None where it is not known.
        nvlink: the board of `clusters.toml` whose links it has; None for a card without NVLink.
    """

    name: str
    title: str
    memory_bytes: int
    memory_bytes_per_second: float | None = None
    fp32_flops_per_second: float | None = None
    tf32_flops_per_second: float | None = None
    bf16_flops_per_second: float | None = None
    fp16_flops_per_second: float | None = None
    compute_capability: tuple[int, int] | None = None
    num_multiprocessors: int | None = None
    boost_mhz: float | None = None
    host_bytes_per_second: float = 31.5e9
    board_watts: float | None = None
    limit_watts: float | None = None
    ecc_in_memory: bool = False
    reached: Reached | None = None
    nvlink: str | None = None

    @property
    def has_bf16(self) -> bool:
        """Whether the card has bf16 units; an unknown card counts as not having them."""
        if self.compute_capability is None:
            return self.bf16_flops_per_second is not None
        return self.compute_capability >= AMPERE

    @property
    def is_laptop(self) -> bool:
        """Whether it is a form for laptops, whose makers choose how much power it may take."""
        return self.title.endswith(("Laptop GPU", "Max-Q Design"))

    @property
    def int8_flops_per_second(self) -> float | None:
        """Rate of products of int8 numbers.

        Since Turing, tensor cores multiply them at twice the rate of fp16: the datasheets of T4
        (130 and 65 TOP/s), A100 (624 and 312) and H100 (1979 and 989). On a GeForce it is more.
        """
        has_cores = self.compute_capability is not None and self.compute_capability >= TURING
        if has_cores and self.fp16_flops_per_second is not None:
            return 2 * self.fp16_flops_per_second
        return self.fp32_flops_per_second

    @property
    def is_before_volta(self) -> bool:
        """Whether the card is known to be older than Volta."""
        return self.compute_capability is not None and self.compute_capability < VOLTA

    @property
    def is_before_ampere(self) -> bool:
        """Whether the card is known to be older than Ampere."""
        return self.compute_capability is not None and self.compute_capability < AMPERE

    @property
    def fp64_flops_per_second(self) -> float | None:
        """On the CUDA cores; tensor cores for fp64 (A100, H100) are not regarded."""
        if self.fp32_flops_per_second is None or self.compute_capability is None:
            return None
        share = FP64_SHARES.get(self.compute_capability, FP64_SHARE_OF_OTHERS)
        return self.fp32_flops_per_second * share

    @property
    def context_bytes(self) -> int:
        """Memory that CUDA holds besides the allocator (context, kernels), estimated +-100 MiB."""
        if self.num_multiprocessors is None:
            return CONTEXT_BYTES_UNKNOWN
        return CONTEXT_BASE_BYTES + CONTEXT_BYTES_PER_MULTIPROCESSOR * self.num_multiprocessors

    @property
    def usable_bytes(self) -> int:
        """Memory that the caching allocator can reserve; an estimate, like the context."""
        return self.memory_bytes - self.context_bytes

    @property
    def cublas_workspace_bytes(self) -> int:
        """PyTorch's default cuBLAS workspace: one a stream, from the caching allocator.

        cuBLASLt (`addmm` with a bias) shares it unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0 (pytorch
        pull request 168175). Not regarded: the environment variable CUBLAS_WORKSPACE_CONFIG.
        """
        major = self.compute_capability[0] if self.compute_capability else 0
        large = major in LARGE_WORKSPACE_MAJORS
        return CUBLAS_WORKSPACE_BYTES_LARGE if large else CUBLAS_WORKSPACE_BYTES


FIELDS = {field.name for field in dataclasses.fields(Card)}


@functools.cache
def rows() -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of `cards.toml`: "card" and "reached", each by name."""
    found: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return found


@functools.cache
def every_card() -> tuple[Card, ...]:
    """Return every card, in the order in which people are shown them."""
    return tuple(_card_of(name, row) for name, row in rows()["card"].items())


def _card_of(name: str, row: Mapping[str, Any]) -> Card:
    values = {column: value for column, value in row.items() if column in FIELDS}
    values["compute_capability"] = tuple(row["compute_capability"])
    if "reached" in row:
        reached = rows()["reached"][row["reached"]]
        values["reached"] = Reached(**{**reached, "product_shape": tuple(reached["product_shape"])})
    return Card(name=name, memory_bytes=row["memory_mib"] * MIB, **values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The device that a prediction is made for.

    Attributes:
        kind: whose semantics hold.
        card: None on a CPU, and for "cuda" without a card: no memory limit, no times.
        name: what `StepResult.device` shows.
        costs: of operators, as a record has them; None to find them here, or by the datasheet.
        cluster: that the card is one of; None for a card by itself.
        host_seconds: that the card's host takes from one operator to the next, where that is known.
    """

    kind: Literal["cpu", "cuda"]
    card: Card | None
    name: str
    costs: KnownCosts | None = None
    cluster: Cluster | None = None
    host_seconds: float | None = None


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


@functools.cache
def _by_key() -> Mapping[str, Card]:
    """Return the cards by all that names them alone; a name comes before a title."""
    of_title = Counter(card.title for card in every_card())
    found = {_key(card.title): card for card in every_card() if of_title[card.title] == 1}
    found |= {_key(card.name): card for card in every_card()}
    for card in every_card():
        found |= {_key(text): card for text in rows()["card"][card.name].get("spellings", ())}
    return {
        key.removeprefix("rtx").removeprefix("gtx"): card for key, card in found.items()
    } | found


@functools.cache
def compared() -> tuple[Card, ...]:
    """Return the cards that people choose from: what they buy and rent, one of a kind."""
    return tuple(card for card in every_card() if rows()["card"][card.name].get("compared"))


def names() -> tuple[str, ...]:
    """Return the names of all cards that memlab knows."""
    return tuple(card.name for card in every_card())


def groups() -> dict[str, list[str]]:
    """Return the names of all cards by the group in which people are shown them.

    >>> list(groups()), groups()["laptop"][0]
    (['data centre', 'workstation', 'desktop', 'laptop'], 'rtx-5090-laptop')
    """
    begins = {first: group for group, first in rows()["first_of"].items()}
    found: dict[str, list[str]] = {}
    for name in names():
        if name in begins:
            found[begins[name]] = []
        found[next(reversed(found))].append(name)
    return found


def nearest(text: object) -> tuple[str, ...]:
    """Return the names of the cards that are spelled most like a text, the nearest first.

    >>> nearest("rtx 3080 laptop")
    ('rtx-3080-laptop-8', 'rtx-3080-ti-laptop', 'rtx-3080-laptop-16')
    """
    key, number = _key(str(text)), 2 * MOST_NEAREST
    longer = [
        known for known in _by_key() if key and key in known
    ]  # an RTX 6000 is a Quadro or an Ada
    keys = difflib.get_close_matches(key, longer, number, cutoff=0)
    keys += difflib.get_close_matches(key, _by_key(), number)
    return tuple(dict.fromkeys(_by_key()[key].name for key in keys))[:MOST_NEAREST]


def find(text: str) -> Card | None:
    """Return the card of this name or memory; None if memlab does not know it.

    Known are the names, in any case and with any separators, the driver's names, and sizes from
    1 GiB up, which stand for a card of that memory whose speed is unknown.

    >>> find("NVIDIA GeForce RTX 4090").name
    'rtx-4090'
    >>> find("24 GiB").memory_bytes // GIB
    24
    """
    return _by_key().get(_key(text)) or _of_size(text)


def cluster(text: str) -> Cluster | None:
    """Return the cluster of this name; None if it names none.

    Known are numbers of nodes and of cards with the name of a card, in any case and with any
    separators, and the names in `clusters.toml`.

    Raises:
        DeviceError: there are no such machines.

    >>> cluster("64 x 8 H100").name, cluster("8x-h100").num_devices
    ('64x8-h100', 8)
    """
    own_name = named(text)
    if own_name is not None:
        sizes = dict(named_clusters()[own_name])
        made = cluster_of(card=_by_key()[_key(sizes.pop("card"))], **sizes)
        return dataclasses.replace(made, name=own_name)

    for num_nodes, per_node, name in numbers_in(text):
        known = _by_key().get(_key(name))
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
    named = [_by_key().get(_key(title)), *(card for card in every_card() if card.title == title)]
    for card in named:
        if card and abs(memory_bytes / card.memory_bytes - 1) < MOST_DRIFT:
            return card
    return None


def resolve(device: str | torch.device | None) -> Target:
    """Return the target for a device of this machine, any card by name or memory, or a cluster.

    None is the device that `measure` would choose. "cuda" on a machine without a card is any CUDA
    card, without a limit. A power limit may stand behind a card: "rtx-4090, 300 W".

    Raises:
        DeviceError: it is neither a device of this machine nor a known card; the message lists
            the cards. Or its power cannot be limited so.

    >>> resolve("RTX 4090").name, resolve("RTX 4090, 300W").name
    ('rtx-4090', 'rtx-4090, 300 W')
    """
    limited = WITH_LIMIT.fullmatch(device) if isinstance(device, str) else None
    if limited is not None:
        return _limited(limited["device"], float(limited["watts"]), shown(device))
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
        own = " and ".join(map(repr, named_clusters()))
        raise DeviceError(
            f"device={shown(device)} is not a card that memlab knows.{_of_nearest(device)} Allowed "
            f"are 'cpu', 'cuda', {', '.join(map(repr, names()))}, the memory of any other card, "
            f"such as '24GiB', or several cards: '8x-h100' is one machine, '64x8-h100' are 64, "
            f"'4x1-rtx-4090' are four PCs with a card each, {own} two"
        )

    return Target(kind="cuda", card=card, name=card.name)


def with_limit(device: str | torch.device | None, watts: float) -> str:
    """Return the name of a card under a power limit.

    Raises:
        DeviceError: no device is named.

    >>> with_limit("rtx-4060-laptop", 60)
    'rtx-4060-laptop, 60 W'
    """
    if device is None:
        raise DeviceError(
            f"watts={watts:g} limits a card; name it, such as device='rtx-4060-laptop'"
        )
    return f"{device}, {watts:.12g} W"


def of_several(count: int, card: Card) -> str:
    """Return the name of this many of a card in one machine, each with its limit."""
    name = f"{count}x-{card.name}"
    return name if card.limit_watts is None else with_limit(name, card.limit_watts)


def _limited(device: str, watts: float, said: str) -> Target:
    """Return a target whose card, or each of whose cards, may take no more than this power."""
    target = resolve(device)
    card = target.card
    if card is None or card.board_watts is None:
        raise DeviceError(
            f"device={said}: what {target.name} takes is not known, so neither is what a power "
            "limit costs. Name a card that memlab knows, such as 'rtx-4060-laptop, 60 W'"
        )
    if card.limit_watts is not None:
        raise DeviceError(f"device={said} has two power limits; allowed is one")
    least, most = math.ceil(LEAST_POWER * card.board_watts), int(MOST_POWER * card.board_watts)
    if not least <= watts <= most:
        raise DeviceError(
            f"device={said}: allowed is {least} to {most} W, since the board of {card.name} takes "
            f"{card.board_watts:g} W by its datasheet; {target.name!r} alone has no limit"
        )
    card = dataclasses.replace(card, limit_watts=watts)
    group = target.cluster and dataclasses.replace(target.cluster, card=card)
    return dataclasses.replace(
        target, card=card, cluster=group, name=f"{target.name}, {watts:.12g} W"
    )
