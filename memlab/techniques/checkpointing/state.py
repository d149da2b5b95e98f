"""`State`: what a forward begins with beside its inputs, noted for its recompute.

The idea. A recompute must do exactly what the forward did, though it runs later: when random
numbers have been drawn, buffers have changed, hooks have been installed. So before each forward we
note all that it could read or change. After it we keep what it did change, as it was before. The
recompute begins by putting that back, and ends by putting everything as it found it:

    forward      note everything -> run -> compare -> keep what changed, as it was before
    backward     put that back -> run again -> put back what was there just now

What is noted:

    random numbers of torch, NumPy and `random`, autocast       devices/generators.py
    context variables                                           here
    tensors that a forward changes in place                     here: `SeenTensors`
    attributes, hooks and buffers of the modules themselves     places.py: `OfModule`
    whatever else their code can reach: lists, closures, ...    places.py: `Reachable`

An example. A forward that counts its calls, `self.calls += 1`, and drops out less with each of
them: the third forward begins with `calls` 2 and a generator in state G. Its recompute, after a
fourth forward, finds 4; it sets 2 and G, runs, and sets 4 and the generator's present state again.

Finding places takes longer than a block takes to run, so a walk is made in the first two forwards
alone: a first forward makes things, a second one changes them. Later forwards read the modules
themselves, and elsewhere those places that the first two changed.

What changes and cannot be put back is refused by name. Left out, and for `memlab.verify` to find:
what no walk can see, such as files and C extensions; and places outside of the modules, NumPy's
and Python's generators among them, that a forward begins to change after its second call.
"""

import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import operator
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from memlab._util.torch_private import pytree
from memlab._util.torch_private.tensors import (
    MODULES,
    PARAMETERS,
    FakeTensor,
    NormWithStatistics,
    buffers_of,
    is_wrapper,
    num_holders_of_storage,
    parameters_of,
    storage_key,
    version_of,
    without_modes,
)
from memlab.devices.generators import (
    autocast_of,
    same_autocast,
    set_random,
    states_in_python,
    states_of_random,
)
from memlab.errors import UnsupportedError
from memlab.techniques.checkpointing.model_cache import OFF
from memlab.techniques.checkpointing.places import (
    ATOMS,
    MISSING,
    OfModule,
    PythonPlace,
    Reachable,
    are_same,
    is_same,
)

NUM_WALKS = 2  # what a first forward makes, a second one fills
NO_CACHE = f", as a cache does; use {OFF} if the model's config has use_cache, or give it none"
Contents = tuple[Any, ...]


