"""Imported first of all: PyTorch must be new enough for whatever memlab imports after this."""

import re
from importlib import metadata

import torch

OLDEST = "2.11"  # of pyproject.toml


def _is_older(version: str | None) -> bool:
    """Return whether a version is known, and below the oldest that memlab supports."""
    found, oldest = (re.match(r"(\d+)\.(\d+)", text or "") for text in (version, OLDEST))
    assert oldest
    return found is not None and (*map(int, found.groups()),) < (*map(int, oldest.groups()),)


def _installed() -> str | None:
    """Return the version that a new process would find; None if nothing says it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


if _is_older(torch.__version__):
    # a notebook's kernel keeps the one that it imported before pip replaced it
    is_replaced = _installed() is not None and not _is_older(_installed())
    remedy = (
        "a newer one is installed, so " if is_replaced else f'pip install "torch>={OLDEST}", and '
    )
    raise ImportError(
        f"memlab needs PyTorch {OLDEST} or newer, and this process runs {torch.__version__}: "
        f"{remedy}restart Python, or the notebook's kernel"
    )
