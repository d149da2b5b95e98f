"""Fake tensors."""

import torch
from torch import nn

from tests.private_cases.parts import arguments_of, at, case, fakes, raised, there


@case(
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
    "._is_param",
    to="run a step without memory",
)
def _() -> None:
    module = at("torch._subclasses.fake_tensor")
    with fakes() as mode:
        x = torch.ones(2)
        with module.unset_fake_temporarily():
            assert type(torch.ones(2)) is torch.Tensor
        known = torch.tensor(2.0).constant
        parameter = nn.Parameter(x)
    assert known == 2.0
    assert type(x) is module.FakeTensor
    assert (x.fake_mode, x.fake_device.type, x.constant) == (mode, "cpu", None)
    assert callable(mode.fake_tensor_converter.add_constant_storage_mapping)
    assert parameter._is_param
    with at("torch._C._DisableTorchDispatch")():
        made = module.FakeTensor(mode, torch.empty(2, device="meta"), torch.device("cpu"))
    assert made.device.type == "cpu"


@case(
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager",
    to="look at the memory of a fake tensor in another way",
)
def _() -> None:
    module = at("torch._subclasses.fake_tensor")
    with fakes() as mode:
        x = torch.empty(2, 3)
    with at("torch._C._DisableTorchDispatch")():
        with module.in_kernel_invocation_manager(mode):
            view = torch.ops.aten.view.default(x, [6])
            assert view.device.type == "meta"
        made = module.FakeTensor(mode, view, x.fake_device)
    assert (made.shape, made.device.type) == ((6,), "cpu")
    assert made.untyped_storage()._cdata == x.untyped_storage()._cdata


@case("torch._subclasses.fake_tensor", to="run operators that have no fake kernel")
def _() -> None:
    function = at("torch._subclasses.fake_tensor").run_fallback_kernel
    given = ["fake_mode", "func", "flat_args", "args_spec", "orig_not_implemented_exception"]
    assert arguments_of(function) == given


@case("torch._subclasses", to="hide fake tensors from libraries that skip work for them")
def _() -> None:
    assert torch._subclasses.FakeTensor is at("torch._subclasses.fake_tensor.FakeTensor")


@case(
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
    to="notice values that a model reads, and kernels that are missing",
)
def _() -> None:
    raised("DataDependentOutputException", lambda x: x.sum().item())
    raised("DynamicOutputShapeException", lambda x: x.nonzero())
    module = at("torch._subclasses.fake_tensor")
    assert issubclass(module.UnsupportedOperatorException, RuntimeError)


@case("torch._C._swap_tensor_impl", to="move a fake parameter that others refer to")
def _() -> None:
    with fakes():
        here, other = (torch.nn.Parameter(torch.empty(n)) for n in (2, 3))
    torch._C._swap_tensor_impl(here, other)
    assert (here.shape, other.shape) == ((3,), (2,))


@case("._engine_run_backward", to="see what a person's code does in a backward")
def _() -> None:
    x = torch.ones(2, requires_grad=True)
    run = at("torch.autograd._engine_run_backward")
    run((x.sum(),), (torch.ones(()),), False, False, (), allow_unreachable=True,
        accumulate_grad=True)  # fmt: skip
    assert x.grad.tolist() == [1, 1]


@case("torch.utils.data.dataloader._BaseDataLoaderIter", to="know when a batch is asked for")
def _() -> None:
    loader = torch.utils.data.DataLoader([1, 2])
    assert isinstance(iter(loader), at("torch.utils.data.dataloader._BaseDataLoaderIter"))


there("._cuda_getCurrentRawStream", to="answer libraries that ask for the current stream")
there("._cuda_getDriverVersion", to="answer scripts that ask for the version of the driver")


@case("torch._subclasses.fake_tensor.FakeTensor.data", to="let scripts set the data of parameters")
def _() -> None:
    kind = at("torch._subclasses.fake_tensor.FakeTensor")
    assert "data" not in vars(kind)
    assert kind.data is torch.Tensor.data
