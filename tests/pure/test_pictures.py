"""The pictures of a panel: what is drawn, when it is drawn again, and what waits for more runs."""

import re

import pytest
from memlab._panel.pictures import Pictures, Scene

from memlab import StepConfig, plots
from memlab._panel import pictures as comparisons
from memlab._panel.runs import RunLog
from memlab.errors import ConfigError
from memlab.result import Source
from memlab.trace import Category
from tests.figure_parts import MIB, held, make_held, make_result


def config(batch=8, steps=1, **changes):
    return StepConfig(batch_size=batch, accumulation_steps=steps, **changes)


def logged(*configs):
    log = RunLog()
    for each in configs:
        log.add(make_result(config=each))
    return tuple(log.runs)


def predicted(**changes):
    return make_result(source=Source.PREDICTED, config=config(**changes))


def scene(*, prediction=None, runs=(), **changes):
    values = {"shown": None, "comparison": None, "limit_bytes": None, "predicted": prediction}
    return Scene(**{**values, "runs": runs, **changes})


@pytest.fixture
def pictures():
    made = Pictures()
    made.details.layout.display = "none"
    return made


# the heat map and its axes


def test_the_heat_map_takes_only_runs_that_agree_in_all_but_its_axes():
    runs = logged(config(8, 1), config(8, 2), config(16, 1, precision="bf16"), config(16, 4))
    found = comparisons.grid(runs)
    assert {found.rows, found.columns} == {"batch_size", "accumulation_steps"}
    assert [run.number for run in found.runs] == [1, 2, 4]
    assert found.missing == ()
    # two values of both settings go before a long row
    row = [config(batch, 2, memory_budget=0.5) for batch in (16, 32, 64, 8)]
    found = comparisons.grid(logged(config(8, 1), *row))
    assert {found.rows, found.columns} == {"memory_budget", "accumulation_steps"}
    assert found.num_cells == 2


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ([config()],
         "Still to run: another batch size and another accumulation, with everything else as in "
         "run 1."),
        ([config(8), config(16)],
         "Still to run: another accumulation, with everything else as in run 2."),
        ([config(8), config(8, precision="bf16")],
         "Still to run: another batch size, with everything else as in run 2."),
    ],
)  # fmt: skip
def test_until_there_is_a_heat_map_its_box_says_what_is_missing(pictures, settings, missing):
    pictures.draw(scene(runs=logged(*settings)))
    assert missing in pictures.boxes["heat_map"].value
    assert "<svg" not in pictures.boxes["heat_map"].value
    pictures.draw(scene(runs=logged(config(8, 1), config(16, 2))))
    assert "<svg" in pictures.boxes["heat_map"].value


# the neighbours of a setting


def test_neighbours_differ_in_one_setting_by_the_nearest_step():
    known = [
        predicted(batch=16), predicted(batch=4), predicted(batch=64), predicted(batch=16, steps=2),
        predicted(steps=2), predicted(memory_budget=0.5), predicted(memory_budget=0.9),
        predicted(precision="bf16"), predicted(),
    ]  # fmt: skip
    found = {str(result.config) for result in comparisons.neighbours(config(), known)}
    expected = [
        config(16), config(4), config(8, 2), config(memory_budget=0.9), config(precision="bf16"),
    ]  # fmt: skip
    assert found == set(map(str, expected))


def test_a_neighbour_that_was_run_is_not_drawn_twice(pictures):
    now = scene(runs=logged(config(8), config(16)), prediction=predicted(batch=8),
                neighbours=(predicted(batch=16), predicted(batch=4)))  # fmt: skip
    asked = []
    pictures._show = lambda name, key, *rest: asked.append((name, key))
    pictures.draw(now)
    ((_, here, beside),) = [key for name, key in asked if name == "memory_against_time"]
    assert here is None
    assert [result.config.batch_size for result in beside] == [4]


def test_dots_of_neighbours_wait_until_the_slider_rests(pictures):
    runs, box = logged(config(8)), pictures.boxes["memory_against_time"]
    pictures.draw(scene(runs=runs, prediction=predicted(batch=16), is_settled=False))
    first = box.value
    assert "<svg" in first
    pictures.draw(scene(runs=runs, prediction=predicted(batch=32), is_settled=False))
    assert box.value == first
    pictures.draw(scene(runs=runs, prediction=predicted(batch=32)))
    assert box.value != first


