"""`Attention`: the implementations of attention that models of transformers have."""

from enum import StrEnum


class Attention(StrEnum):
    """What computes the attention of a model of transformers.

    - as-built changes nothing: what the model's config says, `sdpa` where nobody has chosen.
    - eager multiplies by Python's operators, and keeps the whole matrix of attention weights.
    - sdpa is `torch.nn.functional.scaled_dot_product_attention`, which chooses a kernel by itself.
    - flash_attention_2 is the kernel of the package flash_attn, for CUDA cards and 16-bit formats.
    - flex_attention is PyTorch's kernel with masks as code, compiled for CUDA cards.
    """

    AS_BUILT = "as-built"
    EAGER = "eager"
    SDPA = "sdpa"
    FLASH_ATTENTION_2 = "flash_attention_2"
    FLEX_ATTENTION = "flex_attention"
