"""`Card`: what is known of one CUDA card, and what PyTorch and CUDA take of its memory."""

from dataclasses import dataclass

from memlab.arguments.units import KIB, MIB

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
