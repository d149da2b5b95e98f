"""*Fit for me*: what it searches, where it moves the sliders, and what it never does."""

import threading
from contextlib import closing
from dataclasses import replace

import pytest

import memlab
from memlab import MemlabError, StepConfig
from memlab._panel import questions, runner
from memlab.prediction.predict import Prediction
from memlab.running import Progress
from memlab.search.answer import Recommendation, Recommendations
from memlab.search.search import BestSoFar
from tests.forecast_parts import MIB, predicted
from tests.panel_parts import (
    PATIENCE_SECONDS,
    badge,
    is_idle,
    line,
    make_workload,
    move,
    press,
    settled,
    status,
    until,
)

LIMIT = 6 * MIB


def result_of(config, *, peak, seconds, **changes):
    result = predicted(
        peak, config=config, device="h200", peak_reserved_bytes=peak, step_seconds=seconds,
        **changes,
    )  # fmt: skip
    return result.against_limit(LIMIT)


def recommendation(config, *, peak=5 * MIB, seconds=0.1, **changes):
    result = result_of(config, peak=peak, seconds=seconds, **changes)
    return Recommendation(result=result, reasons=("why",), predicted=result)


def best_so_far(config):
    result = result_of(config, peak=5 * MIB, seconds=0.3)
    prediction = Prediction(result=replace(result, memory_limit_bytes=None), size_model=None)
    return BestSoFar(text="found one that fits", fraction=1.0, result=result, prediction=prediction)


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
        self.early = threading.Semaphore(0)  # each lets one more of `first` be told
        self.first = []  # settings that are told before the answer

    def __call__(self, workload, memory_limit, **options):
        self.asked.append((workload.name, memory_limit, options))
        self.threads.append(threading.current_thread())
        options["on_progress"](Progress(text="step 1 of at most 40", fraction=0.01))
        self.begun.set()
        for changes in self.first:
            until(lambda: self.early.acquire(blocking=False) or options["cancel"].is_set())
            if not options["cancel"].is_set():
                options["on_progress"](best_so_far(replace(options["config"], **changes)))
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
            recommendation(
                replace(base, **changes), peak=LIMIT, uncertainty={"peak_reserved_bytes": 0.1}
            )
            for changes in self.close
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
    with closing(
        memlab.panel(
            make_workload(), device="h200", memory_limit=LIMIT, config=StepConfig(batch_size=8)
        )
    ) as made:
        settled(made)
        yield made


def begin(panel, search):
    """Press *Fit for me* and return once the search has begun, which waits."""
    search.go.clear()
    press(panel, "fit")
    search.begun.wait(PATIENCE_SECONDS)


def searched(panel):
    """Press *Fit for me* and wait for the end of the search."""
    press(panel, "fit")
    until(lambda: is_idle(panel))


def pane(panel):
    return panel._told.panes["fit"]


def listed(panel):
    return [row["settings"] for row in pane(panel)["rows"]]


def test_the_sliders_move_to_the_fastest_that_fits_as_a_move_that_the_page_can_undo(panel):
    before = panel._told.asked
    searched(panel)
    until(lambda: "moved to accumulation 2, bf16-mixed" in status(panel))
    best = StepConfig(batch_size=8, precision="bf16-mixed", accumulation_steps=2)
    assert panel.config == best
    assert "5.00 MiB reserved" in status(panel)
    assert "predicted" in status(panel)
    until(lambda: "fits: 4.00 of 6.00 MiB" in badge(panel)["text"])
    now = panel._told.asked
    assert (now["by"], now["move"]) == ("search 1", before["move"] + 1)
    move(panel, **before["fields"])
    assert panel.config == StepConfig(batch_size=8)
    assert not pane(panel)["isPast"]


def test_what_else_fits_is_listed_with_its_price_and_a_click_that_goes_there(panel):
    searched(panel)
    assert "2 settings fit by prediction, the fastest first" in pane(panel)["answer"]
    first, second = pane(panel)["rows"]
    assert (first["isHere"], second["isHere"], second["settings"]) == (True, False, "budget 0.5")
    for words in ("5.00 MiB", "20 % slower than the first", "17 % free"):
        assert words in second["price"]
    assert pane(panel)["notes"] == ["tf32 is left out: no such card"]
    press(panel, "use", pane="fit", at=1)
    assert panel.config == StepConfig(batch_size=8, memory_budget=0.5)
    assert [row["isHere"] for row in pane(panel)["rows"]] == [False, True]


