"""The CUDA cards that memlab knows: what each holds and how fast it can be at best.

Peaks are dense (datasheets since Ampere print twice as much, "with sparsity"), at the boost clock;
where a format has two, the one that sums in fp32, as PyTorch does. So the P4 and the P100, which
have no tensor cores, have no fp16 peak of their own: what a P100 does at twice the rate of fp32
sums in fp16. Left out: MIG slices, power limits, cards that clock higher than their datasheet, and
cards that are sold under the name of another, such as the RTX 3080 with 12 GB.

Sources, by the letter in the table:
  H  NVIDIA H100 architecture white paper (SXM5 and PCIe); H200 datasheet (same chip, 4.8 TB/s)
  K  NVIDIA Blackwell datasheet, an eighth of HGX B200 (B200 at 1000 W)
  A  NVIDIA A100 datasheet (SXM4 and PCIe: equal peaks, other bandwidths at 80 GB), A10 datasheet
  N  NVIDIA A10G datasheet, as Amazon publishes it
  V  NVIDIA V100 datasheet (SXM2, and PCIe at a lower clock), T4 datasheet
  P  NVIDIA P100 (PCIe) and P4 datasheets
  G  NVIDIA GA102 white paper 2.0 (RTX 3080; appendices: RTX 3070, RTX 3090, RTX A6000)
  D  NVIDIA Ada white paper 2.x and the L4 and L40S datasheets
  B  NVIDIA RTX Blackwell white paper (RTX 5070, 5080, 5090)
  R  no white paper of its own: CUDA cores x 2 x boost clock from the product page, tensor cores by
     the ratio of the same architecture's white paper (fp16 and bf16 twice fp32, tf32 equal to it)
  L  as R for a laptop, at the upper end of the boost clocks of the product page, which a laptop
     with a lower power limit does not reach; bandwidth is the bus of the product page times the
     memory clock that machines report (GDDR6: 14 Gbit/s of the RTX 3000, 16 and 18 of the 4000;
     GDDR7: 24 of the RTX 5070, 28 of the 5080 and 5090)
The bus is PCIe of 16 lanes in each card's datasheet or product page (8 of the RTX 4060 and of
laptops with the same or the next larger chip), its rate that of the PCI Express base specification
in one direction: lanes x 8, 16 or 32 GT/s (3.0, 4.0, 5.0) x 128/130 / 8 bytes. The machine around a
card may have fewer lanes or an older generation.

Board power is the largest of the datasheet or product page; of a laptop, the upper end of the
graphics power that its page gives, of an A10G the limit that nvidia-smi reports on Amazon's
machines. Error correction lies in the memory itself on data-centre cards with GDDR, which are
delivered with it on: it takes some of the memory, which is why these show less, and bandwidth too.
HBM has room of its own for it; workstation cards are delivered with it off.

Memory is what `torch.cuda.get_device_properties(...).total_memory` says, as posted from Linux
machines (deviceQuery, PyTorch issues and logs). It is 1-8 % less than the size on the box. Drivers
differ by up to 1 %, on cards of 8 GB and less by up to 3 %; Windows shows nearly all. The RTX 4060
is a figure of its 8 GB laptop form, "7.75 GiB". Where no post was found, it is derived:
  RTX 4090 and 4080 laptop: of the desktop card of the same chip and size (RTX 4080, RTX 4070)
  RTX 5080 laptop: of the desktop RTX 5080, for which nvidia-smi reports the same 16303 MiB
  RTX 5070 laptop: nvidia-smi's 8151 MiB less 470 MiB, as for RTX 5070 (472) and RTX 5080 (463)
  RTX 3080 laptop of 8 GB: of the RTX 3070 laptop, the same chip and size
The RTX 5090 laptop is posted as "23.4 GiB", the P4 by deviceQuery alone.

`reached.py` has what kernels came to on data-centre cards.
"""

from memlab.arguments.units import MIB
from memlab.devices.card import Card
from memlab.devices.reached import with_reached

Peaks = tuple[float, float | None, float | None, float | None]  # fp32, tf32, bf16, fp16


def _card(
    name: str,
    title: str,
    memory_bytes: int,
    bandwidth: float,
    peaks: Peaks,
    capability: tuple[int, int],
    multiprocessors: int,
    host_bandwidth: float,
    watts: int,
    ecc_in_memory: bool = False,
) -> Card:
    return Card(
        name=name,
        title=title,
        memory_bytes=memory_bytes,
        memory_bytes_per_second=bandwidth,
        fp32_flops_per_second=peaks[0],
        tf32_flops_per_second=peaks[1],
        bf16_flops_per_second=peaks[2],
        fp16_flops_per_second=peaks[3],
        compute_capability=capability,
        num_multiprocessors=multiprocessors,
        host_bytes_per_second=host_bandwidth,
        board_watts=watts,
        ecc_in_memory=ecc_in_memory,
    )


