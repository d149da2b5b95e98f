"""Optimizers that a person's own function makes: predicted to the byte, tried and exported."""

import copy
import functools
import io
import re

import cloudpickle
import pytest
import torch
from torch import nn

from memlab import (
    StepConfig,
    StepResult,
    Workload,
    explain,
    measure,
    predict,
    training_step,
    verify,
)
from memlab.errors import ConfigError, UnsupportedError, WorkloadError
from memlab.integrations.export import export_script
from memlab.store.identity import setting_key, workload_key
from memlab.techniques import registry
from memlab.techniques.optimizers.optimizers import Lion
from memlab.techniques.optimizers.own import Several
from memlab.techniques.step import build_step, set_seed
from tests import predictions
from tests.models import blocks
from tests.predictions import FEW_BYTES, predicted

NEEDS_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 or newer")
DENSE = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD",
)  # fmt: skip


class Own(torch.optim.Optimizer):
    """Momentum, with its state kept in an odd way."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.update(p, self.state[p], group), alpha=group["lr"])

    def update(self, p, state, group):
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        return momentum.mul_(0.9).add_(p.grad)


class AtConstruction(Own):
    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum"] = torch.zeros_like(p)


class Nested(Own):  # as Shampoo keeps a list of preconditioners
    def update(self, p, state, group):
        if "factors" not in state:
            state["factors"] = [p.new_zeros(n, n) for n in p.shape]
        update = p.grad.clone()
        for dim, factor in enumerate(state["factors"]):
            flat = p.grad.movedim(dim, 0).flatten(1) if p.ndim > 1 else p.grad[:, None]
            factor.add_(flat @ flat.T)
            update = torch.tensordot(update, factor, dims=([0], [0]))
        return update


class Counts(Own):
    """A step of Python, one on the host, and one whose value is read."""

    def update(self, p, state, group):
        state["number"] = state.get("number", 0) + 1
        host = state.setdefault("step", torch.zeros(()))
        host += 1
        return super().update(p, state, group) / (1 - 0.9 ** host.item()) * state["number"]


class OfAGroup(Own):
    """Counts the updates of a group, and so too many where one parameter after another goes."""

    def update(self, p, state, group):
        if p is group["params"][0]:
            group["step"] = group.get("step", 0) + 1
        return super().update(p, state, group) / group["step"]


class Normed(Own):  # as LARS and LAMB
    def update(self, p, state, group):
        return super().update(p, state, group) * (p.norm() / p.grad.norm())


class Modes(Own):  # as schedule-free optimizers
    is_training = False

    def train(self):
        self.is_training = True

    def step(self, closure=None):
        if not self.is_training:
            raise RuntimeError("call train() first")
        super().step()


class Masters(Own):
    def update(self, p, state, group):
        master = state.setdefault("exact", p.detach().double().clone())
        master.sub_(p.grad.double(), alpha=group["lr"])
        return (p - master) / group["lr"]


class Wrapped(Own):  # as Lookahead
    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.inner = torch.optim.AdamW(self.param_groups, lr=lr)
        self.state = self.inner.state

    def step(self, closure=None):
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                slow.lerp_(p.detach(), 0.5)


ODD = (AtConstruction, Nested, Counts, OfAGroup, Normed, Modes, Masters, Wrapped)


def mixed():
    """Weights of four, two and one dimensions, and a scalar."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * self.scale

    return Workload(
        name="mixed",
        build_model=lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 64), nn.ReLU(), nn.Linear(64, 4),
            Scaled(),
        ),
        make_batch=lambda n: (torch.randn(n, 3, 8, 8), torch.randint(4, (n,))),
        compute_loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )  # fmt: skip


def assert_predicted(workload, config):
    found, real = predictions.assert_predicted(workload, config)
    # where a first step makes its counters is a matter of a few bytes
    assert abs(found.first_step_peak_bytes - real.first_step_peak_bytes) <= FEW_BYTES


@pytest.mark.parametrize("name", DENSE)
def test_every_optimizer_of_torch_is_predicted_to_the_byte(name):
    assert_predicted(mixed(), StepConfig(batch_size=8, optimizer=getattr(torch.optim, name)))


@pytest.mark.parametrize("kind", ODD)
def test_one_with_an_odd_state_is_predicted_to_the_byte(kind):
    workload = blocks() if kind is Nested else mixed()
    assert_predicted(workload, StepConfig(batch_size=8, optimizer=functools.partial(kind, lr=0.1)))


