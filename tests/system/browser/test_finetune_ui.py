"""A fine-tuning and ranks as a person meets them: chosen, explained, run, and seen."""

import pytest

from tests.system.browser import lab_browser as lab_ui
from tests.system.browser.conftest import SHOTS
from tests.system.browser.panel_page import (
    box,
    button,
    first_row,
    open_panel,
    pane,
    press_run,
    settle,
    tops,
    wait_for,
)


def test_an_adapter_and_a_base_are_chosen_and_a_wrong_pair_is_explained(page, lab):
    panel = open_panel(page, lab, "finetune.ipynb")
    settle(panel)
    wait_for(lambda: "parameters are trained" in panel.inner_text())
    SHOTS.mkdir(parents=True, exist_ok=True)
    for width, dark in ((1600, False), (1600, True), (900, False)):
        page.set_viewport_size({"width": width, "height": 900})
        lab_ui.set_theme(page, dark)
        panel.screenshot(path=SHOTS / f"finetune-{width}-{'dark' if dark else 'light'}.png")

    held = panel.locator(".ml-choices").bounding_box()
    box(panel, "Base").select_option(label="int8")
    box(panel, "Adapter").select_option(label="dora")
    wait_for(lambda: "loses the scales of base='int8'" in panel.inner_text())
    assert button(panel, "Keep this prediction").is_disabled()
    assert panel.locator(".ml-choices").bounding_box() == held, "nothing has moved"
    button(panel, "set them back").click()
    wait_for(lambda: button(panel, "Keep this prediction").is_enabled())

    box(panel, "Adapter").select_option(label="ia3")
    wait_for(lambda: box(panel, "Rank").is_disabled())
    code = pane(panel, "code")
    wait_for(lambda: "adapter='ia3'" in code.inner_text())


@pytest.mark.slow
def test_a_strategy_is_chosen_explained_run_and_shown_rank_by_rank(page, panel):
    settle(panel)
    drawer = pane(panel, "Ranks (one device)")
    assert box(drawer, "World size").is_disabled()
    held = pane(panel, "what each rank holds")
    wait_for(lambda: "One device trains by itself" in held.inner_text())
    places = tops(panel, (".ml-run", ".ml-chart"))

    box(panel, "Sharding").select_option(label="zero3: and the parameters")
    wait_for(lambda: "keeps everything" in panel.inner_text())
    button(panel, "2 ranks").click()
    wait_for(lambda: "each of 2 ranks computes 4 of 8 samples" in panel.inner_text())
    button(panel, "Ranks (zero3 x 2)").wait_for()
    wait_for(lambda: "A rank sends" in held.inner_text())
    assert tops(panel, (".ml-run", ".ml-chart")) == places, "nothing else has moved"

    box(panel, "World size").fill("3")
    wait_for(lambda: "batch_size=8 does not divide" in panel.inner_text())
    button(panel, "set to 6").wait_for()
    box(panel, "World size").fill("2")
    wait_for(lambda: button(panel, "Run").is_enabled())

    found = press_run(panel)
    assert found["outcome"] == "ok", found["message"]
    assert len(found["ranks"]) == 2
    assert "zero3 x 2" in first_row(panel)["other"]
    wait_for(lambda: "rank 0" in held.inner_text() or "ranks 0" in held.inner_text())
    assert "parameters" in held.inner_text()
