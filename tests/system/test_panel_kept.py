"""Predictions for cards that are not here: kept on the table, and compared side by side."""

import threading

import pytest

from memlab import MemlabError, Outcome, StepConfig
from memlab._panel import choices, page, questions
from memlab.prediction.predict import Prediction
from tests.forecast_parts import MIB, predicted, question
from tests.panel_parts import PATIENCE_SECONDS, move, opened, press, row, settled, status, until


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
def panel(worker, nothing_ahead):
    with opened("h200", config=StepConfig(batch_size=8)) as made:
        settled(made)
        yield made


def test_a_kept_prediction_is_a_row_and_a_result_and_in_the_saved_notebook(panel):
    result = panel.keep(batch_size=4, memory_limit="1 GiB")
    assert (result.source, result.device, result.fits) == ("predicted", "h200", True)
    assert panel.result is result
    assert list(panel.results["source"]) == ["predicted"]
    assert list(panel.results["memory_limit_bytes"]) == [2**30]
    assert row(panel)["limit"] == "fits 1.00 GiB"
    assert "this prediction is in the table" in status(panel)
    assert "tiny, predicted for h200: budget 1, batch 4" in panel._repr_mimebundle_()["text/html"]
    (told,) = panel._told.runs["rows"]
    assert (told["isPredicted"], told["peakBytes"]) == (True, result.counted_peak.nbytes)


@pytest.mark.slow
def test_the_button_waits_for_the_exact_prediction_and_says_so(panel, worker):
    worker.go.clear()
    panel.set(batch_size=16)
    for _ in range(2):
        press(panel, "run")
    assert "the prediction for batch 16 on h200 is added to the table as soon" in status(panel)
    assert panel._log.runs == []
    panel.set(batch_size=32)  # another setting does not make it forget
    worker.go.set()
    until(lambda: panel._log.runs)
    assert [run.result.config.batch_size for run in panel._log.runs] == [16]
    until(lambda: "run 1" in status(panel) and panel._told.answer["status"]["isPast"])


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.UNSUPPORTED])
def test_what_failed_or_does_not_fit_is_kept_too(panel, worker, outcome):
    assert panel.keep(memory_limit="1 MiB").fits is False
    assert row(panel)["limit"] == "over 1.00 MiB"
    worker.outcome = outcome
    assert panel.keep(batch_size=2).outcome is outcome
    assert row(panel)["outcome"].startswith("predicted: ")
    assert len(panel.results) == 2


def test_kept_predictions_are_pinned_and_compared(panel):
    for batch_size in (4, 8):
        panel.keep(batch_size=batch_size)
    press(panel, "pin", run=1, name="")
    first, _ = panel._told.runs["rows"]
    assert (first["label"], first["isPinned"]) == ("run 1, predicted", True)
    press(panel, "compare", run=2)
    assert [told["isCompared"] for told in panel._told.runs["rows"]] == [False, True]
    press(panel, "compare", run=0)
    assert not any(told["isCompared"] for told in panel._told.runs["rows"])
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


def rows(panel):
    """Return the rows of the table of cards: name, cells as text, whether it is on screen."""
    told = panel._told.panes.get("cards", {"rows": []})
    return {
        row["name"]: ([c if isinstance(c, str) else c["text"] for c in row["cells"]], row["isHere"])
        for row in told["rows"]
    }


def count(panel, words):
    return sum(words in " ".join(cells) for cells, _ in rows(panel).values())


def here(panel):
    return [name for name, (_, is_here) in rows(panel).items() if is_here]


@pytest.mark.slow
def test_cards_are_asked_for_only_while_their_table_is_open(panel, worker):
    assert {device for device, _ in worker.calls} == {"h200"}
    assert "cards" not in panel._told.panes
    press(panel, "open", panes=["cards"])
    until(lambda: count(panel, "16.0 MiB reserved") == len(choices.compared_cards()))
    assert count(panel, "fits ") == len(choices.compared_cards())
    assert [device for device, _ in worker.calls] == ["h200", *OTHERS]
    assert here(panel) == ["h200"]
    press(panel, "open", panes=[])
    panel.set(batch_size=16)
    settled(panel)
    assert len(worker.calls) == len(OTHERS) + 2


def test_the_setting_on_screen_comes_before_its_cards(panel, worker):
    worker.go.clear()
    press(panel, "open", panes=["cards"])
    until(lambda: len(worker.calls) == 2)
    panel.set(batch_size=16)
    until(lambda: panel._page.forecasts._wanted is not None)
    worker.go.set()
    until(lambda: count(panel, "32.0 MiB reserved") == len(choices.compared_cards()))
    first, second, third = worker.calls[:3]
    assert (first, second) == (("h200", 8), (OTHERS[0], 8))
    assert third == ("h200", 16)
    assert {batch for _, batch in worker.calls[3:]} == {16}


def test_the_card_on_screen_is_compared_with_the_limit_that_was_typed_for_it(panel):
    press(panel, "open", panes=["cards"])
    move(panel, device="t4")
    until(lambda: here(panel) == ["t4"])
    panel.set(memory_limit="4 MiB")
    until(lambda: count(panel, "over 4.00 MiB"))
    assert count(panel, "over") == 1
    assert not panel._told.panes["cards"]["isPast"]


@pytest.mark.slow
def test_no_card_is_predicted_during_a_run(panel, worker):
    panel._page.forecasts.hold(True)
    press(panel, "open", panes=["cards"])
    until(lambda: count(panel, "waiting"))
    assert len(worker.calls) == 1
    panel._page.forecasts.hold(False)
    until(lambda: rows(panel) and not count(panel, "waiting"))
