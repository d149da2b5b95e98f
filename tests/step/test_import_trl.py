"""`memlab.from_trainer` of trl's trainers: the imported step against the trainer's own."""

import os
import pickle

import cloudpickle
import pytest
import torch

import memlab
from memlab.integrations.reading import FieldStatus
from memlab.techniques.step import build_step
from tests.import_parts import (
    first_update,
    needs_trainer,
    needs_trl,
    sentences,
    texts,
    tiny,
    trainer_of,
    trl_trainer_of,
    worst_error,
)
from tests.models import LIBRARY_BYTES

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when trl is imported: it sends no telemetry
pytestmark = [
    pytest.mark.slow,  # importing transformers' Trainer takes seconds
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
LAYERS = 2


def llama(dtype=torch.float32):
    return tiny("llama", needs_trainer()).to(dtype)


def field(imported, name):
    return next(each for each in imported.fields if each.name == name)


def assert_same_update(imported, trainer):
    """Compare loss and gradients of the imported step with the trainer's own first update."""
    step = build_step(imported.workload, imported.config, "cpu")
    loss = float(step.accumulate())
    gradients = {n: p.grad for n, p in step.model.named_parameters() if p.grad is not None}
    own = first_update(trainer)
    assert loss == pytest.approx(own.loss, rel=1e-5)
    assert worst_error(own.gradients, gradients) < 1e-5


SFT = {
    "as-is": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "packed": {"packing": True, "max_length": 24, "gradient_accumulation_steps": 2,
               "per_device_train_batch_size": 2},
    "unpadded": {"padding_free": True, "max_length": None, "gradient_accumulation_steps": 2},
    "full": {"peft_config": None, "gradient_checkpointing": False},
    "dft": {"loss_type": "dft"},
    "smoothed": {"label_smoothing_factor": 0.1},
}  # fmt: skip
DPO = {
    "as-is": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "bf16-two-losses": {"bf16": True, "loss_type": ["sigmoid", "sft"]},
    "full-precomputed": {"peft_config": None, "precompute_ref_log_probs": True},
}


@pytest.mark.parametrize("settings", SFT.values(), ids=SFT.keys())
def test_the_imported_step_is_the_sft_trainers_own(tmp_path, settings):
    trainer = trl_trainer_of(tmp_path, llama(), "SFTTrainer", **settings)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    imported = memlab.from_trainer(trainer)
    assert imported.config.batch_size == imported.config.accumulation_steps * (
        trainer.args.per_device_train_batch_size
    )
    names = {each.name for each in imported.not_imported}
    assert names == {"learning_rate", "lr_scheduler_type", "weight_decay"}
    assert_same_update(imported, trainer)
    frozen = [name for name, p in trainer.model.named_parameters() if not p.requires_grad]
    after = trainer.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in frozen)


@pytest.mark.parametrize("settings", DPO.values(), ids=DPO.keys())
def test_the_imported_step_is_the_dpo_trainers_own(tmp_path, settings):
    trainer = trl_trainer_of(tmp_path, llama(), "DPOTrainer", **settings)
    imported = memlab.from_trainer(trainer)
    batch = imported.workload.make_batch(3)
    assert len(batch["input_ids"]) == 6  # of each pair two rows
    assert imported.workload.count_samples(batch) == 3
    parts = imported.workload.split_batch(batch, [2, 1])
    third = imported.workload.make_batch(1) | {"input_ids": parts[1]["input_ids"]}
    assert [len(part["input_ids"]) for part in parts] == [4, 2]
    assert not torch.equal(third["input_ids"], imported.workload.make_batch(1)["input_ids"])
    assert_same_update(imported, trainer)


def test_adapters_of_a_narrow_base_run_in_the_autocast_of_the_trainer(tmp_path):
    trainer = trl_trainer_of(tmp_path, llama(torch.bfloat16), "SFTTrainer", bf16=True)
    imported = memlab.from_trainer(trainer)
    assert imported.config.precision == "as-built"
    assert "autocast" in field(imported, "bf16").why
    assert field(imported, "bf16").status is FieldStatus.IMPORTED
    assert_same_update(imported, trainer)


@pytest.mark.parametrize("adapter", ["LoraConfig", "IA3Config", "PromptTuningConfig"])
def test_any_trainer_over_an_adapter_is_imported(tmp_path, adapter):
    needs_trl()
    import peft

    own = {"num_virtual_tokens": 3} if adapter == "PromptTuningConfig" else {}
    given = getattr(peft, adapter)(task_type="CAUSAL_LM", **own)
    model = peft.get_peft_model(llama(torch.bfloat16), given)
    samples = texts(is_ragged=True)
    settings = {"bf16": True, "gradient_accumulation_steps": 2}
    trainer = trainer_of(tmp_path, model, samples, **settings)
    imported = memlab.from_trainer(trainer)
    assert imported.config.accumulation_steps == 2
    assert_same_update(imported, trainer)


def top_of(profiled):
    """Return the most bytes that stood at once, of those that were allocated in a profile."""
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    standing = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        standing += event.nbytes()
        most = max(most, standing)
    return most


