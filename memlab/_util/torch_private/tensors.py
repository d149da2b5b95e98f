"""Private attributes of tensors and of their storages.

Each is read by one call in C, since most are asked for at every operator of a recorded step.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import _meta_registrations, nn
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._ops import _OpNamespace as OpNamespace
from torch._subclasses import fake_tensor as _fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch._subclasses.fake_tensor import in_kernel_invocation_manager as shapes_alone
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormWithStatistics
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.optim.optimizer import _foreach_supported_types as foreach_types
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, transform_subclass
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils.data import dataloader

__all__ = [
    "MODULES",
    "MODULE_OF_OPERATORS",
    "PARAMETERS",
    "BatchNorm",
    "DataDependentOutputException",
    "Dropout",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "InstanceNorm",
    "NormWithStatistics",
    "OpNamespace",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "UnguardedMode",
    "UnsupportedOperatorException",
    "are_tensors_fake",
    "below_autograd",
    "buffers_of",
    "convert",
    "converted_by",
    "detect_fake_mode",
    "foreach_types",
    "found_as",
    "found_as_itself",
    "has_kernel_for",
    "is_composed",
    "is_registered",
    "missing_kernels_run_by",
    "names_of_all_operators",
    "parameters_of",
    "remember_constant",
    "runs_for",
    "schema_of",
    "shapes_alone",
    "subclasses_left_out",
    "unset_fake_temporarily",
    "whole_of",
    "with_versions_counted",
    "without_key",
    "without_modes",
    "without_python",
]


# the number that identifies a storage for as long as anything holds it
storage_key: Callable[[Any], int] = attrgetter("_cdata")

# how many tensors, arrays and others hold a storage, by its key
num_holders_of_storage = torch._C._storage_Use_Count

# how many references C++ code has to a tensor
num_references: Callable[[torch.Tensor], int] = methodcaller("_use_count")

# the number that each change in place raises; inference tensors have none
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")

# whether a tensor is a view of another one, for autograd
is_view: Callable[[torch.Tensor], bool] = methodcaller("_is_view")

# the two parts of a sparse tensor, without a copy and whether coalesced or not
indices_of: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_indices")
values_of: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_values")

# the attributes in which a parameter keeps its hooks, and a function that returns both
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
hooks_of: Callable[[torch.Tensor], tuple[Any, ...]] = attrgetter(*HOOKS)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a view is of, which has the gradient of all views; else itself."""
    base: torch.Tensor | None = tensor._base
    return tensor if base is None else base


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold the memory of this one: itself, or the parts that it wraps.

    A quantized weight of torchao, for instance, wraps the integers and their scales, each of which
    has memory. Its own storage has none.
    """
    return [part for _, part in named_parts("", tensor)]


def named_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each of `parts_of`, with the path to it: this name, or "name.scale"."""
    if not is_wrapper(type(tensor)):
        yield name, tensor
        return
    attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for attribute in attributes:
        yield from named_parts(f"{name}.{attribute}", getattr(tensor, attribute))


def with_parts(
    tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return a tensor that wraps others with each of `parts_of` changed."""
    made: torch.Tensor = transform_subclass(
        tensor, lambda _, part: with_parts(part, change) if is_wrapper(type(part)) else change(part)
    )
    return made


def is_wrapper(kind: type) -> bool:
    """Return whether tensors of this class consist of others, on which they call operators."""
    return hasattr(kind, "__tensor_flatten__") and not issubclass(kind, NestedTensor)


# The dispatcher: modes that see each operator, and guards that exclude dispatch keys.

# a guard under which operators reach neither modes nor the code of tensor subclasses
without_python = torch._C._DisableTorchDispatch

# a guard under which operators reach their kernels, past autograd
below_autograd = torch._C._AutoDispatchBelowAutograd

_COUNTS_VERSIONS = torch._C.DispatchKey.ADInplaceOrView
_set_excluded = torch._C._SetExcludeDispatchKeyGuard


def with_versions_counted() -> Any:
    """Return a guard under which views share their version, inside of a mode as well."""
    return _set_excluded(_COUNTS_VERSIONS, False)


def without_key(name: str) -> Any:
    """Return a guard under which operators dispatch past a key, such as "AutocastCPU"."""
    key = torch._C._parse_dispatch_key(name)
    assert key is not None  # torch defines a key of this name
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))


def are_tensors_fake() -> bool:
    """Return whether a mode of fake tensors is on."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


# Fake tensors: shapes, strides and devices without memory.


def remember_constant(fake: Any) -> None:
    """Make PyTorch forget a fake tensor's known value when its memory is written."""
    fake.fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)


