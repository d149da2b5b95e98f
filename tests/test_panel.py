"""The panel without a browser: its texts, its settings, its runs, and what code may ask of it."""

import json
import threading
import time

import ipywidgets
import numpy as np
import pytest
import torch
from torch import nn

import memlab
from memlab import MemlabError, Outcome, StepConfig, Workload, _isolation
from memlab._inspect import WorkloadFacts
from memlab._panel import advice, app, job, pictures, snapshot, state, texts, verdicts
from memlab._panel.runs import RunLog, table_html
from memlab._running import Progress
from memlab.result import Source, StepResult
from memlab.trace import CATEGORIES, Timeline


def make_workload(name="tiny"):
    return Workload(
        name=name,
        build_model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)),
        make_batch=lambda n: (torch.ones(n, 16), torch.ones(n, 1)),
        compute_loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    )


def make_result(outcome=Outcome.OK, peak=2**20, **changes):
    values = {
        "message": "a sentence",
        "source": Source.MEASURED,
        "device": "cpu",
        "config": StepConfig(),
        "workload_name": "tiny",
        "peak_allocated_bytes": peak,
        "step_seconds": 0.5,
    }
    return StepResult(outcome=outcome, **{**values, **changes})


def make_facts(**changes):
    facts = {
        "num_parameters": 1000,
        "parameter_bytes": 4000,
        "sample_bytes": 64,
        "random_modules": (),
        "sample_mixing_modules": (),
        "recurrent_modules": (),
        "blocks": ("h.0", "h.1"),
    }
    return WorkloadFacts(**{**facts, **changes})


def settings(**changes):
    return {**state.from_config(StepConfig()), **changes}


@pytest.fixture
def panel():
    made = memlab.panel(make_workload(), device="cpu")
    yield made
    made.close()


# settings


@pytest.mark.parametrize(
    "config",
    [
        StepConfig(batch_size=24, accumulation_steps=5, precision="bf16-mixed"),
        StepConfig(memory_budget=0.35, budget_engine="compile", optimizer="sgd"),
        StepConfig(checkpointing="blocks", compile=True),
    ],
    ids=str,
)
def test_a_config_survives_the_way_through_the_controls(config):
    made = memlab.panel(make_workload(), device="cpu", config=config)
    try:
        assert made.config == config
    finally:
        made.close()


def test_a_budget_below_one_is_planned_by_the_compile_engine():
    assert state.to_config(settings(memory_budget=0.5)).budget_engine == "compile"
    assert state.to_config(settings(memory_budget=1.0)).budget_engine == "eager"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("batch_size", 0, "batch_size=0 is below 1"),
        ("batch_size", "abc", "batch_size='abc' is no whole number"),
        ("memory_budget", 1.5, "memory_budget=1.5 is outside"),
        ("memory_budget", "", "memory_budget='' is no number"),
        ("accumulation_steps", -3, "accumulation_steps=-3 is below 1"),
    ],
)
def test_a_wrong_number_is_named_at_its_control_with_a_remedy(field, value, said):
    now = settings(**{field: value})
    wrong = state.problems(now)
    assert list(wrong) == [field]
    line = texts.lines(now, wrong, None, device="cpu", name="tiny", own_loss=False)[field]
    assert said in line.text
    label, remedy = line.remedy
    assert not state.problems({**now, **remedy})
    assert label == f"set to {remedy[field]:g}"


def test_accumulation_above_the_batch_offers_the_largest_power_of_two_within_it():
    now = settings(batch_size=12, accumulation_steps=32)
    lines = texts.lines(now, state.problems(now), None, device="cpu", name="t", own_loss=False)
    assert lines["accumulation_steps"].remedy == ("set to 8", {"accumulation_steps": 8})
    assert "12 samples" in lines["accumulation_steps"].text


def test_a_precision_without_a_control_is_refused_with_what_there_is():
    with pytest.raises(MemlabError, match=r"precision='tf32' has no control.*'bf16-mixed'"):
        memlab.panel(make_workload(), config=StepConfig(precision="tf32"))


