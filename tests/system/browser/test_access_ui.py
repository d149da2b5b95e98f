"""Can everybody use the panel: by keyboard, by screen reader, tomorrow?"""

import json

import nbformat
import pytest

from tests.system.browser import lab_browser as lab_ui
from tests.system.browser.pages import violations
from tests.system.browser.panel_page import (
    PANEL,
    box,
    button,
    first_row,
    pane,
    press_run,
    radio,
    settle,
    slider,
    status,
    value,
    wait_for,
)

GRAVE = {"serious", "critical"}
MOST_TABS = 80
WHOLE_NOTEBOOK = 1200  # seconds; on a busy machine its cells take minutes
NAME_OF_FOCUS = """() => { const e = document.activeElement;
  return e.ariaLabel || (e.labels && e.labels[0] && e.labels[0].innerText) || e.innerText || '';
}"""
PANES = ("More options (AdamW)", "Ranks (one device)", "what fits", "what holds the peak",
         "what each rank holds", "cards", "code", "?")  # fmt: skip


def findings(page):
    """Return what axe-core finds in the panel: the rule and the first element, if it is grave."""
    found = violations(page, PANEL)
    return [(rule["id"], rule["nodes"][0]["html"]) for rule in found if rule["impact"] in GRAVE]


def test_nothing_shuts_people_out_in_either_theme_whatever_is_open(page, panel):
    settle(panel)
    press_run(panel)
    button(panel, "pin run 1").click()
    button(panel, "compare run 1").click()
    wait_for(lambda: panel.locator(".ml-chart").count() == 2)
    for name in PANES:
        pane(panel, name)
    wait_for(lambda: panel.locator("[data-pane=cards] tbody tr").count() > 3)
    for dark in (False, True):
        lab_ui.set_theme(page, dark)
        assert json.dumps(findings(page)) == "[]", dark
    box(panel, "Batch size").fill("nothing")
    wait_for(lambda: "is not a whole number" in panel.inner_text())
    assert json.dumps(findings(page)) == "[]"


def test_a_slider_says_its_name_and_its_value(page, panel):
    sliders = panel.locator("input[type=range]")
    wait_for(lambda: sliders.count() == 3)
    names = sliders.evaluate_all("all => all.map(e => e.ariaLabel)")
    assert names == ["Memory budget slider", "Batch size slider", "Accumulation slider"]
    handle = slider(panel, "Batch size")
    box(panel, "Batch size").fill("40")
    wait_for(lambda: handle.get_attribute("aria-valuetext") == "40")
    handle.press("ArrowRight")
    wait_for(lambda: handle.get_attribute("aria-valuetext") in ("48", "64"))
    assert value(panel, "Batch size") == handle.get_attribute("aria-valuetext")


def test_the_size_of_a_sample_has_a_slider_that_goes_from_one_offered_size_to_the_next(page, panel):
    workload = panel.get_by_label("Workload")
    workload.select_option("gpt-small")
    handle = slider(panel, "Sequence length")
    handle.wait_for()
    wait_for(lambda: handle.get_attribute("aria-valuetext") == "128")
    handle.press("ArrowRight")
    wait_for(lambda: value(panel, "Sequence length") == "256")
    wait_for(lambda: "8 samples of 256 tokens: 2,048 tokens in each" in panel.inner_text())
    wait_for(lambda: "gpt-small, sequence length 256: 3," in panel.inner_text())
    box(panel, "Sequence length").fill("300")
    wait_for(lambda: handle.get_attribute("aria-valuetext") == "300")
    box(panel, "Sequence length").fill("0")
    button(panel, "set to 128").click()
    wait_for(lambda: value(panel, "Sequence length") == "128")
    workload.select_option("vit-digits")
    wait_for(lambda: slider(panel, "Image size").get_attribute("aria-valuetext") == "32")
    workload.select_option("tiny-mlp")
    wait_for(lambda: panel.locator("input[type=range]").count() == 3)


def test_keys_on_a_control_do_nothing_to_the_cell(page, panel):
    cells = page.locator(".jp-Cell").count()
    for control in (slider(panel, "Batch size"), button(panel, "code"), radio(panel, "fp32")):
        control.focus()
        for key in "ddaby":
            page.keyboard.press(key)
        assert control.evaluate("e => e === document.activeElement")
    lab_ui.lab_command(page, "docmanager:save")  # which comes after all that the keys asked for
    assert page.locator(".jp-Cell").count() == cells
    assert panel.is_visible()


@pytest.mark.slow
def test_tab_goes_through_the_controls_in_reading_order(page, panel):
    settle(panel)
    # the number format of the model is found beside its prediction
    panel.get_by_text("as built", exact=True).wait_for(state="detached")
    panel.get_by_label("Workload").focus()
    seen = []
    while "check gradients" not in seen and len(seen) < MOST_TABS:
        seen.append(page.evaluate(NAME_OF_FOCUS).strip())
        page.keyboard.press("Tab")
    assert [name for name in seen if name in {"Workload", "On", "Limit", "Fit for me", "code", "?",
            "Memory budget slider", "Batch size", "Accumulation", "fp32", "Run"}] == [
        "Workload", "On", "Limit", "Fit for me", "code", "?", "Memory budget slider", "Batch size",
        "Accumulation", "fp32", "Run",
    ]  # fmt: skip


