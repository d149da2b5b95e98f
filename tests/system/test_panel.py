"""The panel without a browser: what code may ask of it, and its threads."""

import json
import threading
from contextlib import closing

import ipywidgets
import pytest
import torch

import memlab
from memlab import MemlabError, Outcome, StepConfig, Workload
from memlab._panel import asked, job
from memlab.running import Progress
from memlab.runtime import isolation
from tests.panel_parts import PATIENCE_SECONDS, find, make_result, make_workload, opened, until


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
    def choices(widget):
        if isinstance(widget, ipywidgets.Dropdown):
            yield widget
        for child in getattr(widget, "children", ()):
            yield from choices(child)

    found = {choice.description: choice for choice in choices(panel._view._root)}
    for norm, label in ((1.0, "1"), (None, "no clipping")):
        panel.set(max_grad_norm=norm)
        assert found["Clip gradients at"].label == label
    assert [name for name, choice in found.items() if choice.index is None] == []


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


def test_a_name_can_be_given_and_taken_back(panel):
    panel.run(batch_size=2)
    panel.run(batch_size=4)
    table = panel._view.table
    table._toggles[1][0].value = True
    assert (table.name.value, table.name.placeholder) == ("", "run 1")
    table.name.value = "the "
    assert table.name.value == "the "
    table.name.value = "the plain one"
    assert '<td class="memlab-long" title="1 the plain one">' in table._table.value
    table.name.value = ""
    assert panel._log.runs[0].name == "run 1"
    assert "plain" not in table._table.value


# the panel by code


def test_run_measures_what_is_set_and_gives_the_same_numbers_everywhere(panel):
    result = panel.run(batch_size=8, accumulation_steps=2, memory_limit="1 GiB")
    assert result.outcome is Outcome.OK
    assert result.config == panel.config == StepConfig(batch_size=8, accumulation_steps=2)
    assert panel.result is result
    assert result.fits is True
    assert list(panel.results["peak_allocated_bytes"]) == [result.peak_allocated_bytes]
    shown = json.loads(
        find(panel, "memlab-json").value.split(">")[1].split("<")[0].replace("&quot;", '"')
    )
    assert shown["peak_allocated_bytes"] == result.peak_allocated_bytes
    assert shown["run"] == 1


def test_check_gradients_fills_the_badge(panel):
    panel.run(batch_size=4, check_gradients=True)
    assert panel._log.last.report.ok
    assert "same" in find(panel, "memlab-table").value


def test_out_of_memory_is_a_result_with_a_sentence(panel):
    result = panel.run(batch_size=8, memory_limit="2 KiB")
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert "out of memory in" in find(panel, "memlab-status").value
    assert "does not fit" in find(panel, "memlab-fit").value


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
        memlab.panel("gpt-small")


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


def test_the_saved_notebook_shows_a_picture_beside_the_widgets(panel):
    empty = panel._repr_mimebundle_()
    assert "image/png" not in empty
    assert "no run yet" in empty["text/html"]
    panel.run(batch_size=4)
    bundle = panel._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["image/png"].startswith("iVBOR")
    assert "<table" in bundle["text/html"]
    assert bundle["image/png"] in bundle["text/html"]


def test_a_closed_panel_leaves_no_widget_of_its_own_and_keeps_its_results():
    memlab.panel(make_workload(), device="cpu").close()  # the first one leaves one, for all later
    before = len(ipywidgets.widgets.widget._instances)
    made = memlab.panel(make_workload(), device="cpu")
    made.run(batch_size=2)
    made.run(batch_size=4)
    made._page._draw.wait(PATIENCE_SECONDS)
    made.close()
    assert len(ipywidgets.widgets.widget._instances) == before >= 1
    assert len(made.results) == 2
    with pytest.raises(MemlabError, match=r"closed; make a new one with memlab\.panel"):
        made.run()
    assert "image/png" in made._repr_mimebundle_()


