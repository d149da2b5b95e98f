"""Parts of a model that a person has compiled: what they take lies within what is stated."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import memlab
from memlab import Outcome, StepConfig, Workload
from memlab.trace import Phase
from tests.predictions import predicted

WIDTH, ROWS = 64, 512
COMPILE = {"backend": "aot_eager_decomp_partition"}


def act(x):
    return x * torch.sigmoid(1.702 * x) + torch.tanh(x)


class Blocks(nn.Module):
    def __init__(self, between=act):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(3))
        self.between = between

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(self.between(up(x)))
        return x


def compiled_module():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.compile(Blocks(), **COMPILE))


def compiled_in_place():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Blocks())
    model[1].compile(**COMPILE)
    return model


def compiled_function():
    return Blocks(torch.compile(act, fullgraph=True, **COMPILE))


def workload(build_model):
    return Workload(
        name="compiled",
        build_model=build_model,
        make_batch=lambda n: (torch.randn(n, ROWS, WIDTH), torch.randn(n, ROWS, WIDTH)),
        compute_loss=lambda model, batch: mse_loss(model(batch[0]), batch[1]),
    )


@pytest.mark.parametrize(
    ("build_model", "name", "accumulation_steps"),
    [
        (compiled_function, "act", 3),
        (compiled_module, "Blocks", 1),
        (compiled_in_place, "Blocks", 1),
    ],
)
def test_a_compiled_part_is_named_and_its_memory_lies_within(build_model, name, accumulation_steps):
    config = StepConfig(batch_size=12, accumulation_steps=accumulation_steps)
    found = predicted(config, workload=workload(build_model))
    assert found.outcome == Outcome.OK, found.message
    assert any(f"other code of {name}" in note for note in found.notes)
    assert found.step_seconds is None

    measured = memlab.measure(
        workload(build_model), config, "cpu", repeats=1, warmup=0, isolate=False
    )
    assert measured.outcome == Outcome.OK, measured.message
    error = measured.peak_allocated_bytes / found.peak_allocated_bytes - 1
    assert 0.05 < abs(error) < found.uncertainty["peak_allocated_bytes"] < 1


def test_a_part_for_the_eager_backend_is_predicted_as_it_runs():
    config = StepConfig(batch_size=4)
    plain = predicted(config, workload=workload(Blocks))
    eager = predicted(
        config, workload=workload(lambda: Blocks(torch.compile(act, backend="eager")))
    )
    assert eager.uncertainty["peak_allocated_bytes"] == plain.uncertainty["peak_allocated_bytes"]
    assert eager.peak_allocated_bytes == plain.peak_allocated_bytes


def test_a_compiled_function_with_a_small_part_leaves_the_rest_certain():

    class Last(Blocks):
        def forward(self, x):
            return torch.compile(act, **COMPILE)(super().forward(x))

    found = predicted(StepConfig(batch_size=4), workload=workload(Last))
    (note,) = [note for note in found.notes if "other code of act" in note]
    assert "from" in note
    assert 0.01 < found.uncertainty["peak_allocated_bytes"] < 0.5
    assert found.peak_place.phase is Phase.BACKWARD
