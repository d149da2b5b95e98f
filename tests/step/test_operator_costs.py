import functools

import pytest

from memlab import StepConfig, workloads
from memlab.devices.cards import Target, resolve
from memlab.devices.operators import KnownCosts, OperatorCost
from memlab.prediction.plans import plan_for
from memlab.runtime import isolation

RUN = functools.partial(isolation.run, timeout_seconds=120)
GPT = workloads.get("gpt-small", num_layers=2, hidden_size=32, num_heads=2, sequence_length=16)


def arguments(config, target, plan=None):
    return {"workload": GPT, "config": config, "target": target, "seed": 0, "plan": plan}


def predicted(config, target, plan=None):
    return RUN("predict", arguments(config, target, plan) | {"memory_limit": None}).result


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, {"accumulation_steps": 3, "precision": "bf16-mixed"}, {"memory_budget": 0.3}]
)
def test_a_prediction_by_recorded_costs_is_the_one_that_was_calibrated(fields):
    config = StepConfig(batch_size=7, **fields)
    plan = plan_for(GPT, config, resolve("cpu"), seed=0, run=RUN)
    here = predicted(config, resolve("cpu"), plan)
    found = RUN("operators", arguments(config, resolve("cpu"), plan))
    assert found.outcome == "ok"
    there = predicted(config, Target(kind="cpu", card=None, name="x", costs=found.costs), plan)
    assert there.peak_allocated_bytes == here.peak_allocated_bytes
    assert there.step_seconds == pytest.approx(here.step_seconds, rel=1e-9)
    assert there.device == "x"


@pytest.mark.slow
def test_recorded_costs_are_used_and_nothing_is_run_for_what_is_missing():
    config, cpu = StepConfig(batch_size=4), resolve("cpu")
    known = RUN("operators", arguments(config, cpu)).costs
    none = KnownCosts(operators={}, overheads=known.overheads)
    result = predicted(config, Target(kind="cpu", card=None, name="x", costs=none))
    assert "is not in the record" in " ".join(result.notes)
    assert result.uncertainty["peak_allocated_bytes"] > 0.02
    assert result.step_seconds is None
    assert "100 % of the work of the operators has no known time" in " ".join(result.notes)


@pytest.mark.slow
def test_operators_of_a_card_are_told_with_their_share_of_the_time():
    config, card = StepConfig(batch_size=4), resolve("t4")
    found = RUN("operators", arguments(config, card))
    assert found.costs is None
    assert "aten.addmm.default" in {signature[0] for signature in found.seconds}
    assert min(found.seconds.values()) >= 0.0 < sum(found.seconds.values())
    cost = OperatorCost(output_bytes=(), peak_bytes=0, seconds=10.0)
    products = [s for s in found.seconds if s[0] == "aten.addmm.default"]
    slow = KnownCosts(operators=dict.fromkeys(products, cost), overheads={})
    target = Target(kind="cuda", card=card.card, name="t4, recorded", costs=slow)
    assert predicted(config, target).step_seconds > 10.0
    assert predicted(config, card).step_seconds < 1.0


def test_what_cannot_be_predicted_says_why():
    found = RUN("operators", arguments(StepConfig(precision="fp8-mixed"), resolve("t4")))
    assert found.outcome == "unsupported"
    assert "fp8" in found.message
