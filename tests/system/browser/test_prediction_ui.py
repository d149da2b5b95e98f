"""Live prediction as a person meets it: a slider is moved, and picture and badge follow, unrun."""

import pytest

from tests.system.browser import lab_browser as lab_ui
from tests.system.browser.conftest import SHOTS
from tests.system.browser.panel_page import (
    badge,
    button,
    costs,
    first_row,
    num_rows,
    press_run,
    settle,
    wait_for,
)


def picture(panel):
    return panel.locator(".memlab-picture-timeline").inner_html()


def is_inside(locator):
    """Whether nothing of an element is wider than its place."""
    return locator.evaluate("e => e.scrollWidth <= e.clientWidth + 1")


def shown_peak(panel):
    """The text above the timeline that begins with "peak"; "" while nothing is drawn."""
    texts = panel.locator(".memlab-picture-timeline text").all_text_contents()
    return next((text for text in texts if text.startswith("peak ")), "")


def test_a_moved_slider_changes_picture_and_badge_before_any_run(page, panel):
    settle(panel)
    panel.get_by_label("Limit").fill("2 MiB")
    wait_for(lambda: badge(panel).startswith("✔ fits"))
    wait_for(lambda: shown_peak(panel))  # drawn by a thread of its own
    before, peak = picture(panel), shown_peak(panel)
    handle = panel.locator(".noUi-handle").nth(1)
    handle.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    wait_for(lambda: badge(panel).startswith("✖ does not fit"))
    wait_for(lambda: "predicted" in badge(panel))
    wait_for(lambda: picture(panel) != before)
    wait_for(lambda: shown_peak(panel) not in ("", peak))
    wait_for(lambda: "limit 2.00 MiB" in picture(panel))
    settle(panel)
    assert num_rows(panel) == 0


def test_a_run_draws_its_line_over_the_prediction(page, panel):
    settle(panel)
    press_run(panel)
    wait_for(lambda: "measured peak" in picture(panel))
    wait_for(lambda: first_row(panel).get("peak error", "").endswith("%"))
    row = first_row(panel)
    assert row["peak predicted"] == row["peak measured"]
    assert abs(float(row["peak error"].removesuffix(" %"))) < 1
    wait_for(lambda: costs(panel).startswith("on cpu: measured") and "predicted" in costs(panel))


@pytest.mark.slow
def test_a_card_that_is_not_here_is_predicted_and_kept(page, panel):
    settle(panel)
    panel.get_by_label("On", exact=True).select_option("rtx-4090, predicted")
    wait_for(lambda: "predicted for rtx-4090" in costs(panel))
    wait_for(lambda: "reserved" in costs(panel))
    limit = panel.get_by_label("Limit")
    wait_for(lambda: limit.get_attribute("placeholder").endswith("GiB: the card"))
    wait_for(lambda: badge(panel).startswith("✔ fits"))
    wait_for(lambda: "is not in this machine" in panel.locator("[role=status]").inner_text())
    button(panel, "Keep this prediction").click()
    wait_for(lambda: num_rows(panel) == 1)
    row = first_row(panel)
    assert (row["device"], row["outcome"]) == ("rtx-4090", "○ predicted")
    assert "peak measured" not in row
    panel.get_by_label("On", exact=True).select_option("another card, by memory size")
    panel.get_by_label("Memory", exact=True).fill("12 GiB")
    wait_for(lambda: "predicted for 12GiB" in costs(panel))
    panel.get_by_label("On", exact=True).select_option("this machine: cpu")
    wait_for(lambda: button(panel, "Run").is_enabled())
    wait_for(lambda: limit.get_attribute("placeholder").endswith("GiB: this machine"))


def test_nothing_moves_while_a_prediction_comes_and_goes(page, panel):
    def places():
        names = (".memlab-run-row", ".memlab-status", ".memlab-memory", ".memlab-table-box")
        return [round(panel.locator(name).bounding_box()["y"]) for name in names]

    before = places()
    settle(panel)
    assert places() == before
    panel.get_by_label("Accumulation", exact=True).fill("4")
    wait_for(lambda: "predicting" in costs(panel) or "4 micro-batches" in panel.inner_text())
    assert places() == before
    settle(panel)
    panel.get_by_label("Limit").fill("1 KiB")
    wait_for(lambda: "does not fit" in badge(panel))
    assert places() == before


@pytest.mark.slow
def test_a_prediction_looks_right_in_both_themes(page, panel):
    panel.get_by_label("Limit").fill("2 MiB")
    settle(panel)
    SHOTS.mkdir(parents=True, exist_ok=True)
    for width in (1300, 700):
        page.set_viewport_size({"width": width, "height": 1800})
        for dark in (False, True):
            lab_ui.set_theme(page, dark)
            theme = "dark" if dark else "light"
            panel.screenshot(path=SHOTS / f"prediction-{width}-{theme}.png")
            wait_for(lambda: is_inside(panel))
            wait_for(lambda: is_inside(panel.locator(".memlab-costs")))
