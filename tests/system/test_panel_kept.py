"""Predictions for cards that are not here: kept on the table, and compared side by side."""

import threading

import pytest

from memlab import MemlabError, Outcome, StepConfig
from memlab._panel import choices, job, page, questions
from memlab.prediction.predict import Prediction
from tests.forecast_parts import MIB, predicted, question
from tests.panel_parts import PATIENCE_SECONDS, find, opened, until


class Worker:
    """Stands in for the worker: it answers once it may go, with a peak that the batch gives."""

    def __init__(self):
        self.go, self.calls, self.outcome = threading.Event(), [], Outcome.OK
        self.go.set()

    def __call__(self, workload, config, device, *, on_progress, cancel):
        self.calls.append((device, config.batch_size))
        self.go.wait(PATIENCE_SECONDS)
        peak = config.batch_size * MIB
        result = predicted(
            peak,
            outcome=self.outcome,
            config=config,
            device=device,
            workload_name=workload.name,
            peak_reserved_bytes=2 * peak,
        )
        return Prediction(result=result, size_model=None)


@pytest.fixture
def worker(monkeypatch):
    made = Worker()
    monkeypatch.setattr(questions, "predict_with_size_model", made)
    yield made
    made.go.set()


@pytest.fixture
def panel(worker, monkeypatch, nothing_ahead):
    monkeypatch.setattr(job, "SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(job, "LONGEST_SECONDS", 0.0)
    with opened("h200", config=StepConfig(batch_size=8)) as made:
        until(lambda: made._page._estimate is not None)
        yield made


def press(panel):
    panel._view._run_button.click()


def enter(panel):
    """Press Enter in a number box, as the page reports it."""
    panel._view.controls.sliders["batch_size"].box._handle_custom_msg({"event": "submit"}, [])


def said(panel):
    return find(panel, "memlab-status").value


def test_a_kept_prediction_is_a_row_a_result_and_the_picture_of_the_saved_notebook(panel):
    result = panel.keep(batch_size=4, memory_limit="1 GiB")
    assert (result.source, result.device, result.fits) == ("predicted", "h200", True)
    assert panel.result is result
    assert list(panel.results["source"]) == ["predicted"]
    assert list(panel.results["memory_limit_bytes"]) == [2**30]
    assert "fits 1.00 GiB" in find(panel, "memlab-table").value
    assert "this prediction is in the table" in said(panel)
    assert "predicted" in panel._repr_mimebundle_()["text/html"]
    assert '"source": "predicted"' in find(panel, "memlab-json").value.replace("&quot;", '"')


def test_the_button_waits_for_the_exact_prediction_and_says_so(panel, worker):
    worker.go.clear()
    panel.set(batch_size=16)
    press(panel)
    enter(panel)
    assert "the prediction for batch 16 on h200 is added to the table as soon" in said(panel)
    assert panel._log.runs == []
    panel.set(batch_size=32)  # another setting does not make it forget
    worker.go.set()
    until(lambda: panel._log.runs)
    assert [run.result.config.batch_size for run in panel._log.runs] == [16]
    until(lambda: "run 1" in said(panel) and "memlab-past" in said(panel))


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.UNSUPPORTED])
def test_what_failed_or_does_not_fit_is_kept_too(panel, worker, outcome):
    assert panel.keep(memory_limit="1 MiB").fits is False
    assert "over 1.00 MiB" in find(panel, "memlab-table").value
    worker.outcome = outcome
    assert panel.keep(batch_size=2).outcome is outcome
    assert "predicted: " in find(panel, "memlab-table").value
    assert len(panel.results) == 2


def test_kept_predictions_are_pinned_and_compared(panel):
    for batch_size in (4, 8):
        panel.keep(batch_size=batch_size)
    pin, compare = panel._view.table._toggles[1]
    assert pin.description == "pin run 1"
    pin.value = True
    assert compare.description == "compare run 1"
    assert panel._log.compared_run.label == "run 1, predicted"
    assert panel.keep(device="cpu").device == "cpu"  # this machine, and yet no run
    assert panel._page.outlook().run is None
    assert panel._log.last.prediction_error is None


def test_a_closed_panel_lets_nobody_wait(panel, worker):
    worker.go.clear()
    errors = []

    def keep():
        with pytest.raises(MemlabError, match="closed") as caught:
            panel.keep(batch_size=16)
        errors.append(caught)

    waiting = threading.Thread(target=keep)
    waiting.start()
    until(lambda: panel._page._keeper.questions)
    panel.close()
    waiting.join(PATIENCE_SECONDS)
    assert len(errors) == 1


def test_nobody_waits_for_a_wish_whose_prediction_cannot_be_looked_up():
    def broken(*_):
        raise RuntimeError("the reason")

    keeper = page.Keeper(broken, lambda *_: None)
    wish = keeper.wish(question(), None)
    with pytest.raises(RuntimeError, match="the reason"):
        keeper.settle()
    assert (wish.is_over.is_set(), wish.result) == (True, None)


# several cards


OTHERS = [name for name in choices.compared_cards() if name != "h200"]  # than the one on screen


def table(panel):
    return panel._view.cards._html.value


def test_cards_are_asked_for_only_while_their_table_is_open(panel, worker):
    assert {device for device, _ in worker.calls} == {"h200"}
    panel._view.cards.toggle.value = True
    until(lambda: table(panel).count("16.0 MiB reserved") == len(choices.compared_cards()))
    assert table(panel).count("✔</span> fits") == len(choices.compared_cards())
    assert [device for device, _ in worker.calls] == ["h200", *OTHERS]
    assert 'class="memlab-compared"><td>h200<' in table(panel)


def test_the_setting_on_screen_comes_before_its_cards(panel, worker):
    worker.go.clear()
    panel._view.cards.toggle.value = True
    until(lambda: len(worker.calls) == 2)
    panel.set(batch_size=16)
    until(lambda: panel._page.forecasts._wanted is not None)
    worker.go.set()
    until(lambda: table(panel).count("32.0 MiB reserved") == len(choices.compared_cards()))
    first, second, third = worker.calls[:3]
    assert (first, second) == (("h200", 8), (OTHERS[0], 8))
    assert third == ("h200", 16)
    assert {batch for _, batch in worker.calls[3:]} == {16}


def test_a_card_is_chosen_by_its_button_and_its_typed_limit_counts(panel, worker):
    panel._view.cards.toggle.value = True
    buttons = find(panel, "memlab-cards").children[1].children[1].children[1:]
    chosen = next(row.children[0] for row in buttons if row.children[0].description == "show t4")
    chosen.click()
    assert panel._asked.device == "t4"
    until(lambda: 'class="memlab-compared"><td>t4<' in table(panel))
    panel.set(memory_limit="4 MiB")
    until(lambda: "over 4.00 MiB" in table(panel))
    assert table(panel).count("over") == 1


def test_no_card_is_predicted_during_a_run(panel, worker):
    panel._page.forecasts.hold(True)
    panel._view.cards.toggle.value = True
    until(lambda: "waiting" in table(panel))
    assert len(worker.calls) == 1
    panel._page.forecasts.hold(False)
    until(lambda: "waiting" not in table(panel))
