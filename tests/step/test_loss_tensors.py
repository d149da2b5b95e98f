"""What a loss brings along moves, counts and trains with the step; the person's own stays as it is.

The oracles are bytes counted by hand, the real allocator, and plain PyTorch loops.
"""

import copy
import dataclasses
import functools

import pytest
import torch
from torch import nn

import memlab
from memlab import StepConfig, Workload
from memlab.errors import UnsupportedError
from memlab.techniques.step import build_step
from tests.predictions import assert_predicted

CONFIG = StepConfig(batch_size=8)
CLASSES = torch.tensor([1.0, 2.0, 3.0, 4.0])
PARAMETER_BYTES = 4 * (16 * 4 + 4)  # of the model
TEACHER_BYTES = PARAMETER_BYTES


def layer():
    return nn.Linear(16, 4)


TEACHER = layer()
data = torch.zeros(1000, 1000)  # the losses below name an attribute `data`, and no such global


def workload_of(loss, build=layer):
    return Workload(
        name="own loss",
        build_model=build,
        make_batch=lambda n: (torch.randn(n, 16), torch.arange(n) % 4),
        compute_loss=loss,
    )


def distilled(model, batch, teacher, weight, scale):
    inputs, labels = batch
    out = model(inputs.data)
    return nn.functional.mse_loss(
        out * scale, teacher(inputs).detach()
    ) + nn.functional.cross_entropy(out, labels, weight)


def from_a_global(model, batch):
    return distilled(model, batch, TEACHER, CLASSES, 1.0)


@functools.cache
def loaded_once(kind):
    return layer()


loaded_once("teacher")


def from_a_cache(model, batch):
    return distilled(model, batch, loaded_once("teacher"), CLASSES, 1.0)


def from_a_default(model, batch, teacher=layer(), *, weight=CLASSES):  # noqa: B008
    return distilled(model, batch, teacher, weight, 1.0)


def in_a_closure():
    teacher, weight = layer(), CLASSES.clone()

    @torch.no_grad()
    def soft(inputs):
        return teacher(inputs)

    return lambda model, batch: distilled(model, batch, soft, weight, 1.0)


class Distillation:
    weight = CLASSES

    def __init__(self):
        self.teacher, self.images = layer(), torch.zeros(1000, 1000)

    def loss_of(self, model, batch):
        return distilled(model, batch, self.teacher, self.weight, 1.0)


class Slotted:
    __slots__ = ("held",)

    def __init__(self):
        self.held = {"all": [layer(), (CLASSES,)]}

    def __call__(self, model, batch):
        teacher, (weight,) = self.held["all"]
        return distilled(model, batch, teacher, weight, 1.0)


LOSSES = {
    "a cache": from_a_cache,
    "a global": from_a_global,
    "a default": from_a_default,
    "a closure behind a decorator": in_a_closure(),
    "a partial": functools.partial(distilled, teacher=layer(), weight=CLASSES, scale=1.0),
    "an object": Distillation().loss_of,
    "containers in slots": Slotted(),
}


@pytest.mark.parametrize("holder", LOSSES)
def test_a_teacher_and_class_weights_count_and_move(holder):
    workload = workload_of(LOSSES[holder])
    predicted, measured = assert_predicted(workload, CONFIG)
    card = memlab.predict(workload, CONFIG, "rtx-4060")

    assert measured.peak_by_category["parameters"] == PARAMETER_BYTES + TEACHER_BYTES
    assert measured.peak_by_category["buffers"] == CLASSES.nbytes
    assert predicted.peak_by_category == measured.peak_by_category
    assert card.outcome == "ok", card.message
    assert card.peak_by_category["parameters"] == 4 * 512  # each weight and bias takes 512 bytes


class Margin(nn.Module):
    """ArcFace: the loss has the weights of the classes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 4))

    def forward(self, model, batch):
        cosines = nn.functional.linear(
            nn.functional.normalize(model(batch[0])), nn.functional.normalize(self.weight)
        )
        return nn.functional.cross_entropy(8 * cosines, batch[1])


class Center(nn.Module):
    """A center for each class, which the loss moves itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centers", torch.randn(4, 4))

    def forward(self, model, batch):
        apart = model(batch[0]) - self.centers[batch[1]]
        with torch.no_grad():
            self.centers.index_add_(0, batch[1], apart, alpha=0.1)
        return apart.square().mean()