def test_it_keeps_what_was_chosen_and_searches_the_rest_anew(panel, search):
    panel.set(memory_budget=0.3, accumulation_steps=4, optimizer="sgd")
    searched(panel)
    assert search.asked[-1][2]["config"] == StepConfig(batch_size=8, optimizer="sgd")
    assert search.asked[-1][1] == LIMIT
    assert panel.config.precision == "bf16-mixed"
    assert "Kept: batch 8, sgd." in pane(panel)["about"]

    searched(panel)  # what the first search has set is no choice of the person
    assert search.asked[-1][2]["config"] == StepConfig(batch_size=8, optimizer="sgd")
    panel.set(precision="fp16-mixed")
    searched(panel)
    assert search.asked[-1][2]["config"].precision == "fp16-mixed"


def test_what_a_person_added_to_what_a_search_has_set_stays(panel, search):
    search.changes = [{"checkpointing": "blocks", "checkpoint_policy": "keep-matmuls"}]
    searched(panel)
    panel.set(checkpoint_policy="keep-attention")  # without checkpointing it is not allowed
    searched(panel)
    kept = {"checkpointing": "blocks", "checkpoint_policy": "keep-attention"}
    assert search.asked[-1][2]["config"] == StepConfig(batch_size=8, **kept)


def test_it_runs_beside_the_kernel_and_only_predicts(panel, search):
    begin(panel, search)  # which returns at once
    until(lambda: "step 1 of at most 40" in panel._told.job["text"])
    assert search.threads[0] is not threading.main_thread()
    assert search.asked[0][2]["confirm"] == 0
    assert "Searching for about" in pane(panel)["answer"]


@pytest.mark.parametrize(
    ("changes", "is_past"), [({"accumulation_steps": 4}, False), ({"batch_size": 16}, True)]
)
def test_an_answer_to_former_settings_moves_nothing(panel, search, changes, is_past):
    begin(panel, search)
    panel.set(**changes)
    before = panel.config
    search.go.set()
    until(lambda: is_idle(panel))
    assert "nothing more was moved" in status(panel)
    assert panel.config == before
    assert (pane(panel)["isPast"], len(pane(panel)["rows"])) == (is_past, 2)


def test_an_answer_is_marked_once_another_limit_is_on_screen(panel):
    searched(panel)
    panel.set(memory_limit="7 MiB")
    assert pane(panel)["isPast"]
    before = panel.config
    press(panel, "use", pane="fit", at=1)  # a click that was on its way
    assert panel.config == before
    panel.set(memory_limit=LIMIT)
    assert not pane(panel)["isPast"]


def test_nothing_that_fits_is_said_and_nothing_moves(panel, search):
    search.changes = []
    searched(panel)
    assert "nothing that was tried fits" in status(panel)
    assert "Nothing that was tried fits" in pane(panel)["answer"]
    assert panel.config == StepConfig(batch_size=8)


def test_what_is_too_close_is_listed_and_never_moved_to(panel, search):
    search.changes, search.close = [], [{"memory_budget": 0.2}]
    search.message = "no setting of tiny certainly fits"
    searched(panel)
    assert panel.config == StepConfig(batch_size=8)
    assert [(row["settings"], row["isClose"]) for row in pane(panel)["rows"]] == [
        ("budget 0.2", True),
    ]
    press(panel, "use", pane="fit", at=0)
    assert panel.config.memory_budget == 0.2


def test_stop_ends_the_search_and_moves_nothing(panel, search):
    begin(panel, search)
    assert panel._told.job["running"]
    press(panel, "stop")
    until(lambda: "the search was stopped before anything was found" in status(panel))
    assert panel.config == StepConfig(batch_size=8)
    until(lambda: not panel._told.job["running"])
    search.go.set()
    searched(panel)  # and it can be pressed again
    assert panel.config.accumulation_steps == 2


def test_the_first_that_fits_is_shown_at_once_and_replaced_by_faster_ones(panel, search):
    before = panel._told.asked
    search.first = [{"memory_budget": 0.2}, {"memory_budget": 0.7}]
    begin(panel, search)
    asked = []
    for budget in (0.2, 0.7):
        search.early.release()
        until(lambda budget=budget: listed(panel) == [f"budget {budget}"])
        assert panel.config.memory_budget == budget
        asked.append(panel._told.asked)
        assert panel._told.job["running"]
        for words in (f"moved to budget {budget}", "5.00 MiB", "still looking for a faster one"):
            assert words in status(panel)
        assert "still looking for a faster one" in pane(panel)["answer"]
        (row,) = pane(panel)["rows"]
        assert (row["isHere"], pane(panel)["isPast"]) == (True, False)
        settled(panel)
        assert panel.prediction.peak_reserved_bytes == 5 * MIB, "as the search has predicted it"
    search.go.set()
    until(lambda: is_idle(panel))
    assert panel.config.precision == "bf16-mixed"
    assert "still looking" not in status(panel) + pane(panel)["answer"]
    assert len(pane(panel)["rows"]) == 2
    (by,) = {now["by"] for now in (*asked, panel._told.asked)}
    assert by.startswith("search ")
    move(panel, **before["fields"])  # which is how the page undoes all of it
    search.first = []
    searched(panel)
    assert panel._told.asked["by"] not in (by, before["by"])