def test_run_while_a_run_goes_on_is_refused_and_pressing_run_twice_runs_once(panel, monkeypatch):
    go, started = threading.Event(), []

    def slow(*_, **__):
        started.append(1)
        go.wait(PATIENCE_SECONDS)
        return make_result()

    monkeypatch.setattr(job, "measure", slow)
    monkeypatch.setattr(job, "SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(job, "LONGEST_SECONDS", 0.0)
    for _ in range(2):
        panel._run_pressed(typed=False)
    assert "is going on; press Run again" in find(panel, "memlab-status").value
    with pytest.raises(MemlabError, match="going on"):
        panel.run()
    go.set()
    until(lambda: panel._page.job is None)
    assert started == [1]
    assert len(panel.results) == 1


def test_enter_and_run_wait_for_what_was_typed_before_them(panel, monkeypatch):
    ran = []
    monkeypatch.setattr(job, "measure", lambda _, config, *__, **___: ran.append(config) or result)
    result = make_result()
    box = panel._view.controls.sliders["batch_size"].box
    for press in (
        lambda: box._handle_custom_msg({"event": "submit"}, []),
        panel._view._run_button.click,
    ):
        box.value = "1"
        press()
        box.value = "16"  # which the page had held back while the 1 was on its way
        until(lambda: ran and panel._page.job is None)
        assert [config.batch_size for config in ran] == [16]
        ran.clear()


def test_an_interrupted_cell_says_so_and_only_it_can_be_stopped(panel, monkeypatch):
    stop, during = panel._view._stop_button, []

    def interrupted(*_, on_progress, **__):
        on_progress(Progress(text="metering", fraction=0.5))
        during.append((stop.disabled, stop.tooltip, find(panel, "memlab-status").value))
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        panel.run()
    ((disabled, tooltip, said),) = during
    assert disabled
    assert "interrupt the kernel" in tooltip
    assert "interrupt the kernel" in said
    assert "interrupted" in find(panel, "memlab-status").value
    assert panel._view._progress.value == 0.0
    assert not panel._view._run_button.disabled


def test_stop_in_a_step_ends_the_run_and_a_new_worker_runs_the_next(panel):
    with closing(memlab.panel(make_workload(seconds_per_loss=60), device="cpu")) as slow:
        slow._run_pressed(typed=False)
        until(lambda: "measuring memory" in find(slow, "memlab-status").value)
        former = isolation.measuring.worker
        slow._stop_clicked()
        until(lambda: slow._page.job is None)
        assert slow.result.outcome is Outcome.CANCELLED
    assert isolation.measuring.worker is not former
    assert isolation.measuring.worker.process.poll() is None
    assert panel.run(batch_size=2).outcome is Outcome.OK


def test_a_wrong_limit_is_not_called_none(panel):
    panel._view.limit.value = "abc"
    assert "fits" not in find(panel, "memlab-fit").value
    panel._view.limit.value = "200"
    panel._view._about.button.click()
    assert panel._view.limit.value == "200 MiB"


def test_advice_is_a_click(panel):
    panel.run(batch_size=256, accumulation_steps=8)
    panel.run(accumulation_steps=1, memory_limit=panel.result.peak_allocated_bytes)
    assert "accumulation 8 fits" in panel._view._advice.text.value
    panel._view._advice.button.click()
    assert panel.config.accumulation_steps == 8
    assert "fits" not in panel._view._advice.text.value


def test_the_folded_controls_say_their_choices_on_their_button(panel):
    panel.set(optimizer="sgd", compile=True)
    assert panel._view._more_toggle.description == "More options (SGD, compiled)"


def test_a_fault_in_a_callback_becomes_a_sentence(panel, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("the reason")

    monkeypatch.setattr(job, "measure", broken)
    monkeypatch.setattr(job, "SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(job, "LONGEST_SECONDS", 0.0)
    panel._run_pressed(typed=False)
    until(lambda: panel._page.job is None)
    assert "RuntimeError: the reason" in find(panel, "memlab-status").value
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
        assert "no such layer" in find(made, "memlab-failure").value
        assert "cannot be built" in find(made, "memlab-about").value
        assert made.run().outcome is Outcome.FAILED
