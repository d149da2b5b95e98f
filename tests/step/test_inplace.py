"""In-place activations: which are switched, the same bits, and the bytes that they save."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import memlab
from memlab import MemlabError, Outcome, StepConfig, Workload
from memlab.techniques.step import build_step, set_seed
from memlab.trace import PHASES, Phase

WIDTH = 64


class Model(nn.Module):
    """A linear layer before and after something that is said by `middle`."""

    def __init__(self, middle, act=None):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act, self.norm = act or nn.ReLU(), nn.BatchNorm1d(WIDTH)
        self.middle = middle

    def forward(self, x):
        return self.last(self.middle(self, x))


def workload(middle, act=None, **fields):
    fields = {
        "name": "middle",
        "build_model": lambda: Model(middle, act() if act else None),
        "make_batch": lambda n: torch.randn(n, WIDTH),
        "compute_loss": lambda model, x: model(x).square().mean(),
        **fields,
    }
    return Workload(**fields)


def gradients(made, config):
    step = build_step(made, config, "cpu")
    set_seed(0)
    step.accumulate()
    return [p.grad for p in step.model.parameters() if p.grad is not None]


SAFE = {
    "after a linear layer": lambda m, x: m.act(m.first(x)),
    "after a norm": lambda m, x: m.act(m.norm(m.first(x))),
    "of a sum": lambda m, x: m.act(m.first(x) + x),
    "called twice": lambda m, x: m.act(m.first(m.act(m.first(x)))),
    "after a function": lambda m, x: m.act(functional.gelu(m.first(x))),
}


@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh, nn.Dropout])
@pytest.mark.parametrize("name", SAFE)
def test_it_is_switched_where_nothing_else_reads_the_input(name, act):
    config = StepConfig(batch_size=6, inplace=True)
    made = workload(SAFE[name], act)
    assert build_step(made, config, "cpu").model.act.inplace
    plain, found = gradients(made, StepConfig(batch_size=6)), gradients(made, config)
    assert len(plain) >= 4
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def residual(m, x):
    x = m.first(x)
    return m.act(x) + x


UNSAFE = {
    "added to again": (residual, "add.Tensor reads its input again"),
    "saved by its producer": (lambda m, x: m.act(m.first(x).tanh()), "reads its input again"),
    "saved by a norm": (lambda m, x: m.act(y := m.first(x)) * m.norm(y), "reads its input again"),
    "the batch": (lambda m, x: m.act(x), "not a tensor that the model has computed"),
    "a parameter": (lambda m, x: m.act(m.first.weight)[: len(x)], "a leaf that needs a gradient"),
    "a view": (lambda m, x: m.act(m.first(x).view(-1)).view(len(x), -1), "a view"),
    "once of two": (lambda m, x: m.act(m.first(m.act(x))), "not a tensor that the model has"),
    "not called": (lambda m, x: m.first(x), "not called"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_it_is_refused_where_something_else_reads_the_input(name):
    middle, why = UNSAFE[name]
    with pytest.raises(MemlabError, match=why) as refusal:
        build_step(workload(middle), StepConfig(inplace=True), "cpu")
    assert "use inplace=False" in str(refusal.value)


def test_a_model_without_such_modules_or_compiled_is_refused():
    silu = workload(SAFE["after a linear layer"], nn.SiLU)
    idle = workload(SAFE["after a linear layer"], lambda: nn.Dropout(0.0))
    for made in (silu, idle):
        with pytest.raises(MemlabError, match="it has no active ReLU"):
            build_step(made, StepConfig(inplace=True), "cpu")
    with pytest.raises(MemlabError, match="inplace=False"):
        build_step(silu, StepConfig(inplace=True, compile=True), "cpu")


def test_a_read_that_no_operator_tells_of_is_found_by_the_second_run():
    def middle(m, x):
        hidden = m.first(x)
        seen = hidden.detach().numpy()
        return m.act(hidden) * float(seen.sum())

    with pytest.raises(MemlabError, match="changes the gradients"):
        build_step(workload(middle), StepConfig(inplace=True), "cpu")


def large(then):
    """Return what is safe for two samples and something else for more."""
    return lambda m, x: m.act(m.first(x)) if len(x) <= 2 else then(m, x)


OTHER_OPERATORS = {  # for more samples than were tried
    "in silence": (large(residual), "add.Tensor"),
    "of a saved tensor": (large(lambda m, x: m.act(m.first(x).tanh())), "tanh.default"),
    "of a parameter": (large(lambda m, x: x * m.act(m.first.weight[0])), "in-place operation"),
    "fewer": (large(lambda m, x: m.first(x)), "addmm.default"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", OTHER_OPERATORS)
def test_a_batch_on_which_the_model_runs_other_operators_is_refused(name):
    middle, first = OTHER_OPERATORS[name]
    made = workload(middle)
    config = StepConfig(batch_size=4, inplace=True)
    for run in (partial(memlab.measure, isolate=False), memlab.predict):
        found = run(made, config, "cpu")
        assert found.outcome is Outcome.UNSUPPORTED, found.message
        assert "tried on two samples, and on this batch" in found.message
        assert f"(the first is {first})" in found.message
        assert found.message.endswith("use inplace=False")
    tried = StepConfig(batch_size=4, accumulation_steps=2, inplace=True)
    for ours, plain in zip(
        gradients(made, tried), gradients(made, StepConfig(batch_size=4, accumulation_steps=2)),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(ours, plain)


def test_micro_batches_of_other_sizes_are_no_other_operators():
    class Convolutions(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
            self.act, self.last = nn.ReLU(), nn.Linear(4 * 36, 2)

        def forward(self, x):
            x = self.act(self.norm(self.first(x.view(len(x), 1, 8, 8))))
            return self.last(x.flatten(1))

    made = workload(None, build_model=Convolutions)
    config = StepConfig(batch_size=7, accumulation_steps=4)  # of 2, 2, 2 and 1
    found = gradients(made, replace(config, inplace=True))
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(made, config), strict=True))


def test_the_try_leaves_the_model_as_it_was():
    made = workload(SAFE["after a norm"])
    plain = build_step(made, StepConfig(), "cpu").model
    tried = build_step(made, StepConfig(inplace=True), "cpu").model
    assert all(p.grad is None for p in tried.parameters())
    for (name, ours), theirs in zip(
        tried.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def stack(depth=3):
    layers = [part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [{}, {"checkpointing": "blocks"}, {"precision": "bf16-mixed"}, {"memory_budget": 0.5}],
    ids=str,
)
def test_verify_and_predict_know_it(fields):
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(stack(2) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    made = workload(None, build_model=Blocks)
    config = StepConfig(batch_size=256, inplace=True, **fields)
    report = memlab.verify(made, config, device="cpu")
    assert report.ok, report
    measured = memlab.measure(made, config, device="cpu", repeats=1)
    predicted = memlab.predict(made, config, device="cpu")
    assert measured.outcome is predicted.outcome is Outcome.OK
    error = abs(predicted.peak_allocated_bytes / measured.peak_allocated_bytes - 1)
    assert error <= predicted.uncertainty["peak_allocated_bytes"]
    assert memlab.predict(made, config, device="h200").outcome is Outcome.OK


@pytest.mark.slow
def test_a_peak_in_forward_falls_by_one_activation():
    """One wide ReLU, and a small rest: the peak is when its input and its output are held."""
    made = workload(
        None,
        build_model=lambda: nn.Sequential(
            nn.Linear(4, 4096, bias=False), nn.ReLU(), nn.Linear(4096, 1, bias=False)
        ),
        make_batch=lambda n: torch.randn(n, 4),
    )
    most = {}
    for inplace in (False, True):
        config = StepConfig(batch_size=512, inplace=inplace, optimizer="sgd")
        for run in (partial(memlab.measure, repeats=1), memlab.predict):
            line = run(made, config, device="cpu").timeline
            forward = line.phase == PHASES.index(Phase.FORWARD)
            most.setdefault(inplace, []).append(int(line.total_bytes[forward].max()))
    activation = 512 * 4096 * 4
    saved = [plain - found for plain, found in zip(most[False], most[True], strict=True)]
    assert saved[0] == saved[1]
    # the next instant, in which the last layer's output and the loss are made, is nearly as high
    assert activation - 5 * 512 * 4 <= saved[0] <= activation
