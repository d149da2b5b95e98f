"""What a forward does to anything but tensors is undone after its recompute, or refused."""

import array
import contextvars
import ctypes
import itertools
import random
import threading
import types
import weakref
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from memlab import StepConfig, Workload
from memlab.errors import UnsupportedError
from memlab.techniques.checkpointing.mutable_state import Reachable, is_same
from memlab.techniques.step import build_step, set_seed

CALLS = 0
LATE = 1.0
HELPERS = []
TABLE = {"calls": 0}
LOCAL = threading.local()
NUMBER = contextvars.ContextVar("number", default=0)
HELD = contextvars.ContextVar("held", default=())


def halve(gradient):
    return gradient * 0.5


class Block(nn.Module):
    """A block that does what `act` does before its own work."""

    calls = 0

    def __init__(self, act):
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), act
        self.note = types.SimpleNamespace(calls=0, seen=[])
        self.slotted = Slotted()
        getattr(act, "prepare", lambda block: None)(self)

    def forward(self, x, *given):
        return torch.tanh(self.linear(x * self.act(self, x, *given)))


class Counts:
    """An object that weak references can be made of."""

    calls = 0


@dataclass(slots=True)
class Slotted:
    calls: int = 0


@dataclass(frozen=True, slots=True)
class Frozen:
    calls: int = 0


class Number:
    """A value that a class below computes anew each time, as mpmath's constants do."""

    __slots__ = ("__secret", "digits")

    def __init__(self):
        self.__secret, self.digits = 0, (1,)

    def add(self):
        self.__secret += 1
        return self.__secret


class Computed(Number):
    __slots__ = ()

    @property
    def digits(self):
        return (object(),)

    @digits.setter
    def digits(self, value):
        if value != (1,):
            raise AttributeError("it is computed")


class Model(nn.Module):
    def __init__(self, act, given=lambda: ()):
        super().__init__()
        self.layers, self.given = nn.ModuleList(Block(act) for _ in range(2)), given

    def forward(self, x):
        given = self.given()
        for layer in self.layers:
            x = layer(x, *given)
        return x


def run(act, given=lambda: (), **fields):
    """Return losses, weights, and how many hooks there are, after three updates."""
    global CALLS, LATE
    CALLS, TABLE["calls"], Block.calls, LATE = 0, 0, 0, 1.0
    NUMBER.set(0)
    workload = Workload(
        name="one",
        build_model=lambda: Model(act, given),
        make_batch=lambda n: torch.randn(n, 8).requires_grad_(),
        compute_loss=lambda model, x: model(x).square().mean(),
    )
    step = build_step(workload, StepConfig(batch_size=4, accumulation_steps=2, **fields), "cpu")
    losses = []
    for seed in range(3):
        set_seed(seed)
        losses.append(step())
    hooks = [
        (name, len(held), len(part.linear.weight._backward_hooks or ()))
        for part in step.model.layers
        for module in part.modules()
        for name, held in vars(module).items()
        if isinstance(held, OrderedDict) and "hooks" in name
    ]
    return losses, [p.detach().clone() for p in step.model.parameters()], hooks


def install_hooks_once(block, _):
    """As transformers installs those that capture outputs."""
    if not hasattr(block, "installed"):
        block.installed = True
        block.linear.register_forward_hook(lambda module, args, out: out * 1.1)
        block.linear.register_forward_pre_hook(
            lambda module, args, kwargs: ((args[0] * 1.2,), kwargs), with_kwargs=True
        )
        block.linear.register_full_backward_hook(lambda module, ins, outs: (ins[0] * 0.7,))
    return 1.0


def move_a_hook(block, _):
    for handle in block.note.seen:
        handle.remove()
    block.note.seen[:] = [block.linear.register_forward_hook(lambda m, a, out: out * 1.1)]
    return 1.0


def hook_on_a_weight(block, _):
    block.linear.weight.register_hook(halve)
    return 1.0


def count_in_an_object(block, _):
    block.note.calls += 1
    block.slotted.calls += 1
    return 1.0 + block.note.calls * block.slotted.calls


