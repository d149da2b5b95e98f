"""The clusters that memlab knows: which links go with a card, and how fast they are.

Rates are of datasheets, of one card in one direction (datasheets of NVLink print the sum of both).
The share that NCCL reaches is NCCL's own: what its source counts for a link when it chooses an
algorithm (src/graph/topo.h), or what was published where it says nothing.

    NVLink 2, 3, 4, 5    V100: 6 links of 25 GB/s, A100: 12, H100: 18, B200: 18 of 50 GB/s (DGX-1,
                         DGX A100, DGX H100, DGX B200 datasheets). NCCL counts 20, 20, 20.6 and 40.1
                         GB/s a link. Its authors: "with the protocol overhead (~20%) NCCL can get
                         [...] 370GB/s" of 450 (nccl-tests issue 212)
    NVSwitch 3           adds up an all-reduce itself: "busbw" 480 GB/s on 8 H100 (same issue; 476
                         measured in issue 290)
    InfiniBand           a port of 400 Gb/s for each card (DGX H100, DGX B200), 200 (DGX A100), 50
                         (DGX-1: four ports of 100 for eight cards); 46 to 48 of 50 GB/s (nccl-tests
                         issue 290)
    PCIe                 the bus of the card; NCCL counts 12 of the 15.75 GB/s of PCIe 3.0 x16
    PCIe, by the host    GeForce cards have no access to one another: what they send crosses the
                         memory of the host. Published shares of the bus: 0.31 (nccl issue 445: 4
                         cards), 0.40 (4 RTX 4090), 0.44 and 0.56 (nccl issue 1639: 8 and 4 RTX
                         5090); their median
    Ethernet             one port for each machine, which its cards share: 1460 of the 1538 bytes of
                         a frame are TCP's payload. A message of 8 bytes takes 38 us between two
                         machines (nccl-tests issue 82), of which NCCL counts 8 for its own

Half-widths: a ring computed from links against NCCL on 2, 4 and 8 H100 differs by 21, 12 and 10 %
(ASTRA-sim, validation on HGX-H100), so 0.2 for NVLink. Published shares of a PCIe bus lie within a
third of their median. Networks: 0.2, on one switch with nobody else; what others send is not known.

Every card has all lanes of its bus, as workstations have them. A bridge between two RTX 3090 or RTX
A6000 is not regarded. Left out: cards whose machines differ too much for a rule (nodes of L4, T4).
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from memlab.devices.card_table import Card
from memlab.errors import DeviceError

# `Cluster`: several cards of one kind, and the links between them.


class Medium(StrEnum):
    """What a link is made of: NCCL knows how long a message takes to start on each."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    NETWORK = "network"


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What connects a card with the others.

    Attributes:
        title: as people call it, for instance "NVLink 4".
        medium: what it is made of.
        bytes_per_second: datasheet peak of one card in one direction.
        efficiency: the share of it that NCCL reaches with long messages.
        half_width: the relative half-width of the time of a long message, from the spread of what
            was published.
        latency_seconds: of each message, besides what NCCL itself counts for the medium.
        switch_bytes_per_second: of an all-reduce that the switch adds up, as nccl-tests counts its
            "busbw"; None if the switch adds nothing.
    """

    title: str
    medium: Medium
    bytes_per_second: float
    efficiency: float
    half_width: float
    latency_seconds: float = 0.0
    switch_bytes_per_second: float | None = None

    @property
    def reached_bytes_per_second(self) -> float:
        """What NCCL reaches with long messages, of one card in one direction."""
        return self.bytes_per_second * self.efficiency


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes with equally many cards of one kind. Ranks fill one node after the other.

    Attributes:
        name: as `memlab.predict` takes it, for instance "64x8-h100".
        title: in words.
        card: of every rank.
        num_nodes: machines.
        devices_per_node: cards in each of them.
        within: what connects the cards of a node.
        between: what connects the nodes; None with one node.
    """

    name: str
    title: str
    card: Card
    num_nodes: int
    devices_per_node: int
    within: Link
    between: Link | None

    @property
    def num_devices(self) -> int:
        """The cards of all nodes."""
        return self.num_nodes * self.devices_per_node

    def node_of(self, rank: int) -> int:
        """Return the node that a rank is in."""
        return rank // self.devices_per_node


