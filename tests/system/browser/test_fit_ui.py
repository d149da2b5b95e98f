"""*Fit for me* as a person meets it: pressed, watched, undone, by mouse and by keyboard."""

import pytest

from tests.system.browser.conftest import SHOTS
from tests.system.browser.panel_page import (
    badge,
    button,
    costs,
    open_panel,
    settle,
    status,
    wait_for,
)


def value(panel, name):
    return panel.get_by_label(name, exact=True).input_value()


def top(panel, name):
    return round(panel.locator(name).bounding_box()["y"])


def test_the_sliders_move_to_what_fits_and_undo_brings_them_back(page, panel):
    settle(panel)
    panel.get_by_label("Batch size", exact=True).fill("256")
    panel.get_by_label("Limit").fill("1.2 MiB")  # which the plain step exceeds
    wait_for(lambda: badge(panel).startswith("✖ does not fit"))
    assert button(panel, "Undo").count() == 0, "nothing to undo"

    fit = button(panel, "Fit for me")
    assert fit.bounding_box()["height"] >= 24
    fit.focus()
    page.keyboard.press("Space")
    found = panel.locator(".memlab-fits")
    wait_for(lambda: found.is_visible() and "Searching" in found.inner_text())
    places = {name: top(panel, name) for name in (".memlab-body", ".memlab-charts")}
    wait_for(lambda: status(panel).startswith("✔ moved to"))
    assert {name: top(panel, name) for name in places} == places, "the answer moves nothing"
    wait_for(lambda: badge(panel).startswith("✔ fits"))
    assert value(panel, "Batch size") == "256"
    # within the uncertainty of the times there is no fastest
    assert "by prediction, the " in found.inner_text()
    assert "Kept: batch 256, adamw" in found.inner_text()

    button(panel, "Undo").click()
    wait_for(lambda: badge(panel).startswith("✖ does not fit"))
    assert (value(panel, "Accumulation"), value(panel, "Memory budget")) == ("1", "1")
    button(panel, "use 1").click()
    wait_for(lambda: badge(panel).startswith("✔ fits"))


@pytest.mark.slow
def test_where_nothing_fits_that_is_said_and_nothing_moves(panel):
    settle(panel)
    panel.get_by_label("Limit").fill("1 KiB")
    wait_for(lambda: badge(panel).startswith("✖ does not fit"))
    before = [value(panel, name) for name in ("Batch size", "Accumulation", "Memory budget")]
    button(panel, "Fit for me").click()
    wait_for(lambda: "nothing that was tried fits 1.00 KiB" in status(panel), seconds=180)
    assert "takes at least" in panel.locator(".memlab-fits").inner_text()
    after = [value(panel, name) for name in ("Batch size", "Accumulation", "Memory budget")]
    assert after == before
    SHOTS.mkdir(parents=True, exist_ok=True)
    panel.screenshot(path=SHOTS / "nothing-fits.png")


@pytest.mark.slow
def test_a_panel_opens_on_a_trainer_that_was_configured(page, lab):
    panel = open_panel(page, lab, "trainer.ipynb")
    wait_for(lambda: costs(panel).startswith("predicted for"), seconds=180)
    assert (value(panel, "Batch size"), value(panel, "Accumulation")) == ("8", "2")
    assert button(panel, "bf16-mixed").get_attribute("aria-pressed") == "true"
    button_of_more = panel.locator(".memlab-more-row button").first
    assert button_of_more.evaluate("e => getComputedStyle(e).overflowX") == "hidden"
    more = button_of_more.bounding_box()
    assert more["x"] + more["width"] <= panel.locator(".memlab-memory").bounding_box()["x"]
    SHOTS.mkdir(parents=True, exist_ok=True)
    panel.screenshot(path=SHOTS / "trainer.png")


def test_the_header_stays_one_line_on_a_laptop(page, panel):
    page.set_viewport_size({"width": 1366, "height": 768})
    undo = panel.locator(".memlab-fit-button").last  # invisible, with its place kept
    limit = panel.get_by_label("Limit").bounding_box()
    wait_for(lambda: abs(undo.bounding_box()["y"] - limit["y"]) < 12)
    assert undo.bounding_box()["x"] > limit["x"] + limit["width"]