def count_in_the_class(block, _):
    type(block).calls += 1
    return 1.0 + type(block).calls


def count_in_a_global(block, _):
    global CALLS
    CALLS += 1
    TABLE["calls"] += 1
    return 1.0 + CALLS * TABLE["calls"]


def count_in_a_default(block, _, seen=[]):  # noqa: B006
    seen.append(1)
    del seen[: -7 if block is None else 0]
    return 1.0 + len(seen) % 7


def count_in_a_closure():
    calls = 0

    def act(block, _):
        nonlocal calls
        calls += 1
        return 1.0 + calls % 5

    return act


def count_in_the_context(block, _):
    NUMBER.set(NUMBER.get() + 1)
    return 1.0 + NUMBER.get()


def make_a_buffer(block, x):
    if not hasattr(block, "scale"):
        block.register_buffer("scale", torch.full((8,), 0.9))
        return 1.5
    return block.scale


def draw_from_an_object(block, x):
    if not hasattr(block.note, "source"):
        block.note.source = [np.random.default_rng(0)], np.ones(3)
    block.note.source[1][:] += 0.1
    return float(block.note.source[0][0].random() + block.note.source[1][0])


def prepared(prepare):
    """Run `prepare` on each block when it is made."""
    return lambda act: (setattr(act, "prepare", prepare), act)[1]


def change_late(block, _):
    """Change nothing but an attribute in the first four calls."""
    global LATE
    block.number = getattr(block, "number", 0) + 1
    if block.number == 5:
        LATE *= 0.5
        block.note.factor = block.slotted.calls = 3
    return LATE * getattr(block.note, "factor", 1) + block.slotted.calls


def share(block):
    block.draws, block.source, block.queue = random.Random(0), torch.Generator(), []
    block.note.shared = [block.draws, block.source, block.queue]


@prepared(share)
def use_what_is_held_twice(block, _):
    draws, source, queue = block.note.shared
    queue.append(draws.random() + block.draws.random())
    noise = torch.rand((), generator=source) + 2 * torch.rand((), generator=block.source)
    return noise + sum(block.queue)


def keep_tensors(block):
    block.note.mean, block.note.bank = torch.zeros(8), [torch.zeros(4, 8)]


@prepared(keep_tensors)
def write_to_tensors_of_others(block, x):
    note = block.note
    factor = 1 + note.mean + note.bank[0].mean(0)
    with torch.no_grad():
        note.mean.mul_(0.9).add_(x.mean(0))
        note.bank[0].data[note.calls % 4] = x.mean(0)
    note.calls += 1
    return factor


def alias_buffers(block):
    block.register_buffer("table", torch.zeros(2, 8))
    block.register_buffer("row", block.table[0], persistent=False)
    block.view = block.table.numpy()


@prepared(alias_buffers)
def write_to_memory_of_a_buffer(block, _):
    block.row.add_(0.1)
    block.view[1] += 0.2
    return 1 + block.table.sum(0)


def hold_bytes(block):
    block.held = UserDict(calls=0), bytearray(1), array.array("l", [0]), ctypes.c_int(0)
    HELPERS.append(Counts())
    block.weak, block.me = weakref.WeakKeyDictionary({block.linear: 0}), weakref.ref(HELPERS[-1])


@prepared(hold_bytes)
def count_in_bytes(block, _):
    calls, some, longs, number = block.held
    calls["calls"] += 1
    some[0] += 1
    longs[0] += 1
    number.value += 1
    block.weak[block.linear] += 1
    block.me().calls += 1
    calls = (calls["calls"], some[0], longs[0], number.value, *block.weak.values())
    return 1 + sum(calls) * block.me().calls


@prepared(lambda block: setattr(block, "frozen", (Frozen(), Computed())))
def count_in_slots(block, _):
    frozen, number = block.frozen
    object.__setattr__(frozen, "calls", frozen.calls + 1)
    return 1.0 + 0.1 * frozen.calls + 0.01 * number.add()


