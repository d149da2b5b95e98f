"""Predictions made ahead: one after another while nothing is asked for, and then nothing more."""

import dataclasses
import threading
import time

import pytest

from memlab import Outcome, StepConfig
from memlab._panel import questions
from memlab._panel.questions import Forecasts, How
from memlab.prediction.predict import Prediction
from memlab.running import Progress
from memlab.runtime import isolation
from memlab.runtime.accumulation import AccumulationEffect
from tests.forecast_parts import answered, of_estimates, predicted, question, sizes, worker
from tests.panel_parts import PATIENCE_SECONDS, make_workload, opened, rested, until


@pytest.fixture
def made(monkeypatch):
    """Forecasts of the tiny workload, and what arrived."""
    monkeypatch.setattr(questions, "SETTLE_SECONDS", 0.01)
    arrived = []
    found = Forecasts({"tiny": make_workload()}, arrived.append, lambda text: None)
    yield found, arrived
    found.close()


def test_neighbours_are_predicted_in_order_once_nothing_is_asked_for_and_then_it_is_quiet(
    made, monkeypatch
):
    found, arrived = made
    calls = worker(monkeypatch, lambda config, cancel: predicted(config=config))
    answered(found, 8)
    ahead = [question(size) for size in (4, 8, 16)]
    found.ahead(ahead)
    assert found.wait(PATIENCE_SECONDS)
    assert sizes(calls) == [8, 4, 16]
    assert of_estimates(arrived) == [8, 4, 16]
    assert found.look(question(16)).exact

    found.ahead(ahead)
    assert found.wait(PATIENCE_SECONDS)
    assert len(calls) == 3, "all of them are known"


def test_what_is_refused_is_not_asked_for_again_and_again(made, monkeypatch):
    found, _ = made
    calls = worker(
        monkeypatch, lambda config, cancel: predicted(config=config, outcome=Outcome.UNSUPPORTED)
    )
    for _ in range(3):  # as each answer looks up what is on screen
        found.ahead([], first=[question(config=StepConfig(memory_budget=0.5))])
        assert found.wait(PATIENCE_SECONDS)
    assert len(calls) == 1


def test_a_question_comes_before_neighbours_which_are_dropped(made, monkeypatch):
    found, _ = made
    go = threading.Event()
    go.set()

    def slow(config, cancel):
        go.wait(PATIENCE_SECONDS)
        return predicted(config=config)

    calls = worker(monkeypatch, slow)
    answered(found, 8)
    go.clear()
    found.ahead([question(size) for size in (4, 16)])
    until(lambda: sizes(calls) == [8, 4])
    assert found.ask(question(32))
    go.set()
    assert found.wait(PATIENCE_SECONDS)
    assert sizes(calls) == [8, 4, 32], "16 is no neighbour of what is on screen now"


def test_a_neighbour_that_takes_long_is_stopped_for_a_question(made, monkeypatch):
    found, arrived = made
    monkeypatch.setattr(questions, "PATIENCE_SECONDS", 0.05)

    def endless(config, cancel):
        while config.batch_size == 4 and not cancel.is_set():
            time.sleep(0.01)
        stopped = Outcome.CANCELLED if cancel.is_set() else Outcome.OK
        return predicted(config=config, outcome=stopped)

    calls = worker(monkeypatch, endless)
    answered(found, 8)
    found.ahead([question(4)])
    until(lambda: sizes(calls) == [8, 4])
    found.ask(question(2))
    assert found.wait(PATIENCE_SECONDS)
    assert of_estimates(arrived) == [8, 2]


def test_what_tells_nothing_of_the_question_is_left_at_once(made, monkeypatch):
    found, arrived = made

    def endless(config, cancel):
        until(lambda: config.precision == "bf16" or cancel.is_set())
        stopped = Outcome.CANCELLED if cancel.is_set() else Outcome.OK
        return predicted(config=config, outcome=stopped)

    worker(monkeypatch, endless)
    found.ask(question(8))
    until(lambda: found._asked is not None)
    half = dataclasses.replace(question(8).config, precision="bf16")
    found.ask(dataclasses.replace(question(8), config=half))
    assert found.wait(PATIENCE_SECONDS)
    assert [one.question.config.precision for one in arrived] == ["bf16"]


def test_a_neighbour_is_left_for_whoever_waits_for_the_worker(made, monkeypatch):
    found, _ = made

    def endless(config, cancel):
        until(lambda: config.batch_size == 8 or cancel.is_set())
        stopped = Outcome.CANCELLED if cancel.is_set() else Outcome.OK
        return predicted(config=config, outcome=stopped)

    calls = worker(monkeypatch, endless)
    answered(found, 8)
    found.ahead([question(4)])
    until(lambda: sizes(calls) == [8, 4])
    monkeypatch.setattr(isolation.predicting, "num_waiting", 1)
    assert found.wait(PATIENCE_SECONDS)


def test_a_question_that_is_being_predicted_ahead_is_not_stopped(made, monkeypatch):
    found, _ = made
    monkeypatch.setattr(questions, "PATIENCE_SECONDS", 0.0)
    go, stopped = threading.Event(), []

    def slow(config, cancel):
        if config.batch_size == 4:
            go.wait(PATIENCE_SECONDS)
        stopped.append(cancel.is_set())
        return predicted(config=config)

    calls = worker(monkeypatch, slow)
    answered(found, 8)
    found.ahead([question(4)])
    until(lambda: sizes(calls) == [8, 4])
    assert found.ask(question(4))
    go.set()
    assert found.wait(PATIENCE_SECONDS)
    assert sizes(calls) == [8, 4]
    assert stopped == [False, False]


