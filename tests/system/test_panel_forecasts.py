"""Live prediction in the panel: what is shown at once, what the worker is asked, and then."""

import threading
import time

import pytest

import memlab
from memlab import MemlabError, Outcome, StepConfig, api, workloads
from memlab._panel import job, questions
from memlab._panel.questions import Forecasts
from memlab.devices import cards
from memlab.devices.here import machine_memory_bytes
from memlab.prediction.interpolation import REGROUPED, estimate_accumulation, interpolated
from memlab.prediction.predict import Prediction
from memlab.running import Progress
from tests.forecast_parts import answered, of_estimates, predicted, question, sizes, worker
from tests.panel_parts import (
    PATIENCE_SECONDS,
    badge,
    fields,
    line,
    make_result,
    make_workload,
    move,
    opened,
    row,
    settled,
    status,
    until,
    use,
)


@pytest.fixture(scope="module")
def base():
    """A real prediction of the tiny workload at batch size 8."""
    return api.predict_with_size_model(make_workload(), StepConfig(batch_size=8), "cpu")


@pytest.fixture
def panel(nothing_ahead):
    with opened(config=StepConfig(batch_size=8)) as made:
        yield made


@pytest.fixture
def made():
    """Forecasts of the tiny workload, and what arrived."""
    arrived = []
    found = Forecasts({"tiny": make_workload()}, arrived.append, lambda text: None)
    yield found, arrived
    found.close()


def test_a_run_of_another_time_has_the_worker_asked_again_and_nothing_blank_meanwhile(
    made, monkeypatch
):
    found, _ = made
    times = [2.0, 2.0, 0.1]
    calls = worker(
        monkeypatch,
        lambda config, cancel: predicted(
            config=config, step_seconds=times.pop(0), uncertainty={"step_seconds": 0.25}
        ),
    )
    answered(found, 8, 16)

    def run(least):
        config = StepConfig(batch_size=8)
        times = (3 * least, least)
        return make_result(config=config, step_seconds=2 * least, step_seconds_all=times)

    found.doubt(run(1.9))
    assert found.look(question(8)).exact, "it took what was predicted"
    found.doubt(make_result(config=StepConfig(batch_size=4), step_seconds_all=(0.1,)))
    assert found.look(question(8)).exact, "nothing was predicted for that setting"

    found.doubt(run(0.1))
    for size in (8, 16):
        held = found.look(question(size))
        assert (held.exact, held.result.step_seconds) == (False, 2.0)
    answered(found, question(8))
    assert sizes(calls) == [8, 16, 8]
    again = found.look(question(8))
    assert (again.exact, again.result.step_seconds) == (True, 0.1)
    assert not found.look(question(16)).exact


@pytest.mark.slow
def test_interpolating_gives_what_the_worker_would_have_said(base):
    config = StepConfig(batch_size=32)
    estimate = interpolated(base, config)
    asked = api.predict_with_size_model(make_workload(), config, "cpu").result
    assert estimate.config == asked.config == config
    assert estimate.peak_allocated_bytes == asked.peak_allocated_bytes
    assert estimate.peak_by_category == asked.peak_by_category
    assert (estimate.timeline.total_bytes == asked.timeline.total_bytes).all()
    assert sum(h.nbytes for h in estimate.peak_holdings) == estimate.peak_allocated_bytes
    assert estimate.uncertainty["peak_allocated_bytes"] > asked.uncertainty["peak_allocated_bytes"]


@pytest.mark.slow
def test_what_was_recorded_is_not_called_interpolated(base):
    estimate = interpolated(base, StepConfig(batch_size=base.size_model.program.size))
    assert "interpolated" not in estimate.message
    assert estimate.uncertainty == base.result.uncertainty


@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize("name", ["gpt-small", "vit-digits"])
@pytest.mark.slow
def test_the_uncertainty_of_interpolation_and_of_another_accumulation_holds(name, device):
    workload = memlab.workloads.get(name)
    base = api.predict_with_size_model(workload, StepConfig(batch_size=8), device)
    for batch_size, steps in ((5, 1), (32, 1), (16, 2), (32, 4)):
        config = StepConfig(batch_size=batch_size, accumulation_steps=steps)
        estimate = interpolated(base, config) if steps == 1 else estimate_accumulation(base, config)
        asked = api.predict(workload, config, device)
        error = estimate.counted_peak.nbytes / asked.counted_peak.nbytes - 1
        stated = estimate.uncertainty[f"peak_{estimate.counted_peak.kind}_bytes"]
        assert abs(error) <= (stated if steps == 1 else REGROUPED), (batch_size, steps, error)


def test_a_question_is_answered_once_and_kept(monkeypatch, made):
    found, arrived = made
    calls = worker(monkeypatch, lambda config, cancel: predicted(config=config))
    assert found.look(question()) is None
    answered(found, question())
    answered(found, question())
    assert sizes(calls) == [8]
    assert [e.exact for e in arrived] == [True]
    assert found.look(question()).result is arrived[0].result


