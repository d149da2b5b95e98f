"""CUDA cards that need not be in this machine: what each holds and how fast it can be at best.

Peaks are dense (datasheets since Ampere print twice as much, "with sparsity"), at the boost clock;
where a format has two, the one that sums in fp32, as PyTorch does. Left out: MIG slices, power
limits, cards that clock higher than their datasheet, and PCIe variants of the SXM cards.

Sources, by the letter in the table:
  H  NVIDIA H100 architecture white paper (SXM5); H200 datasheet (same chip, 4.8 TB/s)
  A  NVIDIA A100 datasheet (SXM4; the PCIe card has the same peaks), A10 datasheet
  V  NVIDIA V100 datasheet (SXM2), T4 datasheet
  G  NVIDIA GA102 white paper 2.0, appendices A and C (RTX 3090, RTX A6000)
  D  NVIDIA Ada white paper 2.x and the L4 and L40S datasheets
  B  NVIDIA RTX Blackwell white paper
  R  no white paper of its own: CUDA cores x 2 x boost clock from the product page, tensor cores by
     the ratio of the same architecture's white paper (fp16 and bf16 twice fp32, tf32 equal to it)
The bus is PCIe of 16 lanes in each card's datasheet or product page (8 of the RTX 4060), its rate
that of the PCI Express base specification in one direction: lanes x 8, 16 or 32 GT/s (3.0, 4.0,
5.0) x 128/130 / 8 bytes. The machine around a card may have fewer lanes or an older generation.
Memory is what `torch.cuda.get_device_properties(...).total_memory` says, as posted from Linux
machines (deviceQuery, PyTorch issues and logs); drivers differ by up to 1 %, and it is 1-8 % less
than the size on the box. The RTX 4060 is a figure of its 8 GB laptop form, "7.75 GiB".
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import Literal

import torch

from memlab.arguments.checks import checked
from memlab.arguments.quoting import shown
from memlab.arguments.units import GIB, KIB, MIB, format_bytes, parse_bytes
from memlab.devices.here import resolve_device
from memlab.errors import ConfigError, DeviceError
from memlab.operators.cost import KnownCosts

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

SMALLEST_CARD_BYTES = GIB  # nobody means a size in bytes by "4090" or "24"
VENDOR = {"nvidia", "geforce", "tesla", "gpu", "sxm", "sxm2", "sxm4", "sxm5", "hbm3"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What is known about a card. None means not known, or for a number format not supported.

    Attributes:
        name: as `memlab.predict` takes it, for instance "rtx-4090" or "24GiB".
        title: as the driver names it, or the name where there is none.
        memory_bytes: all that CUDA can give, the context included.
        memory_bytes_per_second: datasheet peak of the card's memory, not of its caches.
        fp32_flops_per_second: on the CUDA cores.
        tf32_flops_per_second: on the tensor cores, as are bf16 and fp16.
        bf16_flops_per_second: summed in fp32.
        fp16_flops_per_second: summed in fp32.
        compute_capability: major and minor.
        num_multiprocessors: as `multi_processor_count` of PyTorch.
        host_bytes_per_second: of the bus to the host, in one direction; PCIe 4.0 where not known.
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

    @property
    def has_bf16(self) -> bool:
        """Whether the card has bf16 units; an unknown card counts as not having them."""
        if self.compute_capability is None:
            return self.bf16_flops_per_second is not None
        return self.compute_capability >= (8, 0)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The device that a prediction is made for.

    Attributes:
        kind: whose semantics hold.
        card: None on a CPU, and for "cuda" without a card: no memory limit, no times.
        name: what `StepResult.device` shows.
        costs: of operators, as a record has them; None to find them here, or by the datasheet.
    """

    kind: Literal["cpu", "cuda"]
    card: Card | None
    name: str
    costs: KnownCosts | None = None


def _card(
    name: str,
    title: str,
    memory_bytes: int,
    bandwidth: float,
    peaks: tuple[float, float | None, float | None, float],
    capability: tuple[int, int],
    multiprocessors: int,
    host_bandwidth: float,
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
    )


_P3, _P4, _P5 = 15.75e9, 31.5e9, 63e9

