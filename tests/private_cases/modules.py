"""Modules and operators."""

import importlib

import torch
from torch import nn

from tests.private_cases.parts import arguments_of, at, case


@case("._modules", "._parameters", "._buffers", to="read and replace what a module holds")
def _() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    norm = vars(model)["_modules"]["0"]
    assert set(vars(norm)["_parameters"]) == {"weight", "bias"}
    norm._buffers["running_mean"] = torch.ones(2)
    assert norm.running_mean.tolist() == [1.0, 1.0]


@case("._apply", "torch.nn.Module._apply", to="change all tensors of a module")
def _() -> None:
    assert arguments_of(nn.Module._apply) == ["self", "fn", "recurse"]
    assert nn.Linear(1, 1)._apply(torch.Tensor.double).weight.dtype is torch.float64


@case(
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.nn.modules.instancenorm._InstanceNorm",
    to="find modules whose samples depend on each other, and running statistics",
)
def _() -> None:
    batch, base = (at(f"torch.nn.modules.batchnorm.{name}") for name in ("_BatchNorm", "_NormBase"))
    assert isinstance(nn.BatchNorm2d(2), batch)
    assert isinstance(nn.InstanceNorm2d(2), at("torch.nn.modules.instancenorm._InstanceNorm"))
    assert isinstance(nn.InstanceNorm2d(2), base)
    assert "running_mean" in nn.BatchNorm2d(2)._buffers


@case("torch.nn.modules.dropout._DropoutNd", to="find modules that draw random numbers")
def _() -> None:
    kind = at("torch.nn.modules.dropout._DropoutNd")
    assert all(isinstance(each(), kind) for each in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))


@case("torch.optim.optimizer._foreach_supported_types", to="keep foreach over fake tensors")
def _() -> None:
    types = at("torch.optim.optimizer._foreach_supported_types")
    assert isinstance(types, list)
    assert nn.Parameter in types


@case("._orig_mod", to="refuse a model that is compiled already")
def _() -> None:
    assert torch.compile(nn.Linear(1, 1))._orig_mod.in_features == 1


@case("._no_grad_trunc_normal_", to="note a truncated normal as one operator")
def _() -> None:
    assert arguments_of(nn.init._no_grad_trunc_normal_)[0] == "tensor"
    assert "_no_grad_trunc_normal_" in nn.init.trunc_normal_.__code__.co_names


@case(
    "torch._ops.HigherOrderOperator",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
    "torch._ops._OpNamespace",
    to="distinguish operators from other functions, and send them to a worker",
)
def _() -> None:
    ops, aten = importlib.import_module("torch._ops"), torch.ops.aten
    assert type(aten.add.Tensor) is ops.OpOverload
    assert (type(aten.add), type(aten)) == (ops.OpOverloadPacket, ops._OpNamespace)
    assert {kind.__module__ for kind in (ops.OpOverload, type(torch.ops))} == {"torch._ops"}
    assert isinstance(torch.ops.higher_order.cond, ops.HigherOrderOperator)


@case("._schema", to="know what an operator writes and returns a view of")
def _() -> None:
    schema = torch.ops.aten.add_.Tensor._schema
    assert (schema.name, schema.is_mutable) == ("aten::add_", True)
    assert schema.arguments[0].alias_info.is_write
    assert schema.returns[0].alias_info.is_write
    assert schema.arguments[2].kwarg_only
    assert not torch.ops.aten.view.default._schema.returns[0].alias_info.is_write


@case(
    "torch._C._dispatch_has_kernel",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._dispatch_has_computed_kernel_for_dispatch_key",
    "torch._C._dispatch_get_all_op_names",
    to="find operators that are made of others, or have no kernel on a device",
)
def _() -> None:
    has = at("torch._C._dispatch_has_kernel_for_dispatch_key")
    assert at("torch._C._dispatch_has_kernel")("aten::mm")
    assert has("aten::mm", "CPU")
    assert not has("aten::mm", "CompositeImplicitAutograd")
    assert has("aten::linear", "CompositeImplicitAutograd")
    assert not has("aten::linear", "CPU")
    runs = at("torch._C._dispatch_has_computed_kernel_for_dispatch_key")
    assert runs("aten::linear", "CPU")
    assert not runs("aten::cudnn_convolution", "CPU")
    assert "aten::mm" in at("torch._C._dispatch_get_all_op_names")()