class Changes:
    """What is known of a module from one forward to the next.

    Attributes:
        path: of the module in its model, for messages.
        module: the module itself.
        parts: the module and all modules within it.
        own: their attributes and hooks.
        others: what else its first forwards have changed.
        seen: of the tensors that its forwards can reach.
        own_devices: of its parameters.
        walks_given: whether the next forward walks through what its arguments hold.
        draws_in_python: whether a forward has drawn random numbers of NumPy or Python.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module, self.parts = path, module, list(module.modules())
        self.own: list[PythonPlace] = [OfModule(part, path) for part in self.parts]
        self.others: list[PythonPlace] = []
        self.seen = SeenTensors()
        self.own_devices = {p.device for p in module.parameters()}
        self.walks_given, self.draws_in_python = True, False
        self._num_walks = NUM_WALKS  # left to do

    @property
    def is_learning(self) -> bool:
        """Whether the module has run too rarely to know what its forward changes."""
        return self._num_walks > 0

    def places(self) -> list[PythonPlace]:
        """Return the places that the module may change: after the first forwards, those it did."""
        if not self.is_learning:
            return [*self.own, *self.others]
        found = Reachable([(self.path, self.module)], self.parts)
        if found.unreadable:
            self.refuse(
                f"its forward can reach {found.unreadable[0]}, which does not tell how far it has "
                "come; keep a list and a number in its place"
            )
        self.seen.learn(found.tensors, self.parts, found.names)
        return [*self.own, *found.places]

    def learn(self, changed: list[PythonPlace], of_given: set[int]) -> None:
        """Remember which places a forward has changed.

        Args:
            changed: the places.
            of_given: ids of the holders that its arguments reach.
        """
        if self.is_learning:
            self._num_walks -= 1
            known = {id(place) for place in [*self.own, *self.others]}
            own = [place for place in changed if id(place.holder) not in of_given]
            self.others += [place for place in own if id(place) not in known]
        is_given = any(id(place.holder) in of_given for place in changed)
        self.walks_given = self.is_learning or is_given

    def refuse(self, what: str) -> None:
        """Raise UnsupportedError for what cannot be put back."""
        remedy = f"{', or' if ';' in what else ';'} leave the module out by checkpoint_modules"
        raise UnsupportedError(f"{self.path} cannot be recomputed: {what}{remedy}")

    def refuse_as_later(self, what: str) -> None:
        """Raise UnsupportedError for what a first forward did not do."""
        raise UnsupportedError(
            f"{self.path} {what} in this forward and did not in its first, so that it cannot be "
            "recomputed exactly; leave it out by checkpoint_modules"
        )


class State:
    """The state that one call begins with.

    Args:
        changes: of the module.
        tensors: of the call's arguments.
        given: the arguments themselves, of any structure.
    """

    def __init__(self, changes: Changes, tensors: list[torch.Tensor], given: Any = ()) -> None:
        self.changes = changes
        self.inputs = {id(tensor) for tensor in tensors}
        self.places: list[tuple[PythonPlace, Contents]] = []  # with what they held before
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []  # with their values before
        every = {torch.device("cpu"), *(t.device for t in tensors), *changes.own_devices}
        self.devices = [device for device in every if device.type != "meta"]
        self.autocast = autocast_of(self.devices)
        self.random: dict[torch.device, bytes] = {}
        self.in_python: bytes | None = None
        self.context: dict[contextvars.ContextVar[Any], Any] = {}
        self._given = given

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the state, run the forward, keep what it changed as it was before."""
        changes = self.changes
        made_of, own_forward = _made_of(changes.parts), vars(changes.module).get("forward")
        trainable = [p.requires_grad for p in changes.module.parameters()]
        draws = changes.is_learning or changes.draws_in_python
        context, in_python = contextvars.copy_context(), states_in_python() if draws else None
        random = states_of_random(self.devices)

        with self._places_noted():
            watched = changes.seen.watch(changes.parts, self.inputs)
            yield

        now = states_of_random(self.devices)
        self.random = {d: state for d, state in random.items() if state != now[d]}
        if in_python is not None and in_python != states_in_python():
            self.in_python, changes.draws_in_python = in_python, True
        if vars(changes.module).get("forward") is not own_forward:
            changes.refuse("its forward replaces the forward of its own module")
        self._judge_structure(made_of)
        self._judge_context(context)
        self._judge_tensors(watched)
        if trainable != [p.requires_grad for p in changes.module.parameters()]:
            changes.refuse("its forward sets requires_grad of a parameter")

    @contextlib.contextmanager
    def _places_noted(self) -> Iterator[None]:
        """Note what is held wherever the forward may write, and keep it where it did."""
        changes = self.changes
        given = Reachable([("its argument", self._given)] if changes.walks_given else [])
        self._given = None
        inner = [(w, t, version(t)) for w, t in given.tensors if id(t) not in self.inputs]
        places = [*given.places, *changes.places()]
        before = [place.read() for place in places]

        yield

        for where, tensor, earlier in inner:
            if version(tensor) != earlier:
                changes.refuse(f"its forward changes {where} in place{NO_CACHE}")
        after = [place.read() for place in places]
        of_given = {id(place.holder) for place in given.places}
        changed = _differing(places, before, after)
        for place, held, now in changed:
            if place.fixed:
                changes.refuse(f"its forward changes {place.where}, {place.fixed}")
            if id(place.holder) in of_given and _keeps_results(now, held):
                changes.refuse(f"its forward adds results to {place.where}{NO_CACHE}")

        # a module may also change between its forward and its recompute, as by `eval`
        own = zip(places, before, after, strict=True)
        kept = [each for each in own if isinstance(each[0], OfModule)]
        kept += [each for each in changed if not isinstance(each[0], OfModule)]
        self.places = [(place, _without_graphs(held, now)) for place, held, now in kept]
        changes.learn([place for place, *_ in changed], of_given)

    def _judge_structure(self, before: list[tuple[str, Contents]]) -> None:
        """Refuse a forward that changes what the model is made of.

        Another class over the memory of a frozen weight is no change.
        """
        for (what, held), (_, now) in zip(before, _made_of(self.changes.parts), strict=True):
            if not is_same(held, now) and not _are_of_same_memory(held, now):
                self.changes.refuse(
                    f"its forward makes, replaces or removes {what} of its own; do that in its "
                    "constructor"
                )

    def _judge_context(self, before: contextvars.Context) -> None:
        for variable, value in contextvars.copy_context().items():
            if before.get(variable, MISSING) is not value and type(value) not in ATOMS:
                self.changes.refuse(f"its forward leaves another {variable.name!r} in its context")
        self.context = {var: value for var, value in before.items() if type(value) in ATOMS}

    def _judge_tensors(self, watched: list["Watched"]) -> None:
        """Keep the values before of tensors that were changed in place, or refuse the change."""
        changed = self.changes.seen.judge(watched)
        for tensor in changed:
            if tensor.is_fixed:
                self.changes.refuse(
                    f"its forward changes {tensor.what} in place, which a recompute would do once "
                    "more; make that tensor a buffer"
                )
            if tensor.before is None:
                self.changes.refuse_as_later(f"changes {tensor.what}")
        self.tensors = [(w.tensor, w.before) for w in changed if w.before is not None]

    @contextlib.contextmanager
    def restored(self) -> Iterator[Callable[..., Any]]:
        """Go back to the noted state for a recompute, and leave everything as it is now.

        Yields:
            What calls a function with its arguments in the context variables of the forward.
        """
        context = contextvars.copy_context()  # what is set in it is forgotten with it
        for variable, value in self.context.items():
            context.run(variable.set, value)
        random = states_of_random(self.random)
        in_python = states_in_python() if self.in_python else None
        with contextlib.ExitStack() as stack:
            stack.callback(set_random, random, in_python)
            stack.enter_context(self._places_restored())
            set_random(self.random, self.in_python)
            stack.enter_context(same_autocast(self.autocast))
            in_place = self.changes.seen.writes_unseen
            stack.enter_context(values_put_back(self.tensors, in_place=in_place))
            yield context.run

    @contextlib.contextmanager
    def _places_restored(self) -> Iterator[None]:
        """Put back what the forward changed, and afterwards what the recompute did."""
        changes = self.changes
        every = [*(place for place, _ in self.places), *changes.places()]
        places = list({id(place): place for place in every}.values())
        before = [place.read() for place in places]
        for (place, contents), held in zip(self.places, before, strict=False):
            if not is_same(held, contents):
                place.write(contents)
        try:
            yield
        finally:
            after = [place.read() for place in places]
            for place, held, _ in _differing(places, before, after):
                if place.fixed:
                    changes.refuse(f"running again, it changes {place.where}, {place.fixed}")
                place.write(held)