_P3, _P4, _P5 = 15.75e9, 31.5e9, 63e9
_HOPPER = (66.9e12, 494.7e12, 989.4e12, 989.4e12)
_A100 = (19.5e12, 156e12, 312e12, 312e12)
_V100 = (15.7e12, None, None, 125e12)
_V100_PCIE = (14e12, None, None, 112e12)


def _of_ratio(fp32: float) -> Peaks:
    """Return the peaks of a GeForce card since Ampere: fp16 and bf16 at twice fp32, tf32 at it."""
    return fp32, fp32, 2 * fp32, 2 * fp32


# name, title, memory, bytes a second, (fp32, tf32, bf16, fp16), compute capability,
# multiprocessors, bus, board power in watts, whether error correction lies in the memory
# fmt: off
_DATA_CENTRE = (
    _card("b200", "NVIDIA B200", 182_642 * MIB, 7.7e12,
          (75e12, 1125e12, 2250e12, 2250e12), (10, 0), 148, _P5, 1000),  # K
    _card("h200", "NVIDIA H200", 143_156 * MIB, 4.8e12, _HOPPER, (9, 0), 132, _P5, 700),  # H
    _card("h100", "NVIDIA H100 80GB HBM3", 81_089 * MIB, 3.35e12,
          _HOPPER, (9, 0), 132, _P5, 700),  # H
    _card("h100-pcie", "NVIDIA H100 PCIe", 81_008 * MIB, 2e12,
          (51.2e12, 378e12, 756e12, 756e12), (9, 0), 114, _P5, 350),  # H
    _card("a100-40", "NVIDIA A100-SXM4-40GB", 40_339 * MIB, 1.555e12,
          _A100, (8, 0), 108, _P4, 400),  # A
    _card("a100-80", "NVIDIA A100-SXM4-80GB", 81_158 * MIB, 2.039e12,
          _A100, (8, 0), 108, _P4, 400),  # A
    _card("a100-pcie-40", "NVIDIA A100-PCIE-40GB", 40_377 * MIB, 1.555e12,
          _A100, (8, 0), 108, _P4, 250),  # A
    _card("a100-pcie-80", "NVIDIA A100 80GB PCIe", 81_154 * MIB, 1.935e12,
          _A100, (8, 0), 108, _P4, 300),  # A
    _card("l40s", "NVIDIA L40S", 45_589 * MIB, 864e9,
          (91.6e12, 183e12, 362.05e12, 362.05e12), (8, 9), 142, _P4, 350, True),  # D
    _card("l4", "NVIDIA L4", 22_518 * MIB, 300e9,
          (30.3e12, 60e12, 121e12, 121e12), (8, 9), 58, _P4, 72, True),  # D
    _card("a10", "NVIDIA A10", 22_599 * MIB, 600e9,
          (31.2e12, 62.5e12, 125e12, 125e12), (8, 6), 72, _P4, 150, True),  # A
    _card("a10g", "NVIDIA A10G", 22_587 * MIB, 600e9,
          _of_ratio(35e12), (8, 6), 80, _P4, 300, True),  # N
    _card("v100-16", "Tesla V100-SXM2-16GB", 16_130 * MIB, 900e9, _V100, (7, 0), 80, _P3, 300),  # V
    _card("v100-32", "Tesla V100-SXM2-32GB", 32_494 * MIB, 900e9, _V100, (7, 0), 80, _P3, 300),  # V
    _card("v100-pcie-16", "Tesla V100-PCIE-16GB", 16_160 * MIB, 900e9,
          _V100_PCIE, (7, 0), 80, _P3, 250),  # V
    _card("v100-pcie-32", "Tesla V100-PCIE-32GB", 32_510 * MIB, 900e9,
          _V100_PCIE, (7, 0), 80, _P3, 250),  # V
    _card("t4", "Tesla T4", 15_095 * MIB, 320e9,
          (8.1e12, None, None, 65e12), (7, 5), 40, _P3, 70, True),  # V
    _card("p100", "Tesla P100-PCIE-16GB", 16_280 * MIB, 732e9,
          (9.3e12, None, None, None), (6, 0), 56, _P3, 250),  # P
    _card("p4", "Tesla P4", 7_612 * MIB, 192e9,
          (5.5e12, None, None, None), (6, 1), 20, _P3, 75, True),  # P
)
_WORKSTATION = (
    _card("a6000", "NVIDIA RTX A6000", 48_676 * MIB, 768e9,
          (38.7e12, 77.4e12, 154.8e12, 154.8e12), (8, 6), 84, _P4, 300),  # G
)
_CONSUMER = (
    _card("rtx-5090", "NVIDIA GeForce RTX 5090", 32_109 * MIB, 1.792e12,
          (104.8e12, 104.8e12, 209.5e12, 209.5e12), (12, 0), 170, _P5, 575),  # B
    _card("rtx-5080", "NVIDIA GeForce RTX 5080", 15_840 * MIB, 960e9,
          (56.3e12, 56.3e12, 112.6e12, 112.6e12), (12, 0), 84, _P5, 360),  # B
    _card("rtx-5070", "NVIDIA GeForce RTX 5070", 11_755 * MIB, 672e9,
          (30.9e12, 30.9e12, 61.7e12, 61.7e12), (12, 0), 48, _P5, 250),  # B
    _card("rtx-4090", "NVIDIA GeForce RTX 4090", 24_207 * MIB, 1.008e12,
          (82.6e12, 82.6e12, 165.2e12, 165.2e12), (8, 9), 128, _P4, 450),  # D
    _card("rtx-4080", "NVIDIA GeForce RTX 4080", 16_049 * MIB, 716.8e9,
          (48.7e12, 48.7e12, 97.5e12, 97.5e12), (8, 9), 76, _P4, 320),  # D
    _card("rtx-4070", "NVIDIA GeForce RTX 4070", 11_994 * MIB, 504e9,
          _of_ratio(29.1e12), (8, 9), 46, _P4, 200),  # R
    _card("rtx-4060", "NVIDIA GeForce RTX 4060", 7_936 * MIB, 272e9,
          _of_ratio(15.1e12), (8, 9), 24, _P4 / 2, 115),  # R
    _card("rtx-3090", "NVIDIA GeForce RTX 3090", 24_268 * MIB, 936e9,
          (35.6e12, 35.6e12, 71e12, 71e12), (8, 6), 82, _P4, 350),  # G
    _card("rtx-3080", "NVIDIA GeForce RTX 3080", 9_987 * MIB, 760e9,
          (29.8e12, 29.8e12, 59.5e12, 59.5e12), (8, 6), 68, _P4, 320),  # G
    _card("rtx-3070", "NVIDIA GeForce RTX 3070", 7_842 * MIB, 448e9,
          (20.3e12, 20.3e12, 40.6e12, 40.6e12), (8, 6), 46, _P4, 220),  # G
    _card("rtx-3060", "NVIDIA GeForce RTX 3060", 11_938 * MIB, 360e9,
          (12.7e12, 12.7e12, 25.5e12, 25.5e12), (8, 6), 28, _P4, 170),  # R
)
_LAPTOP = (
    _card("rtx-5090-laptop", "NVIDIA GeForce RTX 5090 Laptop GPU", 23_962 * MIB, 896e9,
          _of_ratio(45.3e12), (12, 0), 82, _P5, 150),  # L
    _card("rtx-5080-laptop", "NVIDIA GeForce RTX 5080 Laptop GPU", 15_840 * MIB, 896e9,
          _of_ratio(35.1e12), (12, 0), 60, _P5, 150),  # L
    _card("rtx-5070-laptop", "NVIDIA GeForce RTX 5070 Laptop GPU", 7_681 * MIB, 384e9,
          _of_ratio(21.6e12), (12, 0), 36, _P5 / 2, 100),  # L
    _card("rtx-4090-laptop", "NVIDIA GeForce RTX 4090 Laptop GPU", 16_049 * MIB, 576e9,
          _of_ratio(39.7e12), (8, 9), 76, _P4, 150),  # L
    _card("rtx-4080-laptop", "NVIDIA GeForce RTX 4080 Laptop GPU", 11_994 * MIB, 432e9,
          _of_ratio(33.9e12), (8, 9), 58, _P4, 150),  # L
    _card("rtx-4070-laptop", "NVIDIA GeForce RTX 4070 Laptop GPU", 7_806 * MIB, 256e9,
          _of_ratio(20e12), (8, 9), 36, _P4 / 2, 115),  # L
    _card("rtx-4060-laptop", "NVIDIA GeForce RTX 4060 Laptop GPU", 7_806 * MIB, 256e9,
          _of_ratio(14.6e12), (8, 9), 24, _P4 / 2, 115),  # L
    _card("rtx-3080-laptop-16", "NVIDIA GeForce RTX 3080 Laptop GPU", 15_993 * MIB, 448e9,
          _of_ratio(21e12), (8, 6), 48, _P4, 150),  # L
    _card("rtx-3080-laptop-8", "NVIDIA GeForce RTX 3080 Laptop GPU", 7_982 * MIB, 448e9,
          _of_ratio(21e12), (8, 6), 48, _P4, 150),  # L
    _card("rtx-3070-laptop", "NVIDIA GeForce RTX 3070 Laptop GPU", 7_982 * MIB, 448e9,
          _of_ratio(16.6e12), (8, 6), 40, _P4, 125),  # L
    _card("rtx-3060-laptop", "NVIDIA GeForce RTX 3060 Laptop GPU", 5_806 * MIB, 336e9,
          _of_ratio(13.1e12), (8, 6), 30, _P4, 115),  # L
)
# fmt: on
TABLE = (*map(with_reached, _DATA_CENTRE), *_WORKSTATION, *_CONSUMER, *_LAPTOP)
"""Every card, in the order in which people are shown them."""
