"""Adapters of peft on bases in every number format: predictions against `measure`."""

import dataclasses
import importlib.util
import json

import pytest
import torch

import memlab
from memlab import StepConfig, workloads
from memlab._util.torch_private.tensors import FakeTensorMode, parts_of
from memlab._util.units import MIB
from memlab.errors import WorkloadError
from memlab.techniques.step import build_step
from memlab.tracing.fakify import outlines
from memlab.workloads.quantizing import quantize_linear_layers
from tests.models import LIBRARY_BYTES

TOKENS = 48
LARGE_BLOCK = 2 * MIB
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("peft", "bitsandbytes")),
    reason="needs memlab[finetune]",
)
SETTINGS = [
    {"adapter": "lora", "base": "bf16", "targets": "all-linear"},
    {"adapter": "lora", "base": "fp32", "modules_to_save": ("lm_head",)},
    {"adapter": "rslora", "base": "nf4", "double_quantization": False},
    {"adapter": "lora", "base": "nf4", "prepare_for_kbit": True},
    {"adapter": "lora", "base": "int8"},
    {"adapter": "lora", "base": "int8-weight-only"},
    {"adapter": "dora", "base": "fp8-weight-only"},
    {"adapter": "dora", "base": "bf16"},
    {"adapter": "dora", "base": "nf4"},
    {"adapter": "ia3", "base": "fp4", "prepare_for_kbit": True},
    {"adapter": "prefix", "base": "bf16"},
    {"adapter": "prompt", "base": "int8"},
    {"adapter": "none", "base": "bf16"},
]


def tiny(**options):
    """Return a fine-tuning that takes a moment on a CPU."""
    return workloads.finetune("llama-tiny", tokens=TOKENS, **options)


@pytest.mark.parametrize(
    "options", SETTINGS, ids=lambda options: "-".join(map(str, options.values()))
)
def test_adapters_are_predicted(options):
    workload, config = tiny(**options), StepConfig(batch_size=2)
    predicted = memlab.predict(workload, config, "cpu")
    measured = memlab.measure(workload, config, "cpu", repeats=1, warmup=0)
    assert (predicted.outcome, measured.outcome) == ("ok", "ok"), predicted.message
    assert 0 <= measured.peak_allocated_bytes - predicted.peak_allocated_bytes <= LIBRARY_BYTES


def by_hand(workload, batch):
    """Return the gradients of the parameters that are trained, and what the base holds."""
    torch.manual_seed(0)
    model = workload.build_model().to("cpu")
    workload.compute_loss(model, batch).backward()
    base = [p.clone() for t in model.parameters() if not t.requires_grad for p in parts_of(t)]
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}, base


@pytest.mark.parametrize("base", ["int8", "int8-weight-only", "fp8-weight-only"])
def test_weights_in_8_bits_take_a_byte_and_a_scale_for_each_row_on_a_card(base):
    result = memlab.predict(tiny(base=base), StepConfig(batch_size=2), "rtx-4090")
    assert result.outcome == "ok", result.message
    model = tiny(base="bf16").build_model()
    by_hand = 0
    for name, parameter in model.named_parameters():
        is_packed = "_proj" in name and "lora" not in name
        by_hand += parameter.numel() if is_packed else parameter.nbytes
        if base != "int8" and is_packed:  # bitsandbytes keeps the scales in a buffer
            by_hand += parameter.shape[0] * 4
    rounded = 512 * 3 * len(list(model.parameters()))
    assert 0 <= result.peak_by_category["parameters"] - by_hand < rounded


@pytest.mark.parametrize("base", ["nf4", "int8", "int8-weight-only"])
def test_a_quantized_base_has_the_layers_of_one_that_transformers_loads(base):
    """Layers of bitsandbytes get other layers of peft, which compute in other formats."""
    transformers, peft = map(importlib.import_module, ("transformers", "peft"))
    how = {
        "nf4": lambda: transformers.BitsAndBytesConfig(load_in_4bit=True),
        "int8": lambda: transformers.BitsAndBytesConfig(load_in_8bit=True),
        "int8-weight-only": lambda: transformers.TorchAoConfig(
            importlib.import_module("torchao.quantization").Int8WeightOnlyConfig()
        ),
    }[base]()
    for adapter, own in (("lora", peft.LoraConfig), ("ia3", peft.IA3Config)):
        made = tiny(base="bf16", adapter="none").build_model()
        loaded = type(made).from_pretrained(
            None, config=made.config, state_dict=made.state_dict(), quantization_config=how,
            device_map="cpu",
        )  # fmt: skip
        loaded = peft.get_peft_model(loaded, own(task_type="CAUSAL_LM"))
        ours = tiny(base=base, adapter=adapter).build_model()
        assert kinds_of(ours) == kinds_of(loaded)


def kinds_of(model):
    return {path: type(module) for path, module in model.named_modules()}