def test_only_the_newest_question_waits_and_none_is_killed(monkeypatch, made):
    found, _ = made
    go = threading.Event()
    cancelled = []

    def slow(config, cancel):
        go.wait(PATIENCE_SECONDS)
        cancelled.append(cancel.is_set())
        return predicted(config=config)

    calls = worker(monkeypatch, slow)
    found.ask(question(1))
    until(lambda: sizes(calls) == [1])
    for batch_size in range(2, 9):
        found.ask(question(batch_size))
    go.set()
    assert found.wait(PATIENCE_SECONDS)
    assert sizes(calls) == [1, 8]
    assert cancelled == [False, False]
    assert found.look(question(1)) is not None


def test_a_slider_that_moves_asks_once_it_stands(monkeypatch, made):
    found, _ = made
    # far longer than the slider takes to move, even where the machine is busy with other things
    monkeypatch.setattr(questions, "SETTLE_SECONDS", 2.0)
    calls = worker(monkeypatch, lambda config, cancel: predicted(config=config))
    for batch_size in range(1, 6):
        found.ask(question(batch_size))
        time.sleep(0.02)
    assert found.wait(PATIENCE_SECONDS)
    assert sizes(calls) == [5]


@pytest.mark.slow
def test_what_is_asked_for_later_waits_for_what_is_wanted_and_is_never_lost(monkeypatch, made):
    found, _ = made
    monkeypatch.setattr(questions, "PATIENCE_SECONDS", 0.0)
    go = threading.Event()

    def slow(config, cancel):
        until(lambda: go.is_set() or cancel.is_set())
        ended = Outcome.CANCELLED if cancel.is_set() else Outcome.OK
        return predicted(config=config, outcome=ended)

    calls = worker(monkeypatch, slow)

    found.ask_later([question(2), question(4)])
    until(lambda: sizes(calls) == [2])
    found.ask_later([question(2), question(8)])
    found.ask(question(1))
    until(lambda: sizes(calls) == [2, 1])
    go.set()
    assert found.wait(PATIENCE_SECONDS)
    assert sizes(calls) == [2, 1, 2, 8]
    found.ask_later([question(8)])
    assert found.wait(PATIENCE_SECONDS)
    assert sizes(calls) == [2, 1, 2, 8]


def test_what_goes_on_for_long_is_given_up_for_what_is_wanted(monkeypatch, made):
    found, arrived = made
    monkeypatch.setattr(questions, "PATIENCE_SECONDS", 0.05)

    def endless(config, cancel):
        while config.batch_size == 1 and not cancel.is_set():
            time.sleep(0.01)
        return predicted(
            config=config,
            outcome=Outcome.CANCELLED if cancel.is_set() else Outcome.OK,
        )

    calls = worker(monkeypatch, endless)
    found.ask(question(1))
    until(lambda: sizes(calls) == [1])
    time.sleep(0.1)
    assert sizes(calls) == [1], "nothing else is wanted, so it goes on"
    answered(found, question(2))
    assert of_estimates(arrived) == [2]
    assert found.look(question(1)) is None, "it may be asked again"


def test_what_the_worker_was_doing_is_forgotten_once_it_is_stopped(monkeypatch):
    monkeypatch.setattr(questions, "PATIENCE_SECONDS", 0.05)
    told = []

    def answer(workload, config, device, *, on_progress, cancel):
        on_progress(Progress(text=f"recording {config.batch_size}", fraction=0.5))
        until(lambda: config.batch_size == 2 or cancel.is_set())
        ended = Outcome.CANCELLED if cancel.is_set() else Outcome.OK
        return Prediction(result=predicted(config=config, outcome=ended), size_model=None)

    monkeypatch.setattr(questions, "predict_with_size_model", answer)
    found = Forecasts({"tiny": make_workload()}, lambda estimate: None, told.append)
    found.ask(question(1))
    until(lambda: told == ["recording 1"])
    answered(found, question(2))
    assert told == ["recording 1", "", "recording 2"]
    found.close()


def test_a_worker_that_says_much_is_told_of_a_few_times_and_at_last_no_more(
    monkeypatch, nothing_ahead
):
    monkeypatch.setattr(job, "UPDATE_SECONDS", 2.0)  # far longer than it speaks
    go = threading.Event()

    def answer(workload, config, device, *, on_progress, cancel):
        go.wait(PATIENCE_SECONDS)
        for at in range(100):
            on_progress(Progress(text=f"{at} of 100", fraction=0.5))
        return Prediction(result=predicted(config=config, device=device), size_model=None)

    monkeypatch.setattr(questions, "predict_with_size_model", answer)
    with opened("t4") as panel:
        doing = []
        panel._told.observe(lambda change: doing.append(change["new"]["doing"]), "answer")
        go.set()
        settled(panel)
        assert {text for text in doing if text} == {"0 of 100"}
        time.sleep(1.5 * job.UPDATE_SECONDS)
        assert panel._told.answer["doing"] == "", "late progress is told of nothing"


def test_no_prediction_begins_while_a_measurement_runs(monkeypatch, made):
    found, _ = made
    calls = worker(monkeypatch, lambda config, cancel: predicted(config=config))
    found.hold(True)
    found.ask(question())
    time.sleep(2 * questions.SETTLE_SECONDS)
    assert calls == []
    found.hold(False)
    assert found.wait(PATIENCE_SECONDS)
    assert sizes(calls) == [8]


