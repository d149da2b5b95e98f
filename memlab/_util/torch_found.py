"""Imported first of all: PyTorch must be new enough for whatever memlab imports after this."""

from importlib import metadata

import torch

OLDEST = "2.11"  # of pyproject.toml


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]


if _numbers(torch.__version__) < _numbers(OLDEST):
    # a notebook's kernel keeps the one that it imported before pip replaced it
    is_replaced = _numbers(metadata.version("torch")) >= _numbers(OLDEST)
    remedy = (
        "a newer one is installed, so " if is_replaced else f'pip install "torch>={OLDEST}", and '
    )
    raise ImportError(
        f"memlab needs PyTorch {OLDEST} or newer, and this process runs {torch.__version__}: "
        f"{remedy}restart Python, or the notebook's kernel"
    )
