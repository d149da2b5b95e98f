"""Checkpoints: what `torch.distributed.checkpoint` notes of where a tensor is in its files."""

from typing import Any


def place_in_file(file: str, offset: int, length: int) -> Any:
    """Return what a rank reports of a tensor that it has written."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def begin_of_files(prefix: str) -> Any:
    """Return what a rank is told of the names of its files."""
    from torch.distributed.checkpoint.filesystem import _StoragePrefix

    return _StoragePrefix(prefix)
