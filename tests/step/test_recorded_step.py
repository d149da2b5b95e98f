"""A step recorded with its kernels: all that begin with one report a failing model alike."""

import functools

import pytest
import torch
from torch import nn

from memlab import StepConfig, Workload, workloads
from memlab.devices.cards import Target, resolve
from memlab.devices.operators import KnownCosts, OperatorCost
from memlab.prediction.plans import plan_for
from memlab.running import Progress
from memlab.runtime import isolation

RUN = functools.partial(isolation.run, timeout_seconds=120)
ASKED = ["predict", "plan", "operators"]


class IsJagged(nn.Linear):
    def forward(self, x):
        rows = torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)
        return super().forward(rows.to_padded_tensor(0.0))


class HasNoMemory(nn.Linear):
    def forward(self, x):
        raise MemoryError("none left")


def failure(model, function, **more):
    """Return the outcome and the message of what a worker was asked for."""
    workload = Workload(
        name="fails",
        build_model=lambda: model(4, 4),
        make_batch=lambda n: torch.ones(n, 4),
        compute_loss=lambda model, batch: model(batch).mean(),
    )
    limit = {"memory_limit": None} if function == "predict" else {}
    asked = {"workload": workload, "config": StepConfig(), "target": resolve("cpu"), "seed": 0}
    found = RUN(function, asked | limit, **more)
    found = getattr(found, "result", found)
    return found.outcome, found.message.removeprefix("the memory budget cannot be planned: ")


@pytest.mark.parametrize("function", ASKED)
def test_an_error_that_only_a_fake_tensor_raises_gets_a_clear_message(function):
    outcome, message = failure(IsJagged, function)
    assert outcome == "unsupported"
    assert "the model makes a nested tensor of jagged layout" in message
    assert "pad the samples to one length" in message


@pytest.mark.parametrize("function", ASKED)
def test_running_out_of_memory_while_recording_says_nothing_of_the_step(function):
    outcome, message = failure(HasNoMemory, function)
    assert outcome == "unsupported"
    assert message.startswith("the prediction itself needs more memory than there is")


@pytest.mark.parametrize("function", ASKED)
def test_the_progress_names_what_is_recorded(function):
    said: list[Progress] = []
    failure(HasNoMemory, function, on_progress=said.append)
    assert said[-1].text.startswith("recording fails")


#


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
