"""State in odd places, and transforms of torch.func, inside modules that are recomputed."""

import collections
import gc

import numpy as np
import pytest
import torch
from torch import nn

from memlab.errors import UnsupportedError
from memlab.techniques.checkpointing import recompute
from memlab.techniques.step import build_step
from tests.checkpointing_parts import draw, make_workload, plain_config
from tests.same_state import assert_same, state_after


class Hostile(nn.Module):
    """A block whose forward does what `act` does beside its own work."""

    def __init__(self, act, **state):
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), act
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        for name, value in state.items():
            setattr(self, name, value())

    def forward(self, x):
        return self.linear(self.act(self, self.linear(x), x)).tanh()


def hostile(act, **state):
    return make_workload(lambda: [Hostile(act, **state)])


def hook_on_its_input(_, h, x):
    x.register_hook(lambda gradient: gradient * 0.5)
    return h


def norm_of_its_own(block, h, _):
    return nn.functional.batch_norm(h, block.mean, block.var, training=True)


def write_past_autograd(block, h, _):
    block.mean.data.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return h * block.mean


def count(block, h, _):
    block.counts["calls"] += 1
    block.nested["in"]["calls"] += 1
    block.array += 1
    return h * block.counts["calls"] * block.nested["in"]["calls"] * float(block.array[0])


FIRST, SECOND = 1.0, 1.0


def raise_first(h):
    global FIRST
    FIRST += 0.5
    return h * FIRST


def raise_second(h):
    global SECOND
    SECOND += 0.25
    return h * SECOND


def two_globals(_, h, __):
    return raise_second(raise_first(h))


HOSTILE = {
    "two globals of one file, each in a function of its own": (two_globals, {}),
    "a hook on an input": (hook_on_its_input, {}),
    "a norm without a module": (norm_of_its_own, {}),
    "a buffer through .data": (write_past_autograd, {}),
    "containers": (
        count,
        {
            "counts": lambda: collections.Counter(),
            "nested": lambda: {"in": {"calls": 0}},
            "array": lambda: np.zeros(1),
        },
    ),
    "a generator in a list": (draw, {"generators": lambda: [torch.Generator().manual_seed(1)]}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_state_in_odd_places_is_the_same_bit_by_bit(name):
    global FIRST, SECOND
    act, state = HOSTILE[name]
    config = plain_config(checkpointing="blocks", checkpoint_modules="Hostile")
    expected = state_after(hostile(act, **state), plain_config(), steps=3)
    FIRST = SECOND = 1.0
    assert_same(state_after(hostile(act, **state), config, steps=3), expected)


def change_frozen(block, h, _):
    block.frozen.mul_(0.9)
    return h


def change_attribute(block, h, _):
    block.number += 1
    return h * block.number


@pytest.mark.parametrize(
    ("act", "what"), [(change_frozen, "a frozen parameter"), (change_attribute, "'number'")]
)
def test_a_tensor_that_is_no_buffer_may_not_change_in_place(act, what):
    workload = hostile(act, number=lambda: torch.zeros(()))
    config = plain_config(checkpointing="blocks", checkpoint_modules="Hostile")
    with pytest.raises(UnsupportedError, match=f"changes .*{what}.* make that tensor a buffer"):
        build_step(workload, config, "cpu").accumulate()


def keep_aside(block, h, _):
    block.last = h.exp().sin()
    block.all = [*block.all[-1:], h.exp().sin()]
    return h


@pytest.mark.slow
def test_a_result_that_a_module_keeps_aside_does_not_keep_the_steps_before():
    workload = hostile(keep_aside, all=list)
    step = build_step(
        workload, plain_config(checkpointing="blocks", checkpoint_modules="Hostile"), "cpu"
    )

    def alive():
        step()
        gc.collect()
        return sum(type(thing) is recompute._ForwardCall for thing in gc.get_objects())

    numbers = [alive() for _ in range(8)]
    assert numbers[4:] == numbers[4:5] * 4


def test_a_table_that_only_the_first_forward_makes_is_made_again_in_its_recompute():
    made = {}

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            if "table" not in made:
                made["table"] = torch.full((8,), 0.5).mul(torch.ones(8))
            hidden = self.linear(x)
            return hidden.mul(1.5).mul(made["table"]).mul(hidden)

    def after(**fields):
        made.clear()
        return state_after(make_workload(lambda: [Table()]), plain_config(**fields))

    for policy in ("aten.mul", "recompute-all"):
        assert_same(after(checkpointing="blocks", checkpoint_policy=policy), after())


def test_a_forward_that_makes_modules_or_is_a_generator_is_refused():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            if not hasattr(self, "norm"):
                self.norm = nn.BatchNorm1d(8)
            return self.norm(self.linear(x))

    class Generates(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            yield self.linear(x)

    with pytest.raises(UnsupportedError, match="its forward makes, replaces or removes modules"):
        state_after(make_workload(lambda: [Late()]), plain_config(checkpointing="blocks"))
    model = nn.Sequential(Generates())
    recompute.wrap("0", model[0], None, lambda *_: None)
    with pytest.raises(UnsupportedError, match="0 cannot be recomputed: its forward is a generato"):
        model[0](torch.ones(2, 8))


class Transformed(nn.Module):
    """Adds what a transform of torch.func makes of a layer."""

    def __init__(self, transform):
        super().__init__()
        self.transform = transform
        self.layer = nn.Linear(8, 8)

    def of_row(self, row):
        return torch.tanh(self.layer(row))

    def forward(self, x):
        return x + self.transform(self.of_row)(x)


def rows_of_jacobians(function):
    return lambda x: torch.func.vmap(torch.func.jacrev(function))(x).sum(-1)


def gradient(function):
    return torch.func.grad(lambda x: function(x).square().sum())


def three_updates(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_a_block_that_calls_vmap_is_recomputed_bit_by_bit():
    plain, recomputing = (nn.Sequential(Transformed(torch.func.vmap)) for _ in range(2))
    recomputing.load_state_dict(plain.state_dict())
    recompute.wrap("0", recomputing[0], None, lambda *_: None)
    pairs = zip(three_updates(plain), three_updates(recomputing), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("transform", [rows_of_jacobians, gradient])
def test_a_block_that_calls_a_gradient_of_torch_func_is_refused_by_name(transform):
    model = nn.Sequential(Transformed(transform))
    recompute.wrap("0", model[0], None, lambda *_: None)
    with pytest.raises(UnsupportedError, match="0 cannot be recomputed: it calls grad, vjp, jac"):
        three_updates(model)


@pytest.mark.parametrize("transform", [torch.func.vmap, gradient])
def test_a_block_inside_a_transform_of_torch_func_is_refused_by_name(transform):
    model = Transformed(transform)
    recompute.wrap("layer", model.layer, None, lambda *_: None)
    with pytest.raises(UnsupportedError, match="layer cannot be recomputed: it is called inside"):
        three_updates(model)
