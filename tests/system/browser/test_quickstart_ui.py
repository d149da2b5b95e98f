"""The panel as a person meets it: JupyterLab in Chromium, by keyboard, mouse and typing."""

import html
import os
from pathlib import Path

import nbformat
import pytest
from PIL import Image

from tests.system.browser import lab_browser as lab_ui
from tests.system.browser.conftest import SHOTS
from tests.system.browser.panel_page import (
    button,
    first_row,
    in_kernel,
    num_rows,
    open_panel,
    press_run,
    shown_json,
    status,
    wait_for,
)


def test_a_slider_moved_by_keyboard_is_what_runs_and_what_is_shown(page, panel):
    handle = panel.locator(".noUi-handle").nth(1)
    handle.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    box = panel.get_by_label("Batch size", exact=True)
    wait_for(lambda: box.input_value() == "32")
    wait_for(lambda: "32 samples" in panel.inner_text())

    result = press_run(panel)
    assert result["outcome"] == "ok"
    assert result["config"]["batch_size"] == 32

    in_python = in_kernel(
        page, "{k: v for k, v in panel.result.to_dict().items() if k != 'timeline'}"
    )
    assert {k: v for k, v in result.items() if k != "run"} == in_python
    shown = in_kernel(
        page,
        "[memlab._util.units.format_bytes(panel.result.peak_allocated_bytes), "
        "memlab._util.units.format_seconds(panel.result.step_seconds)]",
    )
    wait_for(lambda: first_row(panel)["peak measured"] == shown[0])
    row = first_row(panel)
    assert [row["peak measured"], row["time measured"]] == shown
    assert row["batch"] == "32"
    assert row["outcome"].endswith("ok")
    wait_for(lambda: panel.locator(".memlab-memory svg").count() == 2)


def test_run_waits_for_a_change_that_the_busy_main_thread_holds(page, panel):
    """The page sends the first change of a control there, and later presses to another thread."""
    assert press_run(panel)["config"]["batch_size"] == 8
    busy = "(__import__('time').sleep(1), 1)"
    page.evaluate(
        """code => {
          const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
          kernel.requestExecute({code, store_history: false});
        }""",
        busy,
    )
    panel.get_by_label("Batch size", exact=True).fill("16")
    assert press_run(panel)["config"]["batch_size"] == 16


PRECISIONS = (
    *("fp32", "tf32", "bf16-mixed", "fp16-mixed", "bf16", "fp16"),
    *("bf16-master", "bf16-stochastic", "fp8-mixed"),
)


@pytest.mark.slow
def test_tab_goes_through_the_controls_in_reading_order(page, panel):
    button(panel, "as built").wait_for(state="hidden")  # offered until the model was looked at
    panel.get_by_label("Workload").focus()
    seen = []
    for _ in range(25):
        seen.append(
            page.evaluate(
                "() => { const e = document.activeElement; return e.getAttribute('role')"
                " || (e.labels && e.labels[0] && e.labels[0].innerText) || e.innerText; }"
            ).strip()
        )
        page.keyboard.press("Tab")
    assert seen == [
        *("Workload", "On", "Limit", "Fit for me", "code", "?"),
        *("slider", "Memory budget", "slider", "Batch size", "slider", "Accumulation"),
        *PRECISIONS,
        *("More options (AdamW)", "Ranks (one device)", "Run", "check gradients"),
    ]


@pytest.mark.slow
def test_an_optimizer_that_cannot_be_says_so_and_the_remedy_is_a_click(page, panel):
    button(panel, "More options (AdamW)").click()
    panel.get_by_label("update in backward").check()
    wait_for(lambda: "each gradient is used and freed" in panel.inner_text())
    panel.get_by_label("Accumulation", exact=True).fill("4")
    wait_for(lambda: "each micro-batch would update the weights" in panel.inner_text())
    page.screenshot(path=SHOTS / "optimizer-row.png")
    button(panel, "accumulation 1").click()
    wait_for(lambda: "each gradient is used and freed" in panel.inner_text())
    wait_for(lambda: panel.get_by_label("Accumulation", exact=True).input_value() == "1")
    for name in PRECISIONS:
        node = button(panel, name)
        assert node.evaluate("e => e.scrollWidth <= e.clientWidth"), f"{name} is cut off"


def test_stop_ends_the_run_and_the_panel_recovers(page, panel):
    panel.get_by_label("Batch size", exact=True).fill("200000")
    wait_for(lambda: "200000 samples" in panel.inner_text())
    button(panel, "Run").click()
    wait_for(lambda: button(panel, "Stop").is_enabled())
    wait_for(lambda: "measuring memory" in status(panel) or "timing" in status(panel))
    button(panel, "Stop").click()
    wait_for(lambda: button(panel, "Run").is_enabled())
    wait_for(lambda: "stopped" in status(panel))
    assert shown_json(panel)["outcome"] == "cancelled"
    panel.get_by_label("Batch size", exact=True).fill("4")
    wait_for(lambda: "4 samples in" in panel.inner_text())
    assert press_run(panel)["outcome"] == "ok"


