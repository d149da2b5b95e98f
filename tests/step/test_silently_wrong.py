"""What would train wrongly without a word: each is refused, or exact."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

import memlab
from memlab import StepConfig, Workload
from memlab.errors import UnsupportedError
from memlab.techniques import meta_init
from memlab.techniques.checkpointing import checkpointing
from memlab.techniques.optimizers.weight_formats import round_at_random
from memlab.techniques.step import build_step
from tests.models import blocks

SIZE = 8


class ReadsAWeightOnceMore(nn.Module):
    """A backward that needs the weight of `last` after it has the gradient of it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, inputs):
        return self.last(linear(self.first(inputs), self.last.weight.detach()).tanh())


class FromNumpy(nn.Module):
    """Its constructor goes on using the array that it copied."""

    def __init__(self):
        super().__init__()
        array = np.ones((SIZE, SIZE), np.float32)
        self.weight = nn.Parameter(torch.empty(SIZE, SIZE))
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(array))
        array[:] = 5.0


def test_on_meta_an_array_is_copied_when_the_constructor_does():
    built = meta_init.build(FromNumpy, torch.device("cpu"))
    assert torch.equal(built.weight.detach(), torch.ones(SIZE, SIZE))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.complex64))
        self.head = nn.Linear(SIZE, SIZE)

    def forward(self, inputs):
        turned = (inputs.to(torch.complex64) @ self.turn).abs()
        return self.head(turned.to(self.head.weight.dtype))


class Hooked(nn.Linear):
    def __init__(self):
        super().__init__(SIZE, SIZE)
        self.weight.register_hook(lambda gradient: 3 * gradient)


def workload(build_model, compute_loss=None):
    return Workload(
        name="one",
        build_model=build_model,
        make_batch=lambda n: (torch.randn(n, SIZE), torch.randint(SIZE, (n,))),
        compute_loss=compute_loss or (lambda model, b: cross_entropy(model(b[0]).float(), b[1])),
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer_implementation": "fused"},
        {"precision": "bf16-master"},
        {"precision": "bf16-stochastic"},
    ],
    ids=str,
)
def test_backward_never_reads_a_weight_that_was_updated_in_it(fields):
    config = StepConfig(batch_size=4, optimizer_in_backward=True, **fields)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        build_step(workload(ReadsAWeightOnceMore), config, "cpu")()


@pytest.mark.parametrize("precision", ["bf16-master", "bf16-stochastic"])
def test_complex_weights_keep_their_imaginary_part(precision):
    step = build_step(workload(Complex), StepConfig(batch_size=4, precision=precision), "cpu")
    before = step.model.turn.detach().clone()
    step()
    assert not torch.equal(step.model.turn, before)
    torch.testing.assert_close(step.model.turn.detach().imag, before.imag, rtol=0, atol=2e-3)


def test_no_nan_is_rounded_to_a_number():
    of_a_card, of_a_cpu = 0x7FFFFFFF, -0x400000  # what an operator returns on CUDA, on x86
    exact = torch.tensor([of_a_card, of_a_cpu] * 64, dtype=torch.int32).view(torch.float32)
    out = torch.zeros(128, dtype=torch.bfloat16)
    round_at_random(exact, out)
    assert out.isnan().all()


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-momentum"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_fused_sgd_that_updates_a_part_of_half_weights_is_refused(optimizer, precision):
    config = StepConfig(optimizer=optimizer, precision=precision, optimizer_implementation="fused")
    with pytest.raises(UnsupportedError, match="use optimizer_implementation='foreach'"):
        build_step(workload(lambda: nn.Linear(SIZE, SIZE)), config, "cpu")


def test_a_second_derivative_of_a_loss_in_chunks_is_refused():
    def penalised(model, batch):
        inputs = batch[0].clone().requires_grad_()
        loss = cross_entropy(model(inputs), batch[1])
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + slope.square().sum()

    step = build_step(
        workload(lambda: nn.Linear(SIZE, SIZE), penalised), StepConfig(loss_chunks=2), "cpu"
    )
    with pytest.raises(UnsupportedError, match="second derivative"):
        step()


def test_classes_where_pytorch_does_not_read_them_are_refused():
    made = Workload(
        name="one",
        build_model=lambda: nn.Linear(SIZE, SIZE),
        make_batch=lambda n: (torch.randn(n, SIZE, SIZE), torch.randint(SIZE, (n, SIZE))),
        compute_loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
    )
    with pytest.raises(UnsupportedError, match="dimension 1"):
        build_step(made, StepConfig(batch_size=4, loss_chunks=2), "cpu")()


def test_a_hook_that_a_constructor_registers_is_not_lost_on_meta():
    with pytest.raises(UnsupportedError, match="hook on weight"):
        build_step(workload(Hooked), StepConfig(init_on_meta=True), "cpu")


def test_rungs_may_come_from_a_generator_and_need_those_before_them():
    rungs = [{"checkpointing": "blocks"}, {"checkpoint_policy": "keep-matmuls"}]
    found = memlab.ladder(blocks(), (rung for rung in rungs), device="t4", batch_size=4)
    assert [result.config.checkpoint_policy for result in found[1:]] == [
        "recompute-all",
        "keep-matmuls",
    ]


def test_a_copy_of_a_checkpointed_model_runs_its_own_weights():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    checkpointing.apply(model, StepConfig(checkpointing="blocks"), compiled=False)
    teacher, x = copy.deepcopy(model), torch.randn(3, 4)
    before = teacher(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(teacher(x), before)
    assert not torch.equal(model(x), before)
    teacher(x).sum().backward()
    assert teacher[0][0].weight.grad is not None
    assert model[0][0].weight.grad is None