@NEEDS_MUON
def test_muon_takes_the_matrices_of_hidden_layers_and_adamw_all_others():
    def build():
        return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))

    workload = Workload(
        name="words",
        build_model=build,
        make_batch=lambda n: torch.randint(5, (n,)),
        compute_loss=lambda model, x: nn.functional.cross_entropy(model(x), x),
    )
    config = StepConfig(batch_size=8, optimizer="muon")
    assert_predicted(workload, config)
    step = build_step(workload, config, "cpu")
    step()
    words, weight, bias = step.model.parameters()
    assert {p: set(state) for p, state in step.optimizer.state.items()} == {
        words: {"step", "exp_avg", "exp_avg_sq"},
        weight: {"momentum_buffer"},
        bias: {"step", "exp_avg", "exp_avg_sq"},
    }
    torch.manual_seed(0)
    own = build()
    hidden = [own[1].weight]
    others = [own[0].weight, own[1].bias]
    each = torch.optim.Muon(hidden, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)
    set_seed(0)
    x = workload.make_batch(8)
    workload.compute_loss(own, x).backward()
    for optimizer in each:
        optimizer.step()
    assert all(map(torch.equal, own.parameters(), step.model.parameters()))


def test_lion_moves_by_the_sign_of_its_momentum():
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = Lion([weight], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    for gradient in ([1.0, -1.0], [-0.05, 3.0]):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
    # first: sign(0.1 g); then momentum 0.01 g: signs of 0.009 - 0.005 > 0 and of -0.009 + 0.3 > 0
    first = [1.0 * 0.95 - 0.1, -2.0 * 0.95 + 0.1]
    expected = [first[0] * 0.95 - 0.1, first[1] * 0.95 - 0.1]
    assert weight.tolist() == pytest.approx(expected)
    assert_predicted(mixed(), StepConfig(batch_size=8, optimizer="lion"))


def groups(model):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": others, "weight_decay": 0.0}, {"params": decayed, "lr": 0.1}], lr=1e-2
    )


def pair(model):
    return {
        "some": torch.optim.SGD(model[0].parameters(), lr=0.1),
        "rest": torch.optim.NAdam([p for m in model[1:] for p in m.parameters()]),
    }


def with_own(make_optimizer, workload=None):
    workload = workload or blocks()
    return Workload(
        name="own",
        build_model=workload.build_model,
        make_batch=workload.make_batch,
        compute_loss=workload.compute_loss,
        make_optimizer=make_optimizer,
    )


@pytest.mark.parametrize("make", [groups, pair])
def test_a_workload_makes_its_optimizer_from_the_model(make):
    workload, config = with_own(make), StepConfig(batch_size=8)
    assert_predicted(workload, config)
    step = build_step(workload, config, "cpu")
    rates = [group["lr"] for group in step.optimizer.param_groups]
    assert rates == ([1e-2, 0.1] if make is groups else [0.1, 2e-3])
    assert verify(workload, config, "cpu", isolate=False).ok
    clipped = StepConfig(batch_size=8, max_grad_norm=0.1, checkpointing="blocks")
    assert verify(workload, clipped, "cpu", isolate=False).ok


WRONG = {
    "returned NoneType": lambda parameters: None,
    "returned list": lambda parameters: [torch.optim.SGD(parameters)],
    "raised ZeroDivisionError": lambda parameters: 1 / 0,
    "raised TypeError": lambda: None,
    "leaves out 9 trainable parameters, the first of them 0.0.bias": lambda parameters: (
        torch.optim.SGD([p for p in parameters if p.ndim > 1])
    ),
    "updates 1 tensors that are no parameters": lambda parameters: torch.optim.SGD(
        [*parameters, nn.Parameter(torch.ones(2))]
    ),
    "updates 0.0.weight twice": lambda parameters: {
        "a": torch.optim.SGD(parameters),
        "b": torch.optim.SGD(parameters[:1]),
    },
    "returned dict": lambda parameters: {},
}


@pytest.mark.parametrize("said", WRONG)
def test_a_function_that_makes_no_optimizer_of_the_model_is_refused(said):
    with pytest.raises(ConfigError, match=rf"optimizer='.*{said}.*; allowed"):
        build_step(blocks(), StepConfig(optimizer=WRONG[said]), "cpu")


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(UnsupportedError, match=r"optimizer='torch.*LBFGS' .*closure"):
        build_step(blocks(), StepConfig(optimizer=torch.optim.LBFGS), "cpu")


