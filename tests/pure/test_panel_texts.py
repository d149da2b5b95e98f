"""What the panel says, without its widgets: settings, verdicts, advice, the table of runs."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from memlab import Outcome, StepConfig
from memlab._panel import catalog, outlook, state, texts
from memlab._panel.page import Page
from memlab._panel.runs import Run, RunLog
from memlab._panel.table import told
from memlab.errors import ConfigError
from memlab.runtime.accumulation import AccumulationEffect
from memlab.techniques.attention import MATH_KERNEL
from memlab.techniques.registry import CONTROLS
from memlab.trace import CATEGORIES, Timeline
from tests.panel_parts import make_facts, make_result, settings, texts_of_row
from tests.verify_parts import alike

# settings


def test_a_budget_that_leaves_the_gradient_alone_is_tried_before_smaller_micro_batches():
    tried = []
    config = StepConfig(batch_size=2)
    for _ in range(4):
        remedy = outlook.advice_line(make_result(config=config), [], 2**10).remedy
        tried.append(remedy[1])
        config = dataclasses.replace(config, **remedy[1])
    assert tried == [
        {"memory_budget": 0.5}, {"memory_budget": 0.2}, {"memory_budget": 0.0},
        {"accumulation_steps": 2},
    ]  # fmt: skip
    blocks = make_result(config=StepConfig(checkpointing="blocks"))
    assert "accumulation 2" in outlook.advice_line(blocks, [], 2**10).text


def test_a_policy_counts_only_where_something_is_checkpointed():
    kept = settings(checkpoint_policy="keep-matmuls")
    assert state.to_config(kept).checkpoint_policy == "recompute-all"
    blocks = state.to_config({**kept, "checkpointing": "blocks"})
    assert blocks.checkpoint_policy == "keep-matmuls"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("batch_size", 0, "batch_size=0 is below 1"),
        ("batch_size", "abc", "batch_size='abc' is not a whole number"),
        ("memory_budget", 1.5, "memory_budget=1.5 is outside"),
        ("memory_budget", "", "memory_budget='' is not a number"),
        ("accumulation_steps", -3, "accumulation_steps=-3 is below 1"),
    ],
)
def test_a_wrong_number_is_named_at_its_control_with_a_remedy(field, value, said):
    now = settings(**{field: value})
    wrong = state.problems(now)
    assert list(wrong) == [field]
    line = line_of(field, now)
    assert said in line.text
    label, remedy = line.remedy
    assert not state.problems({**now, **remedy})
    assert label == f"set to {remedy[field]:g}"


def test_accumulation_above_the_batch_offers_a_power_of_two_and_uneven_parts_are_counted():
    line = line_of("accumulation_steps", settings(batch_size=12, accumulation_steps=32))
    assert line.remedy == ("set to 8", {"accumulation_steps": 8})
    assert "12 samples" in line.text
    uneven = line_of("accumulation_steps", settings(batch_size=6, accumulation_steps=4))
    assert uneven.text.startswith("2 micro-batches of 2 and 2 of 1")


# texts


def line_of(field, now, facts=None, device="cpu"):
    wrong = state.problems(now)
    return texts.lines(now, wrong, facts, device=device, name="t", effect=alike())[field]


def verdict(facts, **config):
    return state.gradient_verdict(
        StepConfig(**{"batch_size": 32, "accumulation_steps": 4, **config}), facts, alike()
    )


def test_the_gradient_is_unchanged_only_without_mixing_and_random_modules():
    assert verdict(make_facts()).kind == state.GOOD
    assert verdict(None).text == "gradient: not known yet"
    mixing = verdict(make_facts(sample_mixing_modules=("layer1.0.bn1",)))
    assert mixing.text == "gradient differs: BatchNorm in layer1.0.bn1 sees 8 samples, not 32"
    drawing = verdict(make_facts(random_modules=("drop",)))
    assert "drop draws new random numbers in each micro-batch" in drawing.text
    divided = StepConfig(batch_size=32, accumulation_steps=4)
    for same, kind in {"no": state.WARN, "unknown": state.OPEN, "yes": state.GOOD}.items():
        effect = AccumulationEffect(same=same, why="the loss reads all samples")
        found = state.gradient_verdict(divided, make_facts(), effect)
        assert found.kind == kind
        assert same == "yes" or "the loss reads all samples" in found.detail
    assert state.gradient_verdict(divided, make_facts(), None).kind == state.OPEN
    undivided = verdict(make_facts(random_modules=("drop",)), accumulation_steps=1)
    assert undivided.text == "gradient: unchanged"


def test_a_budget_says_its_share_its_engine_and_what_it_cannot():
    half = settings(memory_budget=0.5)
    drawing = make_facts(random_modules=("drop",), recurrent_modules=("lstm",))
    assert "at most 50 %" in line_of("memory_budget", half, drawing).text
    assert line_of("memory_budget", half, drawing).remedy is None
    assert (
        "as few activations as" in line_of("memory_budget", settings(memory_budget=0.0), None).text
    )
    assert "nothing is recomputed" in line_of("memory_budget", settings(), drawing).text
    compiled = line_of("memory_budget", {**half, "compile": True}, None)
    assert compiled.remedy == ("budget by torch.compile", {"budget_engine": "compile"})
    blocks = line_of("memory_budget", {**half, "checkpointing": "blocks"}, None)
    assert blocks.remedy == ("no checkpointing", {"checkpointing": "none"})


def test_a_budget_by_torch_compile_says_what_it_cannot():
    half = settings(memory_budget=0.5, budget_engine="compile")
    assert "planned by torch.compile" in line_of("memory_budget", half, None).text
    by_memlab = {"budget_engine": "eager", "compile": False}
    for facts, word in (
        (make_facts(recurrent_modules=("lstm",)), "lstm, a recurrent module"),
        (make_facts(random_modules=("drop",)), "drop draws random numbers"),
    ):
        line = line_of("memory_budget", half, facts)
        assert word in line.text
        assert line.remedy == ("let memlab plan it", by_memlab)


def test_solver_and_estimator_count_with_the_compile_engine_alone():
    now = settings(memory_budget=0.5, budget_solver="greedy", budget_estimator="profile")
    assert state.problems(now) == {}
    assert state.to_config(now) == StepConfig(memory_budget=0.5)
    compiled = {**now, "budget_engine": "compile"}
    assert state.to_config(compiled).budget_solver == "greedy"
    assert "greedy" in state.describe(make_result(config=state.to_config(compiled)))
    line = line_of("more", compiled, device="cpu")
    assert line.remedy == ("flops", {"budget_estimator": "flops"})
    assert "most expensive first" in line_of("more", compiled, device="cuda").text
    assert (
        "most expensive"
        not in line_of("more", {**compiled, "memory_budget": 1.0}, device="cpu").text
    )


def test_channels_last_is_explained_by_device():
    now = settings(channels_last=True)
    assert "channels last" in state.describe(make_result(config=state.to_config(now)))
    assert state.setting_words("channels_last", False) == "channels first"
    assert "rarely helps" in line_of("more", now, device="cpu").text
    assert "half precision" in line_of("more", now, device="cuda").text


@pytest.mark.parametrize("steps", [1, 2, 6])
def test_what_a_further_division_does_is_said_of_one_that_ranks_can_take(steps):
    page = SimpleNamespace(
        _facts_of=lambda name: None,
        _asked=SimpleNamespace(name=""),
        _effect_of=lambda name: None,
    )
    asked = StepConfig(batch_size=12, accumulation_steps=steps, sharding="zero3", world_size=2)
    assert bool(Page._said_of_division(page, asked)) == (steps < 6)


@pytest.mark.parametrize(
    ("peak", "limit", "kind", "text"),
    [
        (2**20, 2**21, state.GOOD, "fits: 1.00 of 2.00 MiB (50 %), measured"),
        (2**21, 2**20, state.BAD, "does not fit: 2.00 of 1.00 MiB (200 %), measured"),
        (2**20, None, state.OPEN, "no limit set; peak 1.00 MiB allocated, measured"),
    ],
)
def test_fits_is_said_in_words(peak, limit, kind, text):
    found = state.fit_verdict(make_result(peak=peak), limit)
    assert (found.kind, found.text) == (kind, text)
    for under, what in ((None, "this machine"), (2**20, "the limit of 1.00 MiB")):
        stopped = make_result(Outcome.OUT_OF_MEMORY, peak=None, memory_limit_bytes=under)
        found = state.fit_verdict(stopped, limit)
        assert (found.kind, found.text) == (state.BAD, f"does not fit {what}")


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
    line = outlook.advice_line(runs[-1].result, runs, 100 * 2**20)
    assert line.text == "accumulation 4 fits: 90.0 MiB allocated, measured in run 2"
    assert line.remedy == ("use run 2", {"accumulation_steps": 4})
    assert outlook.advice_line(runs[-1].result, runs, 200 * 2**20).text == ""
    machine = make_result(Outcome.OUT_OF_MEMORY, peak=None, config=config())
    runs = logged(*(run.result for run in runs[:-1]), machine)
    assert outlook.advice_line(runs[-1].result, runs, None).text.startswith("accumulation 2 fits")


@pytest.mark.parametrize(
    ("now", "remedy"),
    [
        (config(16, 4, memory_budget=0.0), ("try accumulation 8", {"accumulation_steps": 8})),
        (config(12, 8, memory_budget=0.0), ("try accumulation 12", {"accumulation_steps": 12})),
        (
            config(16, 16, memory_budget=0.0),
            ("try batch 8", {"batch_size": 8, "accumulation_steps": 8}),
        ),
        (config(1, 1, memory_budget=0.0), None),
    ],
    ids=str,
)
def test_where_nothing_measured_fits_the_next_step_is_offered(now, remedy):
    (run,) = logged(make_result(Outcome.OUT_OF_MEMORY, config=now))
    line = outlook.advice_line(run.result, [run], 2**10, lambda asked: "gradient differs")
    assert line.remedy == remedy
    assert "_" not in line.text
    if remedy and "batch_size" not in remedy[1]:  # which divides the batch into more parts
        assert line.text.endswith(f"{remedy[0]} (gradient differs)")


def test_what_micro_batches_do_is_not_looked_for_beside_a_job(monkeypatch):
    page = SimpleNamespace(guarded=nullcontext, lock=nullcontext(), closed=False, job=None,
                           _effects={}, _effect_of=lambda name: None, _workloads={"tiny": None},
                           refresh=lambda: None, show_progress=lambda *_: None)  # fmt: skip
    seen = []

    def effect(workload, cancel):
        seen.append(cancel.is_set())
        Page.begin(page, "a job")
        return AccumulationEffect(same="unknown", why="stopped") if cancel.is_set() else None

    monkeypatch.setattr("memlab._panel.page.accumulation_effect", effect)
    Page._judge(page, "tiny")
    Page._judge(page, "tiny")  # the job goes on
    assert (seen, page._effects) == ([False], {})


def test_what_stands_before_the_first_forward_is_said_to_be_beyond_help():
    rows = np.array([[600 if str(c) == "parameters" else 10 for c in CATEGORIES]])
    zeros = np.zeros(1, np.int32)
    timeline = Timeline(
        bytes_by_category=rows, phase=zeros.astype(np.int8), micro_batch=zeros, operator=zeros
    )
    (run,) = logged(make_result(Outcome.OUT_OF_MEMORY, timeline=timeline))
    said = outlook.advice_line(run.result, [run], 629).text
    assert said.startswith("630 B are held before the first forward")
    assert outlook.advice_line(run.result, [run], 630).remedy[0] == "try budget 0.5"


def test_every_control_has_a_row_in_the_help_and_a_tooltip_that_leads_there():
    named = {
        label for row in catalog.help_page()["rows"] for label in (row[0], *row[0].split(", "))
    }
    for field in (*state.FIELDS, *state.OTHER_FIELDS):
        assert (catalog.HEADER.get(field) or CONTROLS[field].label) in named, field
        assert catalog.tooltip(field).endswith("\nmore in the help (?)"), field
    assert catalog.tooltip("no such field") == ""


def test_every_field_has_one_control_in_a_place_of_the_page():
    controls = catalog.catalog({"tiny": None}, "cpu")["controls"]
    assert sorted(control["field"] for control in controls) == sorted(state.FIELDS)
    for control in controls:
        assert (control["kind"] == "choice") == bool(control["choices"]) or control["kind"] == (
            "number"
        ), control["field"]
        assert (control["kind"] == "number") == bool(control["positions"]), control["field"]


def test_advice_says_what_does_not_fit_and_counts_no_prediction_as_a_run():
    shown = make_result()
    run = Run(number=1, result=make_result())
    kept = Run(number=2, result=make_result(source="predicted"))

    def begins(*runs):
        return outlook.advice_line(shown, runs, 2**10).text.removesuffix("try budget 0.5")

    assert begins(run) == "no run fits; next, "
    assert begins(kept) == "no kept prediction fits; next, "
    assert begins(run, kept) == "no run or kept prediction fits; next, "
    assert begins() == begins(dataclasses.replace(run, result=make_result(device="h200"))) == ""


@pytest.mark.parametrize(("typed", "unit"), [("200", "MiB"), ("8", "GiB"), ("1048575", "MiB")])
def test_a_small_limit_without_a_unit_is_asked_about(typed, unit):
    line = texts.limit_line(typed, 2**36, "the card")
    assert line.remedy == (f"did you mean {typed} {unit}?", {"memory_limit": f"{typed} {unit}"})
    for meant in ("200 KiB", "2000000", ""):
        assert texts.limit_line(meant, 2**40, "the card") is None
    assert texts.limit_line("8 GiB", None, "this machine") is None


def test_a_limit_above_what_the_device_holds_is_said():
    line = texts.limit_line("8 GiB", 6 * 2**30, "the card")
    said = "the limit of 8.00 GiB is more than the card can hold, so 6.00 GiB counts"
    assert (line.text, line.remedy[1]) == (said, {"memory_limit": ""})
    assert texts.limit_line("5 GiB", 6 * 2**30, "the card") is None


def test_a_stale_picture_names_only_what_differs():
    result = make_result(config=StepConfig(batch_size=4))
    assert state.stale_note(result, "tiny", "cpu", StepConfig(batch_size=4)) == ""
    note = state.stale_note(result, "tiny", "cpu", StepConfig(batch_size=8))
    assert note == "last run: batch 4; what is set now was not run"


# runs


def test_clear_and_a_full_table_keep_pinned_runs_until_they_are_unpinned():
    log = RunLog()
    for _ in range(4):
        log.add(make_result())
    log.change(2, name="good")
    log.clear()
    assert [run.number for run in log.visible] == [2, 4]
    assert len(log.runs) == 4
    for _ in range(40):
        log.add(make_result())
    assert [run.number for run in log.visible][:2] == [2, 15]
    log.change(2, name="")
    assert log.visible[0].number == 15


def test_columns_that_say_nothing_are_left_out():
    log = RunLog()
    log.add(make_result())
    assert texts_of_row(told(log)).keys() >= {"workload", "outcome"}
    assert "reserved" not in texts_of_row(told(log))
    log.add(make_result(workload_name="other", peak_reserved_bytes=2**22))
    assert [texts_of_row(told(log), at)["reserved"] for at in (0, 1)] == ["-", "4.00 MiB"]


def test_saving_settings_say_what_they_mean_and_where_they_do_nothing():
    asked = state.from_config(
        StepConfig(loss_chunks=8, inplace=True, offload_activations=True, offload_optimizer=True)
    )
    line = line_of("more", asked, device="h200")
    for said in ("1/8 of the tokens", "write over their input", "optimizer state are kept in"):
        assert said in line.text
    assert state.to_config(asked).loss_chunks == 8
    named = ["loss in 8 chunks", "in place", "activations offloaded", "optimizer state offloaded"]
    assert state.others(state.to_config(asked)) == named
    assert state.setting_words("inplace", False) == "not in place"
    on_meta = state.from_config(StepConfig(init_on_meta=True))
    assert "built without memory" in line_of("more", on_meta, device="h200").text
    assert state.setting_words("init_on_meta", True) == "built on the meta device"
    idle = line_of("more", asked, device="cpu")
    assert idle.kind == state.WARN
    assert idle.remedy[1] == {"offload_activations": False}
    with pytest.raises(ConfigError, match="loss_chunks='5' has no control"):
        state.from_config(StepConfig(loss_chunks=5))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer_in_backward": True, "accumulation_steps": 4}, "accumulation_steps=4"),
        ({"optimizer_in_backward": True, "precision": "fp16-mixed"}, "loss scaler"),
        ({"optimizer": "adafactor", "optimizer_implementation": "fused"}, "Adafactor has no fused"),
        (
            {"optimizer": "adamw-8bit", "optimizer_implementation": "foreach"},
            "has one implementation",
        ),
    ],
    ids=str,
)
def test_an_optimizer_that_cannot_be_is_explained_with_a_remedy_that_helps(changes, said):
    now = settings(**changes)
    line = line_of("optimizer", now)
    assert (line.kind, said in line.text) == (state.WARN, True)
    assert line_of("optimizer", {**now, **line.remedy[1]}).kind == state.OPEN


def test_every_optimizer_implementation_and_precision_is_explained():
    seen = set()
    for field in ("optimizer", "optimizer_implementation"):
        for choice in type(getattr(StepConfig(), field)):
            seen.add(line_of("optimizer", settings(**{field: choice})).text)
    assert len(seen) == 10  # adam and adamw are alike, and so are the defaults
    for precision in state.PRECISIONS:
        assert texts.precision_line(settings(precision=precision), None, "h200").kind == "open"
    for precision in ("tf32", "fp8-mixed"):
        line = texts.precision_line(settings(precision=precision), None, "cpu")
        assert "not possible on a CPU" in line.text
        assert line.remedy[1]["precision"] in ("as-built", "bf16-mixed")


def test_a_cache_that_is_refused_is_switched_off_by_a_click():
    refused = make_result(
        outcome=Outcome.UNSUPPORTED,
        message="an argument of h.0 is a Cache; use model_cache=False, which",
    )
    line = outlook.advice_line(refused, [], None)
    assert line.remedy == ("switch it off", {"model_cache": False})
    asked = state.from_config(StepConfig()) | line.remedy[1]
    assert state.to_config(asked) == StepConfig(model_cache=False)
    assert "cache of keys and values is off" in line_of("more", asked, device="h200").text
    assert state.others(state.to_config(asked)) == ["without the model's cache"]


def test_attention_that_holds_its_whole_matrix_is_told_with_a_click_that_avoids_it():
    told = f"Attention runs in {MATH_KERNEL}: use precision='bf16-mixed'."
    line = outlook.advice_line(make_result(notes=("another", told)), [], None)
    assert (line.text, line.kind) == (told, "warn")
    assert state.to_config(state.from_config(StepConfig()) | line.remedy[1]) == StepConfig(
        precision="bf16-mixed"
    )
    assert not outlook.advice_line(make_result(notes=("another",)), [], None).text
