"""Exported files of fine-tunings, run where memlab cannot be imported, against memlab's step."""

import dataclasses
import importlib.util
import json

import pytest

import memlab
from memlab import StepConfig
from memlab.errors import UnsupportedError
from memlab.integrations.export import export_script
from tests.exported_parts import losses_of, losses_of_step, peak_of

pytest.importorskip("peft", reason="needs memlab[finetune]")
pytest.importorskip("bitsandbytes", reason="needs memlab[finetune]")
CONFIG = StepConfig(batch_size=2)


def tuned(**options):
    return memlab.workloads.finetune("llama-tiny", tokens=16, **options)


def half_of_own_loss(model, batch):
    return model(**batch).loss / 2


def assert_same_losses(cases, folder):
    found = losses_of([export_script(*case, "cpu") for case in cases], folder)
    for (workload, config), losses in zip(cases, found, strict=True):
        assert losses == losses_of_step(workload, config), workload.name
        assert len(set(losses)) > 5


@pytest.mark.slow
def test_a_file_has_the_losses_of_the_step_bit_by_bit(capsys):
    workload = tuned(base="nf4", prepare_for_kbit=True)
    text = export_script(workload, CONFIG, "cpu")
    assert "memlab." not in text
    names = {"__name__": "exported"}
    exec(compile(text, "exported.py", "exec"), names)
    names["NUM_STEPS"] = 3
    names["main"]()
    said = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert said == losses_of_step(workload, CONFIG, 3)
    assert len(set(said)) == 3


@pytest.mark.slow
def test_every_adapter_and_base_has_the_losses_of_the_step(tmp_path):
    cases = [
        tuned(),
        tuned(base="nf4"),
        tuned(base="nf4", prepare_for_kbit=True),
        tuned(adapter="dora", base="fp4", targets=("q_proj", "v_proj"), double_quantization=False),
        tuned(adapter="dora", base="fp16", targets="all-linear"),
        tuned(adapter="rslora", base="int8", dropout=0.1, modules_to_save=("lm_head",)),
        tuned(adapter="ia3", base="fp32", targets=r".*(k_proj|v_proj|down_proj)\b"),
        tuned(adapter="prefix"),
        tuned(adapter="prompt", base="int8", num_virtual_tokens=3),
        tuned(adapter="none"),
        dataclasses.replace(tuned(rank=4), compute_loss=half_of_own_loss),
        tuned().chosen(rank=4, base="nf4").resized(8),
    ]
    if importlib.util.find_spec("torchao"):
        cases += [tuned(base="int8-weight-only"), tuned(adapter="dora", base="fp8-weight-only")]
    assert_same_losses([(workload, CONFIG) for workload in cases], tmp_path)


@pytest.mark.slow
def test_every_setting_of_a_step_holds_for_a_quantized_base_too(tmp_path):
    configs = [
        {"precision": "bf16-mixed", "checkpointing": "blocks"},
        {"attention": "eager", "accumulation_steps": 2, "max_grad_norm": 0.5},
        {"loss_chunks": 4, "optimizer": "sgd-momentum"},
        {"loss_kernel": "chunked-nll", "optimizer": "adamw-8bit"},
        {"memory_budget": 0.5, "optimizer": "adafactor"},
    ]
    if not importlib.util.find_spec("trl"):
        del configs[3]
    workload = tuned(base="nf4", prepare_for_kbit=True)
    cases = [(workload, StepConfig(batch_size=2, **config)) for config in configs]
    assert_same_losses(cases, tmp_path)


@pytest.mark.slow
def test_a_file_peaks_where_the_step_does(tmp_path):
    workload = memlab.workloads.finetune("llama-tiny", tokens=256, base="nf4")
    measured = memlab.measure(workload, CONFIG, "cpu", repeats=1, warmup=0)
    peak = peak_of(export_script(workload, CONFIG, "cpu"), tmp_path)
    assert peak == pytest.approx(measured.peak_allocated_bytes, rel=0.01)


@pytest.mark.slow
def test_a_file_reads_as_a_person_writes_it():
    text = export_script(tuned(base="nf4", targets=("q_proj",)), CONFIG, "h200")
    assert "memlab." not in text
    assert "torchao" not in text  # what another base needs
    assert "prepare_model" not in text
    assert text.count("from_pretrained(") == 2  # of a checkpoint, in a comment, and of no file
    assert "LoraConfig(\n        r=16," in text
    names = {"__name__": "exported"}
    exec(compile(text, "exported.py", "exec"), names)
    names["DEVICE"] = "cpu"
    model = names["build_model"]()
    assert model.base_model.model.config.quantization_config.bnb_4bit_quant_type == "nf4"
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert len(trained) == 8  # two matrices in each of four layers
    assert all("q_proj.lora" in name for name in trained)


@pytest.mark.slow
def test_a_base_that_transformers_loads_in_another_way_is_refused(tmp_path):
    pytest.importorskip("torchao", reason="needs memlab[fp8]")
    values = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(values))
    workload = memlab.workloads.finetune(tmp_path, base="int8-weight-only", tokens=8)
    with pytest.raises(UnsupportedError, match=r"leaves as it is transformer.h.0.*Conv1D.*bf16"):
        export_script(workload, CONFIG, "cpu")
    other = memlab.workloads.finetune(tmp_path, base="nf4", tokens=8)
    assert "load_in_4bit=True" in export_script(other, CONFIG, "cpu")


@pytest.mark.slow
def test_files_for_libraries_train_a_quantized_base_in_one_process(tmp_path):
    workload = tuned(base="nf4", prepare_for_kbit=True)
    expected = losses_of_step(workload, CONFIG)
    flavors = [
        f for f in ("lightning", "transformers", "accelerate") if importlib.util.find_spec(f)
    ]
    texts = [export_script(workload, CONFIG, "cpu", flavor=flavor) for flavor in flavors]
    for losses in losses_of(texts, tmp_path):
        assert losses == pytest.approx(expected, rel=1e-5)
    ranks = StepConfig(batch_size=2, sharding="ddp", world_size=2)
    for flavor in flavors:
        with pytest.raises(UnsupportedError, match=r"loaded quantized.*use flavor='pytorch'"):
            export_script(workload, ranks, "cpu", flavor=flavor)
