"""Steps whose memory is decided by random numbers, predicted to the byte on a CPU."""

import pytest
import torch
from torch import nn

from memlab import StepConfig, Workload, measure
from memlab.devices.cards import resolve
from memlab.prediction.predict import predict_in_process
from memlab.tracing.unknown import Draws


def predicted(given, config, seed=0):
    """Return a prediction made in this process."""
    return predict_in_process(
        given, config, resolve("cpu"), seed=seed, memory_limit=None, report=lambda progress: None
    ).result


class Drops(nn.Module):
    """Layers with dropout, each skipped by chance, and at most some rows kept by a random mask."""

    def __init__(self, skips, width=32):
        super().__init__()
        self.skips = skips
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.GELU()) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            if not self.skips(x):
                x = layer(x)
        return x


def by_number(x):
    return torch.rand([]) < 0.5


def by_number_in_place(x):
    return torch.empty(1).uniform_().item() < 0.5


def by_whole_number(x):
    return int(torch.randint(0, 2, (1,))) == 1


def by_normal_number(x):
    return torch.randn(3).sum() > 0


def workload(model):
    return Workload(
        name="by chance",
        build_model=model,
        make_batch=lambda n: torch.ones(n, 32),
        compute_loss=lambda model, batch: model(batch).square().mean(),
    )


class Masked(nn.Module):
    """Keeps the rows that a random mask selects."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 64)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = self.drop(self.first(x))
        return self.last(x[torch.rand(x.shape[0]) < 0.4])


@pytest.mark.matrix
@pytest.mark.parametrize(
    "model",
    [
        lambda: Drops(by_number),
        lambda: Drops(by_number_in_place),
        lambda: Drops(by_whole_number),
        lambda: Drops(by_normal_number),
        Masked,
    ],
    ids=["number", "number in place", "whole number", "normal number", "mask"],
)
@pytest.mark.parametrize(("accumulation_steps", "seed"), [(1, 0), (3, 1)])
def test_chance_is_foreseen(model, accumulation_steps, seed):
    config = StepConfig(batch_size=24, accumulation_steps=accumulation_steps)
    measured = measure(workload(model), config, "cpu", repeats=1, seed=seed, isolate=False)
    found = predicted(workload(model), config, seed)
    assert found.peak_allocated_bytes == measured.peak_allocated_bytes
    assert found.uncertainty["peak_allocated_bytes"] < 0.1
    assert not [note for note in found.notes if "assumed" in note]


def test_other_seeds_take_other_ways():
    config = StepConfig(batch_size=24)
    given = workload(lambda: Drops(by_number))
    peaks = {predicted(given, config, seed).peak_allocated_bytes for seed in range(3)}
    assert len(peaks) > 1


def test_what_rejects_numbers_is_not_followed():
    def skips(x):
        torch.poisson(torch.ones(3))
        return torch.rand([]) < 0.5

    found = predicted(workload(lambda: Drops(skips)), StepConfig(batch_size=4))
    assert any("assumed False" in note for note in found.notes)
    assert found.uncertainty["peak_allocated_bytes"] > 1


def test_models_without_branches_draw_nothing(monkeypatch):
    followed = []
    monkeypatch.setattr(Draws, "turn", lambda self: followed.append(self._may_decide) or False)
    given = workload(lambda: Drops(lambda x: False))
    assert predicted(given, StepConfig(batch_size=4)).outcome == "ok"
    assert followed == [False]
