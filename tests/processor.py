"""What the processor of this machine can do, where a test depends on it."""

import torch


def has_bf16_kernels() -> bool:
    """Return whether oneDNN has kernels in bf16 here: it needs AVX-512 on an x86 processor.

    Without them autocast still gives an LSTM to oneDNN, which refuses it, and other layers run
    other operators than on the processor whose record is in the package.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
