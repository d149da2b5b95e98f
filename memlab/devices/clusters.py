"""The clusters that memlab knows: which links go with a card, and how fast they are.

`clusters.toml` has the links with their sources, and the column `nvlink` of `cards.toml` says which
cards have NVLink.
"""

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.errors import DeviceError

if TYPE_CHECKING:
    from memlab.devices.cards import Card


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
    card: "Card"
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
BYTES_IN_GIGABIT = 125e6
ETHERNET = 10  # Gb/s


@functools.cache
def tables() -> Mapping[str, Any]:
    """Return what `clusters.toml` holds."""
    found: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return found


def named_clusters() -> Mapping[str, Mapping[str, Any]]:
    """Return the arguments of `cluster_of` for the clusters that have a name of their own."""
    found: Mapping[str, Mapping[str, Any]] = tables()["named"]
    return found


def names() -> tuple[str, ...]:
    """Return the clusters that people are shown. Any number of nodes and cards has such a name."""
    return (*tables()["offered"], *named_clusters())


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
    """Return the name of a cluster of `clusters.toml` that a text spells; None if it spells none.

    >>> named("2 PCs, 1 Gbit")
    '2-pcs-1gbit'
    """
    letters = re.sub(r"[^a-z0-9]", "", text.lower())
    return next((name for name in named_clusters() if name.replace("-", "") == letters), None)


def cluster_of(
    num_nodes: int, devices_per_node: int, card: "Card", gigabits: int = ETHERNET
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
    board = None if card.nvlink is None else tables()["nvlink"][card.nvlink]
    name = f"{num_nodes}x{devices_per_node}" if num_nodes > 1 else f"{devices_per_node}x"
    _check(f"{name}-{card.name}", num_nodes, devices_per_node, card)
    if board is None:
        bus = "bus-by-host" if _is_geforce(card) else "bus"
        within = _link(bus, card.host_bytes_per_second)
        bytes_per_second = gigabits * BYTES_IN_GIGABIT / devices_per_node
        port = _link("ethernet", bytes_per_second, gigabits=gigabits)
    else:
        gigabits = board["port_gigabits"]
        within = _nvlink(board)
        port = _link("infiniband", gigabits * BYTES_IN_GIGABIT, gigabits=gigabits)

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


def _check(name: str, nodes: int, devices: int, card: "Card") -> None:
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
    if nodes > 1 and card.nvlink is None and not _is_geforce(card):
        raise DeviceError(
            f"memlab does not know what connects machines with {card.title}, so device={name!r} "
            f"has no speed; use one machine ('{devices}x-{card.name}'), or cards with NVLink, such "
            "as '2x8-a100-80'"
        )


def _is_geforce(card: "Card") -> bool:
    return "GeForce" in card.title


def _nvlink(board: Mapping[str, Any]) -> Link:
    made = _link(
        "nvlink",
        board["num_links"] * board["bytes_per_second"],
        efficiency=[board["reached_bytes_per_second"], board["bytes_per_second"]],
        generation=board["generation"],
    )
    return replace(made, switch_bytes_per_second=board.get("switch_bytes_per_second"))


def _link(
    kind: str, bytes_per_second: float, efficiency: Sequence[float] = (), **words: int
) -> Link:
    """Return a link of a kind of `clusters.toml`, with these numbers in its title."""
    row = tables()["link"][kind]
    reached, whole = efficiency or row["efficiency"]
    return Link(
        title=row["title"].format(**words),
        medium=Medium(row["medium"]),
        bytes_per_second=bytes_per_second,
        efficiency=reached / whole,
        half_width=row["half_width"],
        latency_seconds=row.get("latency_seconds", 0.0),
    )
