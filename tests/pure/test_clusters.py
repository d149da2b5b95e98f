"""Clusters by name, and the time of collectives in them, held against hand counts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memlab
from memlab._util.collectives import Collective
from memlab.cost_model.links import collective_seconds, half_width
from memlab.devices import cards, clusters
from memlab.errors import DeviceError

MILLION = 10**6
LARGE = 10**10  # bytes, beside which latencies vanish
FORMS = ("8x-h100", "64x8-h100", "4x1-rtx-4090", "2-pcs", "2-pcs-1gbit")


@pytest.mark.parametrize("name", clusters.names())
def test_a_cluster_that_people_are_shown_is_found_by_its_own_name(name):
    cluster = cards.cluster(name)
    assert cluster.name == name
    assert cards.resolve(name).cluster == cluster
    assert cards.resolve(name).card.name in name or "pcs" in name
    assert cluster.num_devices == cluster.num_nodes * cluster.devices_per_node
    assert (cluster.between is None) == (cluster.num_nodes == 1)
    assert cluster.card.title in cluster.title


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("8xH100", "8x-h100"),
        ("8 x NVIDIA H100 80GB HBM3", "8x-h100"),
        ("64 x 8 H100", "64x8-h100"),
        ("64x8xh100", "64x8-h100"),
        ("2x 4090", "2x-rtx-4090"),
        ("2 x RTX 4090", "2x-rtx-4090"),
        ("2x1-rtx-4090", "2x1-rtx-4090"),
        ("4x RTX A6000", "4x-a6000"),
        ("2 PCs", "2-pcs"),
        ("2 PCs, 1 Gbit", "2-pcs-1gbit"),
        ("1x8-a100-80", "8x-a100-80"),
        *zip(FORMS, FORMS, strict=True),
    ],
)
def test_many_spellings_find_a_cluster(text, name):
    assert cards.resolve(text).name == name


@pytest.mark.parametrize(
    "text", ["x-h100", "8x-", "8x", "8x8", "8x-h1000", "8x-24GiB", "pcs", "-1x-h100"]
)
def test_other_texts_name_no_cluster(text):
    assert cards.cluster(text) is None
    with pytest.raises(DeviceError, match="8x-h100"):
        cards.resolve(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("16x-h100", ["'2x8-h100', which is 2 such machines"]),
        ("0x-h100", ["1 to 4096"]),
        ("513x8-h100", ["1 to 4096"]),
        ("2x4-l4", ["'4x-l4'"]),
        *((unknown, map(repr, FORMS)) for unknown in ("3-pcs", "2-pcs-5gbit", "2x-gtx")),
    ],
)
def test_machines_that_do_not_exist_are_refused_with_the_forms_that_there_are(text, said):
    with pytest.raises(DeviceError) as refused:
        cards.resolve(text)
    assert all(each in str(refused.value) for each in said)


@pytest.mark.parametrize(
    ("device", "world_size", "remedy"),
    [("4x-h100", 8, "8x-h100"), ("8x-h100", 64, "8x8-h100"), ("2-pcs", 4, "4x1-rtx-4090")],
)
def test_more_ranks_than_cards_are_refused_before_anything_runs(device, world_size, remedy):
    config = memlab.StepConfig(batch_size=64, sharding="zero3", world_size=world_size)
    workload = memlab.workloads.get("gpt-small", num_layers=1)
    with pytest.raises(DeviceError, match=f"world_size={world_size} is more.*{remedy}"):
        memlab.predict(workload, config, device)
    assert cards.cluster(remedy).num_devices >= world_size
    said = "is more than the one card of device='1x-h100'; use device='2x-h100', or world_size=1$"
    with pytest.raises(DeviceError, match=said):
        clusters.check_room(cards.cluster("1x-h100"), 2)


def test_rates_that_datasheets_print():
    """Of one card in one direction: half of what is printed for NVLink."""
    printed = {"8x-h100": 900e9, "8x-a100-80": 600e9, "8x-v100-16": 300e9, "8x-b200": 1800e9}
    for name, both in printed.items():
        assert cards.cluster(name).within.bytes_per_second == both / 2
    assert cards.cluster("64x8-h100").between.bytes_per_second == 400e9 / 8
    assert cards.cluster("2x4-rtx-4090").between.bytes_per_second == 10e9 / 8 / 4


def test_figures_that_the_authors_of_nccl_give():
    """370 GB/s of NVLink with H100, 480 for a sum in the switch; 46 to 48 of a port of 400 Gb/s."""
    h100 = cards.cluster("8x-h100")
    gathered = LARGE * 7 / 8 / collective_seconds("all-gather", LARGE, range(8), h100)
    assert gathered == pytest.approx(370e9, rel=0.005)
    reduced = LARGE * 7 / 4 / collective_seconds("all-reduce", LARGE, range(8), h100)
    assert reduced == pytest.approx(480e9, rel=0.005)
    assert 46e9 < cards.cluster("2x8-h100").between.reached_bytes_per_second < 48e9


def test_the_slowest_link_of_a_ring_counts():
    """Eight ports of 47 GB/s are faster than a card's NVLink, one port is slower."""
    cluster = cards.cluster("64x8-h100")
    port = cluster.between.reached_bytes_per_second
    nvlink = cluster.within.reached_bytes_per_second

    def rate(ranks):
        seconds = collective_seconds("reduce-scatter", LARGE, ranks, cluster)
        return LARGE * (len(ranks) - 1) / len(ranks) / seconds

    assert rate(range(8)) == pytest.approx(nvlink, rel=0.01)
    assert rate(range(16)) == pytest.approx(min(nvlink, 8 * port), rel=0.01)
    assert rate([0, 8]) == pytest.approx(port, rel=0.01)  # as the copies of a hybrid step
    assert rate([0, 1, 8]) == pytest.approx(port, rel=0.01)  # one port of the second node
    a100 = cards.cluster("2x8-a100-80")
    seconds = collective_seconds("all-gather", LARGE, range(16), a100)
    assert LARGE * 15 / 16 / seconds == pytest.approx(8 * 25e9 * 0.94, rel=0.01)


