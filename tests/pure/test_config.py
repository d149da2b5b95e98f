import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab import MemlabError, StepConfig
from memlab.config import Precision


def test_defaults_are_the_contract():
    contract = {
        "batch_size": 8,
        "accumulation_steps": 1,
        "precision": "as-built",
        "memory_budget": 1.0,
        "budget_engine": "eager",
        "budget_solver": "dp",
        "budget_estimator": "flops",
        "compile": False,
        "compile_mode": "default",
        "channels_last": False,
        "init_on_meta": False,
        "optimizer": "adamw",
        "optimizer_implementation": "default",
        "optimizer_in_backward": False,
        "checkpointing": "none",
        "checkpoint_modules": "auto",
        "checkpoint_policy": "recompute-all",
        "model_cache": True,
        "loss_chunks": 1,
        "loss_kernel": "as-built",
        "inplace": False,
        "offload_activations": False,
        "offload_fraction": 1.0,
        "offload_parameters": False,
        "offload_optimizer": False,
        "expandable_segments": False,
    }
    assert contract.items() <= StepConfig().to_dict().items()  # which new fields extend
    config = StepConfig(precision="bf16-mixed")  # read from text and printed as text
    assert config.precision is Precision.BF16_MIXED
    assert str(config) == "batch_size=8, precision=bf16-mixed"


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("batch_size", 0, "at least 1"),
        ("batch_size", 2.5, "int"),
        ("batch_size", True, "int"),
        ("accumulation_steps", -1, "at least 1"),
        ("memory_budget", 1.5, "0.0 to 1.0"),
        ("memory_budget", float("nan"), "0.0 to 1.0"),
        ("memory_budget", "half", "0.0 to 1.0"),
        ("loss_chunks", 0, "at least 1"),
        ("offload_activations", 1, "True or False"),
        ("offload_fraction", -0.5, "0.0 to 1.0"),
        ("offload_parameters", "yes", "True or False"),
        ("precision", "fp12", "'bf16-mixed'"),
        ("optimizer", "adamax", "'adamw'"),
        ("budget_engine", None, "'compile'"),
        ("budget_solver", "cplex", "'dp_knapsack_sliding_hirschberg'"),
        ("budget_solver", "greedy", "budget_engine='compile'"),
        ("budget_estimator", "profile", "budget_engine='compile'"),
        ("compile", "yes", "True or False"),
        ("compile_mode", "fast", "'max-autotune-no-cudagraphs'"),
        ("compile_mode", "reduce-overhead", "add compile=True"),
        ("channels_last", 1, "True or False"),
        ("init_on_meta", "yes", "True or False"),
        ("checkpointing", "all", "'blocks'"),
    ],
)
def test_bad_value_names_field_value_and_what_is_allowed(field, value, allowed):
    with pytest.raises(MemlabError) as caught:
        StepConfig(**{field: value})
    message = str(caught.value)
    assert f"{field}={value!r}" in message
    assert allowed in message


def test_the_budget_slides_to_one_with_a_solver_chosen():
    chosen = StepConfig(memory_budget=0.5, budget_engine="compile", budget_solver="greedy")
    assert dataclasses.replace(chosen, memory_budget=1.0).budget_solver == "greedy"
    assert chosen.without_recompute().memory_budget == 1.0


def test_positional_and_unknown_fields_are_refused():
    with pytest.raises(TypeError):
        StepConfig(8)
    with pytest.raises(TypeError):
        StepConfig(batchsize=8)
    with pytest.raises(MemlabError, match=r"accumulation_steps=9 .* batch_size=8.*lower"):
        StepConfig(accumulation_steps=9)
    with pytest.raises(dataclasses.FrozenInstanceError):
        StepConfig().batch_size = 4


@given(st.integers(1, 500), st.data())
def test_micro_batches_are_those_of_tensor_split(batch_size, data):
    import torch

    steps = data.draw(st.integers(1, batch_size))
    config = StepConfig(batch_size=batch_size, accumulation_steps=steps)
    split = torch.tensor_split(torch.arange(batch_size), steps)
    assert list(config.micro_batch_sizes) == [len(part) for part in split]
    assert config.micro_batch_size == max(config.micro_batch_sizes)


@given(
    st.builds(
        StepConfig,
        batch_size=st.integers(32, 64),
        accumulation_steps=st.integers(1, 32),
        precision=st.sampled_from(Precision),
        memory_budget=st.floats(0, 1),
        compile=st.booleans(),
    )
)
def test_a_config_survives_json_types(config):
    assert StepConfig(**config.to_dict()) == config
