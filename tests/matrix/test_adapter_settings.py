"""The benchmark of adapters: its settings on a CPU, and the differences that it shows."""

import importlib.util

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks import adapter_differences, adapter_settings
from benchmarks.adapter_differences import setting
from memlab import StepConfig
from tests.models import made_of

needs_extra = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("peft", "bitsandbytes")),
    reason="needs memlab[finetune]",
)
TINY_LAYERS = {(128, 128): 2, (128, 64): 2, (128, 344): 2, (344, 128): 1}
"""How many linear layers of a block of llama-tiny have these inputs and outputs."""


class Drifting(nn.Module):
    """A frozen layer, which each forward changes if asked to, and a trained one."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        self.changes = changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes:
            self.base.weight.mul_(1.01)
        return self.adapter(self.base(x))


@pytest.mark.parametrize("changes", [False, True])
def test_a_base_that_changes_is_noticed(changes):
    workload = made_of(
        lambda: Drifting(changes),
        lambda n: torch.ones(n, 8),
        lambda model, x: functional.mse_loss(model(x), x),
    )
    error, is_untouched = adapter_settings.against_pytorch(workload, StepConfig(batch_size=2))
    assert error == 0
    assert is_untouched is not changes


@needs_extra
def test_there_are_twenty_settings_of_different_names():
    names = [name for name, _, _ in adapter_settings.cases()]
    assert len(set(names)) == len(names) == 20


@needs_extra
@pytest.mark.slow
def test_an_adapter_of_a_persons_own_is_predicted_and_trained_as_by_pytorch():
    (case,) = (case for case in adapter_settings.cases() if case[0] == "LoHaConfig")
    line = adapter_settings.line_of(*case)
    assert abs(line["error %"]) <= adapter_settings.GOAL_MEDIAN
    assert line["gradients"] <= adapter_settings.GOAL_GRADIENTS
    assert line["base untouched"]


@needs_extra
@pytest.mark.slow
def test_a_higher_rank_takes_its_weights():
    low, high = (
        adapter_differences.predicted("llama-tiny", 48, setting(targets="all-linear", rank=rank))
        for rank in (16, 256)
    )
    columns = sum(count * sum(sizes) for sizes, count in TINY_LAYERS.items())
    added = 4 * 4 * (256 - 16) * columns  # fp32, in four blocks
    kinds, more = low.peak_by_category, high.peak_by_category
    assert more["parameters"] - kinds["parameters"] == added
    assert more["optimizer_state"] - kinds["optimizer_state"] == 2 * added


@needs_extra
@pytest.mark.slow
def test_a_line_has_the_signed_difference_and_its_largest_part():
    plain, checkpointed = setting(), setting(checkpointing="blocks")
    line = adapter_differences.line_of("llama-tiny", 512, "checkpointing", plain, checkpointed)
    assert line["difference GiB"] == line["after GiB"] - line["before GiB"]
    assert line["difference GiB"] < 0
    assert line["most of it"].startswith("activations -")
