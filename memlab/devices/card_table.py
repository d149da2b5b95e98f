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

`REACHED` has what kernels came to on data-centre cards.
"""

import dataclasses
from dataclasses import dataclass

from memlab._util.units import KIB, MIB

# `Card`: what is known of one CUDA card, and what PyTorch and CUDA take of its memory.

# "non-PyTorch memory" of out-of-memory messages (in use, less allocated and cached), torch 2.x with
# lazy loading: T4 (40 multiprocessors) 100 MiB, RTX 4060 laptop (24) 115, RTX 4090 (128) 472 and
# 504, L40 (142) 507; an idle RTX 6000 Ada (142) 426 (unsloth-zoo pull request 1053).
CONTEXT_BASE_BYTES = 32 * MIB
CONTEXT_BYTES_PER_MULTIPROCESSOR = 7 * MIB // 2
CONTEXT_BYTES_UNKNOWN = 512 * MIB

# PyTorch's parseChosenWorkspaceSize (CublasHandlePool.cpp): ":4096:2:16:8", or 32 MiB on these
# architectures. Blackwell (10, 12) since pytorch pull request 175344; torch 2.11 has 9.0 alone.
CUBLAS_WORKSPACE_BYTES = 2 * (4096 * KIB) + 8 * (16 * KIB)
CUBLAS_WORKSPACE_BYTES_LARGE = 32 * MIB
LARGE_WORKSPACE_MAJORS = (9, 10, 12)

# The compute capability of the first cards with tensor cores for TF32 and bf16, and with kernels of
# flash_attn (its README: "Ampere, Ada, or Hopper GPUs").
AMPERE = (8, 0)
VOLTA, TURING = (7, 0), (7, 5)


# Results of fp64 a clock and multiprocessor as a share of those of fp32, by compute capability: the
# table "Throughput of Native Arithmetic Instructions" of the CUDA C++ Programming Guide.
FP64_SHARES = {(6, 0): 1 / 2, (7, 0): 1 / 2, (8, 0): 1 / 2, (9, 0): 1 / 2, (10, 0): 1 / 2,
               (6, 1): 1 / 32, (7, 5): 1 / 32}  # fmt: skip
FP64_SHARE_OF_OTHERS = 1 / 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """What the fastest kernels on a card's tensor cores reached when others timed them.

    Attributes:
        product_share: of the dense peak in bf16, by the fastest of many matrix products.
        product_shape: rows, columns and inner size of that product.
        num_multiprocessors: of the card that it was timed on.
        attention_share: of the dense peak, by the forward of PyTorch's flash attention.
        attention_backward_share: the same of its backward.
    """

    product_share: float
    product_shape: tuple[int, int, int]
    num_multiprocessors: int
    attention_share: float
    attention_backward_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What is known about a card. None means not known, or for a number format not supported.

    Attributes:
        name: as `memlab.predict` takes it, for instance "rtx-4090" or "24GiB".
        title: as the driver names it, or the name where there is none.
        memory_bytes: all that CUDA can give, the context included.
        memory_bytes_per_second: datasheet peak of the card's memory, not of its caches.
        fp32_flops_per_second: on the CUDA cores.
        tf32_flops_per_second: on the tensor cores, as are bf16 and fp16. A card without them takes
            as long for matrix products in fp16 as in fp32, since PyTorch sums them in fp32.
        bf16_flops_per_second: summed in fp32.
        fp16_flops_per_second: summed in fp32.
        compute_capability: major and minor.
        num_multiprocessors: as `multi_processor_count` of PyTorch.
        host_bytes_per_second: of the bus to the host, in one direction; PCIe 4.0 where not known.
        board_watts: the most that the board may take; cards with little of it for their peak run
            below their boost clock when they work.
        ecc_in_memory: whether error correction is on and takes a share of memory and bandwidth.
        reached: the most that was timed on tensor cores of this kind; None where it is not known.
    """

    name: str
    title: str
    memory_bytes: int
    memory_bytes_per_second: float | None = None
    fp32_flops_per_second: float | None = None
    tf32_flops_per_second: float | None = None
    bf16_flops_per_second: float | None = None
    fp16_flops_per_second: float | None = None
    compute_capability: tuple[int, int] | None = None
    num_multiprocessors: int | None = None
    host_bytes_per_second: float = 31.5e9
    board_watts: float | None = None
    ecc_in_memory: bool = False
    reached: Reached | None = None

    @property
    def has_bf16(self) -> bool:
        """Whether the card has bf16 units; an unknown card counts as not having them."""
        if self.compute_capability is None:
            return self.bf16_flops_per_second is not None
        return self.compute_capability >= AMPERE

    @property
    def int8_flops_per_second(self) -> float | None:
        """Rate of products of int8 numbers.

        Since Turing, tensor cores multiply them at twice the rate of fp16: the datasheets of T4
        (130 and 65 TOP/s), A100 (624 and 312) and H100 (1979 and 989). On a GeForce it is more.
        """
        has_cores = self.compute_capability is not None and self.compute_capability >= TURING
        if has_cores and self.fp16_flops_per_second is not None:
            return 2 * self.fp16_flops_per_second
        return self.fp32_flops_per_second

    @property
    def is_before_volta(self) -> bool:
        """Whether the card is known to be older than Volta."""
        return self.compute_capability is not None and self.compute_capability < VOLTA

    @property
    def is_before_ampere(self) -> bool:
        """Whether the card is known to be older than Ampere."""
        return self.compute_capability is not None and self.compute_capability < AMPERE

    @property
    def fp64_flops_per_second(self) -> float | None:
        """On the CUDA cores; tensor cores for fp64 (A100, H100) are not regarded."""
        if self.fp32_flops_per_second is None or self.compute_capability is None:
            return None
        share = FP64_SHARES.get(self.compute_capability, FP64_SHARE_OF_OTHERS)
        return self.fp32_flops_per_second * share

    @property
    def context_bytes(self) -> int:
        """Memory that CUDA holds besides the allocator (context, kernels), estimated +-100 MiB."""
        if self.num_multiprocessors is None:
            return CONTEXT_BYTES_UNKNOWN
        return CONTEXT_BASE_BYTES + CONTEXT_BYTES_PER_MULTIPROCESSOR * self.num_multiprocessors

    @property
    def usable_bytes(self) -> int:
        """Memory that the caching allocator can reserve; an estimate, like the context."""
        return self.memory_bytes - self.context_bytes

    @property
    def cublas_workspace_bytes(self) -> int:
        """PyTorch's default cuBLAS workspace: one a stream, from the caching allocator.

        cuBLASLt (`addmm` with a bias) shares it unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0 (pytorch
        pull request 168175). Not regarded: the environment variable CUBLAS_WORKSPACE_CONFIG.
        """
        major = self.compute_capability[0] if self.compute_capability else 0
        large = major in LARGE_WORKSPACE_MAJORS
        return CUBLAS_WORKSPACE_BYTES_LARGE if large else CUBLAS_WORKSPACE_BYTES


