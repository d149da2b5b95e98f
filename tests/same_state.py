"""What the tests of recompute share: the state that training leaves, compared bit by bit."""

import random

import numpy as np
import torch
from torch.utils.checkpoint import CheckpointPolicy

from memlab.techniques.step import build_step, set_seed


def state_after(workload, config, plan=None, steps=2):
    """Return gradients, buffers and the next random numbers after some steps of training."""
    step = build_step(workload, config, "cpu", plan=plan)
    set_seed(7)
    for _ in range(steps):
        step.accumulate()
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in step.model.named_parameters()
        }
        step.update()
    drawn = torch.rand(3), torch.tensor(random.random()), torch.tensor(np.random.random())
    return gradients | dict(step.model.named_buffers()) | dict(enumerate(drawn))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def keep_everything(_, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE
