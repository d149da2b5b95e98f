"""The panel without a browser: what code may ask of it, and its threads."""

import sys
import threading
import types
from contextlib import closing

import ipywidgets
import pytest
import torch

import memlab
from memlab import MemlabError, Outcome, StepConfig, Workload
from memlab._panel import asked, job, page
from memlab._panel.saved_page import EMPTY
from memlab.running import Progress
from memlab.runtime import isolation
from tests.panel_parts import (
    PATIENCE_SECONDS,
    badge,
    fields,
    is_idle,
    line,
    make_result,
    make_workload,
    move,
    opened,
    press,
    row,
    status,
    until,
    use,
)


@pytest.fixture
def panel(nothing_ahead):
    with opened() as made:
        yield made


@pytest.mark.parametrize(
    "config",
    [
        StepConfig(batch_size=24, accumulation_steps=5, checkpointing="blocks", compile=True),
        StepConfig(
            memory_budget=0.4, budget_engine="compile", budget_solver="greedy", optimizer="sgd",
            optimizer_implementation="fused",
        ),
        StepConfig(
            precision="bf16-master", optimizer="adafactor", optimizer_in_backward=True,
            channels_last=True, init_on_meta=True,
        ),
        StepConfig(sharding="ddp", world_size=6, batch_size=12, tensor_parallel_size=2),
        StepConfig(sharding="hybrid", world_size=4, shard_group_size=2),
        StepConfig(sharding="zero2", world_size=2, sync_each_micro_batch=False),
    ],
    ids=str,
)  # fmt: skip
def test_a_config_survives_the_way_through_the_controls(config):
    with opened(config=config) as made:
        assert made.config == config


def test_every_choice_shows_what_is_set_none_too(panel):
    choices = {
        control["field"]: {choice["value"]: choice["label"] for choice in control["choices"]}
        for control in panel._told.catalog["controls"]
        if control["kind"] == "choice"
    }
    for norm, label in ((1.0, "1"), (None, "no clipping")):
        panel.set(max_grad_norm=norm)
        assert choices["max_grad_norm"][fields(panel)["max_grad_norm"]] == label
    assert [name for name in choices if fields(panel)[name] not in choices[name]] == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"compile": True, "compile_mode": "max-autotune"}, "compile_mode='max-autotune' has no"),
        (
            {"checkpointing": "blocks", "checkpoint_policy": "aten.mm"},
            "checkpoint_policy='aten.mm' has no control.*'keep-matmuls'",
        ),
    ],
)
def test_a_setting_without_a_control_is_refused_with_what_there_is(fields, said):
    with pytest.raises(MemlabError, match=said):
        memlab.panel(make_workload(), config=StepConfig(**fields))


@pytest.mark.slow
def test_a_name_can_be_given_and_taken_back(panel):
    panel.run(batch_size=2)
    panel.run(batch_size=4)

    def shown():
        told = panel._told.runs["rows"][0]
        return told["isPinned"], told["name"], told["label"], row(panel, 0)["#"]

    for name, expected in (
        ("", (True, "", "run 1", "1")),
        ("the ", (True, "the ", "the ", "1 the ")),
        ("the plain one", (True, "the plain one", "the plain one", "1 the plain one")),
        (None, (False, "", "run 1", "1")),
    ):
        press(panel, "pin", run=1, name=name)
        assert shown() == expected


# the panel by code


def test_run_measures_what_is_set_and_gives_the_same_numbers_everywhere(panel):
    result = panel.run(batch_size=8, accumulation_steps=2, memory_limit="1 GiB")
    assert result.outcome is Outcome.OK
    assert result.config == panel.config == StepConfig(batch_size=8, accumulation_steps=2)
    assert panel.result is result
    assert result.fits is True
    assert list(panel.results["peak_allocated_bytes"]) == [result.peak_allocated_bytes]
    (told,) = panel._told.runs["rows"]
    assert (told["number"], told["peakBytes"]) == (1, result.peak_allocated_bytes)
    assert panel._told.answer["run"] == 1


