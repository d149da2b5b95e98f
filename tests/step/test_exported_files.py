"""A whole exported file, run where memlab cannot be imported, against the step of `build_step`."""

import random

import pytest
import torch

import memlab
from memlab import StepConfig
from memlab.integrations.export import export_script
from memlab.memory.meter import Meter, record
from tests.exported_parts import losses_of, losses_of_step, own_functions
from tests.models import blocks

SETTINGS = [
    {},
    {"accumulation_steps": 3},
    {"optimizer": "sgd", "max_grad_norm": 0.0123456789},
    {"optimizer": "sgd-momentum", "checkpointing": "blocks", "checkpoint_modules": "every 2"},
    {"checkpointing": "blocks", "checkpoint_policy": "keep-matmuls", "accumulation_steps": 2},
    {"optimizer_in_backward": True, "precision": "fp32"},
    {"loss_chunks": 2, "optimizer": "adam"},
    {"optimizer": "adafactor", "init_on_meta": True},
]


def assert_all_the_same(pairs, folder):
    pairs = [(workload, StepConfig(batch_size=8, **fields)) for workload, fields in pairs]
    found = losses_of([export_script(*pair, "cpu") for pair in pairs], folder)
    for (workload, config), losses in zip(pairs, found, strict=True):
        assert losses == losses_of_step(workload, config), (workload.name, str(config))
        assert len(set(losses)) > 5


@pytest.mark.slow
def test_a_file_has_the_losses_of_the_step_bit_by_bit(tmp_path):
    zoo = [
        ("plain-mlp", {"dropout": 0.1}),
        ("plain-transformer", {"hidden_size": 32, "dropout": 0.1}),
        ("lstm-text", {"hidden_size": 16, "sequence_length": 16}),
    ]
    draw = random.Random(0)
    pairs = []
    for fields in SETTINGS:
        name, options = draw.choice(zoo)
        if fields.get("checkpointing") or "loss_chunks" in fields:
            name, options = zoo[1]
        pairs.append((memlab.workloads.get(name, **options), fields))
    pairs.append((blocks(), {"memory_budget": 0.3}))
    pairs += [(own_functions(kind), {"accumulation_steps": 3}) for kind in ("terms", "rows")]
    pairs += [(own_functions(kind), {}) for kind in ("terms", "rows")]
    assert_all_the_same(pairs, tmp_path)


@pytest.mark.parametrize(
    "fields",
    [{}, {"accumulation_steps": 4}, {"checkpointing": "blocks", "optimizer": "sgd"}],
    ids=str,
)
def test_a_file_peaks_where_the_step_does(fields):
    workload = memlab.workloads.get("plain-transformer", hidden_size=64)
    config = StepConfig(batch_size=16, **fields)
    names = {"__name__": "exported"}
    exec(compile(export_script(workload, config, "cpu"), "exported.py", "exec"), names)
    names["NUM_STEPS"] = 3
    peaks = [
        record(run, Meter(), torch.device("cpu")).nbytes.cumsum().max()
        for run in (names["main"], lambda: losses_of_step(workload, config, 3))
    ]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


@pytest.mark.long
def test_a_file_with_models_of_transformers_and_monai_has_these_losses_too(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("monai")
    pytest.importorskip("sklearn")
    small = {
        "gpt-small": {"num_layers": 2, "hidden_size": 32, "sequence_length": 16, "dropout": 0.1},
        "resnet-digits": {"image_size": 32},
        "vit-digits": {"num_layers": 1},
        "densenet-digits": {},
        "vnet-digits": {"volume_size": (16, 16)},
    }
    pairs = [(memlab.workloads.get(name, **options), {}) for name, options in small.items()]
    assert_all_the_same(pairs, tmp_path)
