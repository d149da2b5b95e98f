"""The attention implementation: what is set, what stays equal, what it holds, what is refused."""

import dataclasses
import importlib
import importlib.util
import re

import pytest
import torch

from memlab import Outcome, StepConfig, Workload, measure, predict, verify, workloads
from memlab.config import Attention
from memlab.devices import cards
from memlab.errors import UnsupportedError
from memlab.recording import flash_attn_of_transformers
from memlab.recording.stand_in_attention import efficient_takes_groups
from memlab.step import build_step
from memlab.techniques import every
from memlab.techniques.attention import MATH_KERNEL
from tests.models import linear
from tests.script_parts import assert_same

transformers = pytest.importorskip("transformers", reason="needs memlab[zoo]")

LAYERS, HEADS, TOKENS, SAMPLES = 2, 4, 192, 2
MATRIX = SAMPLES * HEADS * TOKENS**2 * 4  # bytes of the attention weights of a layer, in fp32
MASK = SAMPLES * TOKENS**2 * 4
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": 32,
}
BLOOM = {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 32}
EAGER = StepConfig(batch_size=SAMPLES, attention="eager")


def of_kind(kind: str, tokens: int = 16, **options: object) -> Workload:
    """Return a language model whose config is made once, as people do."""
    config = getattr(transformers, f"{kind}Config")(**options)
    return Workload(
        name=kind,
        build_model=lambda: getattr(transformers, f"{kind}ForCausalLM")(config),
        make_batch=lambda n: torch.randint(32, (n, tokens)),
        compute_loss=lambda model, ids: model(input_ids=ids, labels=ids).loss,
    )


def mamba() -> Workload:
    """Return a model of transformers that has no attention."""
    return of_kind("Mamba", hidden_size=16, state_size=4, num_hidden_layers=1, vocab_size=32)


def llama(tokens: int = 16, **options: object) -> Workload:
    return of_kind("Llama", tokens, **SIZES, **options)


def chosen(model: torch.nn.Module) -> set[str]:
    """Return the implementations in the configs that the attention layers read."""
    layers = [m for m in model.modules() if "Attention" in type(m).__name__]
    return {layer.config._attn_implementation for layer in layers if hasattr(layer, "config")}


@pytest.mark.slow
def test_eager_attention_holds_its_matrices_as_counted_by_hand_and_as_measured():
    workload = llama(TOKENS)
    found = measure(workload, EAGER, "cpu", repeats=1, isolate=False)
    guess = predict(workload, EAGER, "cpu")
    usual = predict(workload, StepConfig(batch_size=SAMPLES), "cpu")
    assert guess.peak_allocated_bytes == found.peak_allocated_bytes

    # at the peak: the weights of each layer, the mask, and two gradients of one matrix
    held = guess.peak_by_category
    others = held["activations"] - LAYERS * MATRIX - MASK
    assert 0 < others < usual.peak_by_category["activations"]
    assert held["temporaries"] // MATRIX == 2
    assert usual.peak_by_category["temporaries"] < MATRIX


def test_gradients_stay_equal_but_for_rounding_and_the_reference_keeps_its_own():
    workload = llama()
    report = verify(workload, EAGER, "cpu", isolate=False)
    assert report.ok, report.why
    assert 0 < report.max_relative_error < 1e-5  # 0 would be a comparison with itself
    assert chosen(workload.build_model()) == {"sdpa"}  # a person's own config is left alone


def test_a_script_sets_it_too():
    assert_same(llama(), EAGER)


@pytest.mark.slow
def test_every_part_of_a_model_is_set():
    pytest.importorskip("peft", reason="needs memlab[finetune]")
    tower = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    vision = {**tower, "image_size": 16, "patch_size": 8}
    clip = transformers.CLIPConfig(text_config=SIZES, vision_config=vision)
    of_two = Workload(
        name="clip",
        build_model=lambda: transformers.CLIPModel(clip),
        make_batch=lambda n: (torch.randint(32, (n, 8)), torch.randn(n, 3, 16, 16)),
        compute_loss=lambda model, batch: model(*batch, return_loss=True).loss,
    )
    adapted = workloads.finetune("llama-tiny", base="fp32", tokens=8)
    for workload in (of_two, adapted):
        step = build_step(workload, EAGER, "cpu")
        assert chosen(step.model) == {"eager"}
        step()


