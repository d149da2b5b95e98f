"""Build a model without memory: record its operators on fake tensors, then replay them.

It is plain PyTorch, of which exported scripts contain what they call. `meta_init.py` applies it.
Refused: constructors that read random values, random generators of their own, tensors in places
that a replay cannot find, and parameter classes with their own `__init__`.
"""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

RANDOM = torch.Tag.nondeterministic_seeded
READS = ("supported for tensor subclasses", "Not available for 'meta'")  # said of fake tensors
MAKES = "Creating a new Tensor subclass"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies: the number of its storage, and how it reads it."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class CannotDefer(ValueError):
    """A model needs what a replay would not give; `instead` is another way to write it."""

    def __init__(self, why: str, instead: str = "") -> None:
        super().__init__(why)
        self.instead = instead


class OneMode(FakeTensorMode):
    """A fake mode that is still the same one in a copied or pickled tensor of this process.

    `copy.deepcopy` of a fake tensor copies all that it refers to, its mode included. The mode holds
    weak references to storages (`StorageWeakRef`), which are plain numbers to a copy: it does not
    count them again, but gives each back when it dies. So storages are freed while others refer to
    them, and the process crashes some time later, wherever that memory is used (torch 2.13).
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how this mode is found again: by its identity."""
        _modes[id(self)] = self
        return _mode_of, (id(self),)


_modes: weakref.WeakValueDictionary[int, OneMode] = weakref.WeakValueDictionary()


def _mode_of(identity: int) -> OneMode:
    return _modes[identity]


class Notes(TorchDispatchMode):
    """Operators on fake tensors, which can be run again where there is memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fakes = OneMode(allow_non_fake_inputs=True)
        with self.fakes:
            self.plain = {*vars(torch.empty(0)), "_is_param"}  # attributes that any fake has
        self.operators: list[tuple[Any, Any, Any, Any]] = []
        self.storages: dict[int, Any] = {}  # held, so that no other storage gets its number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.value(args[0])
        taken = self.placed((args, kwargs or {}))  # before: a fake may be moved by the operator
        result = func(*args, **(kwargs or {}))
        self.operators.append((func, *taken, self.placed(result)))
        return result

    @contextlib.contextmanager
    def whole(self, holder: Any, name: str) -> Iterator[None]:
        """Note a function that draws until a number suits as one operator on its first tensor."""
        function = getattr(holder, name)

        def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            taken = self.placed(((tensor, *args), kwargs))
            self.operators.append((function, *taken, self.placed(tensor)))
            return tensor

        setattr(holder, name, noted)
        try:
            yield
        finally:
            setattr(holder, name, function)

    @contextlib.contextmanager
    def classes(self) -> Iterator[None]:
        """Note of which class of parameters each fake one was to be."""
        method = vars(nn.Parameter)["__new__"]
        make = nn.Parameter.__new__

        def noted(kind: Any, data: Any = None, requires_grad: bool = True) -> Any:
            made = make(kind, data, requires_grad)
            if isinstance(made, FakeTensor) and kind is not nn.Parameter:
                if kind.__init__ is not nn.Parameter.__init__:
                    raise CannotDefer(f"build_model makes a {kind.__name__}, which has an __init__")
                vars(made)["_kind"] = kind
            return made

        nn.Parameter.__new__ = staticmethod(noted)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            nn.Parameter.__new__ = method  # type: ignore[method-assign]

    def attributes(self, fake: FakeTensor) -> dict[str, Any]:
        """Return what was set on a fake tensor, by name."""
        return {name: value for name, value in vars(fake).items() if name not in self.plain}

    def placed(self, values: Any) -> Any:
        """Return a tree of values with the place of each fake tensor instead of it."""

        def place(fake: FakeTensor) -> TensorPlace:
            storage = fake.untyped_storage()
            self.storages[storage._cdata] = storage
            size, stride = tuple(fake.shape), tuple(fake.stride())
            return TensorPlace(storage._cdata, fake.dtype, size, stride, int(fake.storage_offset()))

        def take(value: Any) -> Any:
            if isinstance(value, FakeTensor):
                return place(value)
            # a real tensor may be written later, by the constructor or by NumPy
            return value.clone() if isinstance(value, torch.Tensor) else value

        with unset_fake_temporarily():
            return pytree.tree_map(take, values)

    def value(self, tensor: torch.Tensor) -> Any:
        """Return the number in a tensor, by running what it was made of."""
        place, needed = self.placed(tensor), Notes()
        if not isinstance(place, TensorPlace):
            return tensor.item()
        storages = {place.storage}
        for operator in reversed(self.operators):
            touched = {
                p.storage for p in pytree.tree_leaves(operator[1:]) if isinstance(p, TensorPlace)
            }
            if touched & storages:
                storages |= touched
                needed.operators.insert(0, operator)
                drawn = RANDOM in getattr(operator[0], "tags", [RANDOM])
                if drawn:
                    raise CannotDefer(
                        "build_model reads the value of a random number",
                        "draw such numbers with NumPy",
                    )
        with unset_fake_temporarily():
            return tensor_at(place, needed.replay(torch.device("cpu"), storages)).item()

    def replay(self, device: torch.device, kept: set[int]) -> dict[int, torch.Tensor]:
        """Run the operators on a device; return a tensor in each storage that is to be kept."""
        real: dict[int, torch.Tensor] = {}
        last = {
            place.storage: index
            for index, operator in enumerate(self.operators)
            for place in pytree.tree_leaves(operator[1:])
            if isinstance(place, TensorPlace)
        }

        for index, operator in enumerate(self.operators):
            run(operator, real, device)
            for storage in [s for s in real if last[s] == index and s not in kept]:
                del real[storage]
        return real


def run(operator: Any, real: dict[int, torch.Tensor], device: torch.device) -> None:
    """Run a noted operator on real storages, and add a tensor in each storage that it makes."""
    func, args, kwargs, made = operator

    def found(value: Any) -> Any:
        if isinstance(value, TensorPlace):
            return view_at(value, real)
        return value.to(device) if isinstance(value, torch.Tensor) else value

    with torch.no_grad():
        args, kwargs = pytree.tree_map(found, (args, kwargs))
    schema = getattr(func, "_schema", None)
    if schema and any(argument.name == "device" for argument in schema.arguments):
        kwargs["device"] = device
    with torch.no_grad():
        results = pytree.tree_leaves(func(*args, **kwargs))
    for place, result in zip(pytree.tree_leaves(made), results, strict=True):
        if isinstance(place, TensorPlace):
            real.setdefault(place.storage, result)


def tensor_at(place: TensorPlace, real: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return the tensor that reads a real storage as the fake one at this place read its own."""
    whole = real[place.storage]
    tensor = torch.empty(0, dtype=place.dtype, device=whole.device)
    with torch.no_grad():
        return tensor.set_(whole.untyped_storage(), place.offset, place.shape, place.stride)


