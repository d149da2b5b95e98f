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
from tests.panel_parts import find, make_result, until

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


def is_offered(panel):
    return panel._view.base.toggle.layout.display == ""


def shown(panel):
    texts = []

    def read(widget):
        if getattr(widget.layout, "display", None) != "none":
            texts.append(str(getattr(widget, "value", "")))
            for child in getattr(widget, "children", ()):
                read(child)

    read(panel._view.base.box)
    return "\n".join(texts)


def uses(panel):
    return [row.button for row in panel._view.base._rows]


def open_pane(panel):
    panel._view.base.toggle.value = True
    until(lambda: "Not compared yet" not in shown(panel))
    until(lambda: panel._page.job is None)


def test_the_causes_and_the_changes_are_shown_and_a_click_sets_them(panel, monkeypatch):
    threads = []
    before = panel.config
    found = comparison(before)

    def answers(workload, config, device, **_):
        threads.append(threading.current_thread())
        assert (workload.name, config, device) == (TUNED.name, before, "rtx-4060")
        return found

    monkeypatch.setattr(runner, "compare_base", answers)
    assert panel._view.base.toggle.description == "what nf4 saves"
    open_pane(panel)
    assert threads[0] is not threading.main_thread()
    text = shown(panel)
    assert "The step takes more." in text
    assert ">-2.00 MiB<" in text
    assert ">+3.00 MiB<" in text
    assert "because" in text
    assert "<b>Prepare for kbit: no</b>: -1.00 MiB" in text
    assert "in 16 chunks" in text
    assert "no such kernel" in text
    assert [button.disabled for button in uses(panel)] == [False, False, True]
    assert (panel.config, panel.workload.name) == (before, TUNED.name)  # it moves nothing

    uses(panel)[1].click()
    assert panel.config == replace(before, loss_chunks=16)
    assert "of other settings than those on screen" in shown(panel)
    assert all(button.disabled for button in uses(panel))
    panel.set(loss_chunks=before.loss_chunks)
    assert "of other settings" not in shown(panel)
    uses(panel)[0].click()
    assert panel.workload.name == TUNED.chosen(prepare_for_kbit=False).name
    assert panel.config == before

    panel.set(choices={"base": "bf16"})
    assert is_offered(panel)  # so that it can be closed
    panel._view.base.toggle.value = False
    assert not is_offered(panel)


@pytest.mark.parametrize("error", [MemlabError("it cannot be predicted"), ValueError("a bug")])
def test_a_failure_is_a_sentence_and_can_be_asked_again(panel, monkeypatch, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(runner, "compare_base", fails)
    open_pane(panel)
    assert str(error) in shown(panel)
    until(lambda: str(error) in find(panel, "memlab-status").value)
    assert not panel._view.base._compare.disabled
    assert not panel._view._run_button.disabled


def test_stop_ends_a_comparison(panel, monkeypatch):
    begun = threading.Event()

    def waits(*_, cancel, **__):
        begun.set()
        until(cancel.is_set)
        raise MemlabError("the comparison of two bases ended: stopped")

    monkeypatch.setattr(runner, "compare_base", waits)
    panel._view.base.toggle.value = True
    until(begun.is_set)
    assert "Comparing; Stop ends it." in shown(panel)
    panel._view._stop_button.click()
    until(lambda: panel._page.job is None)
    assert "the comparison was stopped" in shown(panel)


def test_a_base_that_is_not_quantized_has_nothing_to_be_compared(panel):
    assert is_offered(panel)
    panel.set(choices={"base": "bf16", "prepare_for_kbit": False})
    assert not is_offered(panel)
    panel.set(workload="gpt-small")
    assert not is_offered(panel)
