"""Real predictions written as snapshots: each must compare equal with itself, to the byte."""

import dataclasses

import pytest
import torch
from torch import nn

import memlab
from memlab import StepConfig, Workload
from memlab._util.units import MIB
from memlab.integrations.snapshot_comparison import Difference
from memlab.trace import Phase
from tests.comparison_parts import Event, events_of, repeated, snapshot_of
from tests.snapshot_parts import dump


def convolutions():
    """Return a workload of three convolutions with normalization."""

    def build():
        blocks = [layer for k in range(3) for layer in
                  (nn.Conv2d(3 if not k else 16 * k, 16 * (k + 1), 3, padding=1),
                   nn.BatchNorm2d(16 * (k + 1)), nn.ReLU())]  # fmt: skip
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))

    return Workload(
        name="convolutions",
        build_model=build,
        make_batch=lambda n: (torch.zeros(n, 3, 32, 32), torch.zeros(n, dtype=torch.long)),
        compute_loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )


@pytest.fixture(scope="module")
def workload():
    return convolutions()


@pytest.fixture
def as_snapshot(tmp_path):
    """Return a function that opens a story as a snapshot."""
    return lambda events, **options: memlab.open_snapshot(
        dump(tmp_path / "snapshot.pickle", snapshot_of(events, **options))
    )


def story_of(workload, config):
    from memlab.api import predict_with_size_model

    found = predict_with_size_model(workload, config, "rtx-3090").size_model
    assert found is not None
    return events_of(found.program.trace(found.own, config.micro_batch_sizes), last_step=1)


CONFIGS = {
    "plain": StepConfig(batch_size=8),
    "momentum, half precision": StepConfig(batch_size=8, optimizer="sgd-momentum",
                                           precision="fp16-mixed", channels_last=True),
    "micro-batches": StepConfig(batch_size=8, accumulation_steps=4),
    "nothing in the optimizer": StepConfig(batch_size=8, optimizer="sgd"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_prediction_written_as_a_snapshot_compares_equal(workload, as_snapshot, name):
    config = CONFIGS[name]
    events = repeated(story_of(workload, config), 2)
    for stacks in (True, False):
        found = as_snapshot(events, stacks=stacks).compare(workload, config, "rtx-3090")
        assert found.differences == (), (name, stacks, found)
        assert found.measured_peak_bytes == found.predicted_peak_bytes > MIB
        assert "to the byte" in found.summary


def test_workspace_that_was_not_predicted_is_named_beside_its_operator(workload, as_snapshot):
    config = CONFIGS["plain"]
    events = story_of(workload, config)
    at = max(i for i, e in enumerate(events) if e.operator == "aten::convolution_backward")
    more = Event("more", 64 * MIB, 1, Phase.BACKWARD)
    events[at + 1 : at + 1] = [more, dataclasses.replace(more, nbytes=None)]
    found = as_snapshot(events).compare(workload, config, "rtx-3090")
    (row,) = found.differences
    assert (row.difference, row.measured_bytes) == (Difference.NOT_PREDICTED, 64 * MIB)
    assert "all of it in an allocation beside aten::convolution_backward of 0" in found.summary


def test_another_batch_size_is_seen_in_every_operator_that_depends_on_it(workload, as_snapshot):
    events = story_of(workload, CONFIGS["plain"])
    other = StepConfig(batch_size=4)
    found = as_snapshot(events).compare(workload, other, "rtx-3090")
    larger = {row.operator for row in found.differences}
    assert "aten::convolution" in larger or "aten::cudnn_convolution" in larger, larger
    assert found.measured_peak_bytes > found.predicted_peak_bytes


def test_a_step_that_cannot_be_predicted_is_a_sentence(workload, as_snapshot):
    broken = dataclasses.replace(workload, compute_loss=lambda model, batch: model(batch[1]).sum())
    opened = as_snapshot(story_of(workload, CONFIGS["plain"]))
    with pytest.raises(memlab.MemlabError, match="cannot be predicted, so there is nothing to"):
        opened.compare(broken, CONFIGS["plain"], "rtx-3090")