@pytest.mark.parametrize("value", [3, None, "nadam", "", ["sgd"], torch.optim.SGD([torch.ones(1)])])
def test_a_value_that_is_no_optimizer_is_refused(value):
    with pytest.raises(ConfigError, match=r"^optimizer=.*allowed is one of 'sgd'"):
        StepConfig(optimizer=value)


@pytest.mark.parametrize("path", ["torch.optim.nothing", "nowhere.at.all", "__main__.<lambda>"])
def test_an_import_path_that_leads_nowhere_is_refused_when_the_step_is_built(path):
    with pytest.raises(ConfigError, match=r"^optimizer='.*cannot be imported"):
        build_step(blocks(), StepConfig(optimizer=path), "cpu")


CHANGES = {
    "optimizer_in_backward": {"optimizer_in_backward": True},
    "offload_optimizer": {"offload_optimizer": True},
    "bf16-master": {"precision": "bf16-master"},
    "bf16-stochastic": {"precision": "bf16-stochastic"},
    "zero3": {"sharding": "zero3", "world_size": 2},
}
REFUSED = {
    OfAGroup: {"offload_optimizer", "bf16-master", "bf16-stochastic"},
    Normed: {"zero3"},
    Nested: {"zero3"},
    Masters: set(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [*REFUSED, torch.optim.NAdam, Lion])
def test_what_would_change_the_updates_of_an_optimizer_is_refused(kind, change):
    """The tries find it; where they find nothing, the updates are those of the plain step."""
    config = StepConfig(batch_size=8, optimizer=kind, **CHANGES[change])
    if change in REFUSED.get(kind, ()):
        said = "sharding" if change == "zero3" else "precision" if "bf16" in change else change
        found = predicted(config, "h200", blocks())
        assert found.outcome == "unsupported"
        assert re.match(rf"{said}=.* with optimizer='.*small tensors", found.message)
        return
    if change in ("zero3", "offload_optimizer"):
        found = predicted(config, "h200", blocks())
        assert found.outcome == "ok", found.message
        return
    step = build_step(blocks(), config, "cpu")
    plain = build_step(blocks(), StepConfig(batch_size=8, optimizer=kind), "cpu")
    for each in (step, plain):
        set_seed(0)
        each()
        each()
    tolerance = 1e-6 if "bf16" not in change else 2e-2
    for one, other in zip(step.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(one.float(), other, atol=tolerance)


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer_implementation": "fused"},
        {"sharding": "zero1", "world_size": 2},
        {"sharding": "tensor", "world_size": 2},
        {"sharding": "deepspeed-zero1", "world_size": 2},
    ],
    ids=str,
)
def test_what_asks_more_than_a_function_can_say_is_refused(fields):
    with pytest.raises(UnsupportedError, match=f"^{next(iter(fields))}=.* with optimizer="):
        build_step(blocks(), StepConfig(optimizer=torch.optim.NAdam, **fields), "cpu")


def test_a_workload_with_its_own_optimizer_takes_no_other():
    with pytest.raises(UnsupportedError, match="optimizer='sgd' with a workload that has"):
        build_step(with_own(groups), StepConfig(optimizer="sgd"), "cpu")
    with pytest.raises(UnsupportedError, match="make_optimizer with offload_optimizer"):
        build_step(with_own(groups), StepConfig(offload_optimizer=True), "cpu")
    with pytest.raises(WorkloadError, match="make_optimizer=3 cannot be called"):
        with_own(3)


def test_no_remedy_for_a_workload_with_its_own_optimizer_is_refused():
    workload, config = with_own(lambda model: torch.optim.Adam(model.parameters())), StepConfig()
    for result in (predict(workload, config, "cpu"), measure(workload, config, "cpu", repeats=1)):
        offered = explain(StepResult.from_dict(result.to_dict())).remedies
        assert offered
        for remedy in offered:
            registry.check(remedy.config, torch.device("cpu"), workload=workload)