def test_two_machines_over_ethernet_by_hand():
    """Half of the bytes at 1460/1538 of 1.25 GB/s."""
    seconds = collective_seconds("all-gather", 100 * MILLION, range(2), cards.cluster("2-pcs"))
    assert seconds == pytest.approx(50e6 / (1.25e9 * 1460 / 1538), rel=0.01)
    slower = collective_seconds("all-gather", 100 * MILLION, range(2), cards.cluster("2-pcs-1gbit"))
    assert slower / seconds == pytest.approx(10, rel=0.02)
    # 38 us for 8 bytes between two machines over sockets (nccl-tests issue 82)
    seconds = collective_seconds("broadcast", 8, range(2), cards.cluster("2-pcs"))
    assert seconds == pytest.approx(38e-6, rel=0.1)


@given(
    st.sampled_from(list(Collective)),
    st.sampled_from(clusters.names()),
    st.integers(0, 2**36),
    st.integers(0, 2**30),
)
def test_more_bytes_take_longer_and_stay_finite(kind, name, nbytes, more):
    cluster = cards.cluster(name)
    ranks = range(cluster.num_devices)
    less = collective_seconds(kind, nbytes, ranks, cluster)
    assert 0 < less <= collective_seconds(kind, nbytes + more, ranks, cluster) < math.inf
    assert 0 < half_width(ranks, cluster) < 1


def test_bytes_on_the_wire_by_hand():
    """Four ranks in a ring: each passes three quarters on, for a sum and back twice that."""
    sent = {kind: kind.sent_bytes(400, 4) for kind in Collective}
    assert sent == {
        "all-gather": 300, "reduce-scatter": 300, "all-reduce": 600, "broadcast": 400,
        "all-to-all": 300,
    }  # fmt: skip
    for kind in Collective:  # one rank sends nothing
        assert collective_seconds(kind, MILLION, [3], cards.cluster("8x-h100")) == 0.0
        assert kind.sent_bytes(MILLION, 1) == 0


def test_a_card_of_a_cluster_has_the_memory_of_the_card():
    assert memlab.card("8x-h100") == memlab.card("h100")
    config = memlab.StepConfig(batch_size=2)
    workload = memlab.workloads.get("gpt-small", num_layers=1, sequence_length=32)
    one, alone = (memlab.predict(workload, config, name) for name in ("8x-h100", "h100"))
    assert one.device == "8x-h100"
    assert one.peak_allocated_bytes == alone.peak_allocated_bytes
    assert one.step_seconds == alone.step_seconds