def test_whatever_the_worker_raises_is_an_outcome(monkeypatch, made):
    found, arrived = made

    def broken(config, cancel):
        raise RuntimeError("the reason")

    worker(monkeypatch, broken)
    answered(found, question())
    assert arrived[0].result.outcome is Outcome.FAILED
    assert "RuntimeError: the reason" in arrived[0].result.message


def test_the_thread_ends_with_the_panel(monkeypatch):
    worker(monkeypatch, lambda config, cancel: predicted(config=config))
    found = Forecasts({"tiny": make_workload()}, lambda estimate: None, lambda text: None)
    answered(found, question())
    found.close()
    found._thread.join(PATIENCE_SECONDS)
    assert not found._thread.is_alive()
    answered(found, question(2))


def test_the_limit_is_what_the_device_holds_unless_less_was_typed_for_it(panel):
    panel.set(device="rtx-4090")
    usable = cards.find("rtx-4090").usable_bytes
    assert panel._asked.limit == pytest.approx(usable, rel=0.01)
    panel.set(device="t4")
    assert panel._asked.limit == pytest.approx(cards.find("t4").usable_bytes, rel=0.01)
    panel.set(device="cpu")
    assert panel._asked.limit == machine_memory_bytes()
    assert panel._told.answer["usableWords"].endswith("GiB: this machine")
    panel.set(memory_limit="2 GiB")
    assert panel._asked.limit == 2 * 2**30
    panel.set(device="t4")
    assert panel._asked.limit == cards.find("t4").usable_bytes
    assert panel._told.answer["usableWords"].endswith("GiB: the card")
    assert "memory_limit=memlab.card('t4').usable_bytes" in panel.code()
    panel.set(device="cpu")
    assert fields(panel)["memory_limit"] == "2 GiB"
    panel.set(device="t4", memory_limit="4 TiB")
    assert panel._asked.limit == cards.find("t4").usable_bytes
    assert "more than the card can hold" in line(panel, "about")["text"]
    use(panel, "about")
    assert fields(panel)["memory_limit"] == ""
    assert line(panel, "about")["kind"] == "open"


def test_a_card_that_is_not_here_is_kept_instead_of_run_and_says_why(panel):
    panel.set(device="h200")
    assert (panel._told.answer["keeps"], panel._told.answer["ready"]) == (True, True)
    assert "h200 is not in this machine" in status(panel)
    with pytest.raises(MemlabError, match=r"h200 is not in this machine; panel\.keep\(\)"):
        panel.run()
    assert "memlab.predict(" in panel.code()
    panel.set(device="cpu")
    assert not panel._told.answer["keeps"]
    assert "memlab.measure(" in panel.code()


@pytest.mark.slow
def test_a_prediction_names_the_operators_of_its_moments():
    workload = workloads.get("gpt-small", num_layers=2, sequence_length=16)
    found = api.predict_with_size_model(workload, StepConfig(batch_size=2), "t4")
    ran = found.size_model.ran((2,))
    timeline = found.result.timeline
    assert len(ran) == int(timeline.operator.max())
    place = found.result.peak_place
    named = {ran[count - 1] for count in timeline.operator[timeline.total_bytes.argmax() :][:1]}
    assert named == {(place.module, place.operator)}


def test_the_memory_of_any_card_can_be_typed(panel):
    move(panel, device="abc")
    assert "is not a card that memlab knows" in line(panel, "about")["text"]
    assert not panel._told.answer["ready"]
    move(panel, device="12 GiB")
    assert panel._asked.question.device == cards.find("12GiB").name
    assert 11 * 2**30 < panel._asked.limit < 12 * 2**30


def test_a_run_lies_over_its_prediction_with_the_error(panel):
    settled(panel)
    result = panel.run()
    settled(panel)
    run = panel._log.last
    assert run.prediction.peak_allocated_bytes == panel.prediction.peak_allocated_bytes
    assert abs(run.prediction_error) < 0.05
    assert (panel._told.answer["source"], panel._told.answer["run"]) == ("run", 1)
    assert "; predicted " in panel._told.answer["costs"]
    assert panel.result is result
    assert panel.prediction.source == "predicted"


@pytest.mark.slow
def test_a_run_before_its_prediction_gets_the_error_later(panel):
    panel.run(batch_size=4)
    settled(panel)
    assert panel._log.last.prediction_error is not None
    assert row(panel)["peak error"].endswith("%")


@pytest.mark.slow
def test_a_compiled_step_says_that_its_time_is_not_known_and_runs(panel):
    panel.set(compile=True)
    settled(panel)
    assert panel.prediction.step_seconds is None
    assert panel._told.answer["costs"].endswith("allocated"), "and no time"
    assert panel._told.answer["ready"]


def test_the_prediction_knows_the_limit_on_screen(panel):
    settled(panel)
    panel.set(memory_limit="1 KiB")
    assert panel.prediction.fits is False
    assert panel.prediction.memory_limit_bytes == 1024
    assert "does not fit" in badge(panel)["text"]
