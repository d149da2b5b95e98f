"""The prediction of one memory budget tells of all others, once the plans are known."""

import dataclasses

import numpy as np
import pytest

from memlab import StepConfig
from memlab.devices.cards import resolve
from memlab.prediction.interpolation import can_replan, estimate_budget, plan_at, renamed, with_peak
from memlab.prediction.planning import plan_in_process
from memlab.prediction.predict import predict_in_process
from memlab.trace import CATEGORIES, Category, Timeline
from tests.models import blocks

BUDGETS = (1.0, 0.7, 0.4, 0.0)
WITHIN = 0.01  # of the peak
OTHER_BATCH = 0.03
MODEL = blocks(norm=True)


def ignore(progress):
    pass


def plans(config, device):
    return plan_in_process(MODEL, config, resolve(device), seed=0, report=ignore).frontier


def predicted(config, device, frontier):
    plan = plan_at(frontier, config) if config.is_planned else None
    return predict_in_process(
        MODEL, config, resolve(device), seed=0, memory_limit=None, plan=plan, report=ignore
    ).result


def of_plan(result):
    """Return the notes on the plan; those on a busy machine differ from run to run."""
    return [note for note in result.notes if "recomputed" in note]


def configs(**changes):
    return [StepConfig(memory_budget=budget, **changes) for budget in BUDGETS]


@pytest.mark.parametrize("device", ["cpu", "t4"])
@pytest.mark.parametrize("steps", [1, 2])
def test_any_budget_is_told_from_any_other(device, steps):
    asked = configs(batch_size=8 * steps, accumulation_steps=steps)
    frontier = plans(asked[0], device)
    assert len(frontier.plans) > 2
    exact = {config: predicted(config, device, frontier) for config in asked}
    for before in asked:
        for config in asked:
            wanted = exact[config]
            found = estimate_budget(exact[before], config, frontier, asked[0])
            assert found.config == config
            assert of_plan(found) == of_plan(wanted)
            assert found.peak_allocated_bytes == found.timeline.total_bytes.max()
            assert found.peak_allocated_bytes == pytest.approx(
                wanted.peak_allocated_bytes, rel=WITHIN
            )
            for name, width in exact[before].uncertainty.items():
                if name in ("needed_bytes", "watts"):  # an estimate does not say these
                    assert getattr(found, name) is None
                    assert name not in found.uncertainty
                    continue
                assert found.uncertainty[name] > width
            if device == "t4":
                assert found.step_seconds == pytest.approx(wanted.step_seconds, rel=WITHIN)


@pytest.mark.slow
def test_the_plans_of_one_batch_size_tell_of_another():
    small, large = configs(batch_size=8), configs(batch_size=24)
    frontier, of_large = plans(small[0], "t4"), plans(large[0], "t4")
    plain = predicted(large[0], "t4", frontier)
    for config in large[1:]:
        found = estimate_budget(plain, config, frontier, small[0])
        wanted = predicted(config, "t4", of_large)
        assert found.peak_allocated_bytes == pytest.approx(
            wanted.peak_allocated_bytes, rel=OTHER_BATCH
        )


def test_two_budgets_with_one_plan_have_one_prediction():
    config = StepConfig(batch_size=8, memory_budget=0.4)
    frontier = plans(config, "cpu")
    share = plan_at(frontier, config).share
    same = dataclasses.replace(config, memory_budget=(share + 0.4) / 2)
    assert plan_at(frontier, same) is plan_at(frontier, config)
    found, wanted = (
        renamed(predicted(config, "cpu", frontier), same, frontier),
        predicted(same, "cpu", frontier),
    )
    assert found.config == same
    assert of_plan(found) == of_plan(wanted) != []
    assert found.peak_allocated_bytes == wanted.peak_allocated_bytes


def test_offloading_and_what_is_refused_are_not_estimated():
    config = StepConfig(batch_size=8, memory_budget=0.4)
    assert can_replan(config, "cuda")
    assert not can_replan(dataclasses.replace(config, offload_activations=True), "cuda")
    assert not can_replan(dataclasses.replace(config, checkpointing="blocks"), "cuda")


def timeline(*rows):
    held = np.zeros((len(rows), len(CATEGORIES)), np.int64)
    for row, (parameters, activations) in zip(held, rows, strict=True):
        row[CATEGORIES.index(Category.PARAMETERS)] = parameters
        row[CATEGORIES.index(Category.ACTIVATIONS)] = activations
    zeros = np.zeros(len(rows), np.int32)
    return Timeline(
        bytes_by_category=held, phase=zeros.astype(np.int8), micro_batch=zeros, operator=zeros
    )


@pytest.mark.parametrize(
    ("peak", "most", "expected"),
    [
        (140, 1.0, [110, 140, 100]),  # 40 of 100 activations at the peak
        (90, 1.0, [100, 100, 100]),  # the parameters alone are more
        (300, 1.5, [137, 250, 100]),  # as much as may be added
    ],
)
def test_activations_are_scaled_until_the_peak_is_reached(peak, most, expected):
    scaled = with_peak(timeline((100, 25), (100, 100), (100, 0)), peak, most)
    assert scaled.total_bytes == pytest.approx(expected, abs=1)