MOST_DEVICES = 4096
CARDS_IN_A_BOARD = 8  # of the boards of NVIDIA on which every card reaches every other by NVLink
OF_WIRE = 0.2  # half-widths
OF_HOST = 0.35
BYTES_IN_GIGABIT = 125e6


@dataclass(frozen=True, kw_only=True, slots=True)
class _Board:
    """A board of cards with NVLink: links of a card, and the rate of its port of a network."""

    generation: int
    num_links: int
    link_bytes_per_second: float
    reached_bytes_per_second: float
    port_gigabits: int  # a second
    switch_bytes_per_second: float | None = None


_A100 = _Board(generation=3, num_links=12, link_bytes_per_second=25e9,
               reached_bytes_per_second=20e9, port_gigabits=200)  # fmt: skip
_H100 = _Board(generation=4, num_links=18, link_bytes_per_second=25e9,
               reached_bytes_per_second=20.6e9, port_gigabits=400,
               switch_bytes_per_second=480e9)  # fmt: skip
_V100 = _Board(generation=2, num_links=6, link_bytes_per_second=25e9,
               reached_bytes_per_second=20e9, port_gigabits=50)  # fmt: skip
_B200 = _Board(generation=5, num_links=18, link_bytes_per_second=50e9,
               reached_bytes_per_second=40.1e9, port_gigabits=400)  # fmt: skip
_BOARDS = {
    "v100-16": _V100, "v100-32": _V100, "a100-40": _A100, "a100-80": _A100, "h100": _H100,
    "h200": _H100, "b200": _B200,
}  # fmt: skip

PCIE_EFFICIENCY = 12 / 15.75
PCIE_EFFICIENCY_BY_HOST = 0.42
TCP_EFFICIENCY = 1460 / 1538
TCP_SECONDS = 30e-6
INFINIBAND_EFFICIENCY = 0.94
ETHERNET = 10  # Gb/s
NAMED = {"2-pcs": (2, 1, "rtx-4090", ETHERNET), "2-pcs-1gbit": (2, 1, "rtx-4090", 1)}
NAMES = (
    "8x-h100", "64x8-h100", "8x-h200", "8x-b200", "8x-a100-80", "8x-a100-40", "2x-a100-40",
    "16x8-a100-80", "8x-v100-32", "4x-l40s", "2x-rtx-4090", "4x-rtx-3090", "2x-rtx-3090", *NAMED,
)  # fmt: skip
"""The clusters that people are shown. Any number of nodes and cards has a name of this form."""


def numbers_in(text: str) -> list[tuple[int, int, str]]:
    """Return how a text may be read as nodes, cards in each and the name of a card.

    >>> numbers_in("8 x H100"), numbers_in("64x8-h100")
    ([(1, 8, 'h100')], [(64, 8, 'h100'), (1, 64, '8-h100')])
    """
    text = text.strip().lower()
    found = []
    if match := re.fullmatch(r"(\d+)\s*x\s*(\d+)(?:\s*x|\s|-)[\s-]*(\S.*)", text):
        found.append((int(match[1]), int(match[2]), match[3]))
    if match := re.fullmatch(r"(\d+)\s*x[\s-]*(\S.*)", text):
        found.append((1, int(match[1]), match[2]))
    return found


def named(text: str) -> str | None:
    """Return the name of `NAMED` that a text spells; None if it spells none.

    >>> named("2 PCs, 1 Gbit")
    '2-pcs-1gbit'
    """
    letters = re.sub(r"[^a-z0-9]", "", text.lower())
    return next((name for name in NAMED if name.replace("-", "") == letters), None)


