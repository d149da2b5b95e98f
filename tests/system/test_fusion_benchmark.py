"""Bytes moved by a chain of pointwise operators: counted by hand, and one kernel when compiled."""

import shutil

import pytest
import torch

from benchmarks import fusion


def test_bytes_moved_are_counted_by_hand():
    x, y = torch.ones(256), torch.ones(256)  # 1 KiB each

    def three(x, y):
        z = x + y  # reads 2 KiB, writes 1
        z = z * z  # the same tensor twice is read once: 1 and 1
        return z.relu()  # 1 and 1

    assert fusion.one_by_one(three, x, y) == (3, 7 * 1024)
    assert fusion.fused(three, x, y) == 3 * 1024


@pytest.mark.slow
def test_the_ways_compute_the_same_and_inductor_makes_one_kernel():
    inputs = (torch.randn(1000), torch.randn(1000))
    expected = torch.nn.functional.gelu(inputs[0] + inputs[1], approximate="tanh")
    torch.testing.assert_close(fusion.chain(*inputs), expected)
    torch.testing.assert_close(fusion.by_torchscript()(*inputs), expected)
    if not shutil.which("g++"):
        pytest.skip("Inductor needs a C++ compiler")
    compiled, num_kernels = fusion.by_inductor(*inputs)
    assert num_kernels == 1
    torch.testing.assert_close(compiled(*inputs), expected)


@pytest.mark.slow
def test_fusing_moves_a_fraction_of_the_bytes():
    found = {row["run by"]: row for row in fusion.rows(1000, 1)}
    eager = found["eager, one by one"]
    assert eager["kernels"] == 10
    assert found["TorchScript (historical, deprecated)"]["bytes moved"] is None
    if "torch.compile, Inductor" in found:
        assert eager["bytes moved"] > 7 * found["torch.compile, Inductor"]["bytes moved"]