# texts


def verdict(facts, **config):
    return verdicts.gradient_verdict(
        StepConfig(**{"batch_size": 32, "accumulation_steps": 4, **config}), facts, own_loss=False
    )


def test_the_gradient_is_unchanged_only_without_mixing_and_random_modules():
    assert verdict(make_facts()).kind == verdicts.GOOD
    assert verdict(None).text == "gradient: not known yet"
    mixing = verdict(make_facts(sample_mixing_modules=("layer1.0.bn1",)))
    assert mixing.text == "gradient differs: BatchNorm in layer1.0.bn1 sees 8 samples, not 32"
    drawing = verdict(make_facts(random_modules=("drop",)))
    assert "drop draws new random numbers in each micro-batch" in drawing.text
    undivided = verdict(make_facts(random_modules=("drop",)), accumulation_steps=1)
    assert undivided.text == "gradient: unchanged"


def test_a_budget_says_its_share_its_engine_and_what_it_cannot():
    half = settings(memory_budget=0.5)
    assert "50 %" in texts.budget_line(half, make_facts()).text
    assert "torch.compile's partitioner" in texts.budget_line(half, None).text
    recurrent = texts.budget_line(half, make_facts(recurrent_modules=("lstm",)))
    assert "cannot put lstm, a recurrent module, in one graph" in recurrent.text
    assert recurrent.remedy == ("set to 1", {"memory_budget": 1.0})
    drawing = texts.budget_line(half, make_facts(random_modules=("drop",)))
    assert "drop draws random numbers" in drawing.text
    assert "plain step" in texts.budget_line(settings(), make_facts(random_modules=("d",))).text


def test_uneven_micro_batches_are_counted():
    line = texts.accumulation_line(
        settings(batch_size=6, accumulation_steps=4), None, own_loss=False
    )
    assert line.text.startswith("2 micro-batches of 2 and 2 of 1")


@pytest.mark.parametrize(
    ("peak", "limit", "kind", "text"),
    [
        (2**20, 2**21, verdicts.GOOD, "fits: 1.00 MiB of 2.00 MiB (50 %)"),
        (2**21, 2**20, verdicts.BAD, "does not fit: 2.00 MiB of 1.00 MiB (200 %)"),
        (2**20, None, verdicts.OPEN, "no limit set; peak 1.00 MiB allocated"),
    ],
)
def test_fits_is_said_in_words(peak, limit, kind, text):
    found = verdicts.fit_verdict(make_result(peak=peak), limit)
    assert (found.kind, found.text) == (kind, text)


@pytest.mark.parametrize(
    ("ran_under", "text"),
    [(None, "does not fit this machine"), (2**20, "does not fit the limit of 1.00 MiB")],
)
def test_out_of_memory_without_a_peak_does_not_fit(ran_under, text):
    result = make_result(Outcome.OUT_OF_MEMORY, peak=None, memory_limit_bytes=ran_under)
    for on_screen in (None, 2**30):
        found = verdicts.fit_verdict(result, on_screen)
        assert (found.kind, found.text) == (verdicts.BAD, text)


def config(batch=16, steps=1, **changes):
    return StepConfig(batch_size=batch, accumulation_steps=steps, **changes)


def logged(*results):
    log = RunLog()
    for result in results:
        log.add(result)
    return log.runs


def test_what_does_not_fit_offers_the_nearest_measured_run_that_does():
    runs = logged(
        make_result(config=config(steps=8), peak=80 * 2**20),
        make_result(config=config(steps=4), peak=90 * 2**20),
        make_result(config=config(batch=8, optimizer="sgd"), peak=2**20),
        make_result(config=config(steps=2), peak=2**20, device="cuda:0"),
        make_result(config=config(steps=2), peak=150 * 2**20),
        make_result(config=config(), peak=160 * 2**20, memory_limit_bytes=2**20, fits=False),
    )
    line = advice.advice_line(runs[-1], runs, 100 * 2**20)
    assert line.text == "accumulation 4 fits: 90.0 MiB allocated, measured in run 2"
    assert line.remedy == ("use run 2", {"accumulation_steps": 4})
    assert advice.advice_line(runs[-1], runs, 200 * 2**20).text == ""
    machine = make_result(Outcome.OUT_OF_MEMORY, peak=None, config=config())
    runs = logged(*(run.result for run in runs[:-1]), machine)
    assert advice.advice_line(runs[-1], runs, None).text.startswith("accumulation 2 fits")


