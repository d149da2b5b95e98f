"""A result and a saved step as the output of a cell; a run of which there is no recording."""

from memlab._util.units import format_bytes
from tests.system.browser import lab_browser as lab_ui
from tests.system.browser.panel_page import (
    badge,
    box,
    chart_label,
    costs,
    in_kernel,
    open_panel,
    press_run,
    radio,
    slider,
    wait_for,
)

FAR_ABOVE, FAR_BELOW = "1 GiB", "64 KiB"


def test_a_result_and_a_saved_step_are_shown_without_anything_to_run(page, lab):
    lab_ui.open_notebook(page, lab, "views.ipynb")
    lab_ui.run_all(page)
    result, step = (page.locator(".ml-still").nth(at) for at in (0, 1))
    for view in (result, step):
        view.scroll_into_view_if_needed()
        wait_for(lambda view=view: chart_label(view) != "")
        assert view.get_by_role("button", name="Run", exact=True).count() == 0

    peak = format_bytes(in_kernel(page, "result.peak_allocated_bytes"))
    assert "measured on cpu" in result.locator(".ml-head").inner_text()
    assert f"peak {peak}" in badge(result)
    assert f"peak {peak}" in chart_label(result)
    assert result.get_by_role("slider", name="Batch size slider").count() == 0
    box(result, "Limit").fill(FAR_ABOVE)
    wait_for(lambda: badge(result).startswith(f"✔ fits: takes {peak} of 1.00 GiB, measured"))
    box(result, "Limit").fill(FAR_BELOW)
    wait_for(lambda: badge(result).startswith("✖ does not fit"))

    before = badge(step)
    assert "predicted" in before
    slider(step, "Batch size").press("PageUp")
    wait_for(lambda: badge(step) != before)


def test_a_run_without_a_recording_has_its_measured_picture(page, lab):
    panel = open_panel(page, lab, "unrecorded.ipynb")
    wait_for(lambda: "no prediction" in costs(panel))
    assert panel.locator(".ml-chart canvas").count() == 0
    result = press_run(panel)
    peak = f"peak {format_bytes(result['peak_allocated_bytes'])} in"
    wait_for(lambda: peak in chart_label(panel))  # painted once the browser has a frame for it
    assert panel.get_by_text("Measured memory", exact=True).is_visible()
    assert radio(panel, "by module").is_disabled()

    box(panel, "Limit").fill(FAR_ABOVE)
    assert "predicting" not in chart_label(panel), "the limit is no part of the step"
    wait_for(lambda: "of 1.00 GiB" in badge(panel))
    assert "measured" in badge(panel)
    slider(panel, "Batch size").press("PageUp")
    wait_for(lambda: "what is set now was not run" in chart_label(panel))
