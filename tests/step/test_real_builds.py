"""Models that cannot be built of fake tensors: what is said, and none is built that cannot fit."""

import pytest
import torch
from torch import nn

from memlab import Outcome, StepConfig, Workload
from memlab.devices.here import available_memory_bytes
from memlab.tracing import fake_workload
from tests.predictions import predicted

WIDE, DEEP = 2**15, 64  # matrices of 4 GiB, and how many of them


def huge():
    return nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEEP)])


def memory_of(layer):
    """Hand the memory of a layer to code that is not PyTorch's; fake tensors have none."""
    if "Fake" in type(layer.weight.data).__name__:
        raise TypeError("no memory to hand over")


def workload(build_model):
    return Workload(
        name="built",
        build_model=build_model,
        make_batch=lambda n: torch.randn(n, 8),
        compute_loss=lambda model, batch: model(batch).mean(),
    )


def test_an_error_that_has_nothing_to_do_with_tensors_is_said_and_not_met_again_for_real():
    built = []

    def build():
        built.append(huge())
        raise ValueError("no targets for this architecture")

    found = predicted(StepConfig(batch_size=2), "h200", workload(build))
    assert found.outcome == Outcome.FAILED
    assert "ValueError: no targets for this architecture" in found.message
    assert len(built) == 4, "two attempts, each over fake tensors and without memory"


@pytest.mark.parametrize("reads", [False, True])
def test_a_model_that_cannot_fit_is_never_built_for_real(reads):
    def build():
        model = huge()
        memory_of(model[0])
        if reads:
            assert model[0].weight.detach().sum().item() != 0
        return model

    found = predicted(StepConfig(batch_size=2), "h200", workload(build))
    assert found.outcome == Outcome.UNSUPPORTED
    assert "build_model raises" in found.message
    assert "it takes 256 GiB" in found.message
    assert available_memory_bytes() < DEEP * WIDE**2 * 4


def test_a_build_for_real_ends_before_it_takes_more_than_there_is(monkeypatch):
    monkeypatch.setattr(fake_workload, "available_memory_bytes", lambda: 2**20)

    def build():
        model = nn.ModuleList()
        memory_of(nn.Linear(8, 8))
        if torch.zeros(2**15).sum().item() == 0:  # not known without memory
            model.extend(nn.Linear(256, 256) for _ in range(2**10))
        return model

    found = predicted(StepConfig(batch_size=2), workload=workload(build))
    assert found.outcome == Outcome.UNSUPPORTED
    assert "it takes more than there is, and 1.00 MiB of memory are available" in found.message


def test_a_small_model_that_needs_memory_is_built_for_real():
    def build():
        model = nn.Linear(8, 8)
        memory_of(model)
        return model

    found = predicted(StepConfig(batch_size=2), workload=workload(build))
    assert found.outcome == Outcome.OK, found.message
    assert any("built for real" in note for note in found.notes)


def test_experts_that_bitsandbytes_leaves_in_16_bits_are_counted_and_said(tmp_path):
    pytest.importorskip("bitsandbytes")
    transformers = pytest.importorskip("transformers")
    from memlab.workloads import finetune

    experts, width, inner, layers = 8, 64, 32, 2
    transformers.Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"], vocab_size=256, hidden_size=width,
        num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=inner,
        num_hidden_layers=layers, head_dim=16, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64,
    ).save_pretrained(tmp_path)  # fmt: skip
    made = finetune(str(tmp_path), base="nf4", targets=("q_proj", "v_proj"), tokens=16)
    found = predicted(StepConfig(batch_size=1), "h200", made)
    assert found.outcome == Outcome.OK, found.message
    nbytes = layers * experts * 3 * width * inner * 2
    (note,) = [note for note in found.notes if "experts of a mixture" in note]
    assert "stay in bfloat16" in note
    assert f"take {nbytes // 1024} KiB" in note
    assert found.peak_by_category["parameters"] > nbytes
