"""Where things are on the page, and what the picture says where a person points."""

import pytest

from tests.system.browser import lab_browser as lab_ui
from tests.system.browser.conftest import SHOTS
from tests.system.browser.panel_page import (
    badge,
    box,
    button,
    is_inside,
    open_panel,
    press_run,
    settle,
    slider,
    status,
    tops,
    wait_for,
)

PLACES = (".ml-answer", ".ml-body", ".ml-run", ".ml-chart", ".ml-table")


def bottom(locator):
    box = locator.bounding_box()
    return box["y"] + box["height"]


def test_sliders_and_picture_share_a_laptops_screen_beside_the_sidebar(page, panel):
    lab_ui.lab_command(page, "application:toggle-left-area")
    page.set_viewport_size({"width": 1366, "height": 768})
    panel.get_by_label("Workload").select_option("lstm-text")  # which has a sequence length
    box(panel, "Sequence length").wait_for()
    settle(panel)
    panel.evaluate("panel => panel.scrollIntoView({block: 'start'})")
    sliders, picture = panel.locator("input[type=range]"), panel.locator(".ml-chart")
    assert sliders.count() == 4
    for seen in (sliders.last, panel.locator(".ml-badge"), picture, button(panel, "Run")):
        wait_for(lambda seen=seen: bottom(seen) <= 768)
    assert picture.bounding_box()["x"] > sliders.first.bounding_box()["x"] + 200


@pytest.mark.matrix
@pytest.mark.parametrize("width", [1920, 1366, 760, 380])
def test_nothing_is_cut_at_any_width(page, panel, width):
    settle(panel)
    box(panel, "Batch size").fill("1000000")
    page.set_viewport_size({"width": width, "height": 1500})
    wait_for(lambda: is_inside(panel))
    for name in ("Batch size", "Memory budget", "Accumulation"):
        assert is_inside(box(panel, name)), name
    box(panel, "Accumulation").fill("2000000")  # more than samples
    button(panel, "set to 524288").wait_for()
    wait_for(lambda: is_inside(panel))
    for dark in (True, False):
        lab_ui.set_theme(page, dark)
        panel.screenshot(path=SHOTS / f"wide-{width}-{'dark' if dark else 'light'}.png")


def test_the_picture_says_what_is_held_where_a_person_points(page, panel):
    settle(panel)
    reading = panel.locator(".ml-reading")
    assert reading.inner_text().startswith("at the peak")
    panel.locator(".ml-chart[role=slider]").focus()
    page.keyboard.press("ArrowRight")
    wait_for(lambda: "parameters" in reading.inner_text())
    cells = page.locator(".jp-Cell").count()
    for key in ("d", "d", "a"):  # which would delete a cell and add one
        page.keyboard.press(key)
    assert page.locator(".jp-Cell").count() == cells


def test_nothing_moves_while_a_prediction_or_a_run_comes_and_goes(page, panel):
    before = tops(panel, PLACES)
    settle(panel)
    assert tops(panel, PLACES) == before
    box(panel, "Accumulation").fill("4")
    wait_for(lambda: "4 micro-batches of 2" in panel.inner_text())
    settle(panel)
    assert tops(panel, PLACES) == before
    box(panel, "Limit").fill("1 KiB")
    wait_for(lambda: "does not fit" in badge(panel))
    assert tops(panel, PLACES) == before
    box(panel, "Limit").fill("")
    press_run(panel)
    assert tops(panel, PLACES) == before


def test_a_status_is_greyed_once_the_settings_are_others(page, panel):
    press_run(panel)
    assert "run 1, batch 8" in status(panel)
    assert panel.locator(".ml-status.ml-past").count() == 0
    box(panel, "Batch size").fill("16")
    wait_for(lambda: panel.locator(".ml-status.ml-past").count() == 1)
    assert "run 1, batch 8" in status(panel)


def test_a_model_that_fails_is_said_first_and_where(page, lab):
    panel = open_panel(page, lab, "failing.ipynb")
    alert = panel.locator(".ml-failure")
    alert.wait_for()
    assert "A training step of Wrong fails" in alert.inner_text()
    assert "a cell of the notebook, line" in alert.inner_text()
    assert bottom(alert) < slider(panel, "Batch size").bounding_box()["y"]


def test_the_header_stays_one_line_on_a_laptop(page, panel):
    page.set_viewport_size({"width": 1366, "height": 768})
    limit, redo = box(panel, "Limit"), button(panel, "Redo")
    wait_for(lambda: abs(redo.bounding_box()["y"] - limit.bounding_box()["y"]) < 12)
    assert redo.bounding_box()["x"] > limit.bounding_box()["x"]
