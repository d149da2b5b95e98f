"""The exported files for libraries, run with the real libraries, against the step of `build_step`.

MEMLAB_LIBRARIES may name folders of packages that are not in the environment.
"""

import functools
import os
import random

import pytest
import torch
from torch import nn

import memlab
from memlab import StepConfig
from memlab.integrations.export import export_script
from tests.exported_parts import losses_of, losses_of_step, peak_of
from tests.models import blocks

FOLDERS = [folder for folder in os.environ.get("MEMLAB_LIBRARIES", "").split(os.pathsep) if folder]
NEEDS = {
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
    "transformers": ("accelerate", "transformers"),
}
SETTINGS = [
    {"precision": "fp32"},
    {"accumulation_steps": 4, "optimizer": "sgd", "max_grad_norm": 0.05},
    {"checkpointing": "blocks", "accumulation_steps": 2, "max_grad_norm": 1.0},
    {"compile": True},
]


@pytest.fixture(params=NEEDS)
def flavor(request, monkeypatch):
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(folder)
    for library in NEEDS[request.param]:
        pytest.importorskip(library, reason=f"{library} is not installed")
    return request.param


@pytest.mark.slow
def test_a_library_trains_as_the_step_does(flavor, tmp_path):
    small = {"hidden_size": 32, "dropout": 0.1}
    pairs = [
        (memlab.workloads.get("plain-transformer", **small), StepConfig(batch_size=8, **fields))
        for fields in SETTINGS
    ]
    pairs.append((blocks(), StepConfig(batch_size=8, precision="bf16-mixed")))
    texts = [export_script(*pair, "cpu", flavor=flavor) for pair in pairs]
    for text, pair, losses in zip(texts, pairs, losses_of(texts, tmp_path, *FOLDERS), strict=True):
        near = 0.02 if "bf16" in str(pair[1]) else 1e-5
        assert losses == pytest.approx(losses_of_step(*pair), rel=near), text
        assert len(set(losses)) > 5


# peaks

TRANSFORMER = ("plain-transformer", {"hidden_size": 64, "dropout": 0.1})
WORKLOADS = [
    ("plain-mlp", {}, {}),
    ("lstm-text", {"hidden_size": 64, "sequence_length": 32}, {}),
    (*TRANSFORMER, {"checkpointing": "blocks"}),
    (*TRANSFORMER, {"memory_budget": 0.5}),
    (*TRANSFORMER, {"compile": True}),
]
CHOICES = {
    "precision": ["fp32", "bf16-mixed"],
    "accumulation_steps": [1, 2, 4],
    "optimizer": ["sgd", "adam", "adamw"],
    "max_grad_norm": [None, 1.0],
}


def drawn(number):
    """Return a workload and a config whose other fields are drawn by a seed."""
    name, options, fields = WORKLOADS[number]
    draw = random.Random(number)
    more = {field: draw.choice(values) for field, values in CHOICES.items()}
    return memlab.workloads.get(name, **options), StepConfig(batch_size=16, **fields, **more)


@functools.cache
def measured_peak(make, *arguments):
    """Return the peak that memlab measures of what a function returns."""
    result = memlab.measure(*make(*arguments), "cpu", repeats=1, warmup=0)
    assert result.outcome == "ok", result.message
    return result.peak_allocated_bytes


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(WORKLOADS)))
def test_a_library_peaks_where_the_step_does(flavor, number, tmp_path):
    text = export_script(*drawn(number), "cpu", flavor=flavor)
    peak = peak_of(text, tmp_path, *FOLDERS)
    assert peak == pytest.approx(measured_peak(drawn, number), rel=0.03), drawn(number)[1]


def bf16_outputs(is_cast):
    """Return a step whose loss keeps the outputs of the model, in bf16 or cast to fp32."""

    def build_model():
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2048))

    def make_batch(n):
        return torch.randn(n, 64)

    def loss_of_outputs(model, batch):
        return nn.functional.gelu(model(batch)).mean()

    def loss_of_copies(model, batch):
        return nn.functional.gelu(model(batch).float()).mean()

    workload = memlab.Workload(
        name="bf16 outputs",
        build_model=build_model,
        make_batch=make_batch,
        compute_loss=loss_of_copies if is_cast else loss_of_outputs,
    )
    return workload, StepConfig(batch_size=64, precision="bf16-mixed")


@pytest.mark.slow
def test_accelerate_casts_the_outputs_of_a_model_and_nothing_else_adds_to_the_peak(
    flavor, tmp_path
):
    peak = peak_of(export_script(*bf16_outputs(False), "cpu", flavor=flavor), tmp_path, *FOLDERS)
    is_cast = "accelerate" in NEEDS[flavor]
    assert peak == pytest.approx(measured_peak(bf16_outputs, is_cast), rel=0.001)
    assert measured_peak(bf16_outputs, True) > 1.03 * measured_peak(bf16_outputs, False)


def checkpointed_blocks():
    """Return a small step with four blocks."""
    return blocks(), StepConfig(batch_size=64, checkpointing="blocks", precision="bf16-mixed")


@pytest.mark.slow
def test_each_checkpoint_of_a_file_keeps_the_state_of_the_random_generator(flavor, tmp_path):
    peak = peak_of(export_script(*checkpointed_blocks(), "cpu", flavor=flavor), tmp_path, *FOLDERS)
    state_bytes = torch.get_rng_state().nbytes
    more = peak - measured_peak(checkpointed_blocks)
    assert state_bytes <= more <= 4 * state_bytes + 100  # what is left of the four at the peak