@prepared(lambda block: setattr(block, "code", nn.Parameter(torch.full((8,), 0.9), False)))
def give_a_frozen_weight_another_class(block, _):
    """As a 4-bit layer of bitsandbytes does with a weight that FSDP has gathered."""
    block.code = nn.Parameter(block.code.detach(), False)
    return block.code


UNDONE = {
    "a frozen weight of another class": give_a_frozen_weight_another_class,
    "slots of frozen, hidden and mangled names": count_in_slots,
    "a global and objects, late": change_late,
    "what is held twice": use_what_is_held_twice,
    "tensors of other objects": write_to_tensors_of_others,
    "memory of a buffer": write_to_memory_of_a_buffer,
    "bytes and weak references": count_in_bytes,
    "hooks": install_hooks_once,
    "a hook that moves": move_a_hook,
    "a hook on a weight": hook_on_a_weight,
    "an object": count_in_an_object,
    "a class": count_in_the_class,
    "a global": count_in_a_global,
    "a context variable": count_in_the_context,
    "a buffer": make_a_buffer,
    "a generator and an array": draw_from_an_object,
}


@pytest.mark.parametrize("name", UNDONE)
def test_a_recompute_leaves_nothing_of_what_it_does(name):
    act = UNDONE[name]
    expected = run(act)
    losses, weights, hooks = run(act, checkpointing="blocks")
    assert losses == expected[0]
    assert all(map(torch.equal, weights, expected[1]))
    assert hooks == expected[2]


def test_what_functions_keep_is_put_back():
    assert run(count_in_a_closure())[0] == run(count_in_a_closure(), checkpointing="blocks")[0]
    seen = count_in_a_default.__defaults__[0]
    lengths = []
    for fields in ({}, {"checkpointing": "blocks"}):
        seen.clear()
        run(count_in_a_default, **fields)
        lengths.append(len(seen))
    assert lengths == [12, 12]  # 2 blocks, 2 micro-batches, 3 updates


def test_a_list_that_a_hook_collects_outputs_in_is_not_appended_twice():
    outputs = []

    def collect(block, _):
        if not block.note.seen:
            block.note.seen.append(1)
            block.linear.register_forward_hook(lambda module, args, out: outputs.append(out.sum()))
        return 1.0

    run(collect, checkpointing="blocks")
    assert len(outputs) == 12


def make_a_parameter(block, x):
    block.scale = nn.Parameter(torch.ones(8))
    return block.scale


@prepared(lambda block: setattr(block, "code", nn.Parameter(torch.ones(8), False)))
def copy_a_frozen_weight(block, x):
    block.code = nn.Parameter(block.code * 0.9, False)
    return block.code


@prepared(lambda block: setattr(block, "code", nn.Parameter(torch.ones(8))))
def give_a_weight_another_object(block, x):
    block.code = nn.Parameter(block.code.detach())
    return block.code


def make_a_module_later(block, x):
    block.note.calls += 1
    if block.note.calls == 3:
        block.linear = nn.Linear(8, 8)
    return 1.0


def replace_its_forward(block, x):
    block.forward = types.MethodType(Block.forward, block)
    return 1.0


def freeze_itself(block, x):
    block.linear.bias.requires_grad_(False)
    return 1.0


def clip_its_weights(block, x):
    with torch.no_grad():
        block.linear.weight.mul_(0.9)
    return 1.0


def count_in_the_thread(block, x):
    LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
    return 1.0


def leave_an_object_in_the_context(block, x):
    HELD.set([x.shape])
    return 1.0


@prepared(lambda block: setattr(block, "ticks", itertools.count()))
def count_by_an_iterator(block, x):
    return float(next(block.ticks))


@prepared(lambda block: setattr(block, "values", (0.5**n for n in range(99))))
def take_from_a_generator(block, x):
    return next(block.values)


@prepared(lambda block: setattr(block, "code", nn.Parameter(torch.ones(8), requires_grad=False)))
def move_a_code_book(block, x):
    block.code.data.mul_(0.9)
    return block.code


