"""`Views`: look at the memory of a fake tensor in another way, without dispatching.

A quarter of a step's operators are views. FakeTensorMode spends ten times as long on the question
what it has to mind as on the view itself. These operators have nothing to mind: what they return
depends on shapes alone, and PyTorch's own kernel for tensors without memory says what that is.
Left out: tensors whose values are known, since those of the view would be, and calls whose fake
tensors belong to another device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memlab.recording.repeats import are_plain
from memlab.recording.values import Values
from memlab.torch_private.dispatch import without_python
from memlab.torch_private.fakes import FakeTensor, shapes_alone

aten = torch.ops.aten
BY_SHAPE = frozenset(
    (
        aten._unsafe_view.default, aten.as_strided.default, aten.detach.default,
        aten.expand.default, aten.permute.default, aten.select.int, aten.slice.Tensor,
        aten.split_with_sizes.default, aten.t.default, aten.transpose.int, aten.unsqueeze.default,
        aten.view.default,
    )
)  # fmt: skip


def view_of(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    values: Values,
    device_type: str,
) -> Any:
    """Return what a view of a fake tensor returns, None if it has to be dispatched."""
    if func not in BY_SHAPE or not are_plain(args, kwargs, values, device_type):
        return None
    base = args[0]
    with without_python():
        with shapes_alone(base.fake_mode):
            made = func(*args, **kwargs)
        if isinstance(made, torch.Tensor):
            return FakeTensor(base.fake_mode, made, base.fake_device)
        return [FakeTensor(base.fake_mode, each, base.fake_device) for each in made]