@pytest.mark.parametrize(
    ("now", "remedy"),
    [
        (config(16, 4), ("try accumulation 8", {"accumulation_steps": 8})),
        (config(12, 8), ("try accumulation 12", {"accumulation_steps": 12})),
        (config(16, 16), ("try batch 8", {"batch_size": 8, "accumulation_steps": 8})),
        (config(1, 1), None),
    ],
    ids=str,
)
def test_where_nothing_measured_fits_the_next_step_is_offered(now, remedy):
    (run,) = logged(make_result(Outcome.OUT_OF_MEMORY, config=now))
    line = advice.advice_line(run, [run], 2**10)
    assert line.remedy == remedy
    assert "_" not in line.text


def test_what_stands_before_the_first_forward_is_said_to_be_beyond_help():
    rows = np.array([[600 if str(c) == "parameters" else 10 for c in CATEGORIES]])
    zeros = np.zeros(1, np.int32)
    timeline = Timeline(
        bytes_by_category=rows, phase=zeros.astype(np.int8), micro_batch=zeros, operator=zeros
    )
    (run,) = logged(make_result(Outcome.OUT_OF_MEMORY, timeline=timeline))
    said = advice.advice_line(run, [run], 629).text
    assert said.startswith("a smaller model, optimizer or precision is needed")
    assert "630 B" in said
    assert advice.advice_line(run, [run], 630).remedy[0] == "try accumulation 2"


def test_the_heat_map_takes_only_runs_that_agree_in_all_but_its_axes():
    runs = logged(
        make_result(config=config(8, 1)),
        make_result(config=config(8, 2)),
        make_result(config=config(16, 1, precision="bf16")),
        make_result(config=config(16, 4)),
    )
    rows, columns, shown = pictures._on_axes(tuple(runs), runs[-1])
    assert {rows, columns} == {"batch_size", "accumulation_steps"}
    assert [run.number for run in shown] == [1, 2, 4]


@pytest.mark.parametrize("typed", ["200", "1.5", "1048575"])
def test_a_small_limit_without_a_unit_is_asked_about(typed):
    line = texts.about_line("tiny", make_facts(), None, typed)
    assert line.remedy == (f"did you mean {typed} MiB?", {"memory_limit": f"{typed} MiB"})
    for meant in ("200 KiB", "2000000", ""):
        assert texts.about_line("tiny", make_facts(), None, meant).remedy is None


def test_a_stale_picture_names_only_what_differs():
    result = make_result(config=StepConfig(batch_size=4))
    assert verdicts.stale_note(result, "tiny", "cpu", StepConfig(batch_size=4)) == ""
    note = verdicts.stale_note(result, "tiny", "cpu", StepConfig(batch_size=8))
    assert note == "last run: batch 4; press Run for what is set now"


def test_no_text_of_a_person_becomes_markup():
    evil = "<script>x</script>"
    assert evil not in table_html([RunLog().add(make_result(message=evil, workload_name=evil))])
    assert evil not in texts.Line(evil).html()
    run = RunLog().add(make_result(workload_name=evil, message=evil))
    assert evil not in snapshot.as_html([run], run, None)


# runs


def test_clear_keeps_pinned_runs_the_last_one_and_every_result():
    log = RunLog()
    for _ in range(4):
        log.add(make_result())
    log.pin(2, "good")
    log.clear()
    assert [run.number for run in log.visible] == [2, 4]
    assert log.comparison(log.last).number == 2
    assert len(log.runs) == 4