def test_check_gradients_fills_the_badge(panel):
    panel.run(batch_size=4, check_gradients=True)
    assert panel._log.last.report.ok
    assert row(panel)["gradients"] == "same"


def test_out_of_memory_is_a_result_with_a_sentence(panel):
    result = panel.run(batch_size=8, memory_limit="2 KiB")
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert "out of memory in" in status(panel)
    assert "does not fit" in badge(panel)["text"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batch": 3}, "no control 'batch'"),
        ({"batch_size": 0}, "batch_size=0 is below 1"),
        ({"precision": "fp12"}, "precision='fp12' is unknown"),
        ({"memory_limit": "abc"}, "memory_limit='abc' is not a size"),
        ({"workload": "nothing"}, "workload='nothing' is not in the panel"),
        ({"device": "cuda:77"}, "is not in this machine"),
        ({"check_gradients": 3}, "check_gradients=3"),
        ({"batch_size": 4, "accumulation_steps": 8}, "accumulation_steps=8 is more than"),
    ],
)
def test_set_refuses_what_cannot_be_and_changes_nothing(panel, fields, said):
    before = panel.config
    with pytest.raises(MemlabError, match=said):
        panel.set(**fields)
    assert panel.config == before


def test_a_panel_needs_a_workload():
    with pytest.raises(MemlabError, match="is not a Workload"):
        memlab.panel(3)


@pytest.mark.slow
def test_the_code_measures_what_is_on_screen(panel):
    panel.set(batch_size=8, accumulation_steps=2, optimizer="sgd", memory_limit="1 GiB")
    names = {"workload": panel.workload}
    exec(panel.code(), names)
    assert names["result"].config == panel.config
    assert names["result"].memory_limit_bytes == 2**30


def test_the_code_says_how_to_reach_a_panel_and_a_workload_that_no_variable_holds():
    mine, panel = make_workload(), object()

    def shown(**namespace):
        found = asked.parts("", mine, StepConfig(), "cpu", "", panel, namespace)
        return {heading.split()[0]: code for heading, code in found}

    named = shown(_=mine, a=panel, w=mine)
    assert named["All"] == "a.results"
    assert named["This"].startswith("memlab.panel(w, ")
    assert shown(Out={3: 1, 7: panel})["All"] == "Out[7].results"

    lines = shown(Out=3)["All"].splitlines()
    assert "no variable holds this panel" in lines[0]
    assert lines[-1] == "panel.results"
    comment, line = shown()["This"].splitlines()
    assert comment.startswith("# put the workload")
    assert line.startswith("memlab.panel(workload, ")


@pytest.mark.slow
def test_the_saved_notebook_shows_a_picture_beside_the_widget(monkeypatch, nothing_ahead):
    monkeypatch.setattr(page.Page, "_look_up", lambda *_: None)  # nothing is predicted
    evil = '<img src=x onerror="x">'
    with closing(memlab.panel(make_workload(evil), device="cpu")) as panel:
        assert EMPTY in panel._repr_mimebundle_()["text/html"]
        panel.run(batch_size=4)
        bundle = panel._repr_mimebundle_()
        assert "application/vnd.jupyter.widget-view+json" in bundle
        for part in (
            "data:image/png;base64,iVBOR",
            "<table",
            "&lt;img",
            ", on cpu: budget 1, batch 4",
        ):
            assert part in bundle["text/html"]
        assert evil not in bundle["text/html"]


def test_on_colab_the_switch_for_widgets_of_others_is_set(monkeypatch, nothing_ahead):
    set_to = []
    output = types.ModuleType("google.colab.output")
    output.enable_custom_widget_manager = lambda: set_to.append(True)
    monkeypatch.setitem(sys.modules, "google.colab.output", output)
    with opened():
        assert set_to == [True]  # by anywidget, once


@pytest.mark.slow
def test_a_closed_panel_leaves_no_widget_of_its_own_and_keeps_its_results():
    memlab.panel(make_workload(), device="cpu").close()  # the first one leaves one, for all later
    before = len(ipywidgets.widgets.widget._instances)
    made = memlab.panel(make_workload(), device="cpu")
    made.run(batch_size=2)
    made.run(batch_size=4)
    made.close()
    assert len(ipywidgets.widgets.widget._instances) == before >= 1
    assert len(made.results) == 2
    with pytest.raises(MemlabError, match=r"closed; make a new one with memlab\.panel"):
        made.run()
    assert list(made._repr_mimebundle_()) == ["text/plain", "text/html"]


