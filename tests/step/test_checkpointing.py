"""Checkpointed modules do as plain ones do, bit by bit: gradients, buffers, random numbers."""

import contextlib
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
from memlab import Outcome, StepConfig
from memlab.errors import ConfigError, UnsupportedError
from memlab.techniques.checkpointing import policies, recompute
from memlab.techniques.step import build_step
from memlab.techniques.technique import Plan, Region
from tests.checkpointing_parts import LATE, WritesUnseen, make_workload, plain_config
from tests.same_state import assert_same, keep_everything, state_after

aten = torch.ops.aten


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
    **LATE,
    "spectral-norm": lambda: [spectral_norm(nn.Linear(8, 8)), nn.Tanh()],
    "parametrized": lambda: [parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh()],
    "depth-torch": lambda: [StochasticDepth(lambda: torch.rand(()).item())],
    "depth-python": lambda: [StochasticDepth(random.random)],
    "depth-numpy": lambda: [StochasticDepth(np.random.random)],
    "average": lambda: [Average()],
    "reassigned": lambda: [Reassigned()],
}  # fmt: skip


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


def test_blocks_of_torchscript_are_refused_by_name():
    traced = torch.jit.trace(nn.Linear(8, 8), torch.randn(4, 8))
    with pytest.raises(UnsupportedError, match="TorchScript runs other operators"):
        state_after(make_workload(lambda: [traced]), plain_config(checkpointing="blocks"))


def test_a_saved_tensor_may_be_written_without_raising_its_version():
    workload = make_workload(lambda: [nn.Linear(8, 8), WritesUnseen()])
    found = state_after(workload, plain_config(checkpointing="blocks"))
    assert_same(found, state_after(workload, plain_config()))


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


@pytest.mark.slow
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
    from memlab.techniques.checkpointing.policies import select

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


def test_every_0_means_no_module():
    config = plain_config(checkpointing="blocks", checkpoint_modules="every 0")
    with pytest.raises(UnsupportedError, match="matches no module"):
        build_step(make_workload(BLOCKS["linear"]), config, "cpu")


def test_a_policy_that_returns_an_array_is_refused():
    config = plain_config(checkpointing="blocks", checkpoint_policy=lambda *_, **__: np.ones(2))
    with pytest.raises(UnsupportedError, match=r"returned ndarray .*allowed is a bool"):
        build_step(make_workload(BLOCKS["linear"]), config, "cpu").accumulate()


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