def focus_by_tab(page, name, key="Tab"):
    """Press Tab until the control of this accessible name has the focus."""
    for _ in range(MOST_TABS):
        page.keyboard.press(key)
        if page.evaluate(NAME_OF_FOCUS).split("\n")[0].strip() == name:
            return
    raise AssertionError(f"{name} is not reached by Tab")


def test_enter_runs_what_was_typed_before_it_and_escape_closes_what_is_open(page, panel):
    box(panel, "Batch size").focus()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("16")
    page.keyboard.press("Enter")
    wait_for(lambda: first_row(panel).get("batch"))
    assert first_row(panel)["batch"] == "16"
    wait_for(lambda: button(panel, "Run").is_enabled())
    button(panel, "code").click()
    panel.locator("[data-pane=code]").wait_for()
    wait_for(lambda: "The same step in plain PyTorch" in panel.inner_text())
    page.keyboard.press("Escape")
    panel.locator("[data-pane=code]").wait_for(state="detached")


def test_a_press_on_an_uncertainty_shows_the_runs_that_it_rests_on(page, panel):
    settle(panel)
    uncertainty = panel.locator(".ml-costs button").first
    uncertainty.click()
    shown = panel.locator("[data-pane=evidence]")
    wait_for(lambda: "timed on this machine" in shown.inner_text())
    assert panel.get_by_label("On", exact=True).locator("optgroup").count() >= 5
    panel.get_by_label("On", exact=True).select_option("rtx-3060")
    wait_for(lambda: "xMem" in shown.inner_text())
    assert "reserved: " in shown.inner_text()
    for dark in (False, True):
        lab_ui.set_theme(page, dark)
        assert json.dumps(findings(page)) == "[]", dark
    uncertainty.focus()
    page.keyboard.press("Escape")
    shown.wait_for(state="detached")


def test_a_session_by_keys_from_workload_to_undo(page, panel):
    settle(panel)
    panel.get_by_label("Workload").focus()
    page.keyboard.type("plain-mlp")
    wait_for(lambda: "plain-mlp: " in panel.inner_text())
    settle(panel)
    focus_by_tab(page, "Batch size slider")
    page.keyboard.press("PageUp")
    page.keyboard.press("ArrowRight")
    wait_for(lambda: value(panel, "Batch size") == "48")
    page.keyboard.press("Enter")  # which runs
    wait_for(lambda: first_row(panel).get("batch") == "48")
    wait_for(lambda: button(panel, "Run").is_enabled())
    page.keyboard.press("Home")
    page.keyboard.press("End")
    wait_for(lambda: value(panel, "Batch size") == "1,024")
    page.keyboard.press("ControlOrMeta+z")
    wait_for(lambda: value(panel, "Batch size") == "48")
    focus_by_tab(page, "what holds the peak")
    page.keyboard.press("Enter")
    panel.locator("[data-pane=peak]").wait_for()
    page.keyboard.press("Escape")
    panel.locator("[data-pane=peak]").wait_for(state="detached")
    assert page.evaluate(NAME_OF_FOCUS) == "what holds the peak"
    focus_by_tab(page, "Batch size", "Shift+Tab")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("200000")
    page.keyboard.press("Enter")
    wait_for(lambda: button(panel, "Stop").is_enabled())
    page.keyboard.press("Escape")
    wait_for(lambda: "stopped" in status(panel))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["short.ipynb", pytest.param("quickstart.ipynb", marks=pytest.mark.long)]
)
def test_from_the_first_cell_to_a_pinned_comparison_by_keyboard_alone(page, lab, folder, name):
    lab_ui.open_notebook(page, lab, name)
    page.keyboard.press("Escape")
    sources = [cell.source for cell in nbformat.read(folder / name, as_version=4).cells]
    for source in sources:
        page.keyboard.press("Shift+Enter")
        if "panel.run(" in source:
            break
    panel = page.locator(PANEL).last
    wait_for(lambda: first_row(panel).get("outcome", "").endswith("ok"), seconds=WHOLE_NOTEBOOK)
    wait_for(lambda: button(panel, "Run").is_enabled())
    for _ in range(2):  # from the next cell to the one that runs, and to that of the panel
        page.keyboard.press("ArrowUp")

    focus_by_tab(page, "Batch size")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("16")
    page.keyboard.press("Enter")  # which runs
    wait_for(lambda: first_row(panel).get("batch", "8") != "8")
    assert first_row(panel)["batch"] == "16"
    wait_for(lambda: button(panel, "Run").is_enabled())
    focus_by_tab(page, "compare run 1")
    page.keyboard.press("Space")
    wait_for(lambda: button(panel, "compare run 1").get_attribute("aria-pressed") == "true")


@pytest.mark.slow
def test_settings_and_runs_come_back_after_a_reload_and_after_a_restart(page, panel):
    press_run(panel)
    box(panel, "Batch size").fill("16")
    wait_for(lambda: "batch 8" in status(panel))
    lab_ui.lab_command(page, "docmanager:save")
    page.reload()
    wait_for(lambda: box(panel, "Batch size").count() == 1)
    assert value(panel, "Batch size") == "16"
    wait_for(lambda: first_row(panel).get("batch") == "8")
    settle(panel)  # the recorded steps were asked for again

    page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
    )
    page.get_by_text("The kernel was restarted or has died").wait_for()
    lab_ui.run_all(page)
    wait_for(lambda: first_row(panel).get("#") == "1 earlier")
    assert value(panel, "Batch size") == "16"
    assert "run 1, earlier, batch 8" in status(panel)
