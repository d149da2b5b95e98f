"""Clip gradients by their total norm, also if ranks divide some of the parameters and not others.

This file imports nothing from memlab, because an exported script contains a copy of it.
"""

from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_gradients(parameters: list[torch.nn.Parameter], max_norm: float) -> None:
    """Scale gradients down to this total norm, in place, if it is larger."""
    alike: dict[Any, list[torch.nn.Parameter]] = {}  # divided over the same ranks, or not at all
    for parameter in parameters:
        alike.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if len(alike) == 1:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return

    norms = []
    for group in alike.values():
        norm: Any = get_total_norm(p.grad for p in group if p.grad is not None)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in alike.values():
        clip_grads_with_norm_(group, max_norm, total)