def test_a_pinned_run_stays_on_a_full_table():
    log = RunLog()
    log.add(make_result())
    log.pin(1, "first")
    for _ in range(40):
        log.add(make_result())
    assert [run.number for run in log.visible][:2] == [1, 12]


def test_unpinning_ends_the_comparison():
    log = RunLog()
    log.add(make_result())
    log.add(make_result())
    log.pin(1, "a")
    log.pin(1, "")
    assert log.comparison(log.last) is None


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


def test_columns_that_say_nothing_are_left_out():
    log = RunLog()
    log.add(make_result())
    assert "workload" not in table_html(log.visible)
    assert "reserved" not in table_html(log.visible)
    log.add(make_result(workload_name="other", peak_reserved_bytes=2**22))
    assert ">workload<" in table_html(log.visible)
    assert "4.00 MiB" in table_html(log.visible)


# the panel by code


def test_run_measures_what_is_set_and_gives_the_same_numbers_everywhere(panel):
    result = panel.run(batch_size=8, accumulation_steps=2, memory_limit="1 GiB")
    assert result.outcome is Outcome.OK
    assert result.config == panel.config == StepConfig(batch_size=8, accumulation_steps=2)
    assert panel.result is result
    assert result.fits is True
    assert list(panel.results["peak_allocated_bytes"]) == [result.peak_allocated_bytes]
    shown = json.loads(
        _find(panel, "memlab-json").value.split(">")[1].split("<")[0].replace("&quot;", '"')
    )
    assert shown["peak_allocated_bytes"] == result.peak_allocated_bytes
    assert shown["run"] == 1


def test_check_gradients_fills_the_badge(panel):
    panel.run(batch_size=4, check_gradients=True)
    assert panel._log.last.report.ok
    assert "same" in _find(panel, "memlab-table").value


def test_out_of_memory_is_a_result_with_a_sentence(panel):
    result = panel.run(batch_size=8, memory_limit="2 KiB")
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert "out of memory in" in _find(panel, "memlab-status").value
    assert "does not fit" in _find(panel, "memlab-fit").value


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batch": 3}, "no control 'batch'"),
        ({"batch_size": 0}, "batch_size=0 is below 1"),
        ({"precision": "fp12"}, "precision='fp12' is unknown"),
        ({"memory_limit": "abc"}, "memory_limit='abc' is no size"),
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
    with pytest.raises(MemlabError, match="is no Workload"):
        memlab.panel("gpt-small")


def test_the_code_measures_what_is_on_screen(panel):
    panel.set(batch_size=8, accumulation_steps=2, optimizer="sgd", memory_limit="1 GiB")
    names = {"workload": panel.workload}
    exec(panel.code(), names)
    assert names["result"].config == panel.config
    assert names["result"].memory_limit_bytes == 2**30


def test_the_code_names_the_zoo_and_the_options_of_it():
    own = memlab.workloads.get("gpt-small", hidden_size=64)
    source = state.source(own, StepConfig(), "cpu", "")
    assert "workload = memlab.workloads.get('gpt-small', hidden_size=64)" in source


def test_the_code_finds_the_name_of_a_persons_own_workload():
    mine = make_workload()
    source = state.source(mine, StepConfig(), "cpu", "", namespace={"_": mine, "mine": mine})
    assert "memlab.measure(mine, config, device='cpu')" in source


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


def test_a_closed_panel_leaves_no_widget_and_keeps_its_results():
    before = len(ipywidgets.widgets.widget._instances)
    made = memlab.panel(make_workload(), device="cpu")
    made.run(batch_size=2)
    made.run(batch_size=4)
    made._draw.wait(30)
    made.close()
    assert len(ipywidgets.widgets.widget._instances) == before
    assert len(made.results) == 2
    with pytest.raises(MemlabError, match=r"closed; make a new one with memlab\.panel"):
        made.run()
    assert "image/png" in made._repr_mimebundle_()