# What the fastest kernels reached on the tensor cores of data-centre cards when others
# timed them.
#
# No kernel comes up to the dense peak of a datasheet, and a card has a share of its own of
# it:
#
#   products in bf16  stas00/ml-engineering, compute/accelerator/README.md at 744d01e, table
# "Maximum Achievable Matmul FLOPS": A100 SXM 271.2 TFLOP/s (86.9 %), A100 PCIe 252.9 (81.1
# %), H100 SXM 794.5 (80.3 %, "H200 is the same"), B200 SXM 1745.0 (77.6 %); each is the
# fastest of many shapes, which stand here beside it flash attention   FlashAttention-2,
# PyTorch's flash kernel: on an A100 up to 73 % in forward and 63 % in backward (arXiv
# 2307.08691, section 4); on an H100 35 % (arXiv 2407.08608, abstract), and 335 TFLOP/s of
# forward and backward together, 34 % (arXiv 2307.08691, section 4.1)
#
# Assumed: the H100 PCIe reaches the share of the SXM form, and the B200 in attention that
# of the H100, since the kernel uses the instructions of neither. Data-centre cards that the
# table lacks reach the highest share in it, that of the A100: then none is faster than was
# seen of any. The fp32 products of five such cards, to which `product_fp32` in
# kernel_times.json was fitted, come to the same share. GeForce and RTX cards have no
# figure: they clock above their datasheet where they can, as steps on an RTX 3090 show.

_A100 = Reached(
    product_share=0.869,
    product_shape=(1024, 10240, 5120),
    num_multiprocessors=108,
    attention_share=0.73,
    attention_backward_share=0.63,
)
_A100_PCIE = dataclasses.replace(_A100, product_share=0.811, product_shape=(2048, 5120, 6144))
_H100 = Reached(
    product_share=0.803,
    product_shape=(2048, 2048, 13312),
    num_multiprocessors=132,
    attention_share=0.35,
    attention_backward_share=0.34,
)
_B200 = dataclasses.replace(
    _H100, product_share=0.776, product_shape=(1792, 16128, 3072), num_multiprocessors=148
)
_BY_NAME = {
    "a100-pcie-40": _A100_PCIE,
    "a100-pcie-80": _A100_PCIE,
    "h100": _H100,
    "h100-pcie": _H100,
    "h200": _H100,
    "b200": _B200,
}


def with_reached(card: Card) -> Card:
    """Return a data-centre card with what was reached; the same card if it has no tensor cores."""
    if card.fp16_flops_per_second is None:
        return card
    return dataclasses.replace(card, reached=_BY_NAME.get(card.name, _A100))


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
_A100_CARD_TABLE = (19.5e12, 156e12, 312e12, 312e12)
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
          _A100_CARD_TABLE, (8, 0), 108, _P4, 400),  # A
    _card("a100-80", "NVIDIA A100-SXM4-80GB", 81_158 * MIB, 2.039e12,
          _A100_CARD_TABLE, (8, 0), 108, _P4, 400),  # A
    _card("a100-pcie-40", "NVIDIA A100-PCIE-40GB", 40_377 * MIB, 1.555e12,
          _A100_CARD_TABLE, (8, 0), 108, _P4, 250),  # A
    _card("a100-pcie-80", "NVIDIA A100 80GB PCIe", 81_154 * MIB, 1.935e12,
          _A100_CARD_TABLE, (8, 0), 108, _P4, 300),  # A
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
