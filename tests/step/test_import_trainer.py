"""`memlab.from_trainer` of transformers' Trainer: the imported step against the Trainer's own."""

import copy
import pickle
import types

import cloudpickle
import pytest
import torch

import memlab
from memlab.integrations.reading import FieldStatus
from memlab.techniques.step import build_step
from tests.import_parts import first_update, needs_trainer, texts, tiny, trainer_of, worst_error

pytestmark = pytest.mark.slow  # importing transformers' Trainer takes seconds


def step_of(imported):
    """Return loss and gradients of one update of an imported step."""
    step = build_step(imported.workload, imported.config, "cpu")
    loss = float(step.accumulate())
    return loss, {name: p.grad for name, p in step.model.named_parameters()}


def field(imported, name):
    return next(each for each in imported.fields if each.name == name)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_the_imported_step_is_the_trainers_own(tmp_path, kind, accumulation):
    transformers = needs_trainer()
    samples = texts(is_ragged=True)
    settings = {"gradient_accumulation_steps": accumulation}
    model = tiny(kind, transformers)
    before = copy.deepcopy(model.state_dict())
    trainer = trainer_of(tmp_path, model, samples, **settings)

    imported = memlab.from_trainer(trainer)
    assert imported.config.batch_size == 4 * accumulation
    assert imported.config.accumulation_steps == accumulation
    loss, gradients = step_of(imported)

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    own = first_update(trainer)
    is_summed = "sums 2 means" in field(imported, "gradient_accumulation_steps").why
    assert is_summed == (kind == "bert" and accumulation == 2)  # its forward computes means
    factor = 2 if is_summed else 1
    assert factor * loss == pytest.approx(own.loss, rel=1e-5)
    own_mean = {name: value / factor for name, value in own.gradients.items()}
    assert worst_error(own_mean, gradients) < 1e-5


def mean_of_squares(outputs, labels, num_items_in_batch):
    shifted = outputs["logits"].sum(-1) * labels.ne(-100)
    return shifted.square().sum() / num_items_in_batch


@pytest.mark.parametrize(
    "settings", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": mean_of_squares}]
)
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_loss_of_the_trainer_is_imported(tmp_path, settings, kind):
    transformers = needs_trainer()
    settings = {**settings, "gradient_accumulation_steps": 2}
    trainer = trainer_of(tmp_path, tiny(kind, transformers), texts(is_ragged=True), **settings)
    imported = memlab.from_trainer(trainer)
    loss, gradients = step_of(imported)
    own = first_update(trainer)
    assert loss == pytest.approx(own.loss, rel=1e-5)
    assert worst_error(own.gradients, gradients) < 1e-5


def test_a_loss_that_the_trainer_sums_is_said(tmp_path):
    transformers = needs_trainer()
    samples = [{"input_ids": s["input_ids"], "labels": i % 3} for i, s in enumerate(texts())]
    model = tiny("classifier", transformers)
    trainer = trainer_of(tmp_path, model, samples, gradient_accumulation_steps=2)
    imported = memlab.from_trainer(trainer)
    assert "sums 2 means" in field(imported, "gradient_accumulation_steps").why
    _, gradients = step_of(imported)
    own = first_update(trainer)
    assert worst_error({n: g / 2 for n, g in own.gradients.items()}, gradients) < 1e-5


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_checkpointing_is_that_of_the_trainer(tmp_path, kind):
    transformers = needs_trainer()
    trainer = trainer_of(tmp_path, tiny(kind, transformers), texts(), activation_checkpointing=True)
    imported = memlab.from_trainer(trainer)
    assert (imported.config.checkpointing, imported.config.model_cache) == ("blocks", False)
    loss, gradients = step_of(imported)
    own = first_update(trainer)
    assert loss == pytest.approx(own.loss, rel=1e-5)
    assert worst_error(own.gradients, gradients) < 1e-5


