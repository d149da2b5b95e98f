"""Cards: how they are found, what a machine says of them, and the table of `cards.toml`."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memlab._util.units import GIB, MIB
from memlab.devices import cards
from memlab.errors import DeviceError

FORMATS = ("fp32", "tf32", "bf16", "fp16")


def peaks(card):
    return [getattr(card, f"{name}_flops_per_second") for name in FORMATS]


def test_the_cards_of_the_contract_are_there():
    asked = {"h200", "h100", "a100-40", "a100-80", "l4", "t4", "rtx-3060", "rtx-4060", "rtx-4090"}
    asked |= {"b200", "h100-pcie", "a100-pcie-40", "a100-pcie-80", "v100-pcie-16", "v100-pcie-32"}
    asked |= {"a10g", "p100", "p4", "rtx-5070", "rtx-5080", "rtx-3070", "rtx-3080", "rtx-4070"}
    assert asked <= set(cards.names())
    assert len(set(cards.names())) == len(cards.names())


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("a100-40", "a100-80"),
        ("v100-16", "v100-32"),
        ("v100-32", "a100-40"),
        ("a100-80", "h100"),
        ("h100", "h200"),
        ("h200", "b200"),
        ("a100-pcie-80", "h100-pcie"),
        ("a100-pcie-80", "a100-80"),
        ("h100-pcie", "h100"),
        ("v100-pcie-32", "v100-32"),
        ("p4", "t4"),
        ("p100", "v100-pcie-16"),
        ("rtx-4070-laptop", "rtx-4070"),
        ("rtx-4080-laptop", "rtx-4090-laptop"),
        ("rtx-4090-laptop", "rtx-4090"),
        ("rtx-5070-laptop", "rtx-5070"),
        ("rtx-5080-laptop", "rtx-5090-laptop"),
        ("rtx-5090-laptop", "rtx-5090"),
        ("rtx-3060", "rtx-3090"),
        ("rtx-3090", "rtx-5090"),
        ("rtx-4060", "rtx-4080"),
        ("rtx-4080", "rtx-4090"),
        ("rtx-4090", "rtx-5090"),
        ("l4", "l40s"),
        ("l40", "l40s"),
        ("v100-pcie-32", "v100s-pcie-32"),
        ("gtx-1060-6", "gtx-1070"),
        ("gtx-1080", "gtx-1080-ti"),
        ("gtx-1080-ti", "rtx-2080-ti"),
        ("rtx-2060", "rtx-2080-ti"),
        ("rtx-2080-ti", "titan-rtx"),
        ("rtx-3050", "rtx-3060"),
        ("rtx-3070", "rtx-3070-ti"),
        ("rtx-3080", "rtx-3080-12"),
        ("rtx-3080-12", "rtx-3080-ti"),
        ("rtx-3080-ti", "rtx-3090"),
        ("rtx-3090", "rtx-3090-ti"),
        ("rtx-4060", "rtx-4060-ti-8"),
        ("rtx-4070", "rtx-4070-super"),
        ("rtx-4070-super", "rtx-4070-ti"),
        ("rtx-4070-ti", "rtx-4070-ti-super"),
        ("rtx-4080", "rtx-4080-super"),
        ("rtx-4090-d", "rtx-4090"),
        ("rtx-5060", "rtx-5060-ti-8"),
        ("rtx-5070", "rtx-5070-ti"),
        ("a2000-12", "a4000"),
        ("a4000", "a5000"),
        ("a5000", "a6000"),
        ("rtx-4000-ada", "rtx-5000-ada"),
        ("rtx-5000-ada", "rtx-6000-ada"),
        ("rtx-6000-ada", "rtx-pro-6000"),
        ("rtx-3050-laptop-4", "rtx-3060-laptop"),
        ("rtx-3070-laptop", "rtx-3070-ti-laptop"),
        ("rtx-4050-laptop", "rtx-4060-laptop"),
    ],
)
def test_a_larger_or_newer_card_of_a_family_is_no_slower(older, newer):
    old, new = cards.find(older), cards.find(newer)
    for before, after in zip(peaks(old), peaks(new), strict=True):
        assert (before or 0) <= (after or 0)
    assert old.memory_bytes_per_second <= new.memory_bytes_per_second


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4090", "rtx-4090"),
        ("  nvidia l4 ", "l4"),
        ("Tesla T4", "t4"),
        ("a100-80gb", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("A100-SXM-80GB", "a100-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40"),
        ("A100 PCIe 40 GB", "a100-pcie-40"),
        ("a100-40-pcie", "a100-pcie-40"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80"),
        ("Tesla V100-PCIE-32GB", "v100-pcie-32"),
        ("Tesla P100-PCIE-16GB", "p100"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop"),
        ("3060 Laptop", "rtx-3060-laptop"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU 16GB", "rtx-3080-laptop-16"),
        ("GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("RTX A6000", "a6000"),
        ("GeForce GTX 1080 Ti", "gtx-1080-ti"),
        ("2080 Ti", "rtx-2080-ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070-ti-super"),
        ("RTX 3080 12GB", "rtx-3080-12"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("Quadro RTX 6000", "quadro-rtx-6000"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("GeForce RTX 2080 Super with Max-Q Design", "rtx-2080-super-max-q"),
    ],
)
def test_many_spellings_find_a_card(text, name):
    assert cards.find(text).name == name


@pytest.mark.parametrize(
    "text",
    ["", "a100", "b", "24", "24G", "rtx", "cuda:7", "gpu", "pcie", "laptop", "v100", "h100-sxm-96",
     "NVIDIA H100 80GB HBM2e", "NVIDIA H200 NVL", "NVIDIA GH200 480GB",
     "NVIDIA GB200", "NVIDIA A100-SXM-64GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
     "Tesla V100-SXM3-32GB", "Tesla V100-DGXS-32GB",
     "Tesla V100-FHHL-16GB", "Tesla P100-SXM2-16GB", "Tesla P100-PCIE-12GB", "Tesla M40",
     "NVIDIA GeForce RTX 4060 Ti",  # of 8 or of 16 GB
     "NVIDIA GeForce RTX 3060 Ti SUPER", "NVIDIA GeForce RTX 3050 6GB Laptop GPU",
     "NVIDIA GeForce GTX 1060 3GB", "NVIDIA GeForce RTX 2060 with Max-Q Design",
     "NVIDIA GeForce RTX 3080 Laptop GPU",  # of 8 or of 16 GB
     "NVIDIA RTX 4000 SFF Ada Generation", "NVIDIA RTX A6000-48Q", "NVIDIA A10M"],
)  # fmt: skip
def test_another_card_of_a_like_name_is_not_taken_for_it(text):
    assert cards.find(text) is None


@given(
    name=st.sampled_from(cards.names()),
    separator=st.sampled_from(["-", " ", "_", ""]),
    upper=st.booleans(),
    vendor=st.sampled_from(["", "NVIDIA ", "nvidia geforce "]),
)
def test_case_separator_and_vendor_do_not_matter(name, separator, upper, vendor):
    text = vendor + name.replace("-", separator)
    assert cards.find(text.upper() if upper else text).name == name


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("rtx 3080 laptop", {"rtx-3080-laptop-8", "rtx-3080-laptop-16"}),
        ("a100", {"a100-40", "a100-80"}),
        ("NVIDIA H100 NVL 2", {"h100-nvl"}),
        ("rtx-4060-ti", {"rtx-4060-ti-8", "rtx-4060-ti-16"}),
        ("rtx-4095", {"rtx-4090"}),
        ("Tesla P100-SXM2-16GB", {"p100"}),
        ("!", set()),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest_ones(text, near):
    assert near <= set(cards.nearest(text))
    assert len(cards.nearest(text)) <= 3
    with pytest.raises(DeviceError) as caught:
        cards.resolve(text)
    said = str(caught.value).partition("Allowed")[0]
    assert all(repr(name) in said for name in near)
    assert ("The nearest: " in said) == bool(near)


@pytest.mark.parametrize("text", ["24GiB", "24 GiB", "24576 MiB", str(24 * GIB)])
def test_a_size_is_a_card_of_that_memory_and_of_no_known_speed(text):
    card = cards.find(text)
    assert (card.name, card.memory_bytes) == ("24GiB", 24 * GIB)
    assert peaks(card) == [None] * 4
    assert card.memory_bytes_per_second is None
    assert not card.has_bf16
    assert 23 * GIB < card.usable_bytes < 24 * GIB
    assert cards.find(card.name) == card


def test_the_workspace_is_what_pytorch_takes_on_each_architecture():
    # CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8 is 8.125 MiB
    assert cards.find("a100-40").cublas_workspace_bytes == 8_519_680
    assert cards.find("24GiB").cublas_workspace_bytes == 8_519_680
    assert cards.find("h200").cublas_workspace_bytes == 32 * MIB
    assert cards.find("rtx-5090").cublas_workspace_bytes == 32 * MIB


@pytest.mark.parametrize(
    ("name", "seen_mib"), [("t4", 100), ("rtx-4060", 115), ("rtx-4090", 472), ("rtx-4090", 504)]
)
def test_the_context_estimate_is_near_what_was_seen(name, seen_mib):
    assert abs(cards.find(name).context_bytes - seen_mib * MIB) < 100 * MIB


def test_a_name_resolves_to_a_target_and_an_unknown_one_is_refused_with_the_list():
    target = cards.resolve("RTX 4090")
    assert (target.kind, target.card.name, target.name) == ("cuda", "rtx-4090", "rtx-4090")
    assert cards.card("RTX 4090") == target.card
    assert cards.resolve("24 GiB").name == "24GiB"
    for device in ("cpu", torch.device("cpu")):
        assert cards.resolve(device) == cards.Target(kind="cpu", card=None, name="cpu")
    for device in ("cpu", "gtx-980"):
        with pytest.raises(DeviceError, match="'h200'"):
            cards.card(device)
    with pytest.raises(DeviceError, match="device='rtx-9999'") as caught:
        cards.resolve("rtx-9999")
    assert all(repr(name) in str(caught.value) for name in [*cards.names(), "24GiB"])
    with pytest.raises(DeviceError):
        cards.resolve(24)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_cuda_has_no_limit_and_an_index_is_refused():
    assert cards.resolve(None).kind == "cpu"
    for device in ("cuda", torch.device("cuda")):
        assert cards.resolve(device) == cards.Target(kind="cuda", card=None, name="cuda")
    with pytest.raises(DeviceError, match="cuda:1"):
        cards.resolve("cuda:1")


def fake_properties(monkeypatch, **facts):
    facts = {"major": 8, "minor": 9, "multi_processor_count": 128} | facts
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**facts))
    return cards.of_device(torch.device("cuda", 0))


def test_a_card_in_the_machine_keeps_its_own_memory_and_takes_the_speed_of_its_kind(monkeypatch):
    title = "NVIDIA GeForce RTX 4090"
    card = fake_properties(monkeypatch, name=title, total_memory=25_250_627_584)
    known = cards.find("rtx-4090")
    assert card == dataclasses.replace(known, memory_bytes=25_250_627_584)


def test_a_card_with_other_multiprocessors_or_name_has_no_known_speed(monkeypatch):
    half = fake_properties(
        monkeypatch, name="NVIDIA L4", total_memory=12 * GIB, multi_processor_count=29
    )
    other = fake_properties(monkeypatch, name="NVIDIA RTX 6000 Ada", total_memory=50_865_307_648)
    assert other.name == "nvidia-rtx-6000-ada"
    assert (other.memory_bytes, other.compute_capability) == (50_865_307_648, (8, 9))
    assert other.has_bf16
    for card in (half, other):
        assert peaks(card) == [None] * 4


@pytest.mark.parametrize(("size", "name"), [(16, "16"), (8, "8")])
def test_of_two_cards_with_one_name_that_of_its_memory_is_taken(monkeypatch, size, name):
    title, memory = "NVIDIA GeForce RTX 3080 Laptop GPU", size * GIB - 200 * MIB
    facts = {"name": title, "minor": 6, "multi_processor_count": 48}
    found = fake_properties(monkeypatch, total_memory=memory, **facts)
    assert (found.name, found.memory_bytes) == (f"rtx-3080-laptop-{name}", memory)


def test_a_card_of_another_memory_has_no_known_speed(monkeypatch):
    facts = {"name": "NVIDIA GeForce RTX 3060", "minor": 6, "multi_processor_count": 28}
    narrow = fake_properties(monkeypatch, total_memory=8 * GIB, **facts)
    assert (narrow.name, peaks(narrow)) == ("nvidia-geforce-rtx-3060", [None] * 4)
    whole = fake_properties(monkeypatch, total_memory=12 * GIB, **facts)  # as Windows shows it
    assert whole.name == "rtx-3060"


# The table of cards, held against physics: units x 2 x clock, which catches typing errors.

# multiply-add units of fp32 in a multiprocessor, by compute capability: CUDA programming guide,
# "arithmetic instructions" (operations per clock of 32-bit fused multiply-add)
FP32_UNITS = {
    (6, 0): 64, (6, 1): 128, (7, 0): 64, (7, 5): 64, (8, 0): 64, (8, 6): 128, (8, 9): 128,
    (9, 0): 128, (10, 0): 128, (12, 0): 128,
}  # fmt: skip
# multiply-adds a clock of a multiprocessor's tensor cores in fp16, summed in fp32: 8 cores of 64
# (V100, T4), 4 of 256 (A100), 128 (GA10x, Ada, RTX Blackwell) and 512 (H100), by the white papers
FP16_UNITS = {
    (7, 0): 512, (7, 5): 512, (8, 0): 1024, (8, 6): 512, (8, 9): 512, (9, 0): 2048, (12, 0): 512,
}  # fmt: skip
NOT_GEFORCE_AT_HALF_RATE = ("a10g", "l40")  # when summing in fp32, as GeForce cards do
WITHOUT_TENSOR_CORES = ("gtx-",)  # Turing too
NOT_OF_THE_CARD = {"memory_mib", "source", "spellings", "tensor_mhz",
                   "memory_bus_bits", "memory_gbits", "compared"}  # fmt: skip

every_card = pytest.mark.parametrize("card", cards.every_card(), ids=cards.names())


def test_every_column_has_a_meaning_and_every_card_a_source():
    """A column that is spelled wrong would be left out in silence."""
    assert set(cards.rows()) == {"reached", "card", "first_of"}
    fields = {field.name for field in dataclasses.fields(cards.Card)} | NOT_OF_THE_CARD
    for name, row in cards.rows()["card"].items():
        assert row.keys() <= fields - {"name", "memory_bytes"}, name
        assert re.fullmatch("[A-Z]", row["source"]), name
        assert cards.find(name).name == name
    used = {row.get("reached") for row in cards.rows()["card"].values()} - {None}
    assert used == cards.rows()["reached"].keys()


@every_card
def test_peaks_are_units_times_two_times_the_clock(card):
    fp32, tf32, bf16, fp16 = peaks(card)
    row = cards.rows()["card"][card.name]
    clock = row["boost_mhz"] * 1e6
    units = FP32_UNITS[card.compute_capability] * card.num_multiprocessors
    assert fp32 == pytest.approx(2 * units * clock, rel=0.03)
    if card.compute_capability not in FP16_UNITS or card.name.startswith(WITHOUT_TENSOR_CORES):
        return

    units = FP16_UNITS[card.compute_capability] * card.num_multiprocessors
    is_half = "GeForce" in card.title or card.name in NOT_GEFORCE_AT_HALF_RATE
    units /= 2 if is_half else 1
    clock = row.get("tensor_mhz", row["boost_mhz"]) * 1e6
    assert fp16 == pytest.approx(2 * units * clock, rel=0.03)
    if tf32 is not None:
        assert bf16 == fp16
        assert tf32 == pytest.approx(fp16 / 2, rel=0.03)


@every_card
def test_bandwidth_is_the_bus_times_its_rate(card):
    row = cards.rows()["card"][card.name]
    bus = row["memory_bus_bits"] * row["memory_gbits"] / 8 * 1e9
    assert card.memory_bytes_per_second == pytest.approx(bus, rel=0.03)


@every_card
def test_figures_are_possible(card):
    assert 3 * GIB < card.memory_bytes < 180 * GIB
    assert 0 < card.context_bytes < card.memory_bytes // 10
    assert card.usable_bytes == card.memory_bytes - card.context_bytes
    fp32, tf32, bf16, fp16 = peaks(card)
    has_tensor_cores = card.compute_capability >= (7, 0)
    has_tensor_cores &= not card.name.startswith(WITHOUT_TENSOR_CORES)
    assert (fp16 is not None) == has_tensor_cores
    assert (tf32 is None) == (bf16 is None) == (card.compute_capability < (8, 0))
    assert card.has_bf16 == (bf16 is not None)
    assert all(peak is None or peak >= fp32 for peak in (tf32, bf16, fp16))


SIZES = {"3060-laptop": 6, "3080-laptop-16": 16, "3080": 10, "3060": 12, "4060": 8, "a6000": 48,
         "b200": 180, "h200": 141, "h100": 80, "l40s": 48, "l4": 24, "a10": 24, "t4": 16, "p4": 8,
         "p100": 16, "5090": 32, "5090-laptop": 24, "2080-ti": 11, "1080-ti": 11, "1650": 4,
         "3080-12": 12, "4060-ti-16": 16, "rtx-6000-ada": 48, "a40": 48, "titan-v": 12,
         "rtx-pro-6000": 96, "h100-nvl": 94}  # fmt: skip


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_cuda_gives_a_little_less_than_the_size_on_the_box(name, size):
    held = cards.find(name).memory_bytes
    box = size * (1e9 if size in (141, 180) else GIB)  # these are sold in units of 1e9
    assert 0.91 * box < held <= 1.07 * box


def kind_of(card):
    if card.is_laptop:
        return "laptop"
    if "GeForce" in card.title:
        return "GeForce"
    return "workstation" if re.search("RTX|TITAN", card.title) else "data centre"


def test_people_are_shown_the_kinds_of_cards_in_this_order():
    names = ("data centre", "workstation", "GeForce", "laptop")
    kinds = [names.index(kind_of(card)) for card in cards.every_card()]
    assert kinds == sorted(kinds)
    assert set(kinds) == {0, 1, 2, 3}


@every_card
def test_power_is_known_and_in_proportion_to_the_peak(card):
    watts = card.board_watts / (card.fp32_flops_per_second / 1e12)
    assert 2 < watts < 40  # an L4 has 2.4 W for each TFLOP/s, a P100 27, a GTX 1050 Ti 36
    # of the memory on the box, error correction in it leaves less than 15 of 16 parts
    is_hbm = card.memory_bytes_per_second > 1.5e12 or card.name.startswith(("v100", "p100"))
    assert not (card.ecc_in_memory and is_hbm)
    if card.ecc_in_memory:
        nearest = -(-card.memory_bytes // (8 * GIB)) * 8 * GIB
        assert card.memory_bytes < 0.94 * nearest


def test_fp64_has_its_own_peak() -> None:
    """The shares of the CUDA C++ Programming Guide: a half in data centres, 1/64 at home."""
    found = {name: cards.find(name) for name in ("a100-80", "h100", "t4", "rtx-3090", "24GiB")}
    peaks = {name: card and card.fp64_flops_per_second for name, card in found.items()}
    assert peaks["a100-80"] == 9.75e12
    assert peaks["h100"] == 66.9e12 / 2
    assert peaks["t4"] == 8.1e12 / 32
    assert peaks["rtx-3090"] == 35.6e12 / 64
    assert peaks["24GiB"] is None
