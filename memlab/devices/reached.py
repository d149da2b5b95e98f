"""What the fastest kernels reached on the tensor cores of data-centre cards when others timed them.

No kernel comes up to the dense peak of a datasheet, and a card has a share of its own of it:

  products in bf16  stas00/ml-engineering, compute/accelerator/README.md at 744d01e, table "Maximum
                    Achievable Matmul FLOPS": A100 SXM 271.2 TFLOP/s (86.9 %), A100 PCIe 252.9
                    (81.1 %), H100 SXM 794.5 (80.3 %, "H200 is the same"), B200 SXM 1745.0 (77.6 %);
                    each is the fastest of many shapes, which stand here beside it
  flash attention   FlashAttention-2, PyTorch's flash kernel: on an A100 up to 73 % in forward and
                    63 % in backward (arXiv 2307.08691, section 4); on an H100 35 % (arXiv
                    2407.08608, abstract), and 335 TFLOP/s of forward and backward together, 34 %
                    (arXiv 2307.08691, section 4.1)

Assumed: the H100 PCIe reaches the share of the SXM form, and the B200 in attention that of the
H100, since the kernel uses the instructions of neither. Data-centre cards that the table lacks
reach the highest share in it, that of the A100: then none is faster than was seen of any. The fp32
products of five such cards, to which `product_fp32` in kernel_times.json was fitted, come to the
same share. GeForce and RTX cards have no figure: they clock above their datasheet where they can,
as steps on an RTX 3090 show.
"""

import dataclasses

from memlab.devices.card import Card, Reached

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
