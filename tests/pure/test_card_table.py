"""The table of cards, held against physics: units x 2 x clock, which catches typing errors."""

import pytest

from memlab._util.units import GIB
from memlab.devices import cards
from memlab.devices.card_table import TABLE

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
AT_HALF_RATE = ("rtx-", "a10g")  # GeForce cards and what is made of them, when summing in fp32
# boost clocks in MHz: datasheets, white papers and product pages; of laptops the upper end
CLOCKS = {
    "b200": 1965, "h200": 1980, "h100": 1980, "h100-pcie": 1755, "a100-40": 1410, "a100-80": 1410,
    "a100-pcie-40": 1410, "a100-pcie-80": 1410, "l40s": 2520, "l4": 2040, "a10": 1695,
    "a10g": 1710, "v100-16": 1530, "v100-32": 1530, "v100-pcie-16": 1380, "v100-pcie-32": 1380,
    "t4": 1590, "p100": 1303, "p4": 1063, "a6000": 1800, "rtx-5090": 2407, "rtx-5080": 2617,
    "rtx-5070": 2512, "rtx-4090": 2520, "rtx-4080": 2505, "rtx-4070": 2475, "rtx-4060": 2460,
    "rtx-3090": 1695, "rtx-3080": 1710, "rtx-3070": 1725, "rtx-3060": 1777,
    "rtx-5090-laptop": 2160, "rtx-5080-laptop": 2287, "rtx-5070-laptop": 2347,
    "rtx-4090-laptop": 2040, "rtx-4080-laptop": 2280, "rtx-4070-laptop": 2175,
    "rtx-4060-laptop": 2370, "rtx-3080-laptop-16": 1710, "rtx-3080-laptop-8": 1710,
    "rtx-3070-laptop": 1620, "rtx-3060-laptop": 1703,
}  # fmt: skip
# the H100 white paper gives its tensor cores a clock of their own
TENSOR_CLOCKS = {"h200": 1830, "h100": 1830, "h100-pcie": 1620}
# bus in bits x data rate in Gbit/s, of the same sources
MEMORY_BUSES = {
    "b200": (8192, 7.5), "h200": (6144, 6.25), "h100": (5120, 5.23), "h100-pcie": (5120, 3.19),
    "a100-40": (5120, 2.43), "a100-80": (5120, 3.19), "a100-pcie-40": (5120, 2.43),
    "a100-pcie-80": (5120, 3.02), "l40s": (384, 18), "l4": (192, 12.5), "a10": (384, 12.5),
    "a10g": (384, 12.5), "v100-16": (4096, 1.75), "v100-32": (4096, 1.75),
    "v100-pcie-16": (4096, 1.75), "v100-pcie-32": (4096, 1.75), "t4": (256, 10),
    "p100": (4096, 1.43), "p4": (256, 6), "a6000": (384, 16), "rtx-5090": (512, 28),
    "rtx-5080": (256, 30), "rtx-5070": (192, 28), "rtx-4090": (384, 21), "rtx-4080": (256, 22.4),
    "rtx-4070": (192, 21), "rtx-4060": (128, 17), "rtx-3090": (384, 19.5), "rtx-3080": (320, 19),
    "rtx-3070": (256, 14), "rtx-3060": (192, 15), "rtx-5090-laptop": (256, 28),
    "rtx-5080-laptop": (256, 28), "rtx-5070-laptop": (128, 24), "rtx-4090-laptop": (256, 18),
    "rtx-4080-laptop": (192, 18), "rtx-4070-laptop": (128, 16), "rtx-4060-laptop": (128, 16),
    "rtx-3080-laptop-16": (256, 14), "rtx-3080-laptop-8": (256, 14),
    "rtx-3070-laptop": (256, 14), "rtx-3060-laptop": (192, 14),
}  # fmt: skip
FORMATS = ("fp32", "tf32", "bf16", "fp16")

every_card = pytest.mark.parametrize("card", TABLE, ids=cards.names())


def peaks(card):
    return [getattr(card, f"{name}_flops_per_second") for name in FORMATS]


@every_card
def test_peaks_are_units_times_two_times_the_clock(card):
    fp32, tf32, bf16, fp16 = peaks(card)
    clock = CLOCKS[card.name] * 1e6
    units = FP32_UNITS[card.compute_capability] * card.num_multiprocessors
    assert fp32 == pytest.approx(2 * units * clock, rel=0.03)
    if card.compute_capability not in FP16_UNITS:
        return

    units = FP16_UNITS[card.compute_capability] * card.num_multiprocessors
    units /= 2 if card.name.startswith(AT_HALF_RATE) else 1
    clock = TENSOR_CLOCKS.get(card.name, CLOCKS[card.name]) * 1e6
    assert fp16 == pytest.approx(2 * units * clock, rel=0.03)
    if tf32 is not None:
        assert bf16 == fp16
        assert tf32 == pytest.approx(fp16 / 2, rel=0.03)


@every_card
def test_bandwidth_is_the_bus_times_its_rate(card):
    bits, gigabits = MEMORY_BUSES[card.name]
    assert card.memory_bytes_per_second == pytest.approx(bits * gigabits / 8 * 1e9, rel=0.03)


@every_card
def test_figures_are_possible(card):
    assert 5 * GIB < card.memory_bytes < 180 * GIB
    assert 0 < card.context_bytes < card.memory_bytes // 10
    assert card.usable_bytes == card.memory_bytes - card.context_bytes
    fp32, tf32, bf16, fp16 = peaks(card)
    has_tensor_cores = card.compute_capability >= (7, 0)
    assert (fp16 is not None) == has_tensor_cores
    assert (tf32 is None) == (bf16 is None) == (card.compute_capability < (8, 0))
    assert card.has_bf16 == (bf16 is not None)
    assert all(peak is None or peak >= fp32 for peak in (tf32, bf16, fp16))


SIZES = {"3060-laptop": 6, "3080-laptop-16": 16, "3080": 10, "3060": 12, "4060": 8, "a6000": 48,
         "b200": 180, "h200": 141, "h100": 80, "l40s": 48, "l4": 24, "a10": 24, "t4": 16, "p4": 8,
         "p100": 16, "5090": 32, "5090-laptop": 24}  # fmt: skip


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_cuda_gives_a_little_less_than_the_size_on_the_box(name, size):
    held = cards.find(name).memory_bytes
    box = size * (1e9 if size in (141, 180) else GIB)  # these are sold in units of 1e9
    assert 0.91 * box < held <= 1.07 * box


def test_people_are_shown_the_kinds_of_cards_in_this_order():
    found = [card.name for card in TABLE]
    laptops = [name for name in found if "-laptop" in name]
    desktops = [name for name in found if name.startswith("rtx-") and name not in laptops]
    assert found[-len(laptops) :] == laptops
    assert found[-len(laptops) - len(desktops) : -len(laptops)] == desktops
    assert found.index("p4") + 1 == found.index("a6000") == found.index("rtx-5090") - 1


@every_card
def test_power_is_known_and_in_proportion_to_the_peak(card):
    watts = card.board_watts / (card.fp32_flops_per_second / 1e12)
    assert 2 < watts < 30  # an L4 has 2.4 W for each TFLOP/s, a P100 27
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
