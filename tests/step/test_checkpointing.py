"""Checkpointed modules do as plain ones do, bit by bit: gradients, buffers, random numbers."""

import collections
import contextlib
import gc
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

import memlab
from memlab import Outcome, StepConfig, Workload
from memlab.errors import ConfigError, UnsupportedError
from memlab.plan import Plan, Region
from memlab.step import build_step
from memlab.techniques.recompute import policies, recompute
from tests.same_state import assert_same, keep_everything, state_after

aten = torch.ops.aten


class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.layers(x)


class StochasticDepth(nn.Module):
    """Left out by chance, as three libraries draw it."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).tanh() if self.draw() < 0.5 else x


class Average(nn.Module):
    """Centres its input on an average that it keeps, and that a recompute must find as it was."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        self.average.mul_(0.9).add_(x.detach().mean(tuple(range(x.ndim - 1))), alpha=0.1)
        return self.linear(x - self.average).tanh()


class Reassigned(Average):
    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(tuple(range(x.ndim - 1)))
        return self.linear(x - self.average).tanh()


class Counting(TorchDispatchMode):
    """Sees what reaches a kernel, below the modes that keep and reuse."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


BLOCKS = {
    "linear": lambda: [nn.Linear(8, 8), nn.GELU()],
    "batch-norm": lambda: [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()],
    "cumulative": lambda: [nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU()],
    "instance-norm": lambda: [
        nn.Unflatten(1, (4, 2)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten(),
        nn.Linear(8, 8),
    ],
    "in-place": lambda: [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)],
    "dropout": lambda: [nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.2)],
    "alpha-dropout": lambda: [nn.Linear(8, 8), nn.AlphaDropout(0.3), nn.Tanh()],
    "feature-dropout": lambda: [
        nn.Linear(8, 8), nn.Unflatten(1, (4, 2)), nn.Dropout1d(0.4), nn.Flatten(), nn.Tanh()
    ],
    "rrelu": lambda: [nn.Linear(8, 8), nn.RReLU()],
    "spectral-norm": lambda: [spectral_norm(nn.Linear(8, 8)), nn.Tanh()],
    "parametrized": lambda: [parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh()],
    "depth-torch": lambda: [StochasticDepth(lambda: torch.rand(()).item())],
    "depth-python": lambda: [StochasticDepth(random.random)],
    "depth-numpy": lambda: [StochasticDepth(np.random.random)],
    "average": lambda: [Average()],
    "reassigned": lambda: [Reassigned()],
}  # fmt: skip


def make_workload(block, depth=3):
    return Workload(
        name="blocks",
        build_model=lambda: nn.Sequential(
            nn.Linear(8, 8), *[Residual(*block()) for _ in range(depth)], nn.Linear(8, 1)
        ),
        make_batch=lambda n: (torch.randn(n, 8), torch.randn(n, 1)),
        compute_loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    )


def plain_config(**changes):
    return StepConfig(batch_size=12, accumulation_steps=2, **changes)


@pytest.mark.parametrize(
    "policy",
    [*policies.PRESET_POLICIES, pytest.param(keep_everything, id="keep-everything")],
    ids=str,
)
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*")
def test_gradients_buffers_and_random_numbers_are_the_same(name, policy):
    workload = make_workload(BLOCKS[name])
    expected = state_after(workload, plain_config())
    config = plain_config(checkpointing="blocks", checkpoint_policy=policy)
    if policy == "keep-attention":
        with pytest.raises(UnsupportedError, match=r"keeps nothing .*They run .*aten\."):
            state_after(workload, config)
    else:
        assert_same(state_after(workload, config), expected)


def test_without_the_noted_state_the_gradients_are_wrong(monkeypatch):
    def call(function, *args, **kwargs):
        return function(*args, **kwargs)

    monkeypatch.setattr(recompute.State, "restored", lambda self: contextlib.nullcontext(call))
    workload = make_workload(BLOCKS["average"])
    found = state_after(workload, plain_config(checkpointing="blocks"), steps=1)
    expected = state_after(workload, plain_config(), steps=1)
    with pytest.raises(AssertionError):
        assert_same(found, expected)


def test_a_kept_graph_is_run_back_twice():
    workload = make_workload(BLOCKS["batch-norm"])
    grads = []
    for config in (
        plain_config(),
        plain_config(checkpointing="blocks", checkpoint_policy="aten.addmm"),
    ):
        step = build_step(workload, config, "cpu")
        loss = workload.compute_loss(step.run_model, step.micro_batches[0])
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([p.grad for p in step.model.parameters()])
    assert all(map(torch.equal, *grads))


def test_dropout_may_be_asked_for_and_is_drawn_again_all_the_same():
    def keep_random(_, op, *args, **kwargs):
        return op in (aten.bernoulli_.float, aten.native_dropout.default, aten.addmm.default)

    workload = make_workload(BLOCKS["dropout"])
    config = plain_config(checkpointing="blocks", checkpoint_policy=keep_random)
    assert_same(state_after(workload, config), state_after(workload, plain_config()))


def test_a_policy_that_compares_with_packets_is_named():
    config = plain_config(
        checkpointing="blocks", checkpoint_policy=lambda ctx, op, *a, **k: op in (aten.addmm,)
    )
    with pytest.raises(UnsupportedError, match=r"keeps nothing: .*compare with torch\.ops\.aten"):
        state_after(make_workload(BLOCKS["linear"]), config)


def test_a_policy_of_a_notebook_reaches_the_worker_with_the_operators_it_names():
    packet, overload, everything = aten.mm, aten.addmm.default, torch.ops

    def keep(_, op, *args, **kwargs):
        return op in (packet.default, overload, everything.aten.bmm.default)

    config = plain_config(checkpointing="blocks", checkpoint_policy=keep)
    report = memlab.verify(make_workload(lambda: [nn.Linear(8, 8), nn.Tanh()]), config, "cpu")
    assert report.bitwise, report.why


@pytest.mark.parametrize("answer", ["save", None, 1.5])
def test_a_policy_that_returns_nonsense_is_refused(answer):
    config = plain_config(checkpointing="blocks", checkpoint_policy=lambda ctx, op, *a, **k: answer)
    with pytest.raises(UnsupportedError, match=f"returned {answer!r} for aten.*MUST_RECOMPUTE"):
        state_after(make_workload(BLOCKS["linear"]), config)


@pytest.mark.skipif(not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="torch before 2.13")
def test_a_policy_that_offloads_is_refused():
    config = plain_config(
        checkpointing="blocks",
        checkpoint_policy=lambda ctx, op, *a, **k: CheckpointPolicy.MUST_CPU_OFFLOAD,
    )
    with pytest.raises(UnsupportedError, match="silently recomputes"):
        state_after(make_workload(BLOCKS["linear"]), config)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("aten.adddmm", r"'aten\.adddmm', which does not exist; did you mean 'aten\.addmm'"),
        ("keep-matmul", "did you mean 'keep-matmuls'"),
        ("aten.mm.out2", "has the overloads default"),
        (",", "names no operator"),
    ],
)
def test_an_unknown_operator_is_refused_with_the_nearest(policy, text):
    with pytest.raises(ConfigError, match=text):
        policies.keeps(policy)


def test_a_kept_matmul_runs_once_and_the_rest_twice():
    counts = []
    for keep in (frozenset(), frozenset({("aten.addmm.default", 0)})):
        plan = Plan(
            regions=(Region(path="1", keep=keep), Region(path="2")),
            saved_bytes=0, plain_saved_bytes=0, peak_bytes=0, recompute_seconds=None,
        )  # fmt: skip
        workload = make_workload(lambda: [nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)])
        step = build_step(workload, StepConfig(batch_size=4), "cpu", plan=plan)
        with Counting() as counting:
            step.accumulate()
        counts.append(counting.operators.count(aten.addmm.default))
    assert counts[0] - counts[1] == 1
    assert_same(state_after(workload, plain_config(), plan), state_after(workload, plain_config()))


@pytest.mark.parametrize(
    ("which", "paths"),
    [
        ("auto", ["1", "2", "3"]),
        ("every 2", ["1", "3"]),
        ("Residual", ["1", "2", "3"]),
        ("[12].layers", ["1.layers", "2.layers"]),
        ("[12]*", ["1", "2"]),
    ],
)
def test_modules_are_named_by_class_pattern_or_number(which, paths):
    from memlab.techniques.recompute.blocks import select

    model = make_workload(BLOCKS["linear"]).build_model()
    assert list(select(model, which)) == paths


def test_a_pattern_without_a_module_says_what_there_is():
    config = plain_config(checkpointing="blocks", checkpoint_modules="Residul")
    with pytest.raises(UnsupportedError, match="did you mean 'Residual'"):
        build_step(make_workload(BLOCKS["linear"]), config, "cpu")


def test_modules_without_checkpointing_are_refused():
    with pytest.raises(ConfigError, match="does nothing with checkpointing='none'"):
        StepConfig(checkpoint_modules="Residual")


def test_a_buffer_that_changes_late_is_refused():
    class Late(Average):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) if self.calls > 2 else self.linear(x)

    config = plain_config(checkpointing="blocks")
    with pytest.raises(UnsupportedError, match="changes its buffer 'average'"):
        state_after(make_workload(lambda: [Late()]), config)


class Unused(nn.Module):
    """Its weight is read and its layer never called, as in `nn.MultiheadAttention`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x):
        return nn.functional.linear(x, self.layer[0].weight)