class UnguardedMode(TorchDispatchMode):
    """A mode whose calls PyTorch does not guard against `torch.compile`: that takes long.

    Attributes:
        is_guarded: whether they are guarded all the same.
    """

    is_guarded = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return cls.is_guarded


@contextlib.contextmanager
def found_as(stand_in: type) -> Iterator[None]:
    """Make libraries that look up `FakeTensor` in `torch._subclasses` find another class.

    PyTorch's own fake kernels look it up there too, to find the device of a tensor, and take
    tensors of any other class to be on a card. They still find the class itself.
    """
    subclasses: Any = torch._subclasses
    kernels: Any = _meta_registrations
    own = kernels.device_hint

    def device_hint(tensor: Any) -> Any:
        with found_as_itself():
            return own(tensor)

    subclasses.FakeTensor, kernels.device_hint = stand_in, device_hint
    try:
        yield
    finally:
        subclasses.FakeTensor, kernels.device_hint = FakeTensor, own


@contextlib.contextmanager
def found_as_itself() -> Iterator[None]:
    """Let libraries find `FakeTensor` itself, inside of `found_as` too."""
    subclasses: Any = torch._subclasses
    before, subclasses.FakeTensor = subclasses.FakeTensor, FakeTensor
    try:
        yield
    finally:
        subclasses.FakeTensor = before


@contextlib.contextmanager
def subclasses_left_out(says_class: Callable[[Any, type], None]) -> Iterator[None]:
    """Make a fake tensor that becomes one of another class stay a fake tensor, inside this context.

    `Tensor._make_subclass` cannot make another class of it. As there, the memory is shared. A class
    of parameters makes a parameter, with the attributes that its `__new__` sets.

    Args:
        says_class: is called with the fake parameter and the class that it must say it is of.
    """
    own = torch.Tensor._make_subclass

    def make(cls: type, data: Any, requires_grad: bool = False, *more: Any, **named: Any) -> Any:
        if not isinstance(data, FakeTensor):
            return own(cls, data, requires_grad, *more, **named)
        made: Any = data.detach().requires_grad_(requires_grad)
        if issubclass(cls, torch.nn.Parameter):
            made._is_param = True
            says_class(made, cls)
        return made

    torch.Tensor._make_subclass = staticmethod(make)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor._make_subclass  # what is left is that of the class above


def swapped(fake: Any, other: Any) -> Any:
    """Return a fake tensor with the memory of another one, which gets its own.

    It is the same object, which others may refer to: an optimizer, for instance.
    """
    torch._C._swap_tensor_impl(fake, other)
    fake.fake_device, other.fake_device = other.fake_device, fake.fake_device
    return fake