@pytest.mark.parametrize("base", ["bf16", "nf4", "int8-weight-only"])
def test_a_step_trains_the_adapter_as_plain_pytorch_and_leaves_the_base_alone(base):
    workload = tiny(base=base)
    torch.manual_seed(1)
    batch = workload.make_batch(2)
    expected, before = by_hand(workload, batch)
    assert all("lora" in name for name in expected)

    kept = dataclasses.replace(workload, make_batch=lambda n: batch)
    step = build_step(kept, StepConfig(batch_size=2), torch.device("cpu"))
    seen = {}
    for name, parameter in step.model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.update({name: p.grad.clone()})
            )
    step()
    assert seen.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[name], gradient, rtol=1e-5, atol=0)
    after = [p for t in step.model.parameters() if not t.requires_grad for p in parts_of(t)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_rounding_over_a_4_bit_base_is_judged_by_the_format_in_which_it_multiplies():
    """All that is trained, and all that is cast, is fp32; the base multiplies in bf16."""
    workload = tiny(base="nf4", prepare_for_kbit=True)
    config = StepConfig(batch_size=4, accumulation_steps=2, attention="eager")
    report = memlab.verify(workload, config, "cpu")
    assert report.ok, report.why
    assert report.tolerance == memlab.verify(tiny(base="bf16"), config, "cpu").tolerance


def test_layers_of_a_large_base_are_predicted_in_4_bits_without_building_them(tmp_path):
    layers, wide, inner, words, rank = 2, 4096, 11008, 32000, 16
    sizes = {"hidden_size": wide, "intermediate_size": inner, "num_hidden_layers": layers}
    values = {"model_type": "llama", "vocab_size": words, "num_attention_heads": 32, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    workload = workloads.finetune(tmp_path, base="nf4", rank=rank, tokens=64)
    result = memlab.predict(workload, StepConfig(batch_size=1), "24GiB")
    assert result.outcome == "ok", result.message
    # half a byte a weight; the allocator does not divide the last MiB of a block of 10 MiB or more
    packed = 4 * wide**2 / 2 + 3 * -(-wide * inner // 2 // LARGE_BLOCK) * LARGE_BLOCK
    in_16_bits = 2 * (2 * words * wide + (2 * layers + 1) * wide)
    adapter = 4 * layers * 2 * rank * (wide + wide)  # fp32, of query and value
    by_hand = layers * packed + in_16_bits + adapter
    assert result.peak_by_category["parameters"] == pytest.approx(by_hand, rel=1e-6)
    assert not any("built for real" in note for note in result.notes)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"adapter": "none", "base": "nf4"}, "with adapter='none' nothing would be trained"),
        ({"adapter": "dora", "base": "int8"}, "adapter='dora'"),
        ({"base": "fp8-weight-only", "prepare_for_kbit": True}, "prepare_for_kbit=False"),
        ({"rank": 0}, "rank=0"),
        ({"base": "nf5"}, "base='nf5'"),
        ({"tokens": 9000}, "max_position_embeddings=4096"),
        ({"targets": ()}, "targets=()"),
    ],
)
def test_what_cannot_be_tuned_is_refused_by_name(options, named):
    with pytest.raises(memlab.MemlabError) as refused:
        workloads.finetune("llama-tiny", **options)
    assert named in str(refused.value)


def test_an_unknown_model_is_refused_with_those_that_there_are():
    with pytest.raises(WorkloadError, match="llama-1b"):
        workloads.finetune("llama-5b")


def test_targets_that_match_nothing_name_the_layers_that_there_are():
    result = memlab.predict(tiny(targets=("query",)), StepConfig(batch_size=2), "cpu")
    assert result.outcome == "failed"
    assert "targets=('query',)" in result.message
    assert "q_proj" in result.message


def test_an_architecture_without_usual_targets_names_the_layers_that_there_are(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "num_hidden_layers": 1}')
    with pytest.raises(WorkloadError, match="its linear layers are named dt_proj, in_proj"):
        workloads.finetune(tmp_path, base="nf4").build_model()


@pytest.mark.parametrize("base", ["nf4", "fp4", "int8"])
def test_a_base_without_linear_layers_is_refused_with_what_it_has(base):
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 2, 1), torch.nn.Linear(2, 2))
    model.get_output_embeddings = lambda: model[1]
    with pytest.raises(WorkloadError, match=r"toy has none besides its head: .* in Conv1d, Linear"):
        quantize_linear_layers(model, base, True, "toy")


def test_a_layer_in_a_format_that_bitsandbytes_refuses_is_named():
    def model_in(dtype):
        made = torch.nn.Sequential(torch.nn.Linear(64, 64, dtype=dtype))
        made.get_output_embeddings = lambda: None
        return made

    with pytest.raises(WorkloadError, match=r"cannot quantize 0 of toy: its weights are torch.fl"):
        quantize_linear_layers(model_in(torch.float64), "nf4", True, "toy")
    own = importlib.import_module("bitsandbytes.functional")
    with pytest.raises(ValueError, match="only supports 16/32-bit floats"):  # as it says itself
        own.quantize_4bit(torch.ones(64, 64, dtype=torch.float64))
    narrow = model_in(torch.float16)
    quantize_linear_layers(narrow, "nf4", True, "toy")
    assert narrow.to("cpu")[0].weight.dtype is torch.uint8


def test_an_outlined_model_takes_no_memory_and_small_tensors_keep_their_values():
    with FakeTensorMode(), outlines():
        large = torch.ones(1 << 16, 1 << 16)  # 16 GiB
        halves = large.to(torch.bfloat16)
        rows = halves[:2].contiguous()
        large.mul_(2)
        table = torch.linspace(0, 1, 5).tolist()
        assert large.device.type == halves.device.type == "cpu"
    assert (halves.dtype, rows.shape) == (torch.bfloat16, (2, 1 << 16))
    assert table == [0, 0.25, 0.5, 0.75, 1]


def test_reading_a_value_of_a_large_tensor_is_an_error():
    with FakeTensorMode(), outlines(), pytest.raises(Exception, match="meta"):
        torch.ones(1 << 20).sum().item()
