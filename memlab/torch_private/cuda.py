"""CUDA: settings of the caching allocator and workspaces of cuBLAS.

Looked up when they are called, since a PyTorch without CUDA need not have them.
"""

import torch


def clear_cublas_workspaces() -> None:
    """Give back the memory that cuBLAS keeps for its kernels."""
    torch._C._cuda_clearCublasWorkspaces()


def set_allocator(settings: str) -> None:
    """Set the caching allocator as PYTORCH_CUDA_ALLOC_CONF would: "expandable_segments:True"."""
    torch.cuda.memory._set_allocator_settings(settings)
