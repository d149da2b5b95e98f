"""torchvision beside another torch than the one it was built for.

Its models are plain Python, and load once two operators of its compiled part have a schema.
"""

import contextlib
import importlib.util

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def declare() -> None:
    """Import torchvision where it is installed, with these operators declared if it needs that."""
    if importlib.util.find_spec("torchvision") is None:
        return
    with contextlib.suppress(RuntimeError):
        import torchvision

        return
    for schema in SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            _LIBRARY.define(schema)
    import torchvision  # noqa: F401