def test_none_is_predicted_ahead_while_a_measurement_runs_or_once_closed(made, monkeypatch):
    found, _ = made
    calls = worker(monkeypatch, lambda config, cancel: predicted(config=config))
    answered(found, 8)
    found.hold(True)
    found.ahead([question(4)])
    time.sleep(0.1)
    assert sizes(calls) == [8]
    found.hold(False)
    assert found.wait(PATIENCE_SECONDS)
    assert sizes(calls) == [8, 4]

    found.close()
    found.ahead([question(16)])
    assert found.wait(PATIENCE_SECONDS)
    assert sizes(calls) == [8, 4]


def test_none_is_predicted_ahead_while_a_cell_measures(made, monkeypatch):
    found, _ = made
    calls = worker(monkeypatch, lambda config, cancel: predicted(config=config))
    answered(found, 8)
    with isolation.measuring.turn(lambda progress: None, threading.Event()):
        found.ahead([question(4)])
        time.sleep(0.1)
        assert sizes(calls) == [8]
        answered(found, 16)
        found.ahead([question(4)])
    assert found.wait(PATIENCE_SECONDS)
    assert sizes(calls) == [8, 16, 4]


def test_a_model_whose_predictions_take_long_has_none_made_ahead(made, monkeypatch):
    found, _ = made
    calls = worker(monkeypatch, lambda config, cancel: predicted(config=config))
    monkeypatch.setattr(questions, "LONGEST_AHEAD_SECONDS", 0.0)
    answered(found, 8)
    found.ahead([question(4)])
    assert found.wait(PATIENCE_SECONDS)
    assert sizes(calls) == [8]


def test_only_so_many_are_predicted_ahead_and_kept(made, monkeypatch):
    found, _ = made
    monkeypatch.setattr(questions, "MOST_KEPT", 20)
    calls = worker(monkeypatch, lambda config, cancel: predicted(config=config))
    answered(found, 8)
    found.ahead([question(size) for size in range(100, 200)])
    assert found.wait(PATIENCE_SECONDS)
    assert len(calls) == 1 + questions.MOST_AHEAD

    for size in range(20, 40):
        assert found.look(question(8)) is not None, "what is looked at is kept"
        answered(found, size)
    assert len(found._answers.kept) == 20
    assert found.look(question(100)) is None


def test_nothing_is_said_of_what_is_predicted_ahead(monkeypatch):
    said = []

    def stand_in(workload, config, device, *, on_progress, cancel):
        on_progress(Progress(text="recording", fraction=0.1))
        return Prediction(result=predicted(config=config), size_model=None)

    monkeypatch.setattr(questions, "predict_with_size_model", stand_in)
    found = Forecasts({"tiny": make_workload()}, lambda estimate: None, said.append)
    try:
        answered(found, 8)
        found.ahead([question(4)])
        assert found.wait(PATIENCE_SECONDS)
        assert said == ["recording"]
    finally:
        found.close()


@pytest.mark.slow
def test_a_panel_at_rest_has_predicted_its_neighbours_and_a_move_to_one_is_exact_at_once():
    with opened("h200", config=StepConfig(batch_size=8)) as panel:
        near = question(8, device="h200", steps=2)
        until(lambda: panel._page.forecasts.known(near) is not None)
        assert panel._page.forecasts.wait(PATIENCE_SECONDS)
        panel.set(accumulation_steps=2)
        estimate = panel._page.forecasts.look(near)
        assert (estimate.exact, estimate.how) == (True, How.PREDICTED)


def test_another_number_of_micro_batches_is_estimated_at_once_and_says_so():
    with opened("h200", config=StepConfig(batch_size=8)) as panel:
        forecasts_ = panel._page.forecasts
        until(lambda: forecasts_.known(question(8, device="h200")) is not None)
        forecasts_.hold(True)  # so that the worker answers nothing more
        panel.set(batch_size=64, accumulation_steps=8)
        rested(panel)
        assert panel.prediction.config == StepConfig(batch_size=64, accumulation_steps=8)
        assert panel._page._estimate.how is How.ESTIMATED
        assert "estimate for h200: " in panel._told.answer["costs"]
        assert "the exact prediction follows" in panel._told.answer["costs"]
        assert not panel._told.answer["exact"]
        forecasts_.hold(False)
        until(lambda: "predicted for h200" in panel._told.answer["costs"])


def test_a_panel_at_rest_has_looked_once_at_what_micro_batches_would_do(monkeypatch):
    asked = []

    def effect(workload, cancel):
        asked.append(workload.name)
        return AccumulationEffect(same="no", why="a sum")

    monkeypatch.setattr("memlab._panel.page.accumulation_effect", effect)
    with opened("h200", config=StepConfig(batch_size=8)) as panel:
        page = panel._page
        until(lambda: page._facts and page._effects)
        said = "gradient differs from that of the whole batch"
        until(lambda: panel._told.answer["divided"] == said)
        panel.set(batch_size=4)
        assert page.forecasts.wait(PATIENCE_SECONDS)
        rested(panel)
        assert page._find_effect.wait(PATIENCE_SECONDS)
        assert asked == ["tiny"]
