"""The slider of the sample size: another sequence length is another workload, everywhere."""

import dataclasses
import threading
import time
from contextlib import closing

import pytest
import torch
from torch import nn

import memlab
from memlab import MemlabError, Outcome, SampleSize, StepConfig, Workload, workloads
from memlab._panel import asked as cells
from memlab._panel import choices, questions
from memlab.prediction.predict import Prediction
from tests.forecast_parts import predicted
from tests.panel_parts import (
    PATIENCE_SECONDS,
    fields,
    line,
    make_workload,
    move,
    press,
    rested,
    row,
    status,
    until,
    use,
)


def fit_to(length=8):
    """A model over a text of so many numbers; more than 64 are too many."""
    if length > 64:
        raise MemlabError(f"length={length} is above 64, the most that the data has")
    size = SampleSize(
        name="length", unit="numbers", value=length, offered=(4, 8, 16, 32), make_workload=fit_to
    )
    return Workload(
        name="fit",
        build_model=lambda: nn.Linear(length, 4),
        make_batch=lambda n: torch.ones(n, length),
        compute_loss=lambda model, batch: model(batch).square().mean(),
        sample_size=size,
    )


@pytest.mark.slow
def test_what_makes_other_sizes_is_not_sent_to_the_worker():
    lock = threading.Lock()

    def one_at_a_time(length):
        with lock:
            return fit_to(length)

    made = fit_to()
    size = dataclasses.replace(made.sample_size, make_workload=one_at_a_time)
    locked = dataclasses.replace(made, sample_size=size)
    step = memlab.StepConfig(batch_size=2)
    assert memlab.measure(locked, step, "cpu", repeats=1).outcome is Outcome.OK
    assert memlab.predict(locked, step, "cpu").outcome is Outcome.OK
    result = memlab.measure(locked.resized(16), step, "cpu", repeats=1)
    assert (result.outcome, result.workload_name) == (Outcome.OK, "fit, length 16")


@pytest.fixture
def panel(nothing_ahead):
    with closing(memlab.panel(fit_to(), device="cpu")) as made:
        yield made


def said(panel):
    return line(panel, "size")["text"]


def shown(panel):
    """Return what is offered, and which size is set of which workload."""
    size = panel._told.form["size"]
    return size and size["label"], fields(panel)["sample_size"], panel.workload.name


@pytest.mark.slow
def test_a_size_that_is_set_is_what_runs_and_what_is_predicted(panel):
    panel.set(sample_size=16, batch_size=4, accumulation_steps=2)
    assert panel.workload.name == panel._asked.question.workload_name == "fit, length 16"
    assert "2 samples of 16 numbers: 32 numbers in each micro-batch" in said(panel)
    result = panel.run()
    assert (result.outcome, result.workload_name) == (Outcome.OK, "fit, length 16")
    assert row(panel)["workload"] == "fit, length 16"
    until(lambda: "fit, length 16: 68 parameters" in line(panel, "about")["text"])
    until(lambda: panel._log.last.prediction is not None)
    assert panel._log.last.prediction.peak_allocated_bytes == result.peak_allocated_bytes

    panel.set(sample_size=None)
    assert panel.workload.name == "fit"
    assert "run 1, fit, length 16, batch 4" in status(panel)


@pytest.mark.slow
def test_no_control_changes_while_a_new_size_is_looked_at(panel):
    until(lambda: "fit: 36 parameters" in line(panel, "about")["text"])
    form = panel._told.form
    assert {"value": "as-built", "label": "fp32"} in form["precisions"]
    panel._page._find_facts.close()
    panel.set(sample_size=16)
    assert "fit, length 16: looking at the model" in line(panel, "about")["text"]
    assert panel._told.form == form


def test_sizes_are_offered_and_any_other_can_be_typed(panel):
    assert panel._told.form["size"] == {"label": "Length", "offered": [4, 8, 16, 32]}
    move(panel, sample_size=16)
    assert panel.workload.name == "fit, length 16"
    move(panel, sample_size="20")
    assert shown(panel) == ("Length", 20, "fit, length 20")
    move(panel, sample_size=8)
    assert panel.workload is panel._asked.given


