"""The exported files for libraries, run with the real libraries, against the step of `build_step`.

MEMLAB_LIBRARIES may name folders of packages that are not in the environment.
"""

import os

import pytest

import memlab
from memlab import StepConfig
from memlab.exporting.export import export_script
from tests.exported_parts import losses_of, losses_of_step
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
