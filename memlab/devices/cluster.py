"""`Cluster`: several cards of one kind, and the links between them."""

from dataclasses import dataclass
from enum import StrEnum

from memlab.devices.card import Card


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