class Target(nn.Module):
    """BYOL: the loss moves a copy of the model after it."""

    def __init__(self):
        super().__init__()
        self.target = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4)).eval()

    def forward(self, model, batch):
        with torch.no_grad():
            both = zip(self.target[0].parameters(), model.parameters(), strict=True)
            for mine, theirs in both:
                mine.lerp_(theirs, 0.01)
            wanted = self.target(batch[0])
        return nn.functional.mse_loss(model(batch[0]), wanted + 1)


class Memory:
    """A bank of earlier outputs, made anew in each step."""

    def __init__(self):
        self.bank = torch.ones(64, 4)

    def __call__(self, model, batch):
        out = model(batch[0])
        loss = (out @ self.bank.T).square().mean()
        self.bank = torch.cat([out.detach(), self.bank])[:64]
        return loss


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_vars = torch.zeros(2, requires_grad=True)  # a leaf that is no nn.Parameter

    def forward(self, model, batch):
        out = model(batch[0])
        parts = torch.stack([out.square().mean(), nn.functional.cross_entropy(out, batch[1])])
        return (parts * torch.exp(-self.log_vars) + self.log_vars).sum()


OWN_STATE = {kind.__name__: kind for kind in (Margin, Center, Target, Memory, Tempered)}


def tensors_of(loss):
    own = [value for value in vars(loss).values() if isinstance(value, torch.Tensor)]
    return [*own, *loss.state_dict().values()] if isinstance(loss, nn.Module) else own


def trained_by(loss):
    parameters = list(loss.parameters()) if isinstance(loss, nn.Module) else []
    return [*parameters, *(t for t in vars(loss).values() if getattr(t, "requires_grad", False))]


@pytest.mark.parametrize("name", OWN_STATE)
def test_what_a_loss_brings_trains_as_in_plain_pytorch_and_the_persons_own_stays(name):
    torch.manual_seed(3)
    loss, model = OWN_STATE[name](), layer()
    plain_loss, plain_model, before = map(copy.deepcopy, (loss, model, loss))
    step = build_step(workload_of(loss, lambda: copy.deepcopy(model)), CONFIG, "cpu")
    found = [step() for _ in range(3)]

    optimizer = torch.optim.AdamW([*plain_model.parameters(), *trained_by(plain_loss)])
    expected = []
    for _ in range(3):
        value = plain_loss(plain_model, step.micro_batches[0])
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(value.item())

    assert found == expected
    for mine, plain in zip(step.model.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(mine, plain)
    for mine, copied in zip(tensors_of(loss), tensors_of(before), strict=True):
        assert torch.equal(mine, copied)
        assert mine.grad is None


@pytest.mark.parametrize("name", OWN_STATE)
def test_a_loss_with_a_state_of_its_own_is_measured_as_predicted_and_verified(name):
    workload = workload_of(OWN_STATE[name]())
    predicted, measured = assert_predicted(workload, CONFIG)
    assert predicted.peak_by_category == measured.peak_by_category

    report = memlab.verify(workload, StepConfig(batch_size=8, accumulation_steps=2), "cpu")
    assert report.ok, report.why


def test_only_parameters_with_a_gradient_take_optimizer_state():
    margin = Margin()

    def loss(model, batch):
        with torch.no_grad():
            soft = TEACHER(batch[0])  # its parameters require gradients and get none
        return margin(model, batch) + nn.functional.mse_loss(model(batch[0]), soft)

    result = memlab.predict(workload_of(loss), CONFIG, "cpu")
    steps = 3 * 4  # AdamW counts the steps of each weight in 4 bytes
    assert result.peak_by_category["optimizer_state"] == 2 * (PARAMETER_BYTES + 160) + steps


def test_a_loss_module_may_be_the_loss_and_names_never_collide():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.loss = layer()

        def forward(self, x):
            return self.loss(x)

    example = torch.randn(8, 16), torch.rand(8, 4)
    loss_fn = nn.BCEWithLogitsLoss(pos_weight=CLASSES)
    step = build_step(Workload.from_module(Model(), example, loss_fn), CONFIG, "cpu")
    assert list(dict(step.with_loss.named_buffers())) == ["loss_.pos_weight"]

    step = build_step(workload_of(Margin(), Model), CONFIG, "cpu")
    assert list(dict(step.with_loss.named_parameters())) == [
        "loss.weight", "loss.bias", "loss_.weight",
    ]  # fmt: skip


def test_what_the_model_and_the_loss_share_is_the_models():
    shared = layer()

    def loss(model, batch):
        return model(batch[0]).square().mean() + shared.weight.square().sum()

    step = build_step(workload_of(loss, lambda: nn.Sequential(shared)), CONFIG, "cpu")
    assert list(dict(step.with_loss.named_parameters())) == ["0.weight", "0.bias"]
    step.accumulate()
    assert shared.weight.grad is step.model[0].weight.grad is not None


def test_tied_weights_of_a_loss_stay_tied():
    first, second = layer(), layer()
    second.weight = first.weight

    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), first(batch[0]) + second(batch[0]))

    measured = memlab.measure(workload_of(loss), CONFIG, "cpu", isolate=False, repeats=1, warmup=0)
    assert measured.peak_by_category["parameters"] == PARAMETER_BYTES + TEACHER_BYTES + 16