def test_run_while_a_run_goes_on_is_refused_and_pressing_run_twice_runs_once(panel, monkeypatch):
    go, started = threading.Event(), []

    def slow(*_, **__):
        started.append(1)
        go.wait(PATIENCE_SECONDS)
        return make_result()

    monkeypatch.setattr(job, "measure", slow)
    for _ in range(2):
        press(panel, "run")
    assert "is going on; press Run again" in status(panel)
    with pytest.raises(MemlabError, match="going on"):
        panel.run()
    go.set()
    until(lambda: is_idle(panel))
    assert started == [1]
    assert len(panel.results) == 1


def test_an_interrupted_cell_says_so_and_only_it_can_be_stopped(panel, monkeypatch):
    during = []

    def interrupted(*_, on_progress, **__):
        on_progress(Progress(text="metering", fraction=0.5))
        during.append(panel._told.job)
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        panel.run()
    (told,) = during
    assert (told["running"], told["fraction"]) == (True, 0.5)
    assert "interrupt the kernel" in told["byCell"]
    assert "interrupt the kernel" in told["text"]
    assert "interrupted" in status(panel)
    assert (panel._told.job["running"], panel._told.job["fraction"]) == (False, 0.0)


@pytest.mark.slow
def test_stop_in_a_step_ends_the_run_and_a_new_worker_runs_the_next(panel):
    with closing(memlab.panel(make_workload(seconds_per_loss=60), device="cpu")) as slow:
        press(slow, "run")
        until(lambda: "measuring memory" in slow._told.job["text"])
        former = isolation.measuring.worker
        press(slow, "stop")
        until(lambda: is_idle(slow))
        assert slow.result.outcome is Outcome.CANCELLED
    assert isolation.measuring.worker is not former
    assert isolation.measuring.worker.process.poll() is None
    assert panel.run(batch_size=2).outcome is Outcome.OK


def test_a_wrong_limit_is_not_called_none(panel):
    move(panel, memory_limit="abc")
    assert "fits" not in badge(panel)["text"]
    assert "is not a size" in line(panel, "about")["text"]
    move(panel, memory_limit="200")
    use(panel, "about")
    assert fields(panel)["memory_limit"] == "200 MiB"


def test_advice_is_a_click(panel):
    panel.run(batch_size=256, accumulation_steps=8)
    panel.run(accumulation_steps=1, memory_limit=panel.result.peak_allocated_bytes)
    assert "accumulation 8 fits" in line(panel, "advice")["text"]
    use(panel, "advice")
    assert panel.config.accumulation_steps == 8
    assert "fits" not in line(panel, "advice")["text"]


def test_the_folded_controls_say_their_choices_on_their_button(panel):
    panel.set(optimizer="sgd", compile=True)
    assert panel._told.form["moreLabel"] == "More options (SGD, compiled)"


def test_a_fault_in_a_callback_becomes_a_sentence(panel, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("the reason")

    monkeypatch.setattr(job, "measure", broken)
    press(panel, "run")
    until(lambda: is_idle(panel))
    assert "RuntimeError: the reason" in status(panel)
    with pytest.raises(RuntimeError, match="the reason"):
        panel.run()


@pytest.mark.slow
def test_a_workload_that_cannot_be_built_says_so_in_the_panel():
    def broken():
        raise KeyError("no such layer")

    workload = Workload(
        name="broken",
        build_model=broken,
        make_batch=lambda n: torch.ones(n, 1),
        compute_loss=lambda model, batch: model(batch).mean(),
    )
    with closing(memlab.panel(workload, device="cpu")) as made:
        assert made._page._find_facts.wait(PATIENCE_SECONDS)
        assert "no such layer" in made._told.answer["failure"]["sentence"]
        assert "cannot be built" in line(made, "about")["text"]
        assert made.run().outcome is Outcome.FAILED
