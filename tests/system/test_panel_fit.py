"""*Fit for me*: what it searches, where it moves the sliders, and what it never does."""

import threading
from contextlib import closing
from dataclasses import replace

import pytest

import memlab
from memlab import MemlabError, StepConfig
from memlab._panel import job, questions, runner
from memlab.prediction.predict import Prediction
from memlab.running import Progress
from memlab.search.answer import Recommendation, Recommendations
from tests.forecast_parts import MIB, predicted
from tests.panel_parts import PATIENCE_SECONDS, find, make_workload, until

LIMIT = 6 * MIB


def result_of(config, *, peak, seconds, workload="tiny"):
    result = predicted(
        peak, config=config, device="h200", workload_name=workload,
        peak_reserved_bytes=peak, step_seconds=seconds,
    )  # fmt: skip
    return result.against_limit(LIMIT)


def recommendation(config, *, peak=5 * MIB, seconds=0.1):
    result = result_of(config, peak=peak, seconds=seconds)
    return Recommendation(result=result, reasons=("why",), predicted=result)


class Search:
    """Stands in for `recommend`: it answers once it may go, and notes how it was asked."""

    def __init__(self):
        self.go, self.asked, self.threads = threading.Event(), [], []
        self.begun = threading.Event()
        self.go.set()
        self.changes = [
            {"precision": "bf16-mixed", "accumulation_steps": 2},
            {"memory_budget": 0.5},
        ]
        self.close, self.message, self.error = [], "nothing that was tried fits 6.00 MiB", None

    def __call__(self, workload, memory_limit, **options):
        self.asked.append((workload.name, memory_limit, options))
        self.threads.append(threading.current_thread())
        options["on_progress"](Progress(text="step 1 of at most 40", fraction=0.01))
        self.begun.set()
        until(lambda: self.go.is_set() or options["cancel"].is_set())
        if options["cancel"].is_set():
            raise MemlabError("the recommendation of 'tiny' ended: stopped")
        if self.error:
            raise self.error
        base = options["config"]
        fitting = tuple(
            recommendation(replace(base, **changes), seconds=0.1 + 0.02 * at)
            for at, changes in enumerate(self.changes)
        )
        close = tuple(
            recommendation(replace(base, **changes), peak=LIMIT) for changes in self.close
        )
        return Recommendations(
            fitting=fitting, message=self.message, limit_bytes=memory_limit, too_close=close,
            notes=("tf32 is left out: no such card",),
        )  # fmt: skip


@pytest.fixture
def search(monkeypatch):
    made = Search()
    monkeypatch.setattr(runner, "recommend", made)
    yield made
    made.go.set()


def predict_at_once(workload, config, device, *, on_progress, cancel):
    peak = 8 * MIB // config.accumulation_steps
    result = predicted(
        peak, config=config, device=device, workload_name=workload.name, peak_reserved_bytes=peak
    )
    return Prediction(result=result, size_model=None)