def test_a_config_with_a_function_is_stored_sent_and_told_apart():
    first = StepConfig(optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    other = StepConfig(optimizer=functools.partial(torch.optim.SGD, lr=0.2))
    key = workload_key(blocks())
    assert setting_key(key, first) not in (None, setting_key(key, other))
    again = cloudpickle.load(io.BytesIO(cloudpickle.dumps(first)))
    assert setting_key(key, first) == setting_key(key, again)
    assert first.to_dict()["optimizer"] == "partial(torch.optim.sgd.SGD, lr=0.1)"
    read = StepConfig(**first.to_dict())
    assert read.to_dict() == first.to_dict()
    with pytest.raises(ConfigError, match="cannot be imported"):  # never another one in silence
        build_step(blocks(), read, "cpu")
    named = StepConfig(optimizer=torch.optim.NAdam)
    step = build_step(blocks(), StepConfig(**named.to_dict()), "cpu")
    assert type(step.optimizer) is torch.optim.NAdam
    assert workload_key(with_own(groups)) != workload_key(with_own(pair))


def half_rate(parameters):
    return torch.optim.NAdam(parameters, lr=RATE / 2)


RATE = 0.02
EXPORTED = {
    "class": ({"optimizer": torch.optim.NAdam}, None),
    "partial": ({"optimizer": functools.partial(torch.optim.RAdam, lr=0.1)}, None),
    "path": ({"optimizer": "torch.optim.Adamax"}, None),
    "function": ({"optimizer": half_rate, "max_grad_norm": 0.1}, None),
    "own class": ({"optimizer": Modes}, None),
    "in backward": ({"optimizer": half_rate, "optimizer_in_backward": True}, None),
    "master": ({"optimizer": half_rate, "precision": "bf16-master"}, None),
    "of the model": ({}, groups),
    "several": ({}, pair),
    "lion": ({"optimizer": "lion", "precision": "bf16-stochastic"}, None),
    "muon": ({"optimizer": "muon", "accumulation_steps": 2}, None),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_it_is_exported_and_trains_as_the_step_does(name):
    fields, make = EXPORTED[name]
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch 2.9 or newer")
    workload, config = with_own(make), StepConfig(batch_size=8, **fields)
    held = {"__name__": "exported"}
    exec(compile(export_script(workload, config, "cpu"), "exported.py", "exec"), held)
    held["set_seed"](held["SEED"])
    functions = [held[n] for n in ("build_model",)]
    more = [held["make_optimizer"]] if "make_optimizer" in held else []
    _, losses = held["train"](
        *functions, held["make_batches"](), held["compute_loss"], held["DEVICE"], *more
    )
    step = build_step(workload, config, "cpu")
    set_seed(0)
    assert losses[:3] == pytest.approx([step() for _ in range(3)], rel=1e-6)


def test_several_optimizers_share_state_groups_and_modes():
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    each = {"a": AtConstruction([weights[0]]), "b": Modes([weights[1]])}
    both = Several(each)
    both.train()
    assert weights[0] in both.state
    both.state = copy.copy(both.state)
    assert each["a"].state is both.state
    for weight in weights:
        weight.grad = torch.ones(2)
    both.step()
    both.zero_grad()
    assert all(w.tolist() == pytest.approx([0.99] * 2) and w.grad is None for w in weights)


def test_each_of_several_optimizers_goes_on_from_a_state_dict():
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    each = {"a": torch.optim.SGD(weights[:1], lr=1.0), "b": torch.optim.Adam(weights[1:])}
    both = Several(each)
    for weight in weights:
        weight.grad = torch.ones(2)
    both.step()
    saved = both.state_dict()
    saved["param_groups"][0]["lr"], saved["param_groups"][1]["lr"] = 0.25, 0.5
    before = [weight.tolist() for weight in weights]
    both.load_state_dict(saved)
    both.step()
    moved = [old[0] - weight[0].item() for old, weight in zip(before, weights, strict=True)]
    assert moved == pytest.approx([0.25, 0.5])
    assert both.state[weights[1]]["step"] == 2


@pytest.mark.parametrize("kind", [Counts, OfAGroup])
def test_a_checkpoint_holds_the_numbers_of_an_optimizer(kind, tmp_path):
    workload, config = with_own(None), StepConfig(batch_size=8, optimizer=kind)
    step, other = (training_step(workload, config, "cpu", seed=seed) for seed in (0, 1))
    batch = workload.make_batch(8)
    step(batch)
    step.save(tmp_path)
    other.load(tmp_path)
    assert [step(batch) for _ in range(3)] == [other(batch) for _ in range(3)]


def test_a_checkpoint_of_a_state_in_lists_is_refused_by_name(tmp_path):
    workload, config = with_own(None), StepConfig(batch_size=8, optimizer=Nested)
    step = training_step(workload, config, "cpu")
    step(workload.make_batch(8))
    with pytest.raises(UnsupportedError, match=r"state\['factors'\] is a list"):
        step.save(tmp_path)
