"""Where things are on the page, and what the picture says where a person points."""

import pytest

from tests.system.browser import lab_browser as lab_ui
from tests.system.browser.panel_page import button, open_panel, status, wait_for

PREDICTED = ".memlab-picture-timeline svg"
MOMENT = ".memlab-moment"


def bottom(locator):
    box = locator.bounding_box()
    return box["y"] + box["height"]


def shown_reading(panel):
    """Return the reading that is visible; "" if none is."""
    found = panel.locator(".memlab-reading").evaluate_all(
        "all => all.filter(e => e.offsetParent !== null).map(e => e.innerText)"
    )
    assert len(found) <= 1
    return found[0] if found else ""


def chosen(panel):
    """Return the number of the chosen moment, from 0; -1 if none is."""
    return panel.locator(f"{MOMENT} input").evaluate_all("all => all.findIndex(e => e.checked)")


def test_sliders_and_picture_share_a_laptops_screen_beside_the_sidebar(page, panel):
    lab_ui.lab_command(page, "application:toggle-left-area")
    page.set_viewport_size({"width": 1366, "height": 768})
    panel.get_by_label("Workload").select_option("lstm-text")  # which has a sequence length
    panel.get_by_label("Sequence length", exact=True).wait_for()
    wait_for(lambda: panel.locator(PREDICTED).count() == 1)
    panel.evaluate("panel => panel.scrollIntoView({block: 'start'})")
    sliders = panel.locator(".memlab-row:visible")
    picture = panel.locator(".memlab-picture-timeline")
    assert sliders.count() == 5, "four sliders, and the number formats"
    for seen in (sliders.last, panel.locator(".memlab-fit"), picture, button(panel, "Run")):
        wait_for(lambda seen=seen: bottom(seen) <= 768)
    assert picture.bounding_box()["x"] > sliders.first.bounding_box()["x"] + 300


@pytest.mark.matrix
@pytest.mark.parametrize("width", [1920, 1366, 760, 380])
def test_nothing_is_cut_at_any_width(page, panel, width):
    wait_for(lambda: panel.locator(PREDICTED).count() == 1)
    panel.get_by_label("Batch size", exact=True).fill("1000000")
    page.set_viewport_size({"width": width, "height": 1500})
    wait_for(lambda: panel.evaluate("e => e.scrollWidth <= e.clientWidth + 1"))
    for name in ("Batch size", "Memory budget", "Accumulation"):
        box = panel.get_by_label(name, exact=True)
        assert box.evaluate("e => e.scrollWidth <= e.clientWidth"), name
    panel.get_by_label("Accumulation", exact=True).fill("2000000")  # more than samples
    button(panel, "set to 524288").wait_for()
    wait_for(lambda: panel.evaluate("e => e.scrollWidth <= e.clientWidth + 1"))


def test_the_picture_says_what_is_held_where_a_person_points(page, panel):
    wait_for(lambda: panel.locator(PREDICTED).count() == 1)
    moments = panel.locator(MOMENT)
    wait_for(lambda: moments.count() > 5)
    assert shown_reading(panel) == ""
    moments.nth(3).hover()
    wait_for(lambda: "forward" in shown_reading(panel))
    assert "parameters" in shown_reading(panel)

    moments.nth(1).click()
    page.mouse.move(5, 5)
    wait_for(lambda: shown_reading(panel) != "")
    assert chosen(panel) == 1
    cells = page.locator(".jp-Cell").count()
    page.keyboard.press("ArrowRight")
    wait_for(lambda: chosen(panel) == 2)
    for key in ("d", "d", "a"):  # which would delete a cell and add one
        page.keyboard.press(key)
    assert page.locator(".jp-Cell").count() == cells


def test_a_status_is_greyed_once_the_settings_are_others(page, panel):
    button(panel, "Run").click()
    wait_for(lambda: status(panel).endswith("a step") and "run 1, batch 8" in status(panel))
    assert panel.locator(".memlab-past").count() == 0
    panel.get_by_label("Batch size", exact=True).fill("16")
    wait_for(lambda: panel.locator(".memlab-past").count() == 1)
    assert "run 1, batch 8" in status(panel)


def test_a_model_that_fails_is_said_first_and_where(page, lab):
    panel = open_panel(page, lab, "failing.ipynb")
    alert = panel.locator(".memlab-failure [role=alert]")
    alert.wait_for()
    assert "A training step of Wrong fails" in alert.inner_text()
    assert "a cell of the notebook, line" in alert.inner_text()
    assert bottom(alert) < panel.locator(".memlab-row").first.bounding_box()["y"]
    assert "ready" not in panel.inner_text()
