"""How long collectives take between the cards of a cluster: latency, and bytes over bandwidth.

The model is that of NCCL itself, by which it chooses how to send a message (NCCL, src/graph/
tuning.cc), and of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005):

    time = start + rounds x latency of a link + bytes that a rank sends / bandwidth of the ring

A ring over several nodes runs at its slowest link: that of a card within its node, or the ports of
all cards of the group in one node, whose rings share the work. NCCL has three protocols, of which
it takes the fastest for each message: Simple, LL128 (120 of 128 bytes are data) and LL (half of
them). Over several nodes it also knows trees for an all-reduce: fewer rounds, a little less
bandwidth. A switch that adds up an all-reduce by itself (NVLink SHARP) does so within a node.

Left out: what else the links carry at the same time, and processors that are slow to start a
collective. How wide that makes a time is said by `half_width`.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memlab.arguments.collectives import Collective
from memlab.devices.cluster import Cluster, Link, Medium


@dataclass(frozen=True, kw_only=True, slots=True)
class _Protocol:
    """How NCCL sends a message.

    Attributes:
        start_seconds: of the collective.
        round_seconds: of each round, by what the link is made of.
        share: of the bandwidth of a link.
    """

    start_seconds: float
    round_seconds: dict[Medium, float]
    share: float


# Simple, LL128 and LL: NCCL's baseLatencies, hwLatencies and "model refinements" of bandwidths.
# LL128 is not used over PCIe.
_RINGS = (
    _Protocol(
        start_seconds=8.4e-6,
        round_seconds={Medium.NVLINK: 3.4e-6, Medium.PCIE: 5.7e-6, Medium.NETWORK: 14e-6},
        share=1.0,
    ),
    _Protocol(
        start_seconds=14e-6,
        round_seconds={Medium.NVLINK: 1.9e-6, Medium.NETWORK: 4e-6},
        share=0.92,
    ),
    _Protocol(
        start_seconds=6.6e-6,
        round_seconds={Medium.NVLINK: 0.6e-6, Medium.PCIE: 1e-6, Medium.NETWORK: 2.7e-6},
        share=0.5,
    ),
)
_TREES = (
    _Protocol(
        start_seconds=8.4e-6,
        round_seconds={Medium.NVLINK: 4e-6, Medium.PCIE: 4e-6, Medium.NETWORK: 14e-6},
        share=0.92,
    ),
    _Protocol(
        start_seconds=14e-6,
        round_seconds={Medium.NVLINK: 1.25e-6, Medium.NETWORK: 8.5e-6},
        share=0.92 * 120 / 128,
    ),
)
SWITCH_SECONDS = 25e-6  # hwLatencies of NVLS


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placement:
    """Ranks that do a collective together, as they lie in a cluster.

    Attributes:
        num_ranks: of the group.
        num_nodes: that have ranks of it.
        within: the link of a card in its node.
        between: the link of a card to other nodes; None if the group lies in one.
        bytes_per_second: of all its rings together, which NCCL reaches.
    """

    num_ranks: int
    num_nodes: int
    within: Link
    between: Link | None
    bytes_per_second: float


def collective_seconds(
    kind: Collective | str, payload_bytes: int, ranks: Sequence[int], cluster: Cluster
) -> float:
    """Return how long a collective takes in a cluster.

    Args:
        kind: of the collective.
        payload_bytes: of the whole tensor, gathered or not yet divided.
        ranks: that do it together.
        cluster: where they are.

    A part of 4 MB of 32 MB for each of 8 cards takes 10 us to start, and 28 MB at 370 GB/s:

    >>> from memlab.devices import cards
    >>> seconds = collective_seconds("all-gather", 32_000_000, range(8), cards.cluster("8x-h100"))
    >>> round(seconds * 1e6)
    108
    """
    kind = Collective(kind)
    group = _placed(ranks, cluster)
    if group.num_ranks == 1:
        return 0.0
    return min(_ways(kind, payload_bytes, group))


def half_width(ranks: Sequence[int], cluster: Cluster) -> float:
    """Return the relative half-width of the time of a collective, that of its widest link."""
    group = _placed(ranks, cluster)
    links = [group.within] if group.between is None else [group.within, group.between]
    return max(link.half_width for link in links)


def _placed(ranks: Sequence[int], cluster: Cluster) -> _Placement:
    in_nodes = Counter(cluster.node_of(rank) for rank in ranks)
    within, between = cluster.within, cluster.between
    rate = within.reached_bytes_per_second
    if len(in_nodes) == 1:
        between = None
    else:
        assert between is not None
        ports = min(in_nodes.values()) * between.reached_bytes_per_second
        # with one rank in each node, nothing crosses the links within
        rate = ports if max(in_nodes.values()) == 1 else min(rate, ports)
    return _Placement(
        num_ranks=len(ranks),
        num_nodes=len(in_nodes),
        within=within,
        between=between,
        bytes_per_second=rate,
    )


def _ways(kind: Collective, payload_bytes: int, group: _Placement) -> Iterator[float]:
    """Yield how long each way takes that NCCL knows for a collective."""
    sent = kind.sent_bytes(payload_bytes, group.num_ranks)
    rounds = kind.rounds(group.num_ranks)
    crossing = 0 if group.between is None else kind.rounds(group.num_nodes)
    for ring in _RINGS:
        latency = _latency(ring, rounds - crossing, crossing, group)
        yield latency + sent / (group.bytes_per_second * ring.share)

    if kind is not Collective.ALL_REDUCE:
        return
    if group.between is not None:
        levels = math.ceil(math.log2(group.num_nodes))
        chain = math.ceil(group.num_ranks / group.num_nodes) - 1
        for tree in _TREES:
            latency = _latency(tree, 2 * chain, 2 * levels, group)
            yield latency + 2 * payload_bytes / (group.bytes_per_second * tree.share)
    elif group.within.switch_bytes_per_second is not None:
        yield SWITCH_SECONDS + sent / group.within.switch_bytes_per_second


def _latency(protocol: _Protocol, within: int, between: int, group: _Placement) -> float:
    """Return the time to start and of all rounds; infinite if the protocol is not used there."""
    seconds = protocol.start_seconds
    for rounds, link in ((within, group.within), (between, group.between)):
        if rounds and link is not None:
            round_seconds = protocol.round_seconds.get(link.medium, math.inf)
            seconds += rounds * (round_seconds + link.latency_seconds)
    return seconds