def of_kind(kind: type, tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Return a parameter of a class of its own that shares the memory of a tensor."""
    made: torch.Tensor = torch.Tensor._make_subclass(kind, tensor, requires_grad)
    return made


def view_at(place: TensorPlace, real: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return what `tensor_at` returns, for use at once: of the same format as a view.

    Fake tensors remember the storages that `set_` was called with, which would never be freed.
    """
    whole = real[place.storage]
    if whole.dtype != place.dtype:
        return tensor_at(place, real)
    return whole.as_strided(place.shape, place.stride, place.offset)


def build_on_meta(build_model: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """Return the model as `build_model` makes it, without memory before it is on the device.

    Raises:
        CannotDefer: it reads random numbers, draws some that are no operator's, or keeps a tensor
            where it cannot be replaced.
    """
    model, notes = noted_build(build_model)
    fill(model, notes, device)
    check_none_is_left(notes)
    return model


def noted_build(build_model: Callable[[], nn.Module]) -> tuple[nn.Module, Notes]:
    """Return a model of fake tensors, and what its tensors are made of."""
    notes, generator = Notes(), torch.get_rng_state()
    drawn = "_no_grad_trunc_normal_"
    try:
        with notes.classes(), notes.fakes, notes.whole(nn.init, drawn), notes:
            model = build_model()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CannotDefer(f"build_model reads values of a tensor ({error.func})") from error
    except RuntimeError as error:
        if MAKES in str(error):
            kind = str(error).split()[5]
            raise CannotDefer(f"build_model makes a {kind}, a tensor of its own class") from error
        if any(said in str(error) for said in READS):
            raise CannotDefer(
                f"build_model reads values of a tensor: {str(error).rstrip('.')}",
                "read them by .tolist()",
            ) from error
        raise
    if not torch.equal(generator, torch.get_rng_state()):
        raise CannotDefer(
            "build_model seeds torch, or draws random numbers outside of operators",
            "draw such numbers with NumPy",
        )
    for path, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CannotDefer(f"build_model registers a hook on {path}, which would be lost")
    return model, notes


def fill(model: nn.Module, notes: Notes, device: torch.device) -> None:
    """Put real tensors in the place of fake ones, wherever a module or a tensor of it holds them.

    They are of the same class, and what was set on the fake ones is set on them.
    """
    holders: list[dict[str, Any]] = []
    for module in model.modules():
        holders += [module.__dict__, module._parameters, module._buffers]
    fakes: dict[int, FakeTensor] = {}
    attributes: dict[int, dict[str, Any]] = {}
    for holder in holders:  # which grow: a tensor may hold others
        for leaf in pytree.tree_leaves(list(holder.values())):
            if isinstance(leaf, FakeTensor) and id(leaf) not in fakes:
                fakes[id(leaf)], attributes[id(leaf)] = leaf, notes.attributes(leaf)
                holders.append(attributes[id(leaf)])
    places = {key: notes.placed(fake) for key, fake in fakes.items()}
    real = notes.replay(device, {place.storage for place in places.values()})
    made: dict[int, torch.Tensor] = {}
    for key, fake in fakes.items():
        made[key], kind = tensor_at(places[key], real), attributes[key].pop("_kind", nn.Parameter)
        if isinstance(fake, nn.Parameter):
            made[key] = of_kind(kind, made[key], fake.requires_grad)
    for holder in holders:
        for name, value in list(holder.items()):
            if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value)):
                holder[name] = pytree.tree_map_only(FakeTensor, lambda f: made[id(f)], value)
    for key, tensor in made.items():
        vars(tensor).update(attributes[key])


def check_none_is_left(notes: Notes) -> None:
    """Raise CannotDefer if anything that is not the model still holds a fake tensor of it."""
    if left_over(notes.fakes):
        gc.collect()  # what only a cycle holds is nobody's
    for fake in left_over(notes.fakes):
        raise CannotDefer(
            f"build_model keeps a tensor of shape {tuple(fake.shape)} in an object or a function "
            "that is not a module, list, tuple or dict",
            "hold it by a module (register_buffer)",
        )


def left_over(mode: OneMode) -> list[FakeTensor]:
    """Return the fake tensors of this mode that anything still holds."""
    # by type: some objects raise where they are asked for their class
    return [one for one in gc.get_objects() if type(one) is FakeTensor and one.fake_mode is mode]
