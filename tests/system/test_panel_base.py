"""What a quantized base saves, in the panel: beside the base, off the kernel's thread, by click."""

import threading
from contextlib import closing
from dataclasses import replace

import pytest

import memlab
from memlab import MemlabError, Outcome, workloads
from memlab._panel import questions, runner
from memlab.prediction.predict import Prediction
from memlab.search.quantized_base import BaseComparison, BasePart, BaseRemedy
from tests.forecast_parts import MIB, predicted
from tests.panel_parts import is_idle, make_result, press, status, until

pytest.importorskip("peft", reason="needs memlab[finetune]")
pytest.importorskip("bitsandbytes", reason="needs memlab[finetune]")
TUNED = workloads.finetune("llama-tiny", rank=8, base="nf4", prepare_for_kbit=True, tokens=64)


def predict_at_once(workload, config, device, **_):
    result = predicted(MIB, config=config, device=device, workload_name=workload.name)
    return Prediction(result=result, size_model=None)


@pytest.fixture
def panel(monkeypatch, nothing_ahead):
    monkeypatch.setattr(questions, "predict_with_size_model", predict_at_once)
    with closing(memlab.panel(TUNED, device="rtx-4060")) as made:
        yield made


def comparison(config):
    """Return an answer with two causes, and changes of a choice, of a setting, and of no use."""
    own = make_result(config=config, workload_name=TUNED.name)

    def remedy(name, nbytes, workload=TUNED, **changes):
        failed = {"outcome": Outcome.UNSUPPORTED, "message": "no such kernel"}
        changed = make_result(config=replace(config, **changes), **({} if nbytes else failed))
        return BaseRemedy(name=name, workload=workload, result=changed, nbytes=nbytes)

    return BaseComparison(
        quantized=own, plain=own, message="the step takes more",
        parts=(BasePart(name="weights", nbytes=-2 * MIB),
               BasePart(name="others", nbytes=3 * MIB, why="because")),
        remedies=(remedy("uncast", -MIB, TUNED.chosen(prepare_for_kbit=False)),
                  remedy("chunks", -1, loss_chunks=16),
                  remedy("autocast", None, precision="bf16-mixed")),
    )  # fmt: skip


def pane(panel):
    return panel._told.panes["base"]


def open_pane(panel):
    press(panel, "open", panes=["base"])
    until(lambda: "base" in panel._told.panes)
    until(lambda: is_idle(panel))


def test_the_causes_and_the_changes_are_shown_and_a_click_sets_them(panel, monkeypatch):
    threads = []
    before = panel.config
    found = comparison(before)

    def answers(workload, config, device, **_):
        threads.append(threading.current_thread())
        assert (workload.name, config, device) == (TUNED.name, before, "rtx-4060")
        return found

    monkeypatch.setattr(runner, "compare_base", answers)
    assert panel._told.form["base"] == "nf4"
    open_pane(panel)
    assert threads[0] is not threading.main_thread()
    told = pane(panel)
    assert (told["answer"], told["isPast"]) == ("The step takes more.", False)
    assert told["causes"] == [["weights", "-2.00 MiB", ""], ["others", "+3.00 MiB", "because"]]
    assert [row["leads"] for row in told["rows"]] == [True, True, False]
    first, chunks, refused = told["rows"]
    assert first["name"] == "Prepare for kbit: no"
    assert first["effect"].startswith("-1.00 MiB")
    assert "in 16 chunks" in chunks["name"]
    assert "no such kernel" in refused["effect"]
    assert (panel.config, panel.workload.name) == (before, TUNED.name)  # it moves nothing

    press(panel, "use", pane="base", at=1)
    assert panel.config == replace(before, loss_chunks=16)
    assert (pane(panel)["isPast"], pane(panel)["canAsk"]) == (True, True)
    press(panel, "use", pane="base", at=0)  # a click that was on its way
    assert panel.config == replace(before, loss_chunks=16)
    panel.set(loss_chunks=before.loss_chunks)
    assert not pane(panel)["isPast"]
    press(panel, "use", pane="base", at=0)
    assert panel.workload.name == TUNED.chosen(prepare_for_kbit=False).name
    assert panel.config == before


@pytest.mark.parametrize("error", [MemlabError("it cannot be predicted"), ValueError("a bug")])
def test_a_failure_is_a_sentence_and_can_be_asked_again(panel, monkeypatch, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(runner, "compare_base", fails)
    open_pane(panel)
    assert str(error) in pane(panel)["answer"]
    until(lambda: str(error) in status(panel))
    assert pane(panel)["canAsk"]
    monkeypatch.setattr(runner, "compare_base", lambda _, config, *__, **___: comparison(config))
    press(panel, "compareBase")
    until(lambda: pane(panel)["answer"] == "The step takes more.")


def test_stop_ends_a_comparison(panel, monkeypatch):
    begun = threading.Event()

    def waits(*_, cancel, **__):
        begun.set()
        until(cancel.is_set)
        raise MemlabError("the comparison of two bases ended: stopped")

    monkeypatch.setattr(runner, "compare_base", waits)
    press(panel, "open", panes=["base"])
    until(begun.is_set)
    assert pane(panel)["answer"] == "Comparing; Stop ends it."
    press(panel, "stop")
    until(lambda: is_idle(panel))
    assert pane(panel)["answer"] == "the comparison was stopped"


def test_a_base_that_is_not_quantized_has_nothing_to_be_compared(panel):
    assert panel._told.form["base"] == "nf4"
    panel.set(choices={"base": "bf16", "prepare_for_kbit": False})
    assert panel._told.form["base"] is None
    press(panel, "open", panes=["base"])
    assert is_idle(panel)
    panel.set(workload="gpt-small")
    assert panel._told.form["base"] is None
