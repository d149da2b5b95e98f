"""A program scaled to another batch is what a recording of that batch would be."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab import StepConfig
from memlab.memory.lifetimes import step_memory
from memlab.prediction.batch_size_model import size_model_of
from memlab.tracing.assembly import sizes_of
from memlab.tracing.trace_step import trace_step
from memlab.tracing.tracker import Tracker
from tests.models import blocks

CPU = torch.device("cpu")


def size_model(config: StepConfig, workload=None):
    program = trace_step(workload or blocks(norm=True), config, CPU, 0, Tracker("cpu"))
    own = sizes_of(program.recording, program.layout, [None] * len(program.recording.operators))
    seconds = np.arange(len(program.recording.intervals), dtype=float)
    return size_model_of(program, own, seconds, settings=None)


BASE = {
    count: size_model(StepConfig(batch_size=6 * count, accumulation_steps=count))
    for count in (1, 2, 3)
}


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(batch=st.integers(2, 40), count=st.integers(1, 7))
def test_any_batch_is_as_if_recorded(batch, count):
    count = min(count, batch // 2)
    config = StepConfig(batch_size=batch, accumulation_steps=count)
    sizes = config.micro_batch_sizes
    base, exact = BASE[min(count, 3)], size_model(config)
    assert base.covers(sizes)
    ours, theirs = base.timeline(sizes), exact.timeline(sizes)
    assert ours.total_bytes.max() == theirs.total_bytes.max()
    assert np.array_equal(ours.bytes_by_category, theirs.bytes_by_category)
    assert np.array_equal(ours.operator, theirs.operator)
    assert np.array_equal(ours.micro_batch, theirs.micro_batch)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_the_timeline_is_that_of_the_trace(count):
    """Two ways to the same numbers: block by block, and by sums."""
    base = BASE[min(count, 3)]
    sizes = [5] * count
    trace, reserved = base.trace(sizes)
    assert (trace.nbytes.sum(), reserved) == (0, None)  # every block is freed
    memory = step_memory(trace, 1)
    assert np.array_equal(memory.timeline.total_bytes, base.timeline(sizes).total_bytes)
    assert np.array_equal(memory.timeline.phase, base.timeline(sizes).phase)
    assert sum(h.nbytes for h in memory.holdings()) == memory.peak_bytes


def test_single_samples_beside_larger_ones_are_recorded_as_they_are():
    config = StepConfig(batch_size=3, accumulation_steps=2)
    found = size_model(config, blocks())
    assert found.program.num_recorded == 2
    assert found.covers(config.micro_batch_sizes)
    assert not found.covers([4, 4])
    assert not BASE[1].covers([1])  # a batch of one needs a recording of one alone
    one = size_model(StepConfig(batch_size=1), blocks())
    assert one.covers([1])
    assert not one.covers([2])


def test_time_is_that_of_the_intervals_of_one_step():
    base = BASE[3]
    three, five = base.step_seconds([6] * 3), base.step_seconds([6] * 5)
    middle = [
        base.seconds[i]
        for i, interval in enumerate(base.program.recording.intervals)
        if interval.step == 1 and interval.micro_batch == 1
    ]
    assert five == pytest.approx(three + 2 * sum(middle))


class Differs(torch.nn.Module):
    """Runs another operator from eight samples on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 3)

    def forward(self, x):
        return self.layer(x.sin() if len(x) >= 8 else x)


def test_a_model_that_does_other_things_over_other_batches_is_recorded_alone():
    import dataclasses

    workload = dataclasses.replace(blocks(), build_model=Differs)
    found = size_model(StepConfig(batch_size=8), workload)
    assert found.covers([8])
    assert not found.covers([9])
