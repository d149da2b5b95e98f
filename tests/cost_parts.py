"""What the tests of kept costs share with the processes that they start."""

import torch

from memlab.devices.operators import OperatorCost, TensorSpec

COST = OperatorCost(output_bytes=(28, 0), peak_bytes=64, seconds=1.25e-6)


def operator(number: int):
    return ("aten.relu.default", (TensorSpec(torch.float32, (number, 7), (7, 1)),), ())