@pytest.mark.slow
def test_a_size_that_takes_long_to_make_holds_nothing_up(monkeypatch):
    may = threading.Event()

    def slow(length):
        if length == 16:
            may.wait(PATIENCE_SECONDS)
        made = fit_to(length)
        size = dataclasses.replace(made.sample_size, make_workload=slow)
        return dataclasses.replace(made, sample_size=size)

    panel = memlab.panel(slow(8), device="cpu", config=StepConfig(batch_size=2))
    try:
        move(panel, sample_size=16)
        assert "making the workload with length 16" in said(panel)
        assert panel._told.answer["note"] == "making the workload"
        assert (panel._told.answer["ready"], panel._told.answer["family"]) == (False, None)
        press(panel, "open", panes=["code"])
        assert panel._told.panes["code"] == []
        move(panel, batch_size=4)
        press(panel, "run")  # as Enter does
        assert "press Run again once it is made" in status(panel)

        may.set()
        until(lambda: panel._told.answer["ready"] and panel._told.panes["code"])
        press(panel, "run")
        until(lambda: panel.result is not None)
        assert (panel.result.workload_name, panel.result.config.batch_size) == (
            "fit, length 16",
            4,
        )
        assert "4 samples of 16 numbers" in said(panel)
    finally:
        may.set()
        panel.close()


def test_a_drag_over_the_sizes_with_the_code_open_ends(panel):
    press(panel, "open", panes=["code"])
    for position in [0, 1, 2, 3, 2, 1, 0, 3] * 5:
        move(panel, sample_size=4 * 2**position)
        time.sleep(0.003 * position)  # so that looks and makers meet at all moments
    until(lambda: panel._told.answer["ready"])
    assert panel._told.answer["workload"] == "fit, length 32"
    rested(panel)


def test_another_workload_shows_its_own_size_or_no_slider(panel):
    assert shown(panel) == ("Length", 8, "fit")
    panel.set(sample_size=16)
    move(panel, workload="vit-digits")
    assert shown(panel) == ("Image size", 32, "vit-digits")
    assert "8 samples of 32 x 32 pixels: 8,192 pixels" in said(panel)
    move(panel, workload="vnet-digits")
    assert shown(panel) == (None, None, "vnet-digits")
    move(panel, workload="fit")
    assert shown(panel) == ("Length", 8, "fit")
    panel.set(workload="gpt-small", sample_size=256)
    assert shown(panel)[1:] == (256, "gpt-small, sequence length 256")
    move(panel, workload="gpt2-medium", sample_size=128)
    assert shown(panel)[1] == 128


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"sample_size": 0}, "sample_size=0 is below 1"),
        ({"sample_size": [8]}, r"sample_size=\[8\] is not a whole number"),
        ({"sample_size": 65}, "length=65 is above 64"),
        ({"workload": "vit-digits", "sample_size": 33}, "image_size=33 is not a multiple of 4"),
        ({"workload": "vnet", "sample_size": 64}, "vnet has samples of one size only"),
    ],
)
def test_a_size_that_cannot_be_is_refused_and_changes_nothing(panel, asked, sentence):
    with pytest.raises(MemlabError, match=sentence):
        panel.set(batch_size=2, **asked)
    assert (panel.workload.name, panel.config.batch_size) == ("fit", 8)


def test_a_typed_size_that_cannot_be_is_explained_beside_it_with_a_remedy(panel):
    for typed, sentence in (("65", "length=65 is above 64"), ("a", "length='a' is not a whole")):
        move(panel, sample_size=typed)
        until(lambda sentence=sentence: sentence in said(panel))
        assert not panel._told.answer["ready"]
        until(lambda: "a setting is not valid" in panel._told.answer["note"])
        with pytest.raises(MemlabError, match=sentence):
            panel.run()
        use(panel, "size")
        assert shown(panel) == ("Length", 8, "fit")
        assert panel._told.answer["ready"]


