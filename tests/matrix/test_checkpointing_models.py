"""Models of every kind, checkpointed: as the plain ones bit by bit, or refused with the reason."""

import dataclasses

import pytest
import torch
from torch import nn

from memlab import Outcome, StepConfig, Workload, verify
from memlab.errors import UnsupportedError
from memlab.techniques.script import script
from memlab.techniques.step import build_step, set_seed
from tests.regressions import Block, config_of, regression
from tests.same_state import assert_same, state_after

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(spectral_norm|weight_norm).*"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*"),
]


def small(**fields):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return sizes | {"intermediate_size": 32} | fields


def build_transformer(name):
    """Return a small model of transformers, with its dropout; those of `torch.nn` aside."""
    import transformers as t

    language = {"vocab_size": 32, "bos_token_id": None, "eos_token_id": None}
    images = {"image_size": 32, "num_labels": 4}
    match name:
        case "gpt2":
            sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 8}
            return t.GPT2LMHeadModel(t.GPT2Config(**sizes, **language, use_cache=False))
        case "llama":
            sizes = small(num_key_value_heads=1, attention_dropout=0.2)
            return t.LlamaForCausalLM(t.LlamaConfig(**sizes, **language, use_cache=False))
        case "bert":
            return t.BertForMaskedLM(t.BertConfig(**small(vocab_size=32)))
        case "t5":
            sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
            config = t.T5Config(**sizes, vocab_size=32, use_cache=False, decoder_start_token_id=0)
            return t.T5ForConditionalGeneration(config)
        case "vit":
            return t.ViTForImageClassification(t.ViTConfig(**small(patch_size=8), **images))
        case "convnext":
            sizes = {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "num_labels": 4}
            config = t.ConvNextConfig(**sizes, drop_path_rate=0.3)
            return t.ConvNextForImageClassification(config)
    sizes = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
    config = t.SwinConfig(**sizes, **images, patch_size=4, drop_path_rate=0.3)
    return t.SwinForImageClassification(config)


def make_images(n):
    return {"pixel_values": torch.randn(n, 3, 32, 32), "labels": torch.randint(4, (n,))}


def make_tokens(n):
    tokens = torch.randint(32, (n, 8))
    return {"input_ids": tokens, "labels": tokens}


def transformer(name, change=lambda model: None):
    def build():
        model = build_transformer(name)
        change(model)
        return model

    sees = name in ("vit", "convnext", "swin")
    return Workload(
        name=name,
        build_model=build,
        make_batch=make_images if sees else make_tokens,
        compute_loss=lambda model, batch: model(**batch).loss,
    )


TRANSFORMERS = ("gpt2", "llama", "bert", "t5", "vit", "convnext", "swin")


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers_are_the_same_bit_by_bit(name):
    workload = transformer(name)
    plain = StepConfig(batch_size=4, accumulation_steps=2)
    expected = state_after(workload, plain)
    for policy in ("recompute-all", "keep-matmuls", "recompute-pointwise"):
        config = dataclasses.replace(plain, checkpointing="blocks", checkpoint_policy=policy)
        assert_same(state_after(workload, config), expected)


def test_hooks_that_a_first_forward_installs_do_not_pile_up():
    import transformers as t

    sizes = small(image_size=16, patch_size=8, num_labels=2, neck_hidden_sizes=[4] * 2)
    sizes |= {"fusion_hidden_size": 4, "backbone_out_indices": [0, 1], "is_hybrid": False}
    config = t.DPTConfig(**sizes, reassemble_factors=[2, 1], auxiliary_loss_weight=0.0)
    workload = Workload(
        name="dpt",
        build_model=lambda: t.DPTForSemanticSegmentation(config),
        make_batch=lambda n: {
            "pixel_values": torch.randn(n, 3, 16, 16),
            "labels": torch.randint(2, (n, 16, 16)),
        },
        compute_loss=lambda model, batch: model(**batch).loss,
    )

    def after(**fields):
        step = build_step(workload, StepConfig(batch_size=2, **fields), "cpu")
        losses = []
        for seed in range(3):
            set_seed(seed)
            losses.append(step())
        hooks = [len(module._forward_hooks) for module in step.model.modules()]
        return losses, hooks, [p.detach() for p in step.model.parameters()]

    expected = after()
    found = after(checkpointing="blocks", checkpoint_modules="dpt")
    assert found[:2] == expected[:2]
    assert sum(expected[1]) > 0
    assert all(map(torch.equal, found[2], expected[2]))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_budgets_of_models_of_transformers_change_no_bit(name):
    config = StepConfig(batch_size=4, memory_budget=0.3)
    report = verify(transformer(name), config, "cpu", isolate=False)
    assert (report.ok, report.bitwise) == (True, True), report.why


@pytest.mark.parametrize("name", ["gpt2", "t5"])
@pytest.mark.parametrize("modules", ["auto", "Linear", "Dropout"])
def test_a_model_that_checkpoints_itself_is_refused_wherever_the_flag_is(name, modules):
    workload = transformer(name, lambda model: model.gradient_checkpointing_enable())
    report = verify(workload, config_of(modules=modules), "cpu", isolate=False)
    assert report.outcome is Outcome.UNSUPPORTED
    assert "already checkpoints itself (gradient_checkpointing)" in report.why


@pytest.mark.parametrize("where", ["timm", "wrapper", "deep"])
def test_other_libraries_flags_are_found(where):
    def build():
        model = nn.Sequential(Block(), Block())
        if where == "timm":
            model.grad_checkpointing = True
        elif where == "deep":
            model[1].up.gradient_checkpointing = True
        else:
            from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

            model[0].up = wrapper.checkpoint_wrapper(model[0].up)
        return model

    with pytest.raises(UnsupportedError, match="already checkpoints itself"):
        build_step(regression(build), config_of(), "cpu")


def test_a_models_own_checkpointing_is_compared_with_the_model_without():
    workload = transformer("gpt2", lambda model: model.gradient_checkpointing_enable())
    report = verify(workload, StepConfig(batch_size=4), "cpu", isolate=False)
    assert (report.ok, report.bitwise) == (True, True), report.why
    assert "the model's own checkpointing is off in the reference step" in report.why


@pytest.mark.parametrize("policy", ["recompute-all", "keep-matmuls"])
def test_a_cache_is_refused_by_name(policy):
    workload = transformer("gpt2", lambda model: setattr(model.config, "use_cache", True))
    report = verify(workload, config_of(policy), "cpu", isolate=False)
    assert report.outcome is Outcome.UNSUPPORTED
    assert "an argument of transformer.h.0 is a DynamicCache" in report.why
    assert "use_cache=False" in report.why


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_cache_is_switched_off_by_an_argument(name):
    configs = []

    def with_cache(model):
        model.config.use_cache = True
        configs.append(model.config)

    workload = transformer(name, with_cache)
    report = verify(workload, config_of(model_cache=False), "cpu", isolate=False)
    assert (report.ok, report.bitwise) == (True, True), report.why
    assert all(config.use_cache for config in configs)  # a person's own is left alone
    text = script(StepConfig(model_cache=False), "cpu")
    assert "    switch_caches_off(model)\n" in text
