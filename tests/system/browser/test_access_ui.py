"""Can everybody use the panel: by keyboard, by screen reader, tomorrow?"""

import json

import nbformat
import pytest

from tests.system.browser import lab_browser as lab_ui
from tests.system.browser.panel_page import (
    button,
    first_row,
    press_run,
    status,
    wait_for,
)

PREDICTED = ".memlab-picture-timeline svg"
HANDLE = ".noUi-handle"
SHOWN_HANDLE = f"{HANDLE}:visible"  # a workload with samples of one size has no slider for it
# the smallest size of a target is not among the rules that run by themselves
OPTIONS = {"resultTypes": ["violations"], "rules": {"target-size": {"enabled": True}}}
GRAVE = {"serious", "critical"}
MOST_TABS = 80
WHOLE_NOTEBOOK = 1200  # seconds; on a busy machine its cells take minutes
NAME_OF_FOCUS = """() => { const e = document.activeElement;
  return e.ariaLabel || (e.labels && e.labels[0] && e.labels[0].innerText) || e.innerText || '';
}"""


def findings(page):
    """Return what axe-core finds in the panel: the rule and the first element, if it is grave."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, ".memlab-panel", OPTIONS).response["violations"]
    return [(rule["id"], rule["nodes"][0]["html"]) for rule in found if rule["impact"] in GRAVE]


def restart_kernel(page):
    page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
    )


def test_nothing_shuts_people_out_in_either_theme(page, panel):
    wait_for(lambda: panel.locator(PREDICTED).count() == 1)
    press_run(panel)
    for dark in (False, True):
        lab_ui.set_theme(page, dark)
        assert json.dumps(findings(page)) == "[]", dark


def test_a_slider_says_its_name_and_its_value(page, panel):
    wait_for(lambda: panel.locator(SHOWN_HANDLE).count() == 3)
    names = panel.locator(SHOWN_HANDLE).evaluate_all("all => all.map(e => e.ariaLabel)")
    assert names == ["Memory budget slider", "Batch size slider", "Accumulation slider"]

    handle = panel.get_by_role("slider", name="Batch size slider")
    panel.get_by_label("Batch size", exact=True).fill("48")
    handle.focus()
    wait_for(lambda: handle.get_attribute("aria-valuetext") == "48")
    page.keyboard.press("ArrowRight")
    wait_for(lambda: handle.get_attribute("aria-valuetext") in ("64", "128"))
    wait_for(
        lambda: (
            panel.get_by_label("Batch size", exact=True).input_value()
            == handle.get_attribute("aria-valuetext")
        )
    )


def test_the_size_of_a_sample_has_a_slider_that_goes_from_one_offered_size_to_the_next(page, panel):
    panel.get_by_label("Workload").select_option("gpt-small")
    handle = panel.get_by_role("slider", name="Sequence length slider")
    handle.wait_for()
    assert panel.locator(SHOWN_HANDLE).count() == 4
    wait_for(lambda: handle.get_attribute("aria-valuetext") == "128")
    handle.focus()
    page.keyboard.press("ArrowRight")
    box = panel.get_by_label("Sequence length", exact=True)
    wait_for(lambda: box.input_value() == "256")
    wait_for(lambda: handle.get_attribute("aria-valuetext") == "256")
    wait_for(lambda: "8 samples of 256 tokens: 2,048 tokens in each" in panel.inner_text())
    wait_for(lambda: "gpt-small, sequence length 256: 3," in panel.inner_text())

    box.fill("300")
    handle.focus()
    wait_for(lambda: handle.get_attribute("aria-valuetext") == "300")
    box.fill("0")
    button(panel, "set to 128").click()
    wait_for(lambda: box.input_value() == "128")

    panel.get_by_label("Workload").select_option("vit-digits")
    handle = panel.get_by_role("slider", name="Image size slider")
    wait_for(lambda: handle.get_attribute("aria-valuetext") == "32")
    panel.get_by_label("Workload").select_option("tiny-mlp")
    handle.wait_for(state="hidden")
    assert panel.locator(SHOWN_HANDLE).count() == 3


def test_a_toggle_says_whether_it_is_pressed(page, panel):
    code = button(panel, "code")
    wait_for(lambda: code.get_attribute("aria-pressed") == "false")
    code.click()
    wait_for(lambda: code.get_attribute("aria-pressed") == "true")
    wait_for(lambda: "The same step in plain PyTorch" in panel.inner_text())


def test_keys_on_a_control_do_nothing_to_the_cell(page, panel):
    cells = page.locator(".jp-Cell").count()
    for control in (panel.locator(HANDLE).first, button(panel, "Run"), button(panel, "fp32")):
        control.focus()
        for key in "ddaby":
            page.keyboard.press(key)
        assert control.evaluate("e => e === document.activeElement")
    lab_ui.lab_command(page, "docmanager:save")  # which comes after all that the keys asked for
    assert page.locator(".jp-Cell").count() == cells
    assert panel.is_visible()


def focus_by_tab(page, name):
    """Press Tab until the control of this accessible name has the focus."""
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        if page.evaluate(NAME_OF_FOCUS).split("\n")[0].strip() == name:
            return
    raise AssertionError(f"{name} is not reached by Tab")


def test_enter_runs_what_was_typed_before_it(page, panel):
    panel.get_by_label("Batch size", exact=True).focus()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("16")
    page.keyboard.press("Enter")
    wait_for(lambda: first_row(panel).get("batch"))
    assert first_row(panel)["batch"] == "16"


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
    panel = page.locator(".memlab-panel").last
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
    focus_by_tab(page, "pin run 1")
    page.keyboard.press("Space")
    wait_for(lambda: button(panel, "compare run 1").get_attribute("aria-pressed") == "true")
    wait_for(lambda: "run 1" in panel.locator(".memlab-picture-timeline").inner_text())


@pytest.mark.slow
def test_settings_and_runs_come_back_after_a_reload_and_after_a_restart(page, panel):
    press_run(panel)
    panel.get_by_label("Batch size", exact=True).fill("16")
    wait_for(lambda: "batch 8" in status(panel))
    lab_ui.lab_command(page, "docmanager:save")
    page.reload()
    wait_for(lambda: panel.get_by_label("Batch size", exact=True).count() == 1)
    assert panel.get_by_label("Batch size", exact=True).input_value() == "16"
    wait_for(lambda: first_row(panel).get("batch") == "8")

    restart_kernel(page)
    panel.locator(".memlab-gone").wait_for()
    lab_ui.run_all(page)
    wait_for(lambda: first_row(panel).get("#") == "1 earlier")
    assert panel.get_by_label("Batch size", exact=True).input_value() == "16"
    assert "run 1, earlier, batch 8" in status(panel)
