"""Several losses in one step, against loops as people write them."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from memlab import StepConfig, Workload, verify
from memlab.errors import UnsupportedError, WorkloadError
from memlab.integrations.export import export_script
from memlab.runtime.updates import run_updates
from memlab.techniques.step import build_step, set_seed
from tests.predictions import FEW_BYTES, assert_predicted, predicted

NOISE, WIDTH = 4, 32


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, noise):
        return self.discriminator(self.generator(noise))


def loss_d(model, real, fake):
    true, false = model.discriminator(real), model.discriminator(fake.detach())
    ones, zeros = torch.ones_like(true), torch.zeros_like(false)
    return cross_entropy(true, ones) + cross_entropy(false, zeros)


def loss_g(model, fake):
    said = model.discriminator(fake)
    return cross_entropy(said, torch.ones_like(said))


def of_gan(model, batch):
    real, noise = batch
    fake = model.generator(noise)
    return {"discriminator": loss_d(model, real, fake), "generator": lambda: loss_g(model, fake)}


def at_once(model, batch):
    real, noise = batch
    fake = model.generator(noise)
    return {"discriminator": loss_d(model, real, fake), "generator": loss_g(model, fake)}


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
        self.critic = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x):
        return self.actor(x), self.critic(x)


def of_agent(model, batch):
    x, _ = batch
    policy, value = model(torch.cat([x, x], 1))
    gain = (1.0 - value).squeeze(1)
    return {
        "critic": gain.square().mean(),
        "actor": -(policy.log_softmax(1)[:, 0] * gain.detach()).mean(),
    }


def in_order(model, batch):
    """Return two losses for all parameters; the second after the update by the first."""
    real, noise = batch
    return [model(noise).square().mean(), lambda: model.discriminator(real).square().mean()]


def workload(loss=of_gan, model=Gan, make_optimizer=None):
    return Workload(
        name="several",
        build_model=model,
        make_batch=lambda n: (
            torch.randn(n, 8 if model is Gan else NOISE), torch.randn(n, NOISE)
        ),
        compute_loss=loss,
        make_optimizer=make_optimizer,
    )  # fmt: skip


def each_its_own(model):
    return {
        "discriminator": torch.optim.SGD(model.discriminator.parameters(), lr=0.1, momentum=0.9),
        "generator": torch.optim.NAdam(model.generator.parameters(), lr=1e-2),
    }


def test_a_gan_trains_as_its_usual_loop_does():
    config = StepConfig(batch_size=8, max_grad_norm=0.01)
    step = build_step(workload(make_optimizer=each_its_own), config, "cpu")
    set_seed(0)
    model = Gan()
    set_seed(0)
    real, noise = workload().make_batch(8)
    each = each_its_own(model)
    for _ in range(3):
        fake = model.generator(noise)
        d = loss_d(model, real, fake)
        d.backward()
        nn.utils.clip_grad_norm_(model.discriminator.parameters(), 0.01)
        each["discriminator"].step()
        g = loss_g(model, fake)
        each["generator"].zero_grad()
        g.backward()
        nn.utils.clip_grad_norm_(model.generator.parameters(), 0.01)
        each["generator"].step()
        model.zero_grad()
        assert step() == pytest.approx(d.item() + g.item())
    assert all(map(torch.equal, model.parameters(), step.model.parameters()))


def test_losses_in_order_train_all_parameters_each():
    step = build_step(workload(in_order), StepConfig(batch_size=8, optimizer="sgd"), "cpu")
    set_seed(0)
    model = Gan()
    set_seed(0)
    batch = workload().make_batch(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for place in (0, 1):
        loss = in_order(model, batch)[place]
        (loss() if callable(loss) else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    step()
    assert all(map(torch.equal, model.parameters(), step.model.parameters()))


CASES = {
    "gan": workload(),
    "gan, own optimizers": workload(make_optimizer=each_its_own),
    "agent": workload(of_agent, Agent),
    "in order": workload(in_order),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "fields", [{}, {"precision": "bf16-mixed"}, {"max_grad_norm": 0.1}], ids=str
)
def test_several_losses_are_predicted_to_the_byte(name, fields):
    config = StepConfig(batch_size=16, **fields)
    assert_predicted(CASES[name], config, within=FEW_BYTES)
    assert predicted(config, "h200", CASES[name]).outcome == "ok"


@pytest.mark.parametrize("name", CASES)
def test_verify_compares_the_gradients_of_each_loss(name):
    own, config = CASES[name], StepConfig(batch_size=16, checkpointing="blocks",
                                          checkpoint_modules="Sequential")  # fmt: skip
    report = verify(own, config, "cpu", isolate=False)
    assert report.ok, report.why
    assert report.bitwise, report.why
    for fields in ({"memory_budget": 0.4}, {"precision": "fp32"}):
        report = verify(own, StepConfig(batch_size=16, **fields), "cpu", isolate=False)
        assert report.ok, report.why


@pytest.mark.parametrize("name", CASES)
def test_the_losses_of_another_step_go_on_from_the_same_weights(name):
    """A last loss that is another one shows in its own gradients, and in no others."""
    own, config = CASES[name], StepConfig(batch_size=16)

    def wrong(model, batch):
        losses = own.compute_loss(model, batch)
        key = list(losses)[-1] if isinstance(losses, dict) else -1
        last = losses[key]
        losses[key] = lambda: 1.01 * (last() if callable(last) else last)
        return losses

    device = torch.device("cpu")
    expected = run_updates(own, config, device, 0)
    changed = dataclasses.replace(own, compute_loss=wrong)
    found = run_updates(changed, config, device, 0, like=expected)
    of_last = {"in order": " of loss 2", "agent": "actor."}.get(name, "generator.")
    for ours, theirs in zip(found.updates, expected.updates, strict=True):
        assert set(ours.gradients) == set(theirs.gradients)
        for path, gradient in theirs.gradients.items():
            factor = 1.01 if of_last in path else 1.0
            assert torch.allclose(ours.gradients[path], factor * gradient, rtol=1e-4, atol=1e-9)


def test_a_loss_that_an_update_has_spoilt_is_said_to_need_a_function():
    with pytest.raises(WorkloadError, match=r"'generator' as a tensor, .*return lambda"):
        build_step(workload(at_once), StepConfig(batch_size=8), "cpu")()

    def shared(model, batch):
        made = model(batch[1])
        return [made.mean(), made.square().mean()]

    with pytest.raises(WorkloadError, match=r"'loss 2' as a tensor, .*return lambda"):
        build_step(workload(shared), StepConfig(batch_size=8), "cpu")()


WRONG = {
    "a number": lambda loss: 1.0,
    "nothing": lambda loss: None,
    "an empty list": lambda loss: [],
    "a number in a list": lambda loss: [1.0],
    "names that are no text": lambda loss: {0: loss},
    "no submodule": lambda loss: {"judge": loss},
    "a tuple": lambda loss: (loss, loss * 2),
    "a loss with its outputs": lambda loss: {"logits": loss[None].expand(4), "loss": loss},
    "a vector": lambda loss: [loss[None].expand(2)],
    "a function of nothing": lambda loss: [lambda: None],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_loss_is_refused(name):
    wrong = workload(lambda model, batch: WRONG[name](model(batch[1]).mean()))
    with pytest.raises(WorkloadError, match=r"^compute_loss returned .*(return|rename)") as refused:
        build_step(wrong, StepConfig(batch_size=8), "cpu")()
    if "tuple" in name or "outputs" in name:
        assert "return the loss alone, such as output.loss" in str(refused.value)


def test_a_parameter_of_the_loss_is_trained_in_order_and_refused_by_name():
    scale = nn.Parameter(torch.ones(()))
    each = workload(lambda model, batch: [model(batch[1]).mean() * scale, lambda: scale.square()])
    step = build_step(each, StepConfig(batch_size=8, optimizer="sgd"), "cpu")
    step()
    (trained,) = step.loss.parameters.values()
    assert trained.item() != 1.0
    assert scale.item() == 1.0
    named = workload(lambda model, batch: {"generator": model(batch[1]).mean() * scale})
    with pytest.raises(UnsupportedError, match="is a parameter of its own"):
        build_step(named, StepConfig(batch_size=8), "cpu")()


@pytest.mark.parametrize(
    "fields",
    [
        {"accumulation_steps": 2},
        {"precision": "fp16-mixed"},
        {"optimizer_in_backward": True},
        {"compile": True},
    ],
    ids=str,
)
def test_settings_for_one_loss_are_refused(fields):
    with pytest.raises(UnsupportedError, match=f"^{next(iter(fields))}=.* with several losses"):
        build_step(workload(), StepConfig(batch_size=8, **fields), "cpu")()


def that_reads_a_value(model, batch):
    losses = of_gan(model, batch)
    return losses if losses["discriminator"].item() < 1e9 else {}


def alone(model, batch):
    return loss_d(model, batch[0], model.generator(batch[1]))


@pytest.mark.parametrize("loss", [of_gan, that_reads_a_value])
def test_several_losses_are_not_exported(loss):
    several = dataclasses.replace(workload(), compute_loss=loss)
    with pytest.raises(UnsupportedError, match="has several losses"):
        export_script(several, StepConfig(batch_size=8), "cpu")


def test_what_is_no_loss_is_not_exported():
    wrong = dataclasses.replace(workload(), compute_loss=lambda *given: (alone(*given), None))
    with pytest.raises(WorkloadError, match=r"compute_loss returned tuple.*return the loss alone"):
        export_script(wrong, StepConfig(batch_size=8), "cpu")


def that_fails(model, batch):
    raise RuntimeError("no such file")


def test_a_script_says_that_its_loss_could_not_be_seen():
    scripts = [
        " ".join(export_script(one, StepConfig(batch_size=8), "cpu").split())
        for one in [dataclasses.replace(workload(), compute_loss=f) for f in (that_fails, alone)]
    ]
    said = "memlab could not see whether compute_loss returns one loss"
    assert [f"{said}: " in script for script in scripts] == [True, False]
    assert "RuntimeError: no such file" in scripts[0]