# name, title, memory, bytes a second, (fp32, tf32, bf16, fp16), compute capability,
# multiprocessors, bus
_HOPPER = (66.9e12, 494.7e12, 989.4e12, 989.4e12)
_A100 = (19.5e12, 156e12, 312e12, 312e12)
_V100 = (15.7e12, None, None, 125e12)
# fmt: off
_TABLE = (
    _card("h200", "NVIDIA H200", 143_156 * MIB, 4.8e12, _HOPPER, (9, 0), 132, _P5),  # H
    _card("h100", "NVIDIA H100 80GB HBM3", 81_089 * MIB, 3.35e12, _HOPPER, (9, 0), 132, _P5),  # H
    _card("a100-40", "NVIDIA A100-SXM4-40GB", 40_339 * MIB, 1.555e12, _A100, (8, 0), 108, _P4),  # A
    _card("a100-80", "NVIDIA A100-SXM4-80GB", 81_158 * MIB, 2.039e12, _A100, (8, 0), 108, _P4),  # A
    _card("l40s", "NVIDIA L40S", 45_589 * MIB, 864e9,
          (91.6e12, 183e12, 362.05e12, 362.05e12), (8, 9), 142, _P4),  # D
    _card("l4", "NVIDIA L4", 22_518 * MIB, 300e9,
          (30.3e12, 60e12, 121e12, 121e12), (8, 9), 58, _P4),  # D
    _card("a10", "NVIDIA A10", 22_599 * MIB, 600e9,
          (31.2e12, 62.5e12, 125e12, 125e12), (8, 6), 72, _P4),  # A
    _card("a6000", "NVIDIA RTX A6000", 48_676 * MIB, 768e9,
          (38.7e12, 77.4e12, 154.8e12, 154.8e12), (8, 6), 84, _P4),  # G
    _card("v100-16", "Tesla V100-SXM2-16GB", 16_130 * MIB, 900e9, _V100, (7, 0), 80, _P3),  # V
    _card("v100-32", "Tesla V100-SXM2-32GB", 32_494 * MIB, 900e9, _V100, (7, 0), 80, _P3),  # V
    _card("t4", "Tesla T4", 15_095 * MIB, 320e9, (8.1e12, None, None, 65e12), (7, 5), 40, _P3),  # V
    _card("rtx-5090", "NVIDIA GeForce RTX 5090", 32_109 * MIB, 1.792e12,
          (104.8e12, 104.8e12, 209.5e12, 209.5e12), (12, 0), 170, _P5),  # B
    _card("rtx-4090", "NVIDIA GeForce RTX 4090", 24_207 * MIB, 1.008e12,
          (82.6e12, 82.6e12, 165.2e12, 165.2e12), (8, 9), 128, _P4),  # D
    _card("rtx-4080", "NVIDIA GeForce RTX 4080", 16_049 * MIB, 716.8e9,
          (48.7e12, 48.7e12, 97.5e12, 97.5e12), (8, 9), 76, _P4),  # D
    _card("rtx-4060", "NVIDIA GeForce RTX 4060", 7_936 * MIB, 272e9,
          (15.1e12, 15.1e12, 30.2e12, 30.2e12), (8, 9), 24, _P4 / 2),  # R
    _card("rtx-3090", "NVIDIA GeForce RTX 3090", 24_268 * MIB, 936e9,
          (35.6e12, 35.6e12, 71e12, 71e12), (8, 6), 82, _P4),  # G
    _card("rtx-3060", "NVIDIA GeForce RTX 3060", 11_938 * MIB, 360e9,
          (12.7e12, 12.7e12, 25.5e12, 25.5e12), (8, 6), 28, _P4),  # R
)
# fmt: on
_OTHER_SPELLINGS = {
    "H100 80GB": "h100",
    "H200 141GB": "h200",
    "A100 40GB": "a100-40",
    "A100-PCIE-40GB": "a100-40",
    "A100 80GB": "a100-80",
    "A100 80GB PCIe": "a100-80",
    "RTX 3060 12GB": "rtx-3060",
}