def test_a_loss_keeps_its_number_format_and_its_mode():
    seen = []
    teacher = nn.Sequential(layer(), nn.Dropout(0.9)).eval()
    prototypes = torch.ones(4, 4, dtype=torch.float64)

    def loss(model, batch):
        seen.append((teacher.training, teacher[0].weight.dtype, prototypes.dtype))
        soft = teacher(batch[0].float())
        return nn.functional.mse_loss(model(batch[0]).double(), soft.double() @ prototypes)

    config = StepConfig(batch_size=8, precision="bf16")
    build_step(workload_of(loss), config, "cpu")()
    assert seen == [(False, torch.float32, torch.float64)]


def test_a_loss_is_put_back_when_it_raises():
    margin = Margin()

    def loss(model, batch):
        margin(model, batch)
        raise ValueError("wrong")

    weight = margin.weight
    step = build_step(workload_of(loss), CONFIG, "cpu")
    with pytest.raises(ValueError, match="wrong"):
        step()
    assert margin.weight is weight


def test_ranks_hold_a_frozen_teacher_and_refuse_a_parameter_that_trains():
    ranks = StepConfig(batch_size=8, sharding="ddp", world_size=2)
    frozen = memlab.predict(workload_of(LOSSES["a global"]), ranks, "2x-rtx-4090")
    assert frozen.outcome == "ok", frozen.message

    trained = memlab.predict(workload_of(Margin()), ranks, "2x-rtx-4090")
    assert trained.outcome == "unsupported"
    assert "loss.weight is a parameter of the loss that trains" in trained.message


def test_an_optimizer_of_the_model_alone_refuses_a_parameter_of_the_loss():
    own = dataclasses.replace(
        workload_of(Margin()), make_optimizer=lambda model: torch.optim.SGD(model.parameters())
    )
    step = build_step(own, CONFIG, "cpu")
    with pytest.raises(UnsupportedError, match=r"loss\.weight is a parameter of the loss"):
        step()


def weighted(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], CLASSES)


def test_a_script_for_a_card_refuses_a_tensor_that_stays_on_the_cpu():
    assert "CLASSES = torch.tensor" in memlab.export_script(workload_of(weighted), CONFIG, "cpu")
    with pytest.raises(UnsupportedError, match=r"uses loss\.CLASSES, a tensor that a script for"):
        memlab.export_script(workload_of(weighted), CONFIG, "rtx-4060")


def test_a_checkpoint_holds_the_parameters_of_the_loss(tmp_path):
    workload = workload_of(Margin())
    step, other = (memlab.training_step(workload, CONFIG, "cpu", seed=s) for s in (0, 1))
    batch = workload.make_batch(8)
    step(batch)
    step.save(tmp_path)
    other.load(tmp_path)
    assert torch.equal(other.loss_parameters["loss.weight"], step.loss_parameters["loss.weight"])
    assert step(batch) == other(batch)
