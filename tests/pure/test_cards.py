import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memlab.arguments.units import GIB, MIB
from memlab.devices import cards
from memlab.errors import DeviceError

ALL = [cards.find(name) for name in cards.names()]
FORMATS = ("fp32", "tf32", "bf16", "fp16")


def peaks(card):
    return [getattr(card, f"{name}_flops_per_second") for name in FORMATS]


def test_the_cards_of_the_contract_are_there():
    asked = {"h200", "h100", "a100-40", "a100-80", "l4", "t4", "rtx-3060", "rtx-4060", "rtx-4090"}
    assert asked <= set(cards.names())
    assert len(set(cards.names())) == len(cards.names())


@pytest.mark.parametrize("card", ALL, ids=cards.names())
def test_figures_are_possible(card):
    assert 7 * GIB < card.memory_bytes < 142 * GIB
    assert 0 < card.context_bytes < card.memory_bytes // 10
    assert card.usable_bytes == card.memory_bytes - card.context_bytes
    assert 200e9 < card.memory_bytes_per_second < 5e12
    fp32, tf32, bf16, fp16 = peaks(card)
    assert 1e12 < fp32 <= fp16 < 1000e12
    assert (tf32 is None) == (bf16 is None) == (card.compute_capability < (8, 0))
    assert card.has_bf16 == (bf16 is not None)
    if tf32 is not None:
        assert fp32 <= tf32
        assert bf16 == fp16
        assert bf16 == pytest.approx(2 * tf32, rel=0.03)  # every architecture so far
    # 64 or 128 CUDA cores a multiprocessor, two operations a clock, 1.2 to 2.7 GHz
    cores = 64 if card.compute_capability in ((7, 0), (7, 5), (8, 0)) else 128
    assert 1.2e9 < fp32 / (2 * cores * card.num_multiprocessors) < 2.7e9


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("a100-40", "a100-80"),
        ("v100-16", "v100-32"),
        ("v100-32", "a100-40"),
        ("a100-80", "h100"),
        ("h100", "h200"),
        ("rtx-3060", "rtx-3090"),
        ("rtx-3090", "rtx-5090"),
        ("rtx-4060", "rtx-4080"),
        ("rtx-4080", "rtx-4090"),
        ("rtx-4090", "rtx-5090"),
        ("l4", "l40s"),
    ],
)
def test_a_larger_or_newer_card_of_a_family_is_no_slower(older, newer):
    old, new = cards.find(older), cards.find(newer)
    assert all((a or 0) <= b for a, b in zip(peaks(old), peaks(new), strict=True) if b is not None)
    assert old.memory_bytes_per_second <= new.memory_bytes_per_second


def test_figures_that_datasheets_print():
    assert cards.find("h100").bf16_flops_per_second == 989.4e12  # 1979 with sparsity
    assert cards.find("a100-80").memory_bytes_per_second == 2.039e12
    assert cards.find("t4").fp16_flops_per_second == 65e12
    assert cards.find("rtx-4090").num_multiprocessors == 128


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H200", "h200"),
        ("RTX 4090", "rtx-4090"),
        ("rtx_4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3060", "rtx-3060"),
        ("  nvidia l4 ", "l4"),
        ("L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("a100-80gb", "a100-80"),
        ("A100_40", "a100-40"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("RTX A6000", "a6000"),
    ],
)
def test_many_spellings_find_a_card(text, name):
    assert cards.find(text).name == name


@pytest.mark.parametrize(
    "text",
    ["", "a100", "b", "24", "24G", "rtx", "cuda:7", "NVIDIA A10G", "NVIDIA H100 PCIe", "gpu",
     "NVIDIA H100 NVL", "NVIDIA GeForce RTX 4060 Ti", "NVIDIA GeForce RTX 4060 Laptop GPU",
     "NVIDIA RTX 6000 Ada Generation", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"],
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


def test_an_unknown_card_is_refused_with_the_list():
    with pytest.raises(DeviceError) as caught:
        cards.resolve("rtx-9999")
    message = str(caught.value)
    assert "device='rtx-9999'" in message
    assert all(repr(name) in message for name in cards.names())
    assert "'24GiB'" in message
    with pytest.raises(DeviceError):
        cards.resolve(24)


def test_a_card_resolves_to_a_cuda_target_of_its_name():
    target = cards.resolve("RTX 4090")
    assert (target.kind, target.card.name, target.name) == ("cuda", "rtx-4090", "rtx-4090")
    assert cards.resolve("24 GiB").name == "24GiB"


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_cpu_is_a_target_without_a_card(device):
    assert cards.resolve(device) == cards.Target(kind="cpu", card=None, name="cpu")


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


def test_a_card_by_name_is_what_a_prediction_for_it_is_for():
    assert cards.card("RTX 4090") == cards.resolve("rtx-4090").card
    for device in ("cpu", "gtx-1080"):
        with pytest.raises(DeviceError, match="'h200'"):
            cards.card(device)