def test_a_model_that_checkpoints_itself_is_taken_as_it_is(tmp_path):
    transformers = needs_trainer()
    model = tiny("llama", transformers)
    model.gradient_checkpointing_enable()
    trainer = trainer_of(tmp_path, model, texts(), activation_checkpointing=True)
    imported = memlab.from_trainer(trainer)
    assert imported.config.checkpointing == "none"
    assert "itself" in field(imported, "activation_checkpointing").why
    loss, _ = step_of(imported)
    assert loss == pytest.approx(first_update(trainer).loss, rel=1e-5)


def test_the_workload_reaches_a_worker(tmp_path):
    transformers = needs_trainer()
    trainer = trainer_of(tmp_path, tiny("gpt2", transformers), texts())
    imported = memlab.from_trainer(trainer)
    sent = pickle.loads(cloudpickle.dumps(imported.workload))
    assert sent.make_batch(3)["input_ids"].shape == (3, 12)
    result = memlab.predict(imported.workload, imported.config, "cpu", timeout_seconds=900)
    assert result.outcome == "ok", result.message


def test_a_panel_opens_on_it(tmp_path):
    transformers = needs_trainer()
    trainer = trainer_of(tmp_path, tiny("gpt2", transformers), texts(), optim="sgd")
    imported = memlab.from_trainer(trainer)
    shown = memlab.panel(imported.workload, config=imported.config, device="cpu")
    assert (shown.config, shown.workload) == (imported.config, imported.workload)
    shown.close()


def test_a_batch_is_that_of_the_trainers_loader(tmp_path):
    transformers = needs_trainer()
    trainer = trainer_of(tmp_path, tiny("gpt2", transformers), texts())
    batch = memlab.from_trainer(trainer).workload.make_batch(4)
    own = next(iter(trainer.get_train_dataloader()))
    assert batch.keys() == own.keys()
    assert all(torch.equal(batch[name], own[name]) for name in own)


