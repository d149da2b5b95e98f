"""Fake tensors that a library makes into tensors of its own class."""

import torch

from memlab._util.torch_private.tensors import FakeTensor, FakeTensorMode, subclasses_left_out
from memlab.tracing.built import as_own_format
from memlab.tracing.faking import replaced_parameters


class Own(torch.nn.Parameter):
    def __new__(cls, data):
        self = torch.Tensor._make_subclass(cls, data, False)
        self.scale = 2
        return self


def test_a_class_of_parameters_leaves_a_fake_tensor_one_that_a_module_takes():
    with FakeTensorMode():
        layer = torch.nn.Linear(3, 3)
        with subclasses_left_out(as_own_format):
            layer.weight = Own(layer.weight)
        assert issubclass(type(layer.weight), FakeTensor)
        assert isinstance(layer.weight, Own)
        assert (layer.weight.scale, layer.weight.requires_grad) == (2, False)
        assert "weight" in dict(layer.named_parameters())
    with subclasses_left_out(as_own_format):
        assert type(Own(torch.zeros(1))) is Own
    assert "_make_subclass" not in vars(torch.Tensor)


def test_a_parameter_stays_of_its_class_when_it_is_moved():
    """DoRA asks a weight for the name of its class, by which it knows that it is in 4 bits."""
    with FakeTensorMode() as mode, replaced_parameters(mode):
        layer = torch.nn.Linear(3, 3)
        with subclasses_left_out(as_own_format):
            layer.weight = Own(layer.weight)
        moved = layer.to(torch.float64)
        assert moved.weight.dtype is torch.float64
        assert moved.weight.__class__ is Own
        assert moved.bias.__class__ is not Own
        assert moved.weight.scale == 2
