"""The course grades answers: right ones, blanks, and each known mistake by a hint of its own."""

import ast
import dataclasses
import json
import re

import nbformat
import numpy as np
import papermill
import pytest
import torch
from torch import nn

import memlab
from memlab import MemlabError, StepConfig, Workload, course, plots
from memlab._util.units import MIB
from memlab.course import chapters, limits, operators, recomputing, updates
from memlab.course.exercise import Exercise, texts
from memlab.course.steps import BATCH, mlp, mlp_step
from tests import ROOT
from tests.store_parts import a_fault, a_script_run, a_stage

NUMBERS = [each["number"] for each in texts()["chapter"]]
EXERCISES = {name: each for n in NUMBERS for name, each in course.chapter(n).exercises.items()}
LEAST_MISTAKES = 4  # of a chapter


def of(number):
    return course.chapter(int(number.partition(".")[0]))


SLOW = (
    "0.1",
    "0.2",
    "5.1",
    "8.1",
    "9.2",
    "10.2",
    "11.3",
    "12.1",
    "12.2",
    "13.2",
    "14.1",
    "14.2",
    "16.2",
)  # they predict several steps of large models


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in EXERCISES]
)
def test_a_right_answer_a_blank_and_each_mistake(number):
    exercise, opened = EXERCISES[number], of(number)
    assert opened.check(number, ...).verdict == chapters.NOT_YET
    found = opened.check(number, exercise.reference())
    assert found.is_right, found
    said = []
    for name, mistake in exercise.mistakes.items():
        found = opened.check(number, mistake())
        assert found.verdict == chapters.WRONG
        before, _, after = exercise.hints[name].partition("{given}")
        assert found.said.startswith(before)
        assert found.said.endswith(after)
        said.append(found.said)
    assert len(set(said)) == len(said)
    assert set(exercise.mistakes) <= set(exercise.hints)


@pytest.mark.parametrize("number", EXERCISES)
@pytest.mark.parametrize(
    "answer",
    ["40 MiB", None, -1, float("nan"), True, [], nn.Linear(2, 2), np.ones(3), torch.ones(3)],
    ids=repr,
)
def test_an_answer_of_another_kind_is_a_sentence(number, answer):
    found = of(number).check(number, answer)
    assert found.verdict == chapters.WRONG
    assert " is no" in found.said


@pytest.mark.parametrize("number", NUMBERS)
def test_a_chapter_has_hints_enough_and_three_sentences(number):
    opened = course.chapter(number)
    assert sum(len(each.mistakes) for each in opened.exercises.values()) >= LEAST_MISTAKES
    assert len(opened.about.remember) == chapters.NUM_REMEMBERED
    assert (ROOT / "notebooks" / opened.about.notebook).is_file()


def test_the_bytes_of_chapter_1_are_those_that_one_counts_and_the_allocator_has():
    hidden, weights = BATCH * 512 * 4, 4 * (784 * 512 + 512 + 512 * 10 + 10)
    batch, last = BATCH * (784 * 4 + 8), 4 * (512 * 10 + 10)
    state = 2 * weights + 4 * 4
    assert EXERCISES["1.1"].reference() == 4 * (1024 * 4096 + 4096)
    assert EXERCISES["1.2"].reference() == state
    assert EXERCISES["1.3"].reference() == weights + state + batch + last + 3 * hidden + 8
    measured = memlab.measure(mlp(), StepConfig(batch_size=BATCH), "cpu", repeats=1)
    assert measured.peak_allocated_bytes == mlp_step().peak_allocated_bytes
    assert EXERCISES["2.2"].reference() == 784 * 4 + 8 + 3 * 512 * 4


OPTIMIZERS = {name: StepConfig(optimizer=name) for name in updates.BYTES if "," not in name}
OPTIMIZERS["adamw, bf16"] = StepConfig(precision="bf16")
OPTIMIZERS["adamw, bf16-master"] = StepConfig(precision="bf16-master")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bytes_a_weight_of_chapter_9_are_those_of_a_prediction(name):
    layer = Workload(
        name="layer",
        build_model=lambda: nn.Linear(4096, 4096),
        make_batch=lambda n: torch.ones(n, 4096),
        compute_loss=lambda model, batch: model(batch).mean(),
    )
    step = memlab.predict(layer, OPTIMIZERS[name], "rtx-4090")
    if name == "adamw-8bit" and step.outcome == "unsupported":
        pytest.skip(step.message)
    held = [step.timeline.bytes_of(kind) for kind in ("parameters", "gradients", "optimizer_state")]
    assert max(sum(held)) / 4096**2 == pytest.approx(updates.BYTES[name], rel=updates.MOST_OFF)


@pytest.mark.parametrize(("factor", "unit"), [(2**20, "in MiB"), (1e6, "in MB"), (2**10, "in KiB")])
def test_an_answer_in_another_unit_is_told_so(factor, unit):
    found = of("1.3").check("1.3", EXERCISES["1.3"].reference() / factor)
    assert unit in found.said


def test_a_number_that_no_mistake_gives_is_told_how_far_off_it_is():
    right = EXERCISES["1.1"].reference()
    assert of("1.1").check("1.1", right * 7).said == "too large by a factor of 7"
    assert of("1.1").check("1.1", right + 1).said == "too large by 0.1% or less"


def test_an_exercise_may_be_given_as_a_number():
    assert course.chapter(1).check(1.1, EXERCISES["1.1"].reference()).is_right


def test_an_answer_of_several_numbers_is_blank_until_all_are_there():
    exercise, opened = EXERCISES["3.1"], course.chapter(3)
    right = exercise.reference()
    assert opened.check("3.1", right | {"mul": ...}).verdict == chapters.NOT_YET
    assert (
        "no answer for mul" in opened.check("3.1", {k: right[k] for k in right if k != "mul"}).said
    )
    assert "mul: None is no number" in opened.check("3.1", right | {"mul": None}).said


def test_ones_own_model_is_graded():
    mine = Workload(
        name="mine",
        build_model=lambda: nn.Linear(512, 512),
        make_batch=lambda n: torch.ones(n, 512),
        compute_loss=lambda model, batch: model(batch).mean(),
    )
    config, opened = StepConfig(batch_size=64), course.chapter(2)
    peak = memlab.predict(mine, config, "cpu").peak_allocated_bytes
    assert opened.check("2.1", (mine, config, 1.15 * peak)).is_right
    assert opened.check("2.1", (mine, config, 1.3 * peak)).verdict == chapters.WRONG
    assert "is no number" in opened.check("2.1", (mine, config, np.ones(3))).said
    broken = Workload(
        name="broken", build_model=lambda: nn.Linear(8, 2), make_batch=mine.make_batch,
        compute_loss=mine.compute_loss,
    )  # fmt: skip
    assert "cannot be predicted yet" in opened.check("2.1", (broken, config, peak)).said


@pytest.mark.parametrize("field", [{"sharding": "zero3", "world_size": 4}, {"batch_size": 32}])
def test_another_training_is_no_faster_step(field):
    found = of("14.1").check("14.1", StepConfig(**{"batch_size": 64, **field}))
    assert "only accumulation_steps and memory_budget" in found.said


def test_a_run_of_ones_own_is_graded_for_any_card():
    opened, run = course.chapter(16), a_script_run()
    peak = max(run.counted(stage).nbytes for stage in run.stages)
    assert opened.check("16.1", (run, peak + 1)).is_right
    assert "more than the limit" in opened.check("16.1", (run, peak - 1)).said
    assert "pass" in opened.check("16.1", (dataclasses.replace(run, stages=()), 1)).said
    worse = dataclasses.replace(run, stages=(a_stage("step", 99 * MIB), a_stage("evaluation")))
    assert opened.check("16.2", (run, worse)).is_right
    assert "takes less" in opened.check("16.2", (worse, run)).said
    other = dataclasses.replace(worse, device="rtx-3050")
    assert "t4 and rtx-3050" in opened.check("16.2", (run, other)).said
    mended = a_script_run(faults=(a_fault(),)), run
    assert "as before" in opened.check("16.2", mended).said


def test_a_guess_is_drawn_and_none_changes_nothing():
    opened = course.chapter(1)
    figure = plots.timeline(mlp_step())
    before = len(figure.axes[0].lines)
    assert opened.guess("peak", ...).on(figure) is figure
    assert "no guess" in repr(opened.guess("peak", "much"))
    assert len(figure.axes[0].lines) == before
    axes, peak = figure.axes[0], mlp_step().peak_allocated_bytes
    assert peak < axes.get_ylim()[1] < 2 * peak  # the axis has bytes
    opened.guess("peak", 1000).on(figure)
    assert set(axes.lines[-1].get_ydata()) == {1000 * MIB}
    assert axes.get_ylim()[1] > 1000 * MIB > peak
    assert opened.guess("peak", 2.0).nbytes == 2 * MIB


def test_the_end_says_what_is_answered_in_any_order():
    opened = course.chapter(1)
    assert "1.1: not yet" in str(opened.finish())
    for number in reversed(opened.exercises):
        opened.check(number, opened.exercises[number].reference())
    finished = opened.finish()
    assert finished.is_complete
    assert "c02_what_does_mine_take.ipynb" in finished._repr_markdown_()
    opened.check("1.1", 1)
    assert not opened.finish().is_complete


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: course.chapter(99), "number=99"),
        (lambda: course.chapter(True), "number=True"),
        (lambda: course.chapter([]), "number=[]"),
        (lambda: course.chapter(1, "all"), "answers='all'"),
        (lambda: course.chapter(1, 5), "answers=5"),
        (lambda: course.chapter(1).check("0.1", ...), "number='0.1'"),
    ],
)
def test_what_is_not_there_is_named(call, named):
    with pytest.raises(MemlabError, match=f"{re.escape(named)}.* allowed"):
        call()


def test_what_a_cell_of_a_notebook_makes_necessary_is_not_told_by_the_name_of_a_file():
    cell = "def loss(model, x):\n    return model(x).mean() * (2 if x.mean() > 0 else 1)"
    made = {}
    exec(compile(cell, "/tmp/ipykernel_1/2345.py", "exec"), {"__name__": "__main__"}, made)
    mine = Workload(
        name="mine", build_model=lambda: nn.Linear(8, 8), make_batch=lambda n: torch.randn(n, 8),
        compute_loss=made["loss"],
    )  # fmt: skip
    notes = " ".join(memlab.predict(mine, StepConfig(batch_size=4), "t4").notes)
    assert "line 2 of a cell of the notebook reads a value" in notes


def test_a_unit_is_no_excuse_where_the_question_is_of_another_size():
    asked = Exercise(number="1.1", reference=lambda: 1000, mistakes={})
    assert asked.hint(1000) == ""
    assert "factor" in asked.hint(3)


def defined_in(notebook):
    """Return what the classes and functions of a notebook are, without running its other lines."""
    (path,) = (ROOT / "notebooks").glob(f"{notebook}_*.ipynb")
    made = {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            tree = ast.parse(cell.source)
            kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
            tree.body = [node for node in tree.body if isinstance(node, kinds)]
            exec(compile(tree, str(path), "exec"), made)
    return made


def peak_of(model, rows, width):
    workload = Workload(
        name="model", build_model=model, make_batch=lambda n: torch.randn(n, width),
        compute_loss=lambda model, batch: model(batch).square().mean(),
    )  # fmt: skip
    step = memlab.require_ok(memlab.predict(workload, StepConfig(batch_size=rows), "t4"))
    return step.peak_allocated_bytes, step.step_seconds


@pytest.mark.slow
def test_a_page_asks_of_the_models_by_which_it_is_graded():
    block = defined_in("c03")["Block"]
    assert peak_of(lambda: block(nn.GELU()), 512, 256) == peak_of(
        lambda: operators.FeedForward(nn.GELU()), 512, 256
    )
    page = defined_in("c05")
    for name in limits.ROUTES:
        mine = page["routed"](page[name])
        assert peak_of(mine.build_model, 512, 64) == peak_of(
            limits.routed(name).build_model, 512, 64
        )
    twelve = defined_in("c07")["Twelve"]
    for length in (1, 3):
        plan = recomputing.in_segments(length)
        assert peak_of(lambda plan=plan: twelve(plan), 512, 256) == peak_of(
            lambda plan=plan: recomputing.Planned(plan), 512, 256
        )
    page = defined_in("c08")
    names = ("Dropout", "AnotherMask", "BatchNorm", "LateHook", "OneMaskKept")
    for name, kind in zip(names, recomputing.BLOCKS.values(), strict=True):
        assert peak_of(page[name], 512, 64) == peak_of(kind, 512, 64)


RUNS = ("", "mistake 1", "mistake 2", "mistake 3")  # with memlab's answers `make course` runs them


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("answers", RUNS)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_chapter_runs_with_blank_and_with_wrong_answers(number, answers, tmp_path):
    notebook = ROOT / "notebooks" / course.chapter(number).about.notebook
    out = tmp_path / "out.json"
    papermill.execute_notebook(
        notebook, tmp_path / "ran.ipynb", {"out_json": str(out), "answers": answers},
        kernel_name="python3", progress_bar=False, cwd=notebook.parent,
    )  # fmt: skip
    verdicts = json.loads(out.read_text())["verdicts"]
    assert list(verdicts) == list(course.chapter(number).exercises)
    wanted = "not right" if answers else "not yet"
    assert all(f": {wanted}" in said for said in verdicts.values()) or "mistake 3" in answers
    assert any(f": {wanted}" in said for said in verdicts.values())
    ran = nbformat.read(tmp_path / "ran.ipynb", as_version=4)
    assert not any(
        output.output_type == "error" for cell in ran.cells for output in cell.get("outputs", [])
    )