def test_wrong_settings_say_so_at_the_control_and_the_remedy_is_a_click(page, panel):
    panel.get_by_label("Accumulation", exact=True).fill("12")
    wait_for(lambda: "more than the 8 samples" in panel.inner_text())
    wait_for(lambda: button(panel, "Run").is_disabled())
    button(panel, "set to 8").click()
    wait_for(lambda: "8 micro-batches of 1" in panel.inner_text())
    wait_for(lambda: button(panel, "Run").is_enabled())

    panel.get_by_label("Limit").fill("abc")
    wait_for(lambda: "memory_limit='abc' is not a size" in panel.inner_text())
    wait_for(lambda: button(panel, "Run").is_disabled())
    panel.get_by_label("Limit").fill("")

    for label, typed, said in (
        ("Batch size", "0", "batch_size=0 is below 1"),
        ("Memory budget", "1.5", "memory_budget=1.5 is outside"),
        ("Memory budget", "much", "memory_budget='much' is not a number"),
    ):
        panel.get_by_label(label, exact=True).fill(typed)
        wait_for(lambda said=said: said in panel.inner_text())
    wait_for(lambda: button(panel, "Run").is_disabled())


def test_a_limit_that_is_crossed_is_said_in_words(page, panel):
    panel.get_by_label("Limit").fill("100 KiB")
    result = press_run(panel)
    assert result["outcome"] == "out_of_memory"
    wait_for(lambda: first_row(panel)["outcome"].endswith("out of memory"))
    wait_for(lambda: "does not fit" in panel.locator(".memlab-fit").inner_text())
    wait_for(lambda: "out of memory in" in status(panel))


@pytest.mark.slow
def test_pin_compare_and_clear(page, panel):
    for batch_size in ("4", "8", "16"):
        panel.get_by_label("Batch size", exact=True).fill(batch_size)
        wait_for(lambda size=batch_size: f"{size} samples in" in panel.inner_text())
        press_run(panel)
    button(panel, "pin run 2").click()
    name = panel.get_by_label("Name of run 2")
    name.fill("the plain one")
    wait_for(lambda: "the plain one" in panel.locator("table.memlab-runs").inner_text())
    button(panel, "clear").click()
    wait_for(lambda: num_rows(panel) == 2)
    button(panel, "undo clear").click()
    wait_for(lambda: num_rows(panel) == 3)
    with page.expect_download() as saved:
        panel.get_by_role("link", name="CSV").click()
    assert "the plain one" in Path(saved.value.path()).read_text()
    assert in_kernel(page, "len(panel.results)") == 3


def test_the_saved_notebook_keeps_the_picture_of_the_last_run(page, panel, folder):
    press_run(panel)
    last = press_run(panel)
    still = page.locator(".memlab-still")
    wait_for(lambda: still.locator("tbody tr").count() == 2)
    wait_for(lambda: not still.is_visible())  # beside a live panel it is hidden
    page.evaluate("() => window.jupyterapp.shell.currentWidget.context.save().then(() => true)")
    notebook = nbformat.read(folder / "panel.ipynb", as_version=4)
    saved = notebook.cells[-1].outputs[-1].data
    assert saved["image/png"].startswith("iVBOR")
    assert last["message"] in html.unescape(saved["text/html"])


def test_nothing_moves_while_it_runs(page, panel):
    def tops():
        names = (".memlab-run-row", ".memlab-memory", ".memlab-table-box")
        return [round(panel.locator(name).bounding_box()["y"]) for name in names]

    before = tops()
    panel.get_by_label("Accumulation", exact=True).fill("12")
    wait_for(lambda: "more than the 8" in panel.inner_text())
    assert tops() == before
    button(panel, "set to 8").click()
    wait_for(lambda: "8 micro-batches" in panel.inner_text())
    press_run(panel)
    wait_for(lambda: panel.locator(".memlab-memory svg").count() == 2)
    assert tops() == before


@pytest.mark.slow
def test_two_panels_and_a_rerun_cell_work(page, lab):
    open_panel(page, lab, "two.ipynb")
    panels = page.locator(".memlab-panel")
    wait_for(lambda: panels.count() == 2)
    button(panels.first, "Run").click()
    lab_ui.run_all(page)  # while a run goes on
    wait_for(lambda: panels.count() == 2)
    assert press_run(panels.first)["outcome"] == "ok"
    assert in_kernel(page, "int((~a.results['is_earlier']).sum())") == 1  # if it had ended by then


@pytest.mark.slow
def test_a_restarted_kernel_is_said_on_the_page(page, panel):
    page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.restartKernel()"
        ".then(() => true)"
    )
    page.get_by_text("run this cell again to get a working panel").wait_for()
    lab_ui.run_all(page)
    again = page.locator(".memlab-panel").last
    assert press_run(again)["outcome"] == "ok"


def test_the_whole_quickstart_runs_and_looks_right_in_both_themes(page, lab):
    panel = open_panel(page, lab, "quickstart.ipynb")
    assert shown_json(panel)["outcome"] == "ok"
    panel.get_by_label("Accumulation", exact=True).fill("4")
    wait_for(lambda: "4 micro-batches of 2" in panel.inner_text())
    wait_for(lambda: "gradient: unchanged" in panel.inner_text())
    press_run(panel)
    wait_for(lambda: "another batch size" in panel.locator(".memlab-picture-heat-map").inner_text())
    panel.get_by_label("Batch size", exact=True).fill("16")
    press_run(panel)
    wait_for(lambda: panel.locator(".memlab-picture-heat-map svg").count() == 1)
    for width in (1300, 700):
        page.set_viewport_size({"width": width, "height": 1800})
        for dark in (False, True):
            lab_ui.set_theme(page, dark)
            SHOTS.mkdir(parents=True, exist_ok=True)
            panel.screenshot(path=SHOTS / f"panel-{width}-{'dark' if dark else 'light'}.png")
            wait_for(lambda: panel.evaluate("e => e.scrollWidth <= e.clientWidth + 1"))
    if picture := os.environ.get("MEMLAB_PICTURE"):  # `make picture`: what README.md shows
        with Image.open(SHOTS / "panel-1300-light.png") as shot:
            shot.quantize(256).save(picture, optimize=True)
