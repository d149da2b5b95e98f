"""A new copy of a trainer's model for each run, whose parts belong to the copy alone.

Libraries set a forward of their own on a module, such as trl's, which computes the loss without
whole logits. `copy.deepcopy` copies that method, but not what the function inside of it refers to,
so that it would still call the module it was made for. Here the copy gets functions that call the
copy.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

import torch

NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class CopiedModel:
    """`build_model` of a workload: a copy on the CPU, without gradients.

    Attributes:
        model: as the trainer has it; never changed.
        autocast: the format to which the forward of the copy autocasts, as accelerate does over
            weights of any format; None if it does not.
    """

    model: torch.nn.Module
    autocast: torch.dtype | None = None

    def __call__(self) -> torch.nn.Module:
        """Return a new copy."""
        made = copy.deepcopy(self.model)
        _bind_forwards(made, dict(zip(self.model.modules(), made.modules(), strict=True)))
        # transformers refuses to move some quantized models, even to where they are
        if any(parameter.device.type != "cpu" for parameter in made.parameters()):
            made = made.to("cpu")
        made.zero_grad(set_to_none=True)

        if self.autocast is not None:
            made.forward_before_autocast = made.forward  # type: ignore[assignment]
            made.autocast_format = self.autocast  # type: ignore[assignment]
            made.forward = MethodType(_in_autocast, made)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make it again, with the classes of parameters, which pickle loses."""
        kinds = {
            name: type(parameter)
            for name, parameter in self.model.named_parameters()
            if type(parameter) is not torch.nn.Parameter
        }
        return _restored, (self.model, self.autocast, kinds)

    def __repr__(self) -> str:
        """Return the class of the model, which may print itself over pages."""
        return f"CopiedModel({type(self.model).__name__})"


def _restored(
    model: torch.nn.Module, autocast: torch.dtype | None, kinds: Mapping[str, type]
) -> CopiedModel:
    """Return what was pickled. A quantized parameter keeps its scales, but not its class."""
    for name, parameter in model.named_parameters():
        if name in kinds:
            parameter.__class__ = kinds[name]
    return CopiedModel(model, autocast)


def _bind_forwards(made: torch.nn.Module, copies: Mapping[Any, torch.nn.Module]) -> None:
    """Have forwards that were set on a module call the copies of what they called."""
    for module in made.modules():
        own = vars(module).get("forward")
        if isinstance(own, MethodType) and isinstance(own.__func__, FunctionType):
            module.forward = MethodType(_bound(own.__func__, copies), own.__self__)


def _bound(function: FunctionType, copies: Mapping[Any, torch.nn.Module]) -> FunctionType:
    """Return a function whose closure has the copies of the modules that it had."""
    cells = function.__closure__ or ()
    bound = tuple(_cell(cell, copies) for cell in cells)
    if all(one is other for one, other in zip(cells, bound, strict=True)):
        return function
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, bound
    )
    made.__kwdefaults__ = function.__kwdefaults__
    vars(made).update(vars(function))
    return made


def _cell(cell: CellType, copies: Mapping[Any, torch.nn.Module]) -> CellType:
    try:
        held = cell.cell_contents
    except ValueError:  # a name that has no value yet
        return cell
    if isinstance(held, torch.nn.Module) and held in copies:
        return CellType(copies[held])
    if isinstance(held, MethodType) and held.__self__ in copies:
        function = held.__func__
        if isinstance(function, FunctionType):
            function = _bound(function, copies)
        return CellType(MethodType(function, copies[held.__self__]))
    return cell


def _in_autocast(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a model in autocast, and return what it returns in fp32."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, model.autocast_format):
        outputs = model.forward_before_autocast(*args, **kwargs)
    return _widened(outputs)


def _widened(outputs: Any) -> Any:
    """Return outputs with narrow tensors cast to fp32, as accelerate returns them."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype in NARROW else outputs
    if isinstance(outputs, dict):  # transformers' outputs are such
        return type(outputs)({name: _widened(value) for name, value in outputs.items()})
    if type(outputs) in (list, tuple):
        return type(outputs)(_widened(value) for value in outputs)
    return outputs
