"""Modules that do odd things, checkpointed: as the plain ones bit by bit, or refused by name."""

import dataclasses
import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from memlab import StepConfig, verify
from memlab.errors import UnsupportedError
from memlab.techniques.checkpointing import recompute
from memlab.techniques.checkpointing.policies import select
from memlab.techniques.step import build_step, set_seed
from tests.regressions import Block, config_of, regression
from tests.same_state import assert_same, keep_everything, state_after

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(spectral_norm|weight_norm).*"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*"),
]

POLICIES = ("recompute-all", "keep-matmuls", keep_everything)


class Stack(nn.Module):
    """A Linear and blocks, called as `call` says."""

    def __init__(self, kind, call=lambda block, x: block(x), depth=3):
        super().__init__()
        self.first, self.call = nn.Linear(8, 8), call
        self.layers = nn.ModuleList(kind() for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return x


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


class Tuples(Block):
    def forward(self, pair):
        left, right = pair if isinstance(pair, tuple) else (pair, pair)
        return self.up(left).tanh(), self.down(right) + left


class Dicts(Block):
    def forward(self, pair):
        pair = pair if isinstance(pair, dict) else {"left": pair, "right": pair}
        return {"left": self.up(pair["left"]).tanh(), "right": self.down(pair["right"])}


class Dataclasses(Block):
    def forward(self, *, pair):
        pair = pair if isinstance(pair, Pair) else Pair(pair, pair)
        return Pair(self.up(pair.left).tanh(), self.down(pair.right) + pair.left)


class InPlace(Block):
    def forward(self, x):
        hidden = self.up(x).add_(1.0)
        hidden.tanh_()
        return nn.functional.elu(self.down(hidden).mul_(2.0), inplace=True)


class Unchanged(Block):
    def forward(self, x):
        return x


class Gated(Block):
    def forward(self, x):
        with torch.no_grad():
            gate = self.down(x).sigmoid()
        return self.up(x) * gate


class Frozen(Block):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class DropPath(Block):
    """Stochastic depth as timm draws it: a mask over samples, from an empty tensor."""

    def forward(self, x):
        mask = x.new_empty((x.shape[0], 1)).bernoulli_(0.7).div_(0.7)
        return x + self.up(x).tanh() * mask


class Counting(Block):
    """State in plain attributes: a number, a list, a tensor, generators, the mode."""

    def __init__(self):
        super().__init__()
        self.calls, self.list, self.last = 0, [], None
        self.torch, self.python = torch.Generator().manual_seed(1), random.Random(1)

    def forward(self, x):
        self.calls += 1
        self.list.append(1.0)
        noise = torch.rand(x.shape, generator=self.torch) * self.python.random()
        shift = 0.0 if self.last is None else self.last
        out = self.up(x * noise + shift).tanh() * self.calls * sum(self.list)
        self.last = out.detach().mean()
        return nn.functional.dropout(out, 0.5, self.training)


class Shapes(Stack):
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = torch.cat([layer(x), layer(x[:2])])
        return x


class Shared(Stack):
    """The same blocks in two lists, and one weight in all of them."""

    def __init__(self):
        super().__init__(Block)
        self.again = nn.ModuleList(self.layers)
        for layer in self.layers:
            layer.down.weight = self.first.weight

    def forward(self, x):
        for layer in self.again:
            x = layer(x)
        return super().forward(x)


def twice(block, x):
    return block(block(x).tanh())


def sum_of_squares(model, x):
    out = model(x)
    parts = out if isinstance(out, tuple) else getattr(out, "__dict__", out).values()
    return sum(part.square().mean() for part in parts)


def eval_before_backward(model, x):
    model.train()
    loss = model(x).square().mean()
    model.eval()
    return loss


ODD = {
    "sequential": regression(lambda: nn.Sequential(*(nn.Sequential(Block()) for _ in range(2)))),
    "nested": regression(
        lambda: nn.Sequential(*(nn.Sequential(Block(), nn.Sequential(Block())) for _ in range(2)))
    ),
    "kwargs": regression(lambda: Stack(Block, lambda block, x: block(x=x))),
    "tuples": regression(lambda: Stack(Tuples), sum_of_squares),
    "dicts": regression(lambda: Stack(Dicts), sum_of_squares),
    "dataclasses": regression(
        lambda: Stack(Dataclasses, lambda block, x: block(pair=x)), sum_of_squares
    ),
    "in-place": regression(lambda: Stack(InPlace)),
    "unchanged": regression(lambda: Stack(Unchanged)),
    "no-grad-part": regression(lambda: Stack(Gated)),
    "frozen": regression(lambda: Stack(Frozen)),
    "no-grad-input": regression(lambda: nn.Sequential(Block(), Block())),
    "drop-path": regression(lambda: Stack(DropPath)),
    "attributes": regression(lambda: Stack(Counting, twice)),
    "shapes": regression(lambda: Shapes(Block)),
    "shared": regression(Shared),
    "eval-before-backward": regression(lambda: Stack(Counting), eval_before_backward),
    "spectral-norm": regression(lambda: Stack(lambda: spectral_norm(nn.Linear(8, 8)), twice)),
    "spectral-norm-new": regression(
        lambda: Stack(lambda: parametrizations.spectral_norm(nn.Linear(8, 8)), twice)
    ),
    "weight-norm": regression(lambda: Stack(lambda: weight_norm(nn.Linear(8, 8)), twice)),
    "weight-norm-new": regression(
        lambda: Stack(lambda: parametrizations.weight_norm(nn.Linear(8, 8)), twice)
    ),
    "sync-batch-norm": regression(
        lambda: nn.SyncBatchNorm.convert_sync_batchnorm(
            nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)))
        )
    ),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("name", ODD)