@pytest.mark.slow
def test_the_code_makes_the_size_on_screen(panel, monkeypatch):
    panel.set(sample_size=16)
    assert "put the workload here" in panel.code()
    names = {"memlab": memlab, "mine": panel._asked.given}
    monkeypatch.setattr(cells, "namespace", lambda: names)
    assert "memlab.measure(mine.resized(16), config, device='cpu')" in panel.code()
    exec(panel.code(), names)
    assert names["result"].workload_name == "fit, length 16"
    assert "memlab.panel(mine.resized(16), device=" in dict(panel._asked.code())["This panel again"]

    panel.set(workload="gpt-small", sample_size=256)
    made = "memlab.workloads.get('gpt-small', sequence_length=256)"
    assert f"workload = {made}\n" in panel.code()
    assert f"memlab.panel({made}, device=" in dict(panel._asked.code())["This panel again"]
    assert choices.zoo_options(panel.workload) == {"sequence_length": 256}


def test_a_panel_of_a_resized_workload_leaves_out_the_same_of_the_zoo():
    resized = workloads.get("gpt-small", num_layers=1).resized(256)
    offered = choices.offered_workloads(resized)
    assert next(iter(offered)) == resized.name
    assert "gpt-small" not in offered
    assert list(choices.offered_workloads(fit_to()))[1:] == workloads.names()


@pytest.mark.slow
def test_the_sizes_beside_the_one_on_screen_are_predicted_ahead(monkeypatch):
    asked = []

    def stand_in(workload, config, device, *, on_progress, cancel):
        asked.append((workload.name, len(workload.make_batch(1)[0])))
        result = predicted(config=config, workload_name=workload.name, device=device)
        return Prediction(result=result, size_model=None)

    monkeypatch.setattr(questions, "predict_with_size_model", stand_in)
    with closing(memlab.panel(fit_to(), device="cpu", config=StepConfig(batch_size=2))):
        near = ["fit, length 4", "fit, length 16", "fit, length 32"]
        until(lambda: {name for name, _ in asked} == {"fit", *near})
        assert asked[0] == ("fit", 8)
        assert {name: length for name, length in asked if name != "fit"} == dict(
            zip(near, (4, 16, 32), strict=True)
        )


# what comes back after a restart


@pytest.fixture
def cell(tmp_path, monkeypatch):
    """Let panels be those of one cell, with a cache of their own."""
    monkeypatch.setenv("MEMLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cells, "place", lambda: "notebook.ipynb one 0")


def shown_size(given, **settings):
    """Show a panel in the cell, set it, close it as a restart does; return the size at first."""
    with closing(memlab.panel(given, device="cpu")) as panel:
        at_first = panel._asked.workload.sample_size
        panel.set(**settings)
        rested(panel)
        return at_first and at_first.value


def test_the_size_comes_back_unless_the_code_has_another_one_now(cell):
    assert shown_size(fit_to(), sample_size=16) == 8
    assert shown_size(fit_to()) == 16
    assert shown_size(fit_to(32)) == 32
    assert shown_size(fit_to(), sample_size=4) == 8
    assert shown_size(make_workload()) is None
    assert shown_size(None, workload="vit-digits", sample_size=64) == 128
    assert shown_size(None) == 64
    assert shown_size(dataclasses.replace(fit_to(), name="another")) == 8


def test_a_size_that_the_edited_code_refuses_leaves_the_other_settings_as_they_were(cell):
    assert shown_size(fit_to(), sample_size=32, batch_size=4, device="t4", memory_limit="1GiB") == 8

    def at_most_16(length=8):
        if length > 16:
            raise ValueError("too long")
        made = fit_to(length)
        size = dataclasses.replace(made.sample_size, make_workload=at_most_16)
        return dataclasses.replace(made, sample_size=size)

    with closing(memlab.panel(at_most_16())) as panel:
        assert panel._asked.settings["sample_size"] is None
        assert (panel.config.batch_size, panel._asked.device) == (4, "t4")
        assert panel._asked.typed_limit == 2**30
