"""Another number of micro-batches, put together from pieces, is nearly what it would be."""

import dataclasses
import itertools

import numpy as np
import pytest

from memlab import StepConfig
from memlab.devices.cards import resolve
from memlab.prediction.interpolation import can_regroup, estimate_accumulation, with_micro_batches
from memlab.prediction.predict import predict_in_process
from memlab.trace import CATEGORIES, PHASES, Phase, Timeline
from tests.models import blocks

SIZE = 6
WITHIN = 0.03  # of the peak


def predicted(count, device="cpu"):
    return predict_in_process(
        blocks(norm=True),
        StepConfig(batch_size=SIZE * count, accumulation_steps=count),
        resolve(device),
        seed=0,
        memory_limit=None,
        report=lambda progress: None,
    )


@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_any_number_is_estimated_from_any_other(device):
    found = {count: predicted(count, device) for count in (1, 2, 3, 5)}
    for recorded in (1, 2, 3):
        for count, exact in found.items():
            base, asked = found[recorded], exact.result
            assert can_regroup(base.size_model, asked.config)
            estimate = estimate_accumulation(base, asked.config)
            assert estimate.config == asked.config
            assert estimate.peak_allocated_bytes == pytest.approx(
                asked.peak_allocated_bytes, rel=WITHIN
            )
            if recorded > 1 and count > 1:
                ours, theirs = estimate.timeline, asked.timeline
                assert np.array_equal(ours.total_bytes, theirs.total_bytes)
                assert np.array_equal(ours.micro_batch, theirs.micro_batch)
                if device == "t4":  # on a CPU two readings of one operator may differ
                    assert estimate.step_seconds == pytest.approx(asked.step_seconds, rel=0.02)
            widths = estimate.uncertainty, base.result.uncertainty
            assert widths[0]["step_seconds"] > widths[1]["step_seconds"]


def test_what_a_technique_refuses_is_not_estimated():
    base = predicted(1)
    config = StepConfig(batch_size=12, accumulation_steps=2)
    assert can_regroup(base.size_model, config)
    assert not can_regroup(base.size_model, dataclasses.replace(config, optimizer_in_backward=True))
    assert not can_regroup(base.size_model, StepConfig(batch_size=2, accumulation_steps=2))


def test_gradients_of_a_later_micro_batch_are_added_to_those_that_are_there():
    """By hand: 1 MiB of weights, of which each half has its gradient computed by one operator."""
    rows = [  # parameters, gradients, activations; phase, operators so far
        (4, 0, 0, Phase.FORWARD, 0),
        (4, 0, 3, Phase.FORWARD, 1),
        (4, 2, 3, Phase.BACKWARD, 2),
        (4, 2, 1, Phase.BACKWARD, 2),
        (4, 4, 0, Phase.BACKWARD, 3),
        (4, 0, 0, Phase.OPTIMIZER, 4),
    ]
    held = np.zeros((len(rows), len(CATEGORIES)), np.int64)
    held[:, [CATEGORIES.index(name) for name in ("parameters", "gradients", "activations")]] = [
        row[:3] for row in rows
    ]
    one = Timeline(
        bytes_by_category=held,
        phase=np.array([PHASES.index(row[3]) for row in rows], np.int8),
        micro_batch=np.zeros(len(rows), np.int32),
        operator=np.array([row[4] for row in rows], np.int32),
    )
    two = with_micro_batches(one, 2)
    assert two.total_bytes.tolist() == [4, 7, 9, 7, 8, 8, 11, 13, 11, 10, 4]
    assert two.micro_batch.tolist() == [0] * 5 + [1] * 6
    assert (np.diff(two.operator) >= 0).all()
    assert with_micro_batches(two, 1).total_bytes.tolist() == one.total_bytes.tolist()
    for recorded, count in itertools.product((one, two), (1, 2, 3, 9)):
        few, many = (with_micro_batches(recorded, count, most_drawn=most) for most in (3, None))
        assert int(few.micro_batch.max()) == min(count, 3) - 1
        assert few.total_bytes.max() == many.total_bytes.max()
        assert few.peak_by_category == many.peak_by_category