@prepared(lambda block: setattr(block, "mean", torch.ones(8)))
def move_a_mean(block, x):
    block.mean.data = 0.9 * block.mean.data
    return block.mean


def normalise_its_weights_late(block, x):
    block.number = getattr(block, "number", 0) + 1
    if block.number == 5:
        block.linear.weight.data.div_(2)
    return 1.0


REFUSED = {
    # Python 3.14 cannot copy a count any more
    r"(changes layers.0.ticks \(count\), which cannot be moved back|can reach layers.0.ticks, a "
    "count, which does not tell how far it has come)": count_by_an_iterator,
    "can reach layers.0.values, a generator": take_from_a_generator,
    "changes a frozen parameter in place": move_a_code_book,
    "changes its attribute 'mean' in place": move_a_mean,
    "changes a trainable parameter in +place": normalise_its_weights_late,
    "makes, replaces or removes parameters": make_a_parameter,
    "makes, replaces or +removes parameters": copy_a_frozen_weight,
    "makes, replaces +or removes parameters": give_a_weight_another_object,
    "makes, replaces or removes modules": make_a_module_later,
    "replaces the forward of its own module": replace_its_forward,
    "sets requires_grad": freeze_itself,
    "changes a trainable parameter in place": clip_its_weights,
    "'LOCAL' of .*, which belongs to its thread": count_in_the_thread,
    "leaves another 'held' in its context": leave_an_object_in_the_context,
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_undone_is_refused_with_the_module(text):
    with pytest.raises(UnsupportedError, match=rf"layers\.0 cannot be recomputed: .*{text}"):
        run(REFUSED[text], checkpointing="blocks")


@prepared(lambda block: block.register_buffer("scale", torch.ones(8)))
def scale_late(block, x):
    block.number = getattr(block, "number", 0) + 1
    if block.number == 5:
        block.scale.data.mul_(0.5)
    return block.scale


def test_a_buffer_that_changes_late_and_unseen_is_refused():
    with pytest.raises(UnsupportedError, match="changes its buffer 'scale' in this forward"):
        run(scale_late, checkpointing="blocks")


@dataclass
class Memory:
    """A cache under a name that nothing tells it by."""

    keys: list = field(default_factory=list)
    last: torch.Tensor | None = None


class Preallocated:
    def __init__(self):
        self.keys = torch.zeros(4, 8)


def remember(block, x, memory):
    memory.keys.append(block.linear(x))
    return sum(key.sum() for key in memory.keys)


def write_into(block, x, memory):
    memory.keys[: len(x)] = x.detach()
    return memory.keys.sum()


@pytest.mark.parametrize(
    ("act", "given"), [(remember, Memory), (write_into, Preallocated)], ids=["grows", "is written"]
)
def test_a_cache_of_any_name_is_refused(act, given):
    run(act, lambda: (given(),))
    with pytest.raises(UnsupportedError, match=r"layers\.0 .*its argument.*as a cache does"):
        run(act, lambda: (given(),), checkpointing="blocks")


def test_an_object_that_is_given_and_notes_something_is_put_back():
    def act(block, x, note):
        note.calls += 1
        return float(note.calls)

    def given():
        return (types.SimpleNamespace(calls=0),)

    assert run(act, given)[0] == run(act, given, checkpointing="blocks")[0]


def test_a_walk_ends_and_looks_into_nothing_of_torch_or_python():
    endless = types.SimpleNamespace()
    endless.me = endless
    found = Reachable([("a", [endless, threading.Lock(), nn.Linear, open])])
    assert sorted(place.where for place in found.places) == ["a", "a[0]"]
    before = [place.read() for place in found.places]
    endless.you = 1
    after = [place.read() for place in found.places]
    assert [is_same(*pair) for pair in zip(before, after, strict=True)].count(False) == 1
    for place, contents in zip(found.places, before, strict=True):
        place.write(contents)
    assert vars(endless) == {"me": endless}
