"""Ranks as a person meets them: chosen, explained, run, and seen rank by rank."""

from tests.system.browser import lab_browser as lab_ui
from tests.system.browser.conftest import SHOTS
from tests.system.browser.panel_page import (
    button,
    costs,
    first_row,
    press_run,
    settle,
    wait_for,
)

HELD = ".memlab-ranks svg"


def top(panel, name):
    return round(panel.locator(name).bounding_box()["y"])


def test_a_strategy_is_chosen_explained_run_and_drawn_rank_by_rank(page, panel):
    settle(panel)
    button(panel, "Ranks (one device)").click()
    assert panel.get_by_label("World size", exact=True).is_disabled()
    button(panel, "what each rank holds").click()
    ranks = panel.locator(".memlab-ranks")
    panel.locator(HELD).wait_for()  # which says that one device has no ranks
    places = {name: top(panel, name) for name in (".memlab-run-row", ".memlab-charts")}

    panel.get_by_label("Sharding", exact=True).select_option(label="zero3: and the parameters")
    wait_for(lambda: "keeps everything" in panel.inner_text())
    button(panel, "2 ranks").click()
    wait_for(lambda: "each of 2 ranks computes 4 of 8 samples" in panel.inner_text())
    button(panel, "Ranks (zero3 x 2)").wait_for()
    wait_for(lambda: costs(panel).startswith("predicted for"))
    wait_for(lambda: panel.locator(HELD).count() == 1)
    wait_for(lambda: "A rank sends" in ranks.inner_text())
    assert {name: top(panel, name) for name in places} == places, "nothing else has moved"

    panel.get_by_label("World size", exact=True).fill("3")
    wait_for(lambda: "batch_size=8 does not divide" in panel.inner_text())
    button(panel, "set to 6").wait_for()
    panel.get_by_label("World size", exact=True).fill("2")
    wait_for(lambda: button(panel, "Run").is_enabled())

    result = press_run(panel)
    assert result["outcome"] == "ok", result["message"]
    assert len(result["ranks"]) == 2
    assert "zero3 x 2" in first_row(panel)["other"]
    label = panel.locator(HELD)
    wait_for(lambda: "category: rank" in (label.get_attribute("aria-label") or ""))
    assert "parameters" in label.get_attribute("aria-label")
    for dark in (True, False):
        lab_ui.set_theme(page, dark)
        panel.screenshot(path=SHOTS / f"ranks-{'dark' if dark else 'light'}.png")
