"""A panel tells of a budget from what it knows of another, and asks for each plan once."""

import dataclasses
from contextlib import closing

import pytest

import memlab
from memlab import Outcome, StepConfig, api
from memlab._panel import questions as forecasts
from memlab._panel.questions import Forecasts, How, Question
from memlab.prediction import plans
from memlab.prediction.interpolation import estimate_budget, plan_at
from memlab.prediction.predict import Prediction
from tests.forecast_parts import answered
from tests.models import blocks
from tests.panel_parts import make_result, until

DEVICE = "t4"


def question(budget, batch_size=8, steps=1):
    config = StepConfig(batch_size=batch_size, accumulation_steps=steps, memory_budget=budget)
    return Question("blocks", config, DEVICE)


@pytest.fixture(scope="module")
def workload():
    return blocks(norm=True)


@pytest.fixture
def made(workload, monkeypatch):
    """Forecasts of a model with blocks, and the budgets that the worker predicts."""
    asked = []

    def predict(workload, config, device, **others):
        asked.append(config.memory_budget)
        return api.predict_with_size_model(workload, config, device, **others)

    monkeypatch.setattr(forecasts, "predict_with_size_model", predict)
    found = Forecasts({"blocks": workload}, lambda estimate: None, lambda text: None)
    yield found, asked
    found.close()


def test_a_new_budget_is_estimated_at_once_of_any_batch_size_and_says_so(made):
    found, asked = made
    answered(found, question(1.0), question(0.7))
    asked_for = question(0.2), question(0.2, batch_size=32)
    estimates = [found.look(here) for here in asked_for]
    for here, estimate, error in zip(asked_for, estimates, (0.01, 0.03), strict=True):
        assert (estimate.exact, estimate.how) == (False, How.ESTIMATED)
        assert "estimated peak" in estimate.result.message
        answered(found, here)
        exact = found.look(here)
        assert exact.exact
        assert estimate.result.peak_allocated_bytes == pytest.approx(
            exact.result.peak_allocated_bytes, rel=error
        )
    assert asked == [1.0, 0.7, 0.2, 0.2]


def test_a_budget_with_the_same_plan_needs_no_worker(made, workload):
    found, asked = made
    answered(found, question(0.5))
    frontier = plans.known_frontier(workload, question(0.5).config, DEVICE, seed=0)
    share = plan_at(frontier, question(0.5).config).share
    same = question((share + 0.5) / 2)
    assert not found.ask(same), "nothing will arrive"
    estimate = found.look(same)
    assert estimate.exact
    assert estimate.result.config == same.config
    assert found.known(same).config == same.config
    assert asked == [0.5]


@pytest.mark.slow
def test_a_run_takes_its_prediction_from_another_budget_with_the_same_plan(workload, nothing_ahead):
    with closing(memlab.panel(workload, device="cpu", config=question(0.5).config)) as panel:
        panel.run()
        until(lambda: panel._log.last.prediction is not None)
        frontier = plans.known_frontier(workload, panel.config, "cpu", seed=0)
        same = (plan_at(frontier, panel.config).share + 0.5) / 2
        panel._page.forecasts.hold(True)  # so that the worker answers nothing more
        config = dataclasses.replace(panel.config, memory_budget=same)
        panel._log.add(dataclasses.replace(panel.result, config=config))
        panel._page.refresh()
        until(lambda: panel._log.last.prediction is not None)
        assert panel._log.last.prediction.config == config


def test_what_ended_early_tells_of_no_other_budget(made, workload):
    found, _ = made
    answered(found, question(0.5))
    frontier = plans.known_frontier(workload, question(0.5).config, DEVICE, seed=0)
    near = question((plan_at(frontier, question(0.5).config).share + 0.5) / 2)
    late = dataclasses.replace(found.known(question(0.5)), outcome=Outcome.TIMED_OUT)
    found._answers.add(question(0.5), Prediction(result=late, size_model=None))
    assert found.look(near) is None
    answered(found, near)
    assert found.look(near).is_ok


def test_a_workload_whose_functions_cannot_be_hashed_is_predicted(workload, monkeypatch):
    class Batches:
        __hash__ = None

        def __call__(self, n):
            return workload.make_batch(n)

    own = dataclasses.replace(workload, make_batch=Batches())
    monkeypatch.setattr(forecasts, "predict_with_size_model", predicted_at_once)
    found = Forecasts({"blocks": own}, lambda estimate: None, lambda text: None)
    try:
        assert found.look(question(0.5)) is None
        answered(found, question(0.5))
        assert found.look(question(0.5)).exact
        assert found.look(question(0.3)) is None
    finally:
        found.close()


def predicted_at_once(workload, config, device, **_):
    result = make_result(config=config, device=device, workload_name="blocks")
    return Prediction(result=result, size_model=None)


def test_what_follows_from_a_doubted_answer_is_not_exact(made):
    found, _ = made
    three, here = question(1.0, 12, steps=3), question(1.0, 16, steps=4)
    answered(found, three)
    assert found.look(here).exact, "the fourth micro-batch is like the third"
    result = found.known(three)
    found.doubt(
        dataclasses.replace(result, source="measured", step_seconds_all=(99.0,), uncertainty=None)
    )
    assert not found.look(here).exact
    assert found.ask(here)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize("name", ["gpt-small", "vit-digits", "resnet-digits", "lstm-text"])
def test_the_uncertainty_of_an_estimate_holds(name, device):
    workload = memlab.workloads.get(name)
    plain = api.predict(workload, StepConfig(batch_size=8), device)
    for budget in (0.75, 0.4, 0.1):
        config = StepConfig(batch_size=8, memory_budget=budget)
        exact = api.predict(workload, config, device)
        if exact.outcome is Outcome.UNSUPPORTED:
            continue
        frontier = plans.known_frontier(workload, config, device, seed=0)
        estimate = estimate_budget(plain, config, frontier, config)
        for field, width in estimate.uncertainty.items():
            if (device, field) == ("cpu", "step_seconds"):
                continue  # two readings of a busy machine differ by more than they say
            error = getattr(estimate, field) / getattr(exact, field) - 1
            assert abs(error) <= width, (budget, field, error)