def _key(text: str) -> str:
    """Return a name without vendor, form factor, case and separators: "NVIDIA L4" -> "l4"."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return "".join(word.removesuffix("gb") for word in words if word not in VENDOR)


_BY_KEY = {_key(card.title): card for card in _TABLE} | {_key(card.name): card for card in _TABLE}
_BY_KEY |= {key.removeprefix("rtx"): card for key, card in _BY_KEY.items()}
_BY_KEY |= {_key(text): card for text, name in _OTHER_SPELLINGS.items() for card in _TABLE
            if card.name == name}  # fmt: skip


def names() -> tuple[str, ...]:
    """Return the names of all cards that memlab knows."""
    return tuple(card.name for card in _TABLE)


def find(text: str) -> Card | None:
    """Return the card of this name or memory; None if memlab does not know it.

    Known are the names, in any case and with any separators, the driver's names, and sizes from
    1 GiB up, which stand for a card of that memory whose speed is unknown.

    >>> find("NVIDIA GeForce RTX 4090").name
    'rtx-4090'
    >>> find("24 GiB").memory_bytes // GIB
    24
    """
    return _BY_KEY.get(_key(text)) or _of_size(text)


@checked()
def card(name: str) -> Card:
    """Return what is known of a CUDA card, which need not be in this machine.

    Args:
        name: as `memlab.predict` takes it: "h200", "rtx-4090", a memory such as "24GiB", or "cuda"
            and "cuda:1" for a card of this machine.

    Returns:
        Its memory in bytes (`memory_bytes`, and `usable_bytes`, which PyTorch's allocator can
        reserve), its peak rates in bytes and FLOPs a second, and which generation it is of. None is
        what is not known.

    Raises:
        MemlabError: memlab knows no such card, or it is not here; the message lists the cards.

    >>> card("T4").name, card("t4").has_bf16
    ('t4', False)
    >>> card("24GiB").memory_bytes == 24 * 2**30
    True
    """
    found = resolve(name).card
    if found is None:
        known = ", ".join(map(repr, names()))
        raise DeviceError(
            f"name={shown(name)} is not a CUDA card; allowed is one of {known}, or a memory such "
            "as '24GiB'"
        )
    return found


def _of_size(text: str) -> Card | None:
    try:
        size = parse_bytes(text)
    except ConfigError:
        return None

    if size < SMALLEST_CARD_BYTES:
        return None
    name = f"{size // GIB}GiB" if size % GIB == 0 else format_bytes(size).replace(" ", "")
    return Card(name=name, title=f"a card of {format_bytes(size)}", memory_bytes=size)


def of_device(device: torch.device) -> Card:
    """Return the card in this machine: its real memory, with the speed of that known model."""
    properties = torch.cuda.get_device_properties(device)
    known = _BY_KEY.get(_key(properties.name))
    multiprocessors = getattr(properties, "multi_processor_count", None)
    if known is not None and multiprocessors in (None, known.num_multiprocessors):
        return dataclasses.replace(
            known, title=properties.name, memory_bytes=properties.total_memory
        )

    return Card(
        name="-".join(re.findall(r"[a-z0-9]+", properties.name.lower())),
        title=properties.name,
        memory_bytes=properties.total_memory,
        compute_capability=(properties.major, properties.minor),
        num_multiprocessors=multiprocessors,
    )


def resolve(device: str | torch.device | None) -> Target:
    """Return the target for a device of this machine, or for any card by name or memory.

    None is the device that `measure` would choose. "cuda" on a machine without a card is any CUDA
    card, without a limit.

    Raises:
        DeviceError: it is neither a device of this machine nor a known card; the message lists
            the cards.

    >>> resolve("RTX 4090").name
    'rtx-4090'
    """
    if device is None or re.fullmatch(r"(cpu|cuda)(:\d+)?", str(device)):
        if str(device) == "cuda" and not torch.cuda.is_available():
            return Target(kind="cuda", card=None, name="cuda")
        here = resolve_device(device)
        if here.type == "cpu":
            return Target(kind="cpu", card=None, name="cpu")
        return Target(kind="cuda", card=of_device(here), name=str(here))

    card = find(device) if isinstance(device, str) else None
    if card is None:
        raise DeviceError(
            f"device={shown(device)} is not a card that memlab knows; allowed are 'cpu', 'cuda', "
            f"{', '.join(repr(name) for name in names())}, or the memory of any other card, "
            f"such as '24GiB'"
        )

    return Target(kind="cuda", card=card, name=card.name)