def test_stop_keeps_the_best_so_far_and_says_that_it_is(panel, search):
    search.first = [{"memory_budget": 0.2}]
    search.early.release()
    begin(panel, search)
    until(lambda: listed(panel) == ["budget 0.2"])
    press(panel, "stop")
    until(lambda: is_idle(panel))
    assert "the best so far is on screen" in status(panel)
    assert panel.config == StepConfig(batch_size=8, memory_budget=0.2)
    assert "best so far" in pane(panel)["answer"]
    assert listed(panel) == ["budget 0.2"]


def test_a_hand_that_moves_during_a_search_is_left_alone(panel, search):
    search.first = [{"memory_budget": 0.2}, {"memory_budget": 0.7}]
    search.early.release()
    begin(panel, search)
    until(lambda: listed(panel) == ["budget 0.2"])
    move(panel, memory_budget=1.0)
    search.early.release()
    until(lambda: listed(panel) == ["budget 0.7"])
    assert (panel.config.memory_budget, pane(panel)["rows"][0]["isHere"]) == (1.0, False)
    press(panel, "stop")
    until(lambda: is_idle(panel))
    assert panel.config == StepConfig(batch_size=8)
    assert "the best so far is listed below the sliders" in status(panel)
    press(panel, "use", pane="fit", at=0)
    assert panel.config.memory_budget == 0.7


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"memory_limit": "banana"}, "banana"), ({"batch_size": "x"}, "batch_size"),
     ({"device": "nothing"}, "nothing")],
    ids=str,
)  # fmt: skip
def test_wrong_settings_are_not_searched_but_said(panel, search, wrong, words):
    searched(panel)
    press(panel, "fit", move=9, fields=wrong)
    until(lambda: is_idle(panel))
    assert len(search.asked) == 1
    assert words in status(panel)
    assert status(panel) == pane(panel)["answer"]
    assert pane(panel)["rows"] == []
    if "memory_limit" in wrong:
        assert status(panel) == line(panel, "about")["text"], "the sentence of the box"


def test_a_search_and_a_run_take_turns(panel, search):
    begin(panel, search)
    press(panel, "fit")
    assert "press Fit for me again once it has ended" in status(panel)
    assert len(search.asked) == 1
    panel.set(device="cpu")
    with pytest.raises(MemlabError, match="a run, a search or a comparison of"):
        panel.run()


@pytest.mark.parametrize("error", [MemlabError("it cannot be built"), ValueError("a bug")])
def test_an_error_is_said_and_the_panel_goes_on(panel, search, error):
    search.error = error
    searched(panel)
    assert str(error) in status(panel)
    assert str(error) in pane(panel)["answer"]
    search.error = None
    searched(panel)
    assert panel.config.accumulation_steps == 2


def test_a_panel_that_is_closed_ends_its_search(panel, search):
    begin(panel, search)
    panel.close()
    until(lambda: is_idle(panel))
    assert search.asked[0][2]["cancel"].is_set()


@pytest.mark.slow
def test_a_real_search_finds_what_the_plain_step_exceeds(nothing_ahead, monkeypatch):
    monkeypatch.setattr(runner, "PATIENCE", PATIENCE_SECONDS)  # on a busy machine too
    plain = memlab.predict(make_workload(), StepConfig(batch_size=64), "cpu")
    limit = int(0.7 * plain.peak_allocated_bytes)
    with closing(
        memlab.panel(
            make_workload(), device="cpu", memory_limit=limit, config=StepConfig(batch_size=64)
        )
    ) as panel:
        settled(panel)
        searched(panel)
        assert "moved to" in status(panel)
        found = memlab.predict(make_workload(), panel.config, "cpu", memory_limit=limit)
        assert found.fit == "fits"
        assert panel.config.batch_size == 64
        until(lambda: badge(panel)["kind"] == "good")