def test_a_data_set_without_length_or_samples(tmp_path):
    transformers = needs_trainer()

    class Stream(torch.utils.data.IterableDataset):
        def __init__(self, samples):
            self.samples = samples

        def __iter__(self):
            return iter(self.samples)

    model = tiny("gpt2", transformers)
    trainer = trainer_of(tmp_path, model, Stream(texts(3)))
    assert len(memlab.from_trainer(trainer).workload.make_batch(7)["input_ids"]) == 7
    with pytest.raises(memlab.MemlabError, match="has no samples"):
        memlab.from_trainer(trainer_of(tmp_path, model, Stream([])))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_loss_in_a_subclass_is_its_own(tmp_path, kind):
    transformers = needs_trainer()

    class MyTrainer(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

        def create_optimizer(self, *args):
            return super().create_optimizer(*args)

    settings = {"gradient_accumulation_steps": 2, "kind": MyTrainer}
    samples = texts(is_ragged=True)
    trainer = trainer_of(tmp_path, tiny(kind, transformers), samples, **settings)
    imported = memlab.from_trainer(trainer)
    assert field(imported, "trainer.compute_loss").became == "workload.compute_loss"
    assert "trainer.create_optimizer" in {each.name for each in imported.not_imported}

    loss, gradients = step_of(pickle.loads(cloudpickle.dumps(imported)))
    is_summed = "sums 2 means" in field(imported, "gradient_accumulation_steps").why
    own = first_update(trainer)
    factor = 2 if is_summed else 1
    assert is_summed == (kind == "bert")
    assert factor * loss == pytest.approx(own.loss, rel=1e-5)
    assert worst_error({n: g / factor for n, g in own.gradients.items()}, gradients) < 1e-5


def test_a_step_in_a_subclass_is_not_imported_silently(tmp_path):
    transformers = needs_trainer()

    class MyTrainer(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    class OwnLoop(transformers.Trainer):
        def _inner_training_loop(self, *args, **kwargs):
            return super()._inner_training_loop(*args, **kwargs)

    for kind, method in ((MyTrainer, "training_step"), (OwnLoop, "_inner_training_loop")):
        trainer = trainer_of(tmp_path, tiny("gpt2", transformers), texts(), kind=kind)
        imported = memlab.from_trainer(trainer)
        assert imported.workload is None
        names = {each.name for each in imported.not_imported}
        assert {f"trainer.{method}", "trainer.model"} <= names
        assert not any(each.became.startswith("workload") for each in imported.fields)
        said = field(imported, f"trainer.{method}").why
        assert f"{kind.__name__} overrides {method}" in said


def test_a_function_in_the_place_of_a_method_is_not_imported_silently(tmp_path, monkeypatch):
    transformers = needs_trainer()

    def tripled(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 3 * model(**inputs).loss

    def trainer():
        return trainer_of(tmp_path, tiny("gpt2", transformers), texts())

    changed = trainer()
    changed.compute_loss = types.MethodType(tripled, changed)
    imported = memlab.from_trainer(changed)
    assert imported.workload is None
    said = field(imported, "trainer.compute_loss").why
    assert said.startswith("compute_loss was replaced on this Trainer itself")
    assert "override compute_loss in a subclass" in said

    monkeypatch.setattr(transformers.Trainer, "compute_loss", tripled)
    imported = memlab.from_trainer(trainer())
    assert imported.workload is None
    said = field(imported, "trainer.compute_loss").why
    assert said.startswith(f"compute_loss was replaced on Trainer by {tripled.__module__}")


def test_a_given_optimizer_wins_over_its_name(tmp_path):
    transformers = needs_trainer()
    model = tiny("gpt2", transformers)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = trainer_of(tmp_path, model, texts(), optimizers=(sgd, None))
    imported = memlab.from_trainer(trainer)
    assert imported.config.optimizer == "sgd-momentum"
    assert field(imported, "optim").status is FieldStatus.NOT_CONCERNED
    assert field(imported, "trainer.optimizer.lr").status is FieldStatus.NOT_IMPORTED


def test_narrow_weights_are_not_cast_by_a_mixed_precision(tmp_path):
    transformers = needs_trainer()
    model = tiny("llama", transformers)
    trainer = trainer_of(tmp_path, model, texts(), bf16=True)
    assert memlab.from_trainer(trainer).config.precision == "bf16-mixed"
    trainer = trainer_of(tmp_path, model.to(torch.bfloat16), texts(), bf16=True)
    imported = memlab.from_trainer(trainer)
    assert imported.config.precision == "as-built"
    assert "in autocast" in field(imported, "bf16").why
    loss, gradients = step_of(imported)
    own = first_update(trainer)
    assert loss == pytest.approx(own.loss, rel=1e-5)
    assert worst_error(own.gradients, gradients) < 1e-5


def test_a_trainer_without_data_or_that_has_run(tmp_path):
    transformers = needs_trainer()
    trainer = trainer_of(tmp_path, tiny("gpt2", transformers), None)
    imported = memlab.from_trainer(trainer)
    assert imported.workload is None
    assert "no train_dataset" in field(imported, "trainer.train_dataset").why
    trainer = trainer_of(tmp_path, tiny("gpt2", transformers), texts())
    trainer.train()
    with pytest.raises(memlab.MemlabError, match="has been run"):
        memlab.from_trainer(trainer)


@pytest.mark.parametrize(("fsdp", "sharding"), [
    ({}, "ddp"),
    ({"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}, "zero3"),
    ({"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": False}}, "zero2"),
])  # fmt: skip
def test_real_arguments_of_several_ranks(tmp_path, fsdp, sharding):
    transformers = needs_trainer()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=4, **fsdp
    )
    found = memlab.from_trainer(arguments, world_size=2)
    config = found.config
    assert (config.sharding, config.world_size, config.batch_size) == (sharding, 2, 8)
    assert not {"fsdp", "fsdp_config"} & {each.name for each in found.not_imported}


def test_a_loss_that_counts_its_calls_begins_anew_with_each_model(tmp_path):
    transformers = needs_trainer()

    class Counting(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            self.calls = getattr(self, "calls", 0) + 1
            return self.calls * super().compute_loss(*args, **kwargs)

    trainer = trainer_of(tmp_path, tiny("gpt2", transformers), texts(), kind=Counting)
    imported = memlab.from_trainer(trainer)
    first, second = (step_of(imported)[0] for _ in range(2))
    assert first == second