@pytest.mark.parametrize("kind", ["SFTTrainer", "DPOTrainer"])
@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_the_memory_is_that_of_the_trainers_own_step(tmp_path, kind, is_checkpointed):
    def profiling():
        return torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )

    settings = {"gradient_checkpointing": is_checkpointed, "bf16": True}
    trainer = trl_trainer_of(tmp_path, llama(torch.bfloat16), kind, **settings)
    imported = memlab.from_trainer(trainer)
    step = build_step(imported.workload, imported.config, "cpu")
    with profiling() as mine:
        step.accumulate()

    class Meter(needs_trainer().TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.profiled = profiling()
            self.profiled.__enter__()

        def on_pre_optimizer_step(self, *args, **kwargs):
            self.profiled.__exit__(None, None, None)

    meter = Meter()
    trainer.add_callback(meter)
    trainer.train()
    # transformers keeps the state of the random numbers for each layer, memlab where one is drawn
    states = LAYERS * torch.get_rng_state().nbytes if is_checkpointed else 0
    assert top_of(meter.profiled) - states == pytest.approx(top_of(mine), rel=1e-3)


@pytest.mark.parametrize("kind", ["SFTTrainer", pytest.param("DPOTrainer", marks=pytest.mark.long)])
def test_a_prediction_is_what_is_measured(tmp_path, kind):
    imported = memlab.from_trainer(trl_trainer_of(tmp_path, llama(), kind))
    predicted = memlab.predict(imported.workload, imported.config, "cpu", timeout_seconds=900)
    measured = memlab.measure(imported.workload, imported.config, "cpu", repeats=1, warmup=0)
    assert (predicted.outcome, measured.outcome) == ("ok", "ok"), predicted.message
    peak = measured.peak_allocated_bytes
    assert predicted.peak_allocated_bytes == pytest.approx(peak, rel=1e-3)


def test_a_quantized_base_keeps_its_format(tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs memlab[finetune]")
    transformers = needs_trl() and needs_trainer()
    llama().save_pretrained(tmp_path / "base")
    packing = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=packing, dtype=torch.bfloat16
    )
    trainer = trl_trainer_of(tmp_path, model, "SFTTrainer", bf16=True)
    imported = memlab.from_trainer(trainer)

    sent = pickle.loads(cloudpickle.dumps(imported.workload)).build_model()
    packed = [p for p in sent.parameters() if type(p).__name__ == "Params4bit"]
    assert len(packed) == 7 * LAYERS
    assert all(p.dtype is torch.uint8 and p.quant_state is not None for p in packed)

    measured = memlab.measure(imported.workload, imported.config, "cpu", repeats=1, warmup=0)
    predicted = memlab.predict(imported.workload, imported.config, "cpu", timeout_seconds=900)
    assert (predicted.outcome, measured.outcome) == ("ok", "ok"), measured.message
    difference = measured.peak_allocated_bytes - predicted.peak_allocated_bytes
    assert 0 <= difference <= LIBRARY_BYTES * len(packed)  # each copied layer has tables of its own
    assert_same_update(imported, trainer)


def test_on_a_card_the_logits_are_never_whole(tmp_path):
    vocabulary, tile, length, rows = 40_000, 32_768, 128, 4
    transformers = needs_trainer()
    sizes = {"hidden_size": 16, "num_hidden_layers": LAYERS, "intermediate_size": 32}
    made = transformers.LlamaConfig(vocab_size=vocabulary, num_attention_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(made).to(torch.bfloat16)
    data = sentences(rows, length)
    trainer = trl_trainer_of(
        tmp_path, model, "SFTTrainer", bf16=True, max_length=length, train_dataset=data
    )
    imported = memlab.from_trainer(trainer)
    result = memlab.predict(imported.workload, imported.config, "24GiB", timeout_seconds=900)
    assert result.outcome == "ok", result.message
    one_tile = rows * (length - 1) * tile * 2  # of the logits in bf16
    assert one_tile <= result.peak_by_category["temporaries"] <= 1.03 * one_tile


def test_a_loss_of_a_subclass_is_its_own(tmp_path):
    class Twice(needs_trl().SFTTrainer):
        factor = 2

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            self.log({"loss": 1.0})
            return self.factor * loss

    class Called(Twice):
        def compute_loss(self, *args, **kwargs):
            return len(self.callback_handler.callbacks) * super().compute_loss(*args, **kwargs)

    steps = {"gradient_accumulation_steps": 2, "hub_token": "hf_secret"}
    trainer = trl_trainer_of(tmp_path, llama(), "SFTTrainer", of_class=Twice, **steps)
    imported = memlab.from_trainer(trainer)
    assert b"hf_secret" not in cloudpickle.dumps(imported)
    assert_same_update(imported, trainer)

    trainer = trl_trainer_of(tmp_path, llama(), "SFTTrainer", of_class=Called)
    imported = memlab.from_trainer(trainer)
    with pytest.raises(memlab.MemlabError, match=r"Called reads self\.callback_handler"):
        build_step(imported.workload, imported.config, "cpu").accumulate()


def test_what_cannot_be_imported_says_why(tmp_path):
    class Own(needs_trl().SFTTrainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    imported = memlab.from_trainer(trl_trainer_of(tmp_path, llama(), "SFTTrainer", of_class=Own))
    assert imported.workload is None
    assert "Own overrides training_step" in field(imported, "trainer.training_step").why
    assert field(imported, "max_length").status is FieldStatus.NOT_IMPORTED

    trainer = trl_trainer_of(tmp_path, llama(), "DPOTrainer")
    trainer.ref_model = llama()
    imported = memlab.from_trainer(trainer)
    assert imported.workload is None
    assert "precompute_ref_log_probs" in field(imported, "trainer.ref_model").why

    def fetch(samples):
        raise OSError("We couldn't connect to the hub")

    trainer = trl_trainer_of(tmp_path, llama(), "SFTTrainer")
    trainer.data_collator = fetch
    with pytest.raises(memlab.MemlabError, match=r"data_collator \(function\).*no network"):
        memlab.from_trainer(trainer)


def test_every_field_of_trl_has_its_place(tmp_path):
    trl = needs_trl()
    for kind in (trl.SFTConfig, trl.DPOConfig):
        imported = memlab.from_trainer(kind(output_dir=str(tmp_path), use_cpu=True))
        assert not any("does not know this field" in each.why for each in imported.fields)