def _differing(
    places: list[PythonPlace], before: list[Contents], after: list[Contents]
) -> list[tuple[PythonPlace, Contents, Contents]]:
    """Return the places whose contents differ, with what they held before and after."""
    if are_same(before, after):  # faster than one by one
        return []
    every = zip(places, before, after, strict=True)
    return [(place, held, now) for place, held, now in every if not is_same(held, now)]


def _keeps_results(now: Contents, before: Contents) -> bool:
    """Return whether a place came to hold tensors that have a graph, as a cache does."""
    known = {id(tensor) for tensor in pytree.tree_leaves(before)}
    new = (leaf for leaf in pytree.tree_leaves(now) if id(leaf) not in known)
    return any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in new)


def _without_graphs(before: Contents, after: Contents) -> Contents:
    """Return what a place held before a forward, without the graphs of autograd in it.

    A graph holds what it was computed from. So a module that keeps its last output, noted before
    each forward as it is, would hold the graphs of all forwards before, one through the other.
    """
    if is_same(before, after) and torch.Tensor not in map(type, before):
        return before
    stayed = set(map(id, after))
    return tuple(
        _tensor_without_graph(value) if id(value) in stayed else _without_graph(value)
        for value in before
    )


def _tensor_without_graph(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _without_graph(value: Any) -> Any:
    """Return a value; of a container that holds results of autograd a copy without their graphs."""
    if type(value) in (list, tuple):
        items = [_without_graph(item) for item in value]
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    if type(value) is dict:
        copied = {key: _without_graph(item) for key, item in value.items()}
        return value if all(copied[key] is value[key] for key in copied) else copied
    return _tensor_without_graph(value)


def _made_of(parts: list[nn.Module]) -> list[tuple[str, Contents]]:
    """Return the modules and the parameters of each module: the names, and then the values."""
    registries = (("modules", MODULES), ("parameters", PARAMETERS))
    held = ((what, vars(part)[name]) for part in parts for what, name in registries)
    return [(what, (*items, *items.values())) for what, items in held]


def _are_of_same_memory(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Return whether nothing but the classes of frozen parameters has changed.

    FSDP gathers a 4-bit weight of bitsandbytes as a plain tensor, and the layer gives it back its
    class in its forward: another object over the same memory, which FSDP replaces again.
    """
    half = len(now) // 2
    return before[:half] == now[:half] and all(map(_is_of_same_memory, before[half:], now[half:]))


def _is_of_same_memory(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if not (isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor)):
        return False
    if before.requires_grad or now.requires_grad:  # its gradient belongs to one object
        return False
    return (
        not is_wrapper(type(before))
        and not is_wrapper(type(now))
        and _memory(before) == _memory(now)
    )


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = storage_key(tensor.untyped_storage())
    return storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


# Tensors that a forward may change in place: detect the changes and restore the old values.
#
# Changed buffers, and changed tensors in other objects, are restored. A changed parameter or
# tensor attribute of the module is refused.
#
# A change normally raises a tensor's version, but kernels of norms and writes through `.data`
# or NumPy do not. Therefore values are compared too: when a tensor is first seen, and in every
# forward of a module whose code uses names that allow such writes.

WRITES_UNSEEN = frozenset(
    (
        "data",
        "numpy",
        "from_numpy",
        "frombuffer",
        "as_tensor",
        "asarray",
        "data_ptr",
        "storage",
        "untyped_storage",
        "set_",
    )
)
"""Names in code that may write to a tensor without raising its version."""
OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(slots=True, eq=False)
class Watched:
    """One tensor in one forward.

    Attributes:
        what: the tensor, in words.
        tensor: the tensor itself.
        is_fixed: whether a change is refused.
        is_statistic: whether it is a running statistic, whose kernel does not raise its version.
        before: a copy of its values; None if it is not expected to change.
        version: its version before the forward.
        sum: checksum of its bytes before the forward; None if that is not compared.
    """

    what: str
    tensor: torch.Tensor
    is_fixed: bool = False
    is_statistic: bool = False
    before: torch.Tensor | None = None
    version: int = 0
    sum: int | None = None


class SeenTensors:
    """What is known of the tensors that the forwards of one module can reach."""

    def __init__(self) -> None:
        self.others: list[tuple[str, weakref.ref[torch.Tensor]]] = []  # in lists, objects, ...
        self.writes_unseen = False
        self._changes: dict[int, tuple[weakref.ref[torch.Tensor], bool, bool]] = {}

    def learn(
        self,
        reached: list[tuple[str, torch.Tensor]],
        parts: list[nn.Module],
        names: Collection[str],
    ) -> None:
        """Remember the tensors and the names in code that a walk has reached."""
        own = {id(tensor) for _, tensor, *_ in _own(parts)}
        self.others = [(w, weakref.ref(tensor)) for w, tensor in reached if id(tensor) not in own]
        self.writes_unseen = not WRITES_UNSEEN.isdisjoint(names)
        self._changes = {key: held for key, held in self._changes.items() if held[0]() is not None}

    def of(self, tensor: torch.Tensor) -> tuple[bool, bool] | None:
        """Return whether forwards change a tensor, and whether silently; None if it is new."""
        reference, changes, is_silent = self._changes.get(id(tensor), (None, False, False))
        return (changes, is_silent) if reference is not None and reference() is tensor else None

    def watch(self, parts: list[nn.Module], inputs: Collection[int]) -> list[Watched]:
        """Record the tensors that the forward of these modules may change.

        Args:
            parts: the modules.
            inputs: ids of the forward's inputs, which are watched elsewhere.
        """
        watched = [Watched(*held) for held in _own(parts)]
        for where, reference in self.others:
            tensor = reference()
            if tensor is not None and id(tensor) not in inputs:
                watched.append(Watched(where, tensor, is_fixed=tensor.requires_grad))

        for one in watched:
            one.version = version(one.tensor)
            known = self.of(one.tensor)
            if not one.is_fixed and (known is None or known[0] or one.is_statistic):
                one.before = one.tensor.detach().clone()
            elif known is None or self.writes_unseen:
                one.sum = sum_of_bytes(one.tensor)
        return watched

    def judge(self, watched: list[Watched]) -> list[Watched]:
        """Return the tensors that a forward has changed, and remember them."""
        changed = []
        for one in watched:
            before = self.of(one.tensor)
            is_silent = before is not None and before[1]
            has_moved = version(one.tensor) != one.version

            if not has_moved and not one.is_statistic and not is_silent:
                if before is None and one.before is not None:
                    is_silent = _has_changed(one.before, one.tensor)
                elif one.sum is not None:
                    is_silent = one.sum != sum_of_bytes(one.tensor)

            is_changed = has_moved or one.is_statistic or is_silent
            if is_changed:
                changed.append(one)
            if before is None or (is_changed, is_silent) != before:
                changes = is_changed or (before is not None and before[0])
                self._changes[id(one.tensor)] = (weakref.ref(one.tensor), changes, is_silent)

        return changed


def _own(parts: list[nn.Module]) -> Iterator[tuple[str, torch.Tensor, bool, bool]]:
    """Yield the modules' own tensors: in words, the tensor, `is_fixed`, `is_statistic`."""
    for part in parts:
        for parameter in parameters_of(part).values():
            if parameter is not None:
                kind = "trainable" if parameter.requires_grad else "frozen"
                yield f"a {kind} parameter", parameter, True, False

        for name, buffer in buffers_of(part).items():
            if buffer is not None:
                is_statistic = isinstance(part, NormWithStatistics) and part.training
                is_statistic = is_statistic and name.startswith("running_")
                yield f"its buffer {name!r}", buffer, False, is_statistic

        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                yield f"its attribute {name!r}", value, True, False


def version(tensor: torch.Tensor) -> int:
    """Return the number that each change in place raises; 0 for an inference tensor."""
    return 0 if tensor.is_inference() else version_of(tensor)


@contextlib.contextmanager
def values_put_back(
    noted: list[tuple[torch.Tensor, torch.Tensor]], *, in_place: bool
) -> Iterator[None]:
    """Give tensors the values that were noted of them, and afterwards those that they have now.

    Args:
        noted: tensors, each with its values.
        in_place: always write to a tensor's own memory, where others may look into it; if not, a
            tensor that nothing else shares its memory with gets other memory for the while.
    """
    undo: list[Callable[[], None]] = []
    for tensor, values in noted:
        if has_own_memory(tensor) and not in_place:
            own, tensor.data = tensor.data, values.clone()
            undo.append(functools.partial(setattr, tensor, "data", own))
        else:
            undo.append(functools.partial(put, tensor, tensor.detach().clone()))
            put(tensor, values)
    try:
        yield
    finally:
        for put_back in undo:
            put_back()


def put(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a tensor's own memory without raising its version."""
    if tensor.layout != torch.strided or tensor.is_nested:
        tensor.data.copy_(values)
        return
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    tensor.data[once].copy_(values[once])


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Return whether no view, array or other tensor shares a tensor's memory."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    return _num_holders(tensor) <= HOLDERS_OF_ONE


def _num_holders(tensor: torch.Tensor) -> int:
    return int(num_holders_of_storage(storage_key(tensor.untyped_storage())))


HOLDERS_OF_ONE = _num_holders(torch.empty(1))  # the tensor and the storage object that asks


def sum_of_bytes(tensor: torch.Tensor) -> int | None:
    """Return a checksum of a tensor's values and address; None if it has no values of its own."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or tensor.is_nested or tensor.is_quantized or not _has_values(tensor):
        return None
    if 0 in tensor.stride():  # expanded from fewer numbers, like an offloaded weight
        return None

    with without_modes(), torch.no_grad():
        flat = tensor.data
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj())

        flat = flat.view(OF_BYTES[flat.element_size()])
        if flat.device.type == "cpu":
            flat = flat.contiguous()
            # not through NumPy: its array would keep FSDP from freeing a gathered parameter
            values = (ctypes.c_byte * flat.nbytes).from_address(flat.data_ptr() or 1)
            return zlib.crc32(values, tensor.data_ptr() & 0xFFFFFFFF)

        return hash((int(flat.sum(dtype=torch.int64)), tensor.data_ptr()))


def _has_changed(before: torch.Tensor, tensor: torch.Tensor) -> bool:
    return _has_values(tensor) and not torch.equal(before, tensor.detach())


def _has_values(tensor: Any) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta
