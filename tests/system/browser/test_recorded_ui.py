"""A recorded device as a person meets it: its runs are played back, and called recorded."""

import pytest

from tests.system.browser import lab_browser as lab_ui
from tests.system.browser.conftest import SHOTS
from tests.system.browser.panel_page import (
    button,
    costs,
    first_row,
    open_panel,
    press_run,
    wait_for,
)


@pytest.mark.slow
def test_a_recorded_run_is_played_back_and_named_so(page, lab):
    panel = open_panel(page, lab, "recorded.ipynb")
    chosen = panel.get_by_label("On", exact=True)
    assert chosen.locator("option:checked").inner_text().endswith("recorded")
    wait_for(lambda: costs(panel).startswith("predicted for"))
    wait_for(lambda: "is another machine" in panel.locator("[role=status]").inner_text())
    advice = panel.locator(".memlab-advice")
    panel.get_by_label("Batch size", exact=True).fill("7")
    wait_for(lambda: "not recorded; the nearest recorded run is batch_size=" in advice.inner_text())
    button(panel, "go there").click()
    wait_for(lambda: "not recorded" not in advice.inner_text())
    result = press_run(panel)
    assert result["source"] == "recorded"
    assert result["outcome"] == "ok"
    wait_for(lambda: first_row(panel)["device"].endswith("recorded"))
    wait_for(lambda: ": recorded " in costs(panel))
    timeline = panel.locator(".memlab-picture-timeline")
    wait_for(lambda: "recorded peak" in timeline.inner_html())
    assert "measured peak" not in timeline.inner_html()
    SHOTS.mkdir(parents=True, exist_ok=True)
    for dark in (False, True):
        lab_ui.set_theme(page, dark)
        panel.screenshot(path=SHOTS / f"recorded-{'dark' if dark else 'light'}.png")
    button(panel, "code").click()
    wait_for(lambda: "memlab.recorded(workload, config, device=" in panel.inner_text())