# what cannot be drawn


def broken(*_, **__):
    raise ConfigError("batch_size=12 does not divide")


@pytest.mark.parametrize("name", ["timeline", "peak_bar", "step_times", "memory_against_time"])
def test_a_picture_that_cannot_be_drawn_says_so_and_takes_no_other_with_it(
    pictures, monkeypatch, name
):
    now = scene(prediction=predicted(), runs=logged(config(8), config(16, 2)))
    pictures.draw(now)  # with the pictures of another setting, which must not stay
    monkeypatch.setattr(plots, name, broken)
    pictures.draw(
        scene(prediction=predicted(batch=32), runs=logged(config(8), config(16, 2), config(4)))
    )
    box = pictures.boxes.get(name, pictures.boxes["peak"]).value
    assert "this picture cannot be drawn: ConfigError: batch_size=12 does not divide" in box
    assert "memlab-waiting" in box
    assert "<svg" not in box
    assert sum("cannot be drawn" in box.value for box in pictures.boxes.values()) == 1
    assert [str(error) for error in pictures.failed] == ["batch_size=12 does not divide"]


def test_a_picture_is_drawn_again_after_a_failure_and_for_new_words(pictures, monkeypatch):
    now, drawn = scene(prediction=predicted()), []
    with monkeypatch.context() as patch:
        patch.setattr(plots, "peak_bar", broken)
        pictures.draw(now)
    for said in ("", "gradient differs", "gradient differs"):
        pictures.said_of_division = lambda _, said=said: said
        pictures.draw(now)
        drawn.append((pictures.num_drawn, "<svg" in pictures.boxes["peak"].value))
    assert drawn == [(2, True), (4, True), (4, True)]


def test_a_readout_that_fails_leaves_the_picture(pictures):
    pictures._lowering, now = broken, scene(prediction=predicted())
    pictures.draw(now)
    for name in ("timeline", "peak"):
        assert "<svg" in pictures.boxes[name].value
        assert "memlab-spots" not in pictures.boxes[name].value
    assert len(pictures.failed) == 2
    pictures.draw(now)  # nothing is drawn, so nothing fails
    assert pictures.failed == []


# what a person opens or chooses


def test_the_part_of_the_step_is_chosen_by_a_button_and_drawn_with_its_readings(pictures):
    box = pictures.boxes["timeline"]
    now = scene(prediction=make_result(source=Source.PREDICTED))
    pictures.draw(now)
    assert "in optimizer" in box.value
    for name in ("forward", "backward", "optimizer"):
        pictures.part.value = name
        pictures.draw(now)
        readings = box.value[box.value.index("memlab-spots") :]
        for other in {"in forward", "in backward", "in optimizer"} - {f"in {name}"}:
            assert other not in readings
        assert f"in {name}" in readings


def test_what_holds_the_peak_is_drawn_only_while_it_is_open_and_kept_up_to_date(pictures):
    one = make_held(held(Category.ACTIVATIONS, "first", 30 * MIB), source=Source.PREDICTED)
    other = make_held(held(Category.ACTIVATIONS, "second", 30 * MIB), source=Source.PREDICTED)
    pictures.draw(scene(prediction=one))
    assert "<svg" not in pictures.boxes["peak_map"].value
    pictures.details.layout.display = ""
    for result, name in ((one, "first"), (other, "second")):
        pictures.draw(scene(prediction=result))
        assert "<svg" in pictures.boxes["peak_map"].value
        assert name in pictures._explanation.value
        assert "what would lower the peak" in pictures._explanation.value
        assert 'tabindex="0"' in pictures._explanation.value  # it scrolls by keyboard


def test_both_readouts_have_their_own_group_of_buttons(pictures):
    pictures.draw(scene(prediction=make_result(source=Source.PREDICTED)))
    page = pictures.boxes["peak"].value
    assert page.count('type="radio"') == 2  # parameters and activations
    assert "25 % of the peak" in page
    peak, timeline = (
        set(re.findall(r' name="([^"]*)"', pictures.boxes[name].value))
        for name in ("peak", "timeline")
    )
    assert len(peak) == len(timeline) == 1
    assert peak != timeline