def raise_an_error(_, op):
    return True


def return_nonsense(_, op, *args, **kwargs):
    return "save"


def offload(_, op, *args, **kwargs):
    return getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", "offload")  # not before torch 2.13


BAD = {
    "no-module": ({"checkpoint_modules": "Residul"}, Outcome.UNSUPPORTED, "mean 'Residual'"),
    "never-called": (
        {"checkpoint_modules": "*.layer"}, Outcome.UNSUPPORTED, "does not call its forward",
    ),
    "keeps-nothing": (
        {"checkpoint_policy": "aten.bmm"}, Outcome.UNSUPPORTED, "keeps nothing in the checkp",
    ),
    "nonsense": (
        {"checkpoint_policy": return_nonsense},
        Outcome.UNSUPPORTED,
        "checkpoint_policy return_nonsense returned 'save' for aten",
    ),
    "raises": ({"checkpoint_policy": raise_an_error}, Outcome.FAILED, "raised TypeError for aten"),
    "offload": ({"checkpoint_policy": offload}, Outcome.UNSUPPORTED, "policy offload returned"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("function", [memlab.measure, memlab.predict, memlab.verify])
def test_bad_input_is_an_outcome_with_a_remedy(name, function):
    fields, outcome, text = BAD[name]
    options = {} if function is memlab.predict else {"isolate": False}
    block = Unused if name == "never-called" else lambda: nn.Sequential(*BLOCKS["linear"]())
    workload = make_workload(lambda: [block()])
    found = function(workload, plain_config(checkpointing="blocks", **fields), "cpu", **options)
    said = found.why if function is memlab.verify else found.message
    assert found.outcome is outcome, said
    assert text in said


@pytest.mark.parametrize("function", [memlab.measure, memlab.predict, memlab.verify])
def test_an_unknown_operator_is_raised_where_it_is_asked_for(function):
    config = plain_config(checkpointing="blocks", checkpoint_policy="aten.adddmm")
    with pytest.raises(ConfigError, match=r"did you mean 'aten\.addmm'"):
        function(make_workload(BLOCKS["linear"]), config, "cpu")


def test_a_module_that_some_forwards_leave_out_is_not_called_unused():
    workload = make_workload(lambda: [StochasticDepth(lambda: 1.0)])
    assert_same(
        state_after(workload, plain_config(checkpointing="blocks")),
        state_after(workload, plain_config()),
    )


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


def draw(block, h, _):
    return h * torch.rand(h.shape, generator=block.generators[0])


HOSTILE = {
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
    act, state = HOSTILE[name]
    config = plain_config(checkpointing="blocks", checkpoint_modules="Hostile")
    expected = state_after(hostile(act, **state), plain_config(), steps=3)
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


def test_every_0_means_no_module():
    config = plain_config(checkpointing="blocks", checkpoint_modules="every 0")
    with pytest.raises(UnsupportedError, match="matches no module"):
        build_step(make_workload(BLOCKS["linear"]), config, "cpu")


def test_a_policy_that_returns_an_array_is_refused():
    config = plain_config(checkpointing="blocks", checkpoint_policy=lambda *_, **__: np.ones(2))
    with pytest.raises(UnsupportedError, match=r"returned ndarray .*allowed is a bool"):
        build_step(make_workload(BLOCKS["linear"]), config, "cpu").accumulate()


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


def test_flops_of_a_recompute_that_keeps_outputs_can_be_counted():
    """Its hooks on modules make views of the inputs that a recompute is given."""
    config = StepConfig(batch_size=4, checkpointing="blocks", checkpoint_policy="aten.addmm")
    flops = []
    for each in (config, StepConfig(batch_size=4)):
        step = build_step(make_workload(BLOCKS["linear"]), each, "cpu")
        with FlopCounterMode(display=False) as counter:
            step.accumulate()
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0


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


def test_names_of_operators_as_people_write_them_are_understood():
    for name in ("torch.ops.aten.addmmm", "torch.addmmm", "aten::addmmm"):
        with pytest.raises(ConfigError, match=r"did you mean 'aten\.addmm?'"):
            policies.keeps(name)
    with pytest.raises(ConfigError, match=r"by commas: 'aten\.mm, aten\.bmm'"):
        policies.keeps("aten.mm aten.bmm")


def test_verify_sees_random_numbers_that_a_policy_draws():
    def drawing(context, func, *args, **kwargs):
        torch.rand(())
        return func == aten.addmm.default

    config = StepConfig(batch_size=4, checkpointing="blocks", checkpoint_policy=drawing)
    report = memlab.verify(make_workload(BLOCKS["linear"]), config, "cpu", isolate=False)
    assert not report.ok
    assert "leaves another random state" in report.why


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