def test_odd_modules_are_the_same_bit_by_bit(name, precision):
    workload = ODD[name]
    expected = state_after(workload, StepConfig(batch_size=6, precision=precision))
    modules = "layers.*" if "-norm" in name and "batch" not in name else "auto"
    policies = POLICIES[: 1 if name == "unchanged" else None]
    for policy in policies:
        found = state_after(workload, config_of(policy, modules, precision=precision))
        assert_same(found, expected)


@pytest.mark.parametrize("name", ["shared", "in-place", "shapes", "attributes", "kwargs"])
def test_budgets_of_odd_modules_change_no_bit(name):
    config = StepConfig(batch_size=6, memory_budget=0.3)
    report = verify(ODD[name], config, "cpu", isolate=False)
    assert (report.ok, report.bitwise) == (True, True), report.why


def test_a_block_in_two_lists_is_checkpointed_once():
    assert list(select(Shared(), "auto")) == ["layers.0", "layers.1", "layers.2"]


def test_fp16_with_a_scaled_loss_is_the_same_bit_by_bit():
    config = config_of("keep-matmuls", precision="fp16-mixed")
    report = verify(ODD["kwargs"], config, "cpu", isolate=False)
    assert (report.ok, report.bitwise) == (True, True), report.why


def test_a_weight_that_autocast_casts_once_does_not_shift_what_is_kept():
    """Tied weights: the forward of a block finds the cast that another made, its recompute not."""

    class Tied(Stack):
        def __init__(self):
            super().__init__(CastsItsInput)
            for layer in self.layers:
                layer.up.weight = self.first.weight

    class CastsItsInput(Block):
        def forward(self, x):
            return self.up(x.float().T.contiguous().float()).tanh().T

    workload = regression(Tied, shape=(8,))
    workload = dataclasses.replace(workload, make_batch=lambda n: torch.randn(8, 8)[:n])
    plain = StepConfig(batch_size=8, precision="bf16-mixed")
    expected = state_after(workload, plain)
    for policy in (keep_everything, "aten.addmm, aten._to_copy"):
        config = dataclasses.replace(plain, checkpointing="blocks", checkpoint_policy=policy)
        assert_same(state_after(workload, config), expected)


def changing_inputs(where):
    class Before(Block):
        def forward(self, x):
            return self.up(nn.functional.elu(x, inplace=True))

    class Plain(Block):
        def forward(self, x):
            return self.up(x + 1).tanh()

    def call(block, x):
        if where in ("before", "before-by-name"):
            return block(x=x) if where == "before-by-name" else block(x)
        out = block(x=x) if where == "after-by-name" else block(x)
        return out + x.add_(1.0)

    return regression(lambda: Stack(Before if "before" in where else Plain, call))


@pytest.mark.parametrize("where", ["before", "before-by-name", "after", "after-by-name"])
@pytest.mark.parametrize("policy", ["recompute-all", "aten.addmm"])
def test_an_input_that_changes_in_place_is_refused_with_the_module(where, policy):
    state_after(changing_inputs(where), StepConfig(batch_size=6))  # the plain step does
    with pytest.raises(UnsupportedError, match=r"layers\.\d cannot be recomputed: .*in place"):
        state_after(changing_inputs(where), config_of(policy))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_derivative_is_the_same_bit_by_bit(policy):
    def penalty(model, x):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return gradient.square().mean()

    workload = regression(lambda: Stack(Block), penalty)
    expected = state_after(workload, StepConfig(batch_size=6))
    assert any(value.any() for name, value in expected.items() if "up" in str(name))
    assert_same(state_after(workload, config_of(policy)), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loss_of_two_calls_and_one_without_gradients_is_the_same_bit_by_bit(policy):
    def loss(model, x):
        with torch.no_grad():
            target = model(x)
        return (model(x + 1) - target).square().mean() + model(x[:2]).square().mean()

    workload = regression(lambda: Stack(DropPath), loss)
    assert_same(
        state_after(workload, config_of(policy)), state_after(workload, StepConfig(batch_size=6))
    )


def test_gradients_of_a_kept_graph_are_taken_twice_with_state():
    grads = []
    for config in (StepConfig(batch_size=6), config_of("keep-matmuls")):
        step = build_step(ODD["attributes"], config, "cpu")
        set_seed(3)
        loss = step.workload.compute_loss(step.run_model, step.micro_batches[0])
        parameters = [p for p in step.model.parameters() if p is not step.model.layers[0].down]
        first = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        second = torch.autograd.grad(loss, parameters, allow_unused=True)
        grads.append([g for g in (*first, *second) if g is not None])
    assert all(map(torch.equal, *grads))


def test_a_module_without_tensor_inputs_keeps_the_random_numbers_of_its_device():
    class Prompt(Block):
        def forward(self):
            return nn.functional.dropout(self.up.weight @ self.down.weight, 0.5)

    class Prompts(Stack):
        def forward(self, x):
            return x @ sum(layer() for layer in self.layers)

    workload = regression(lambda: Prompts(Prompt))
    assert_same(state_after(workload, config_of()), state_after(workload, StepConfig(batch_size=6)))


def test_dropout_inside_an_rnn_of_cudnn_is_refused():
    class Elsewhere(nn.LSTM):
        """Says that it is on another device than the CPU."""

        def parameters(self, recurse=True):
            return iter([torch.empty(0, device="meta")])

    lstm = Elsewhere(8, 8, num_layers=2, dropout=0.5)
    with pytest.raises(UnsupportedError, match=r"cuDNN draws the dropout=0\.5"):
        recompute.wrap("0", lstm, None, lambda *_: None)
