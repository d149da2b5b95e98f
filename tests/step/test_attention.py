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
from memlab.techniques import registry
from memlab.techniques.attention import MATH_KERNEL
from memlab.techniques.step import build_step
from memlab.trace import Phase
from memlab.tracing import fake_cuda, transformers_attention
from memlab.tracing.attention_kernels import efficient_takes_groups
from memlab.tracing.tracker import Tracker, record_fake
from tests.models import linear, made_of
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
    of_two = made_of(
        lambda: transformers.CLIPModel(clip),
        lambda n: (torch.randint(32, (n, 8)), torch.randn(n, 3, 16, 16)),
        lambda model, batch: model(*batch, return_loss=True).loss,
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


@pytest.mark.slow
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
    registry.check(config, torch.device("cuda"), cards.find("h200"))


@pytest.mark.parametrize(
    ("attention", "card", "said", "newer"),
    [
        ("flex_attention", "p100", ".*P100", "t4"),
        ("flash_attention_2", "t4", "Tesla T4", "h200"),
    ],
)
def test_kernels_need_a_card_that_is_new_enough(attention, card, said, newer):
    config = StepConfig(attention=attention)
    with pytest.raises(UnsupportedError, match=rf"no kernels for {said}.*use attention='sdpa'"):
        registry.check(config, torch.device("cuda"), cards.find(card))
    registry.check(config, torch.device("cuda"), cards.find(newer))


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
    recurrent = of_kind("Rwkv", vocab_size=64, hidden_size=16, num_hidden_layers=2)
    assert not build_step(recurrent, StepConfig(), "cpu").notes  # it has no heads


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


@pytest.mark.slow
def test_flex_attention_holds_what_flash_attention_holds_and_the_blocks_of_its_mask():
    flex, sdpa = (
        predict(
            llama(512, num_key_value_heads=2, head_dim=16),
            StepConfig(batch_size=SAMPLES, precision="bf16-mixed", attention=name),
            "h200",
        )
        for name in ("flex_attention", "sdpa")
    )
    assert flex.outcome is Outcome.OK, flex.message
    # eight tensors of the one mask; flash attention keeps a seed and an offset in each layer
    more = 8 * 512 - LAYERS * 2 * 512
    held, usual = flex.peak_by_category["activations"], sdpa.peak_by_category["activations"]
    assert held - usual == more
    assert flex.step_seconds is None  # its kernels have no known time
    assert any("Not counted is what the first step takes to compile" in n for n in flex.notes)


def test_the_kernels_of_flex_attention_allocate_what_was_counted_by_hand():
    samples, heads, shared, tokens, size = 2, 4, 2, 256, 16
    tracker = Tracker(fake_cuda.NAME)

    def run(_):
        module = importlib.import_module(transformers_attention.INTEGRATION)
        masks = importlib.import_module(transformers_attention.MASKS)
        query, key, value = (
            torch.empty(samples, tokens, count, size, dtype=torch.bfloat16, device=device)
            .transpose(1, 2)
            .requires_grad_()
            for count in (heads, shared, shared)
        )
        mask = masks.flex_attention_mask(samples, tokens, tokens, device=device)
        tracker.mark(0, Phase.FORWARD, 0)
        layer = torch.nn.Module()
        out, _ = module.flex_attention_forward(layer, query, key, value, mask)
        tracker.mark(0, Phase.BACKWARD, 0)
        out.backward(torch.empty_like(out))

    with (
        fake_cuda.as_cuda((9, 0)) as device,
        transformers_attention.flex_attention_as_on_card(Attention.FLEX_ATTENTION),
    ):
        recording = record_fake(run, tracker)

    made = {phase: [] for phase in Phase}
    for block in recording.blocks:
        interval = recording.operators[block.operator].interval
        made[recording.intervals[interval].phase].append(block.nbytes)
    of_query, number = samples * heads * tokens * size * 2, samples * heads * tokens * 4
    of_key = of_query * shared // heads
    # the output, in the order that the layer wants; logsumexp, also in base e and in bf16; the
    # largest scores
    forward = [of_query, number, number, number, number // 2]
    assert sorted(made[Phase.FORWARD]) == sorted(forward)
    # the gradient that is given; zeros for the logsumexp; delta; three gradients
    backward = [of_query, number, number, of_query, of_key, of_key]
    assert sorted(made[Phase.BACKWARD]) == sorted(backward)
    assert recording.launches == {
        "torch.nn.attention.flex_attention.flex_attention": 1,
        "torch.nn.attention.flex_attention.flex_attention_backward": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "options", "precision", "said"),
    [
        ("flash_attention_2", {}, "as-built", r"in float32: .* use precision='bf16-mixed'"),
        ("flash_attention_2", {"head_dim": 264}, "bf16",
         r"heads of 264 numbers: flash_attn takes 256 at most"),
        ("flex_attention", {"head_dim": 8}, "bf16",
         r"heads of 8 numbers: PyTorch's kernel takes 16 at least"),
    ],
)  # fmt: skip
def test_what_a_kernel_cannot_compute_is_refused(attention, options, precision, said):
    config = StepConfig(attention=attention, precision=precision)
    result = predict(llama(**options), config, "h200")
    assert result.outcome is Outcome.UNSUPPORTED
    assert re.search(said, result.message)


def test_transformers_compiles_its_own_kernel_again_after_a_prediction():
    modules = [
        importlib.import_module(name)
        for name in (
            transformers_attention.INTEGRATION,
            transformers_attention.MASKS,
        )
    ]
    before = [vars(module).copy() for module in modules]
    with transformers_attention.flex_attention_as_on_card(Attention.FLEX_ATTENTION):
        assert [vars(module) for module in modules] != before
    assert [vars(module) for module in modules] == before


def test_transformers_finds_no_flash_attn_after_a_prediction():
    utilities = importlib.import_module(transformers_attention.UTILITIES)
    before = vars(utilities).copy()
    entry = utilities.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2].copy()
    with transformers_attention.flash_attn_as_on_card(Attention.FLASH_ATTENTION_2):
        assert importlib.util.find_spec("flash_attn")
        functions, _ = utilities.lazy_import_flash_attention("flash_attention_2")
        assert functions[0].__module__ == transformers_attention.__name__
    assert importlib.util.find_spec("flash_attn") is None
    assert vars(utilities) == before
    assert utilities.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2] == entry
