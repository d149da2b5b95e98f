"""Strides of fake outputs, compared with those of the real kernels of this torch."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from memlab.devices.operators import leaf_tensors, signature_of
from memlab.tracing.fake_outputs import MOST_BYTES, as_on_cpu

aten = torch.ops.aten
SIX = torch.ones(6)
CALLS = {
    "norm": lambda x: (aten.native_batch_norm.default, (x, SIX, SIX, None, None, True, 0.1, 1e-5)),
    "norm_backward": lambda x: (
        aten.native_batch_norm_backward.default,
        (x, torch.ones(x.shape), *[SIX] * 5, True, 1e-5, [True] * 3),
    ),
    "entropy": lambda x: (aten.binary_cross_entropy.default, (x, torch.ones(x.shape), None, 0)),
    "log_sigmoid": lambda x: (aten.log_sigmoid_forward.default, (x,)),
    "softmax": lambda x: (aten._softmax.default, (x, 1, False)),
    "sum": lambda x: (aten.sum.dim_IntList, (x, [2])),
}
INPUTS = {
    "transposed": lambda rows: torch.rand(rows, 8, 6).transpose(1, 2),
    "first_last": lambda rows: torch.rand(6, rows, 8).transpose(0, 1),
    "sliced": lambda rows: torch.rand(rows, 6, 16)[..., ::2],
}


def strides(out):
    return [t.stride() for t in leaf_tensors(out)]


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", CALLS)
def test_fake_outputs_have_the_strides_of_the_real_ones(name, kind):
    func, args = CALLS[name](INPUTS[kind](4))
    with FakeTensorMode() as mode:
        fake = func(*tree_map_only(torch.Tensor, mode.from_tensor, args))
    assert strides(as_on_cpu(func, signature_of(func, args, {}), fake)) == strides(func(*args))


def test_of_a_large_call_a_part_is_run():
    rows = MOST_BYTES // (6 * 8 * 4) + 2
    func, args = CALLS["norm"](INPUTS["transposed"](rows))
    with FakeTensorMode() as mode:
        fake = func(*tree_map_only(torch.Tensor, mode.from_tensor, args))
    assert fake[0].stride() == (48, 1, 6)  # like the input; if not, PyTorch has mended it
    assert as_on_cpu(func, signature_of(func, args, {}), fake)[0].stride() == (48, 8, 1)


def test_a_dimension_of_one_says_whether_an_image_lies_channels_last():
    """As a pyramid pools it; what comes after follows, and convolutions take other memory."""
    x = torch.rand(4, 8, 1, 1).as_strided((4, 8, 1, 1), (8, 1, 8, 8))
    mean, variance = torch.zeros(8), torch.ones(8)
    func, args = aten.native_batch_norm.default, (x, None, None, mean, variance, True, 0.1, 1e-5)
    with FakeTensorMode() as mode:
        fake = func(*tree_map_only(torch.Tensor, mode.from_tensor, args))
    found = as_on_cpu(func, signature_of(func, args, {}), fake)
    assert strides(found) == strides(func(*args))
    assert found[0].stride() == (8, 1, 1, 1)