@pytest.mark.parametrize(
    ("workload", "attention", "said"),
    [
        (mamba(), "eager", r"MambaForCausalLM, which has no attention; use attention='as-built'"),
        (mamba(), "sdpa", r"MambaForCausalLM, which has no attention; use attention='as-built'"),
        (linear(), "eager", r"Linear, which is no model of transformers.*attention='as-built'"),
        (of_kind("Bloom", **BLOOM), "sdpa", r"BloomForCausalLM .* does not have it"),
        (of_kind("Falcon", num_hidden_layers=1, hidden_size=32, num_attention_heads=4,
                 vocab_size=32), "eager", r"FalconForCausalLM chooses .* built, here 'sdpa'"),
        (llama(output_attentions=True, attn_implementation="eager"), "sdpa",
         r"output_attentions=True"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_have_it_is_refused_by_name(workload, attention, said):
    with pytest.raises(UnsupportedError, match=said):
        build_step(workload, StepConfig(attention=attention), "cpu")


def test_a_model_without_attention_is_refused_by_every_verb():
    workload, config = mamba(), StepConfig(batch_size=2, attention="eager")
    said = {
        predict(workload, config, "cpu").message,
        predict(workload, dataclasses.replace(config, memory_budget=0.5), "cpu").message,
        measure(workload, config, "cpu", isolate=False).message,
        verify(workload, config, "cpu", isolate=False).why,
    }
    why = "attention='eager' does nothing for MambaForCausalLM, which has no attention; use"
    assert all(why in each for each in said), said


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_kernels_of_cards_are_refused_where_they_do_not_run(attention):
    config = StepConfig(attention=attention)
    result = predict(llama(), config, "cpu")
    assert result.outcome is Outcome.UNSUPPORTED
    assert f"attention='{attention}' cannot train on a CPU" in result.message
    assert "use attention='sdpa'" in result.message
    every.check(config, torch.device("cuda"), cards.find("h200"))


def test_a_prediction_for_a_card_says_what_it_cannot_know():
    result = predict(llama(), StepConfig(attention="flex_attention"), "h200")
    assert result.outcome is Outcome.UNSUPPORTED
    assert "attention='flex_attention' cannot be predicted" in result.message


def test_flash_attn_needs_a_card_of_ampere_or_newer():
    config = StepConfig(attention="flash_attention_2")
    with pytest.raises(UnsupportedError, match=r"no kernels for Tesla T4.*use attention='sdpa'"):
        every.check(config, torch.device("cuda"), cards.find("t4"))


def test_eager_attention_that_nobody_has_chosen_is_told():
    notes = build_step(of_kind("Bloom", **BLOOM), StepConfig(), "cpu").notes
    assert len(notes) == 1
    assert "BloomForCausalLM runs eager attention" in notes[0]
    assert "transformers has no sdpa for it" in notes[0]
    assert "local or linear attention keeps less" in notes[0]  # transformers has Longformer, too
    asked = llama(output_attentions=True, attn_implementation="eager")
    assert "output_attentions=True" in build_step(asked, StepConfig(), "cpu").notes[0]
    assert not build_step(llama(), StepConfig(), "cpu").notes
    assert not build_step(llama(attn_implementation="eager"), StepConfig(), "cpu").notes


@pytest.mark.slow
def test_a_prediction_tells_of_the_math_kernel_what_it_holds():
    workload = llama(512, num_key_value_heads=1)
    fp32 = predict(workload, StepConfig(batch_size=SAMPLES), "h200")
    if efficient_takes_groups():
        pytest.skip("this PyTorch has a memory-efficient kernel for heads that share keys")
    [note] = [note for note in fp32.notes if MATH_KERNEL in note]
    matrix = HEADS * 512**2 * 4
    assert f"{LAYERS} calls of each forward" in note
    assert f"{matrix / 2**20:.2f} MiB a call and sample" in note
    assert fp32.peak_by_category["activations"] > LAYERS * SAMPLES * matrix

    mixed = predict(workload, StepConfig(batch_size=SAMPLES, precision="bf16-mixed"), "h200")
    assert not [note for note in mixed.notes if "Attention runs in" in note]
    assert fp32.peak_allocated_bytes - mixed.peak_allocated_bytes > LAYERS * SAMPLES * matrix


def masked(workload: Workload, tokens: int) -> Workload:
    """Give a language model's batches a mask in which nothing is padded."""

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return model(input_ids=batch[0], attention_mask=batch[1], labels=batch[0]).loss

    def make_batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return workload.make_batch(n), torch.ones(n, tokens, dtype=torch.long)

    return dataclasses.replace(workload, make_batch=make_batch, compute_loss=loss)


@pytest.mark.slow
def test_flash_attn_is_predicted_without_it_and_holds_what_pytorchs_copy_of_it_holds():
    flash, sdpa = (
        StepConfig(batch_size=SAMPLES, precision="bf16-mixed", attention=name)
        for name in ("flash_attention_2", "sdpa")
    )
    workload = masked(llama(512, num_key_value_heads=2, head_dim=20), 512)  # padded to 24
    found = predict(workload, flash, "h200")
    assert found.outcome is Outcome.OK, found.message
    assert found.peak_allocated_bytes == predict(workload, sdpa, "h200").peak_allocated_bytes
    assert found.step_seconds is not None


@pytest.mark.parametrize(
    ("options", "precision", "said"),
    [
        ({}, "as-built", r"in float32: .* use precision='bf16-mixed'"),
        ({"head_dim": 264}, "bf16", r"heads of 264 numbers: flash_attn takes 256 at most"),
    ],
)
def test_what_flash_attn_cannot_compute_is_refused(options, precision, said):
    config = StepConfig(attention="flash_attention_2", precision=precision)
    result = predict(llama(**options), config, "h200")
    assert result.outcome is Outcome.UNSUPPORTED
    assert re.search(said, result.message)


def test_transformers_finds_no_flash_attn_after_a_prediction():
    utilities = importlib.import_module(flash_attn_of_transformers.UTILITIES)
    before = vars(utilities).copy()
    entry = utilities.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2].copy()
    with flash_attn_of_transformers.as_on_card(Attention.FLASH_ATTENTION_2):
        assert importlib.util.find_spec("flash_attn")
        functions, _ = utilities.lazy_import_flash_attention("flash_attention_2")
        assert functions[0].__module__ == flash_attn_of_transformers.__name__
    assert importlib.util.find_spec("flash_attn") is None
    assert vars(utilities) == before
    assert utilities.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2] == entry