def cluster_of(
    num_nodes: int, devices_per_node: int, card: Card, gigabits: int = ETHERNET
) -> Cluster:
    """Return nodes with cards of one kind, connected as such cards are.

    Args:
        num_nodes: machines.
        devices_per_node: cards in each of them.
        card: of the table.
        gigabits: a second, of the Ethernet of machines without InfiniBand.

    Raises:
        DeviceError: there are no such machines, or too many.
    """
    board = _BOARDS.get(card.name)
    name = f"{num_nodes}x{devices_per_node}" if num_nodes > 1 else f"{devices_per_node}x"
    _check(f"{name}-{card.name}", num_nodes, devices_per_node, card, board)
    if board is None:
        within, port = _bus(card), _ethernet(gigabits, devices_per_node)
    else:
        within, port = _nvlink(board), _infiniband(board.port_gigabits)

    title = f"{devices_per_node} x {card.title}"
    title += f", {within.title}" if devices_per_node > 1 else ""
    if num_nodes > 1:
        title = f"{num_nodes} nodes of {title}; {port.title}"
    return Cluster(
        name=f"{name}-{card.name}",
        title=title,
        card=card,
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        within=within,
        between=port if num_nodes > 1 else None,
    )


def check_room(cluster: Cluster, world_size: int) -> None:
    """Raise DeviceError if a cluster has fewer cards than there are ranks."""
    if world_size <= cluster.num_devices:
        return

    per_node = CARDS_IN_A_BOARD if cluster.num_nodes == 1 else cluster.devices_per_node
    larger = f"{-(-world_size // per_node)}x{per_node}-{cluster.card.name}"
    if world_size <= CARDS_IN_A_BOARD and cluster.num_nodes == 1:
        larger = f"{world_size}x-{cluster.card.name}"
    most = cluster.num_devices
    cards, less = (f"{most} cards", f"{most} or less") if most > 1 else ("one card", "1")
    raise DeviceError(
        f"world_size={world_size} is more than the {cards} of device={cluster.name!r}; use "
        f"device={larger!r}, or world_size={less}"
    )


def _check(name: str, nodes: int, devices: int, card: Card, board: _Board | None) -> None:
    """Raise DeviceError if there are no such machines."""
    total = nodes * devices
    if not 1 <= total <= MOST_DEVICES:
        raise DeviceError(
            f"device={name!r} has {total} cards; allowed is 1 to {MOST_DEVICES} in all nodes"
        )
    if devices > CARDS_IN_A_BOARD:
        per_node = CARDS_IN_A_BOARD
        more = -(-total // per_node)
        raise DeviceError(
            f"device={name!r} has {devices} cards in one machine; memlab knows machines of at most "
            f"{per_node}. Use '{more}x{per_node}-{card.name}', which is {more} such machines"
        )
    if nodes > 1 and board is None and not card.name.startswith("rtx-"):
        raise DeviceError(
            f"memlab does not know what connects machines with {card.title}, so device={name!r} "
            f"has no speed; use one machine ('{devices}x-{card.name}'), or cards with NVLink, such "
            "as '2x8-a100-80'"
        )


def _nvlink(board: _Board) -> Link:
    return Link(
        title=f"NVLink {board.generation}",
        medium=Medium.NVLINK,
        bytes_per_second=board.num_links * board.link_bytes_per_second,
        efficiency=board.reached_bytes_per_second / board.link_bytes_per_second,
        half_width=OF_WIRE,
        switch_bytes_per_second=board.switch_bytes_per_second,
    )


def _bus(card: Card) -> Link:
    is_geforce = card.name.startswith("rtx-")
    return Link(
        title="PCIe, by the memory of the host" if is_geforce else "PCIe",
        medium=Medium.PCIE,
        bytes_per_second=card.host_bytes_per_second,
        efficiency=PCIE_EFFICIENCY_BY_HOST if is_geforce else PCIE_EFFICIENCY,
        half_width=OF_HOST,
    )


def _infiniband(gigabits: int) -> Link:
    return Link(
        title=f"InfiniBand, {gigabits} Gb/s a card",
        medium=Medium.NETWORK,
        bytes_per_second=gigabits * BYTES_IN_GIGABIT,
        efficiency=INFINIBAND_EFFICIENCY,
        half_width=OF_WIRE,
    )


def _ethernet(gigabits: int, devices_per_node: int) -> Link:
    return Link(
        title=f"Ethernet, {gigabits} Gb/s a machine",
        medium=Medium.NETWORK,
        bytes_per_second=gigabits * BYTES_IN_GIGABIT / devices_per_node,
        efficiency=TCP_EFFICIENCY,
        half_width=OF_WIRE,
        latency_seconds=TCP_SECONDS,
    )