@pytest.fixture
def panel(search, monkeypatch, nothing_ahead):
    monkeypatch.setattr(questions, "predict_with_size_model", predict_at_once)
    monkeypatch.setattr(job, "SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(job, "LONGEST_SECONDS", 0.0)
    with closing(
        memlab.panel(
            make_workload(), device="h200", memory_limit=LIMIT, config=StepConfig(batch_size=8)
        )
    ) as made:
        until(lambda: made._page._estimate is not None)
        yield made


def fit(panel):
    return panel._view.fit


def begin(panel, search):
    """Press *Fit for me* and return once the search has begun, which waits."""
    search.go.clear()
    fit(panel).button.click()
    search.begun.wait(PATIENCE_SECONDS)


def press(panel):
    """Press *Fit for me* and wait for the end of the search."""
    fit(panel).button.click()
    until(lambda: panel._page.job is None)


def said(panel):
    return find(panel, "memlab-status").value


def shown(panel):
    box = fit(panel).box
    rows = [row.children[1].value for row in box.children[2:-1] if row.layout.display != "none"]
    return "\n".join([box.children[0].value, box.children[1].value, *rows, box.children[-1].value])


def uses(panel):
    return [row.button for row in fit(panel)._rows if row.box.layout.display != "none"]


def can_undo(panel):
    return fit(panel).undo.layout.visibility == "visible"


def test_the_sliders_move_to_the_fastest_that_fits_and_undo_brings_them_back(panel):
    press(panel)
    until(lambda: "moved to accumulation 2, bf16-mixed" in said(panel))
    best = StepConfig(batch_size=8, precision="bf16-mixed", accumulation_steps=2)
    assert panel.config == best
    assert "5.00 MiB reserved" in said(panel)
    assert "predicted" in said(panel)
    until(lambda: "fits: 4.00 of 6.00 MiB" in find(panel, "memlab-fit").value)
    assert can_undo(panel)
    fit(panel).undo.click()
    assert panel.config == StepConfig(batch_size=8)
    assert "as they were before" in said(panel)
    assert not can_undo(panel)
    press(panel)
    assert can_undo(panel)
    panel.set(device="t4")  # which was not searched
    assert not can_undo(panel)


def test_what_else_fits_is_listed_with_its_price_and_a_click_that_goes_there(panel):
    press(panel)
    text = shown(panel)
    assert "2 settings fit by prediction, the fastest first" in text
    assert "<b>budget 0.5</b>: 5.00 MiB" in text
    assert "20 % slower than the first" in text
    assert "17 % free" in text
    assert "tf32 is left out" in text
    uses(panel)[1].click()
    assert panel.config == StepConfig(batch_size=8, memory_budget=0.5)
    fit(panel).undo.click()  # to before the search, not to its first answer
    assert panel.config == StepConfig(batch_size=8)


def test_it_keeps_what_was_chosen_and_searches_the_rest_anew(panel, search):
    panel.set(memory_budget=0.3, accumulation_steps=4, optimizer="sgd")
    press(panel)
    assert search.asked[-1][2]["config"] == StepConfig(batch_size=8, optimizer="sgd")
    assert search.asked[-1][1] == LIMIT
    assert panel.config.precision == "bf16-mixed"
    assert "Kept: batch 8, sgd." in shown(panel)

    press(panel)  # what the first search has set is no choice of the person
    assert search.asked[-1][2]["config"] == StepConfig(batch_size=8, optimizer="sgd")
    panel.set(precision="fp16-mixed")
    press(panel)
    assert search.asked[-1][2]["config"].precision == "fp16-mixed"


def test_what_a_person_added_to_what_a_search_has_set_stays(panel, search):
    search.changes = [{"checkpointing": "blocks", "checkpoint_policy": "keep-matmuls"}]
    press(panel)
    panel.set(checkpoint_policy="keep-attention")  # without checkpointing it is not allowed
    press(panel)
    kept = {"checkpointing": "blocks", "checkpoint_policy": "keep-attention"}
    assert search.asked[-1][2]["config"] == StepConfig(batch_size=8, **kept)


def test_it_runs_beside_the_kernel_and_only_predicts(panel, search):
    search.go.clear()
    fit(panel).button.click()  # returns at once
    search.begun.wait(PATIENCE_SECONDS)
    until(lambda: "step 1 of at most 40" in said(panel))
    assert search.threads[0] is not threading.main_thread()
    assert search.asked[0][2]["confirm"] == 0
    assert panel._view.fit.box.layout.display == ""  # unfolded now, not when the answer arrives


@pytest.mark.parametrize(
    ("changes", "is_past"), [({"accumulation_steps": 4}, False), ({"batch_size": 16}, True)]
)
def test_an_answer_to_former_settings_moves_nothing(panel, search, changes, is_past):
    begin(panel, search)
    panel.set(**changes)
    before = panel.config
    search.go.set()
    until(lambda: panel._page.job is None)
    assert "nothing was moved" in said(panel)
    assert panel.config == before
    assert not can_undo(panel)
    assert all(button.disabled is is_past for button in uses(panel))
    assert ("found for other settings" in shown(panel)) is is_past


def test_an_answer_is_marked_once_another_limit_is_on_screen(panel):
    press(panel)
    panel.set(memory_limit="7 MiB")
    assert "found for other settings" in shown(panel)
    before = panel.config
    fitting_of = panel._fitting
    fitting_of.use(1)  # a click that was on its way
    assert panel.config == before
    panel.set(memory_limit=LIMIT)
    assert "found for other settings" not in shown(panel)


def test_nothing_that_fits_is_said_and_nothing_moves(panel, search):
    search.changes = []
    press(panel)
    assert "nothing that was tried fits" in said(panel)
    assert "Nothing that was tried fits" in shown(panel)
    assert panel.config == StepConfig(batch_size=8)
    assert not can_undo(panel)


def test_what_is_too_close_is_listed_and_never_moved_to(panel, search):
    search.changes, search.close = [], [{"memory_budget": 0.2}]
    search.message = "no setting of tiny certainly fits"
    press(panel)
    assert panel.config == StepConfig(batch_size=8)
    assert "<b>budget 0.2</b>" in shown(panel)
    uses(panel)[0].click()
    assert panel.config.memory_budget == 0.2


def test_stop_ends_the_search_and_moves_nothing(panel, search):
    begin(panel, search)
    assert not panel._view._stop_button.disabled
    panel._view._stop_button.click()
    until(lambda: "the search was stopped" in said(panel))
    assert panel.config == StepConfig(batch_size=8)
    until(lambda: panel._view._stop_button.disabled)
    search.go.set()
    press(panel)  # and it can be pressed again
    assert panel.config.accumulation_steps == 2


def test_a_search_and_a_run_take_turns(panel, search):
    begin(panel, search)
    fit(panel).button.click()
    assert "press Fit for me again once it has ended" in said(panel)
    assert len(search.asked) == 1
    panel.set(device="cpu")
    with pytest.raises(MemlabError, match="a run, a search or a comparison of"):
        panel.run()


@pytest.mark.parametrize("error", [MemlabError("it cannot be built"), ValueError("a bug")])
def test_an_error_is_said_and_the_panel_goes_on(panel, search, error):
    search.error = error
    press(panel)
    assert str(error) in said(panel)
    assert str(error) in shown(panel)
    search.error = None
    press(panel)
    assert panel.config.accumulation_steps == 2


def test_undo_keeps_what_a_person_changed_before_the_last_search(panel, search):
    press(panel)
    until(lambda: "moved to" in said(panel))
    panel.set(batch_size=4)
    press(panel)
    until(lambda: len(search.asked) == 2 and panel._page.job is None)
    assert (panel.config.batch_size, panel.config.accumulation_steps) == (4, 2)
    assert not can_undo(panel)  # what was there before is what was found
    panel.set(precision="fp16-mixed")
    press(panel)
    assert panel.config.precision == "bf16-mixed"
    fit(panel).undo.click()
    assert (panel.config.batch_size, panel.config.precision) == (4, "fp16-mixed")


def test_a_panel_that_is_closed_ends_its_search(panel, search):
    begin(panel, search)
    panel.close()
    until(lambda: panel._page.job is None)
    assert search.asked[0][2]["cancel"].is_set()


@pytest.mark.slow
def test_a_real_search_finds_what_the_plain_step_exceeds(nothing_ahead):
    plain = memlab.predict(make_workload(), StepConfig(batch_size=64), "cpu")
    limit = int(0.7 * plain.peak_allocated_bytes)
    with closing(
        memlab.panel(
            make_workload(), device="cpu", memory_limit=limit, config=StepConfig(batch_size=64)
        )
    ) as panel:
        until(lambda: panel._page._estimate is not None)
        panel._view.fit.button.click()
        until(lambda: "moved to" in said(panel))
        found = memlab.predict(make_workload(), panel.config, "cpu", memory_limit=limit)
        assert found.fit == "fits"
        assert panel.config.batch_size == 64
        until(lambda: "✔" in find(panel, "memlab-fit").value)