@contextlib.contextmanager
def parameters_made_of(fake: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Make parameters of fake tensors, inside this context, where they would be of a CPU's own.

    Args:
        fake: returns a fake tensor for an ordinary one, while a mode of fake tensors is on.
    """
    own = torch.Tensor._make_subclass

    def make(cls: type, data: Any, *more: Any, **named: Any) -> Any:
        is_plain = type(data) is torch.Tensor and data.device.type == "cpu"
        if not is_plain or not issubclass(cls, nn.Parameter) or not are_tensors_fake():
            return own(cls, data, *more, **named)
        return nn.Parameter.__new__(cls, fake(data.detach()), *more, **named)

    own_new: Any = FakeTensor.__new__
    kept_new = vars(FakeTensor)["__new__"]

    def new(cls: type, *given: Any, **named: Any) -> Any:
        """Return a parameter for `type(parameter)(data)`, as libraries copy the class of one.

        Some also give what its `__dict__` holds, where a fake tensor has names of its own.
        """
        if given and isinstance(given[0], torch.Tensor):
            kept = {name: value for name, value in named.items() if name == "requires_grad"}
            return nn.Parameter(*given, **kept)
        return own_new(cls, *given, **named)

    data: Any = torch.Tensor.data

    def set_data(tensor: Any, value: Any) -> None:
        """Set the data of a parameter to values of the host, as of an array."""
        data.__set__(tensor, fake(value.detach()) if type(value) is torch.Tensor else value)

    torch.Tensor._make_subclass = staticmethod(make)  # type: ignore[method-assign]
    FakeTensor.__new__ = staticmethod(new)  # type: ignore[method-assign]
    FakeTensor.data = property(data.__get__, set_data)  # type: ignore[assignment]
    try:
        yield
    finally:
        del FakeTensor.data
        FakeTensor.__new__ = kept_new  # type: ignore[method-assign]
        del torch.Tensor._make_subclass


@contextlib.contextmanager
def missing_kernels_run_by(run: Callable[..., Any]) -> Iterator[None]:
    """Run operators that have no fake kernel by another function, inside this context.

    Args:
        run: called with PyTorch's own function and its arguments: the mode, the operator, its
            arguments in a row, their structure, and the error that a missing kernel raised.
    """
    module: Any = _fake_tensor
    own = module.run_fallback_kernel
    module.run_fallback_kernel = functools.partial(run, own)
    try:
        yield
    finally:
        module.run_fallback_kernel = own


# Private attributes and classes of `torch.nn`, and of optimizers.

# the attributes in which a module keeps its children and its parameters
MODULES, PARAMETERS = "_modules", "_parameters"

# a module's own parameters and buffers by name: dicts that may be written, some values None
parameters_of: Callable[[nn.Module], dict[str, Any]] = attrgetter(PARAMETERS)
buffers_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")


def convert(module: nn.Module, change: Callable[[Any], Any]) -> nn.Module:
    """Change all tensors of a module by a function, as `module.to` does."""
    converted: nn.Module = module._apply(change)
    return converted


@contextlib.contextmanager
def converted_by(apply: Callable[..., Any]) -> Iterator[None]:
    """Convert modules by another function, inside this context.

    Args:
        apply: called with PyTorch's own method, the module, the change and whether to recurse.
    """
    own = nn.Module._apply

    def method(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        return apply(own, self, fn, recurse)

    nn.Module._apply = method  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = own  # type: ignore[method-assign]


# Operators: their classes, their schemas and their kernels.

# the arguments and results of an overload, and which of them it writes or returns a view of
schema_of: Callable[[Any], Any] = attrgetter("_schema")

# the name of the module that defines the classes of operators
MODULE_OF_OPERATORS = OpOverload.__module__

# by an operator's full name: whether it is registered, and has a kernel of its own for a key
is_registered = torch._C._dispatch_has_kernel
has_kernel_for = torch._C._dispatch_has_kernel_for_dispatch_key

# the same, where a kernel that PyTorch takes from elsewhere (composite ones) counts too
runs_for = torch._C._dispatch_has_computed_kernel_for_dispatch_key


@functools.cache
def is_composed(func: OpOverload) -> bool:
    """Return whether an operator only calls others, here and on a device that is written in Python.

    Autograd takes such an operator apart. Below it, as in `torch.inference_mode` and inside of a
    tensor subclass, it comes whole.
    """
    name = func.name()
    return has_kernel_for(name, "CompositeImplicitAutograd") and not any(
        has_kernel_for(name, key) for key in ("CPU", "PrivateUse1", "AutogradPrivateUse1")
    )


# the full names of all operators
names_of_all_operators = torch._C._dispatch_get_all_op_names


# Autograd: the running node, numbers of operators, checkpointing; and the profiler's events.

# the node whose backward runs, None outside of a backward
current_node = torch._C._current_autograd_node

# the number that the next operator with a gradient gets, and the number that a node got
next_sequence_number = torch._C._autograd._get_sequence_nr
sequence_number_of: Callable[[Any], int] = methodcaller("_sequence_nr")

# the innermost `saved_tensors_hooks`, None without any; True: also where they are switched off
innermost_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks

# the innermost transform of torch.func (vmap, grad, ...) that is active, None outside of them
innermost_transform = torch._C._functorch.peek_interpreter_stack

# the kind of an event of the profiler: an operator, an allocation, ...
EventType = torch._C._profiler._EventType

# the function that `checkpoint` calls for its non-reentrant form: the first that PyTorch has
NON_REENTRANT = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)


@contextlib.contextmanager
def checkpointed_by(generator: Callable[..., Iterator[None]], reentrant: type) -> Iterator[None]:
    """Replace what `torch.utils.checkpoint` runs, inside this context.

    Args:
        generator: replaces the one of its non-reentrant form, which surrounds the function's call.
        reentrant: replaces its class of an autograd function, whose `apply` is called.
    """
    module: Any = torch_checkpoint
    name = next(name for name in NON_REENTRANT if hasattr(module, name))
    replaced: dict[str, Any] = {name: generator, "CheckpointFunction": reentrant}
    originals = {name: getattr(module, name) for name in replaced}
    for name, replacement in replaced.items():
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


# CUDA: settings of the caching allocator and workspaces of cuBLAS.
#
# Looked up when they are called, since a PyTorch without CUDA need not have them.


def clear_cublas_workspaces() -> None:
    """Give back the memory that cuBLAS keeps for its kernels."""
    torch._C._cuda_clearCublasWorkspaces()


# the class whose iterators every loader of data has
LoaderIterator: Any = dataloader._BaseDataLoaderIter

# where PyTorch looks up the function that runs a backward
ENGINE = (torch.autograd, "_engine_run_backward")

# where libraries look up the function that returns the number of the current stream
RAW_STREAM = (torch._C, "_cuda_getCurrentRawStream")

# where scripts look up the function that returns the version of the driver, such as 12080
DRIVER_VERSION = (torch._C, "_cuda_getDriverVersion")


def set_allocator(settings: str) -> None:
    """Set the caching allocator as PYTORCH_CUDA_ALLOC_CONF would: "expandable_segments:True"."""
    torch.cuda.memory._set_allocator_settings(settings)


def on_cuda_start(call: Callable[[], None]) -> None:
    """Call a function once CUDA has been started, now if it has; never without CUDA."""
    if torch.backends.cuda.is_built():
        torch.cuda._lazy_call(call)


def on_out_of_memory(tell: Callable[[int, int, int, int], None]) -> None:
    """Have the caching allocator call a function with (device, requested, total, free bytes).

    It is called before the error is raised, with the memory as it was. It cannot be detached.
    """
    torch._C._cuda_attach_out_of_memory_observer(tell)  # type: ignore[attr-defined]


def is_history_recorded() -> bool:
    """Return whether the caching allocator records its events."""
    return bool(torch._C._cuda_isHistoryEnabled())


def record_history(max_entries: int) -> None:
    """Have the caching allocator record its newest events with Python stacks."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python")


def stop_history() -> None:
    """End `record_history`."""
    torch.cuda.memory._record_memory_history(enabled=None)


def dump_history(path: str) -> None:
    """Write the events and the state of the caching allocator to a file."""
    torch.cuda.memory._dump_snapshot(path)