def test_run_while_a_run_goes_on_is_refused_and_pressing_run_twice_runs_once(panel, monkeypatch):
    go, started = threading.Event(), []

    def slow(*_, **__):
        started.append(1)
        go.wait(10)
        return make_result()

    monkeypatch.setattr(job, "measure", slow)
    panel._run_clicked()
    panel._run_clicked()
    with pytest.raises(MemlabError, match="going on"):
        panel.run()
    go.set()
    _until(lambda: panel._job is None)
    assert started == [1]
    assert len(panel.results) == 1


def test_an_interrupted_cell_says_so_and_only_it_can_be_stopped(panel, monkeypatch):
    stop, during = panel._view._stop_button, []

    def interrupted(*_, on_progress, **__):
        on_progress(Progress(text="metering", fraction=0.5))
        during.append((stop.disabled, stop.tooltip, _find(panel, "memlab-status").value))
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        panel.run()
    ((disabled, tooltip, said),) = during
    assert disabled
    assert "interrupt the kernel" in tooltip
    assert "interrupt the kernel" in said
    assert "interrupted" in _find(panel, "memlab-status").value
    assert panel._view._progress.value == 0.0
    assert not panel._view._run_button.disabled


def test_the_worker_is_there_again_after_a_stop(panel):
    panel.set(batch_size=64)
    panel._run_clicked()
    former = _isolation._worker
    time.sleep(0.05)
    panel._stop_clicked()
    _until(lambda: panel._job is None)
    assert _isolation._worker is not former
    assert _isolation._worker.process.poll() is None


def test_a_wrong_limit_is_not_called_none(panel):
    panel._view.limit.value = "abc"
    assert "no limit set" not in _find(panel, "memlab-fit").value
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
    assert panel._view._more_toggle.description == "more: no checkpointing, sgd, compiled"


def test_stop_ends_the_run_and_the_panel_runs_again(panel):
    panel.set(batch_size=64)
    panel._run_clicked()
    time.sleep(0.05)
    panel._stop_clicked()
    _until(lambda: panel._job is None)
    assert panel.result.outcome is Outcome.CANCELLED
    assert panel.run(batch_size=2).outcome is Outcome.OK


def test_a_fault_in_a_callback_becomes_a_sentence(panel, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("the reason")

    monkeypatch.setattr(job, "measure", broken)
    panel._run_clicked()
    _until(lambda: panel._job is None)
    assert "RuntimeError: the reason" in _find(panel, "memlab-status").value
    with pytest.raises(RuntimeError, match="the reason"):
        panel.run()


def test_a_workload_that_cannot_be_built_says_so_in_the_panel():
    def broken():
        raise KeyError("no such layer")

    workload = Workload(
        name="broken",
        build_model=broken,
        make_batch=lambda n: torch.ones(n, 1),
        compute_loss=lambda model, batch: model(batch).mean(),
    )
    made = memlab.panel(workload, device="cpu")
    try:
        assert made._find_facts.wait(60)
        assert "no such layer" in _find(made, "memlab-about").value
        assert made.run().outcome is Outcome.FAILED
    finally:
        made.close()


# threads


def test_a_throttle_sends_the_first_at_once_and_the_last_always(monkeypatch):
    sent = []
    throttled = job.Throttle(sent.append)
    for i in range(100):
        throttled(i)
    assert sent == [0]
    _until(lambda: sent == [0, 99])
    throttled.close()
    throttled(100)
    time.sleep(2 * job.UPDATE_SECONDS)
    assert sent == [0, 99]


def test_latest_drops_what_is_not_newest():
    seen, go = [], threading.Event()

    def slow(value):
        seen.append(value)
        go.wait(5)

    latest = job.Latest(slow)
    latest(0)
    _until(lambda: seen == [0])
    for i in range(1, 10):
        latest(i)
    go.set()
    assert latest.wait(5)
    assert seen == [0, 9]
    latest.close()


def _find(panel: app.Panel, css_class: str):
    def search(widget):
        if css_class in getattr(widget, "_dom_classes", ()):
            return widget
        return next(filter(None, map(search, getattr(widget, "children", ()))), None)

    found = search(panel._view._root)
    assert found is not None, css_class
    return found


def _until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.01)
