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

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from memlab._util.collectives import Collective
from memlab.devices.clusters import Cluster, Link, tables
from memlab.devices.operators import (
    NAMESPACES,
    OperatorCost,
    Signature,
    bytes_of_argument,
    tensors_of,
)
from memlab.tracing.recording import Operator


@dataclass(frozen=True, kw_only=True, slots=True)
class _Protocol:
    """How NCCL sends a message.

    Attributes:
        start_seconds: of the collective.
        round_seconds: of each round, by what the link is made of.
        share: of the bandwidth of a link.
    """

    start_seconds: float
    round_seconds: Mapping[str, float]
    share: float


SWITCH_SECONDS = 25e-6  # hwLatencies of NVLS


@functools.cache
def _protocols(shape: str) -> tuple[_Protocol, ...]:
    """Return the protocols of a "ring" or a "tree", as `clusters.toml` has them."""
    return tuple(_Protocol(**row) for row in tables()["nccl"][shape])


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
    for ring in _protocols("ring"):
        latency = _latency(ring, rounds - crossing, crossing, group)
        yield latency + sent / (group.bytes_per_second * ring.share)

    if kind is not Collective.ALL_REDUCE:
        return
    if group.between is not None:
        levels = math.ceil(math.log2(group.num_nodes))
        chain = math.ceil(group.num_ranks / group.num_nodes) - 1
        for tree in _protocols("tree"):
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


# What collectives allocate inside themselves on a CPU, by rules: they cannot run alone.
#
# The rules are read in torch/csrc/distributed/c10d/ProcessGroupGloo.cpp and hold for all
# sizes and numbers of ranks:
#
#     all-gather        one tensor as large as all outputs, into which the ranks' parts
# arrive reduce-scatter    a copy of the whole input, which is averaged; a part of it is
# then copied all-reduce        nothing: it works on the tensor itself broadcast
# nothing
#
# What Gloo itself takes for messages is not PyTorch's allocator's, and is not counted.
# Times of collectives are not known: they depend on what connects the ranks. A rank that is
# alone in its group returns from an all-reduce and a broadcast at once, whatever their
# size.

OF_OUTPUTS = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_")
OF_INPUTS = ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_")
IN_PLACE = ("allreduce_", "allreduce_coalesced_", "broadcast_")  # a single rank has nothing to do
GATHERS = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")  # return what they gather


def is_collective(signature: Signature) -> bool:
    """Return whether an operator communicates with other ranks."""
    return signature[0].partition(".")[0] in NAMESPACES


def cost_of(operator: Operator) -> OperatorCost:
    """Return the memory of a collective, and its time where a single rank has nothing to do."""
    assert operator.signature is not None
    namespace, name, _ = operator.signature[0].split(".")
    inside = 0
    if namespace == "c10d":
        if name in OF_OUTPUTS:
            inside = bytes_of_argument(operator.signature[1][0])
        elif name in OF_INPUTS:
            inside = bytes_of_argument(operator.signature[1][1])
        return OperatorCost(
            output_bytes=(0,) * len(operator.outputs),
            peak_bytes=inside,
            seconds=0.0 if len(operator.ranks) == 1 and name in IN_PLACE else None,
        )

    given = tensors_of(operator.signature)
    made = () if name == "wait_tensor" or name.endswith("_") else operator.outputs
    sizes = tuple(output.nbytes for output in made) or (0,) * len(operator.outputs)
    if name in GATHERS:
        inside = sum(sizes)
    elif name.startswith("reduce_scatter"):
        inside = sum(spec.nbytes for spec in given)
    return OperatorCost(output_bytes=sizes, peak_bytes=sum(sizes) + inside)
