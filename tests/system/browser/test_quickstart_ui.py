"""The panel as a person meets it: JupyterLab in Chromium, by keyboard, mouse and typing."""

import html
from pathlib import Path

import nbformat
import pytest

from tests.system.browser import lab_browser as lab_ui
from tests.system.browser.conftest import SHOTS
from tests.system.browser.panel_page import (
    PANEL,
    badge,
    box,
    button,
    chart_label,
    costs,
    first_row,
    in_kernel,
    is_inside,
    num_rows,
    open_panel,
    pane,
    press_run,
    radio,
    result,
    settle,
    slider,
    status,
    tops,
    value,
    wait_for,
)

PLACES = (".ml-answer", ".ml-body", ".ml-run", ".ml-chart", ".ml-table")


def test_a_slider_moved_by_keyboard_is_what_runs_and_what_is_shown(page, panel):
    settle(panel)
    slider(panel, "Batch size").focus()
    for _ in range(4):  # half octaves
        page.keyboard.press("ArrowRight")
    wait_for(lambda: value(panel, "Batch size") == "32")
    wait_for(lambda: "32 samples" in panel.inner_text())

    found = press_run(panel)
    assert (found["outcome"], found["config"]["batch_size"]) == ("ok", 32)
    shown = in_kernel(
        page,
        "[memlab._util.units.format_bytes(panel.result.peak_allocated_bytes), "
        "memlab._util.units.format_seconds(panel.result.step_seconds)]",
    )
    wait_for(lambda: first_row(panel).get("peak measured") == shown[0])
    row = first_row(panel)
    assert (row["time measured"], row["batch"], row["outcome"]) == (shown[1], "32", "✔ ok")
    wait_for(lambda: first_row(panel).get("peak error", "").endswith("%"))
    assert first_row(panel)["peak predicted"] == row["peak measured"]
    wait_for(lambda: costs(panel).startswith("measured") and "predicted" in costs(panel))


def test_a_moved_slider_changes_picture_and_badge_before_any_run(page, panel):
    settle(panel)
    box(panel, "Limit").fill("2 MiB")
    wait_for(lambda: badge(panel).startswith("✔ fits"))
    before = chart_label(panel)
    slider(panel, "Batch size").focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    for _ in range(3):
        page.keyboard.press("PageUp")
    wait_for(lambda: badge(panel).startswith("✖ does not fit"))
    assert "predicted" in badge(panel) or "interpolated" in badge(panel)
    wait_for(lambda: chart_label(panel) != before)
    assert "limit 2.00 MiB" in chart_label(panel)
    settle(panel)
    assert num_rows(panel) == 0


def test_a_run_holds_what_was_set_while_the_kernel_was_busy(page, panel):
    """The kernel's main thread is busy; what was typed, and Run, wait in their order."""
    assert press_run(panel)["config"]["batch_size"] == 8
    page.evaluate(
        """code => {
          const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
          kernel.requestExecute({code, store_history: false});
        }""",
        "(__import__('time').sleep(1), 1)",
    )
    box(panel, "Batch size").fill("16")
    assert press_run(panel)["config"]["batch_size"] == 16


def test_an_option_that_cannot_be_says_so_and_the_remedy_is_a_click(page, panel):
    drawer = pane(panel, "More options (AdamW)")
    drawer.get_by_label("update in backward").check()
    wait_for(lambda: "each gradient is used and freed" in panel.inner_text())
    box(panel, "Accumulation").fill("4")
    wait_for(lambda: "each micro-batch would update the weights" in panel.inner_text())
    button(panel, "accumulation 1").click()
    wait_for(lambda: "each gradient is used and freed" in panel.inner_text())
    wait_for(lambda: value(panel, "Accumulation") == "1")


def test_stop_ends_the_run_and_the_panel_recovers(page, panel):
    box(panel, "Batch size").fill("200000")
    wait_for(lambda: "200000 samples" in panel.inner_text())
    button(panel, "Run").click()
    wait_for(lambda: button(panel, "Stop").is_enabled())
    going = panel.locator(".ml-progress")
    wait_for(lambda: "measuring memory" in going.inner_text() or "timing" in going.inner_text())
    button(panel, "Stop").click()
    wait_for(lambda: button(panel, "Run").is_enabled())
    wait_for(lambda: "stopped" in status(panel))
    assert result(panel)["outcome"] == "cancelled"
    box(panel, "Batch size").fill("4")
    assert press_run(panel)["outcome"] == "ok"


def test_wrong_settings_say_so_at_the_control_and_the_remedy_is_a_click(page, panel):
    settle(panel)
    before = tops(panel, PLACES)
    box(panel, "Accumulation").fill("12")
    wait_for(lambda: "more than the 8 samples" in panel.inner_text())
    wait_for(lambda: button(panel, "Run").is_disabled())
    assert tops(panel, PLACES) == before
    button(panel, "set to 8").click()
    wait_for(lambda: "8 micro-batches of 1" in panel.inner_text())
    wait_for(lambda: button(panel, "Run").is_enabled())

    box(panel, "Limit").fill("abc")
    wait_for(lambda: "not a size" in panel.inner_text())
    wait_for(lambda: button(panel, "Run").is_disabled())
    box(panel, "Limit").fill("")

    for label, typed, said in (
        ("Batch size", "0", "batch_size=0 is below 1"),
        ("Memory budget", "1.5", "memory_budget=1.5 is outside"),
        ("Memory budget", "much", "memory_budget='much' is not a number"),
    ):
        box(panel, label).fill(typed)
        wait_for(lambda said=said: said in panel.inner_text())
    wait_for(lambda: button(panel, "Run").is_disabled())


def test_a_limit_that_is_crossed_is_said_in_words(page, panel):
    box(panel, "Limit").fill("100 KiB")
    assert press_run(panel)["outcome"] == "out_of_memory"
    wait_for(lambda: first_row(panel)["outcome"].endswith("out of memory"))
    wait_for(lambda: "does not fit" in badge(panel))
    wait_for(lambda: "out of memory in" in status(panel))


@pytest.mark.slow
def test_undo_and_redo_go_through_what_was_set(page, panel):
    settle(panel)
    box(panel, "Batch size").fill("4")
    radio(panel, "bf16").check(force=True)
    wait_for(lambda: in_kernel(page, "[panel.config.batch_size, str(panel.config.precision)]")
             == [4, "bf16"])  # fmt: skip
    for _ in range(2):
        button(panel, "Undo").click()
    wait_for(lambda: value(panel, "Batch size") == "8")
    wait_for(lambda: in_kernel(page, "panel.config.batch_size") == 8)
    button(panel, "Redo").click()
    wait_for(lambda: in_kernel(page, "panel.config.batch_size") == 4)


@pytest.mark.slow
def test_pin_compare_and_clear(page, panel):
    for batch_size in ("4", "8", "16"):
        box(panel, "Batch size").fill(batch_size)
        press_run(panel)
    button(panel, "pin run 2").click()
    name = panel.get_by_label("name of run 2")
    name.fill("the plain one")
    name.press("Tab")
    wait_for(lambda: "the plain one" in panel.locator("table.ml-runs").inner_text())
    button(panel, "compare run 1").click()
    wait_for(lambda: button(panel, "compare run 1").get_attribute("aria-pressed") == "true")
    wait_for(lambda: panel.locator(".ml-chart").count() == 2)
    difference = panel.locator(".ml-difference")
    wait_for(lambda: "Measured: " in difference.inner_text())
    assert difference.inner_text().startswith("Peak ")
    panel.get_by_label("compare with").select_option("nothing")
    wait_for(lambda: panel.locator(".ml-chart").count() == 1)
    assert button(panel, "compare run 1").get_attribute("aria-pressed") == "false"
    button(panel, "clear").click()
    wait_for(lambda: num_rows(panel) == 2)
    button(panel, "undo clear").click()
    wait_for(lambda: num_rows(panel) == 3)
    with page.expect_download() as saved:
        panel.locator(".ml-table").get_by_role("button", name="CSV", exact=True).click()
    assert "the plain one" in Path(saved.value.path()).read_text()
    assert in_kernel(page, "len(panel.results)") == 3


def test_the_saved_notebook_keeps_the_step_and_its_runs(page, panel, folder):
    press_run(panel)
    last = press_run(panel)
    settle(panel)
    still = page.locator(".ml-still")
    wait_for(lambda: still.count() == 1 and not still.is_visible())  # beside a live panel
    wait_for(lambda: last["message"] in still.text_content())

    def kept():
        page.evaluate("() => window.jupyterapp.shell.currentWidget.context.save().then(() => true)")
        return (
            nbformat.read(folder / "panel.ipynb", as_version=4)
            .cells[-1]
            .outputs[-1]
            .data["text/html"]
        )

    wait_for(lambda: "mount(root" in kept())  # the run's words come before its recorded step
    found = kept()
    for part in ("data:image/png;base64,", last["message"]):
        assert part in html.unescape(found)
    other = page.context.new_page()  # without a kernel
    other.set_content(f"<body>{found}</body>")
    other.locator(".ml .ml-badge").wait_for()
    assert "fits" in badge(other)
    wait_for(lambda: other.locator("table.ml-runs tbody tr").count() == 2)
    slider(other, "Batch size").press("ArrowRight")
    wait_for(lambda: value(other, "Batch size") == "12")
    other.close()


@pytest.mark.slow
def test_two_panels_and_a_rerun_cell_work(page, lab):
    open_panel(page, lab, "two.ipynb")
    panels = page.locator(PANEL)
    wait_for(lambda: panels.count() == 2)
    button(panels.first, "Run").click()
    lab_ui.run_all(page)  # while a run goes on
    wait_for(lambda: panels.count() == 2)
    button(panels.first, "Run").click()
    wait_for(lambda: in_kernel(page, "a.result is not None"))
    assert in_kernel(page, "int((~a.results['is_earlier']).sum())") == 1  # if it had ended by then


@pytest.mark.slow
def test_a_restarted_kernel_is_said_on_the_page(page, panel):
    settle(panel)
    page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.restartKernel()"
        ".then(() => true)"
    )
    page.get_by_text("run this cell again to get a working panel").wait_for()
    slider(panel, "Batch size").press("PageUp")  # what was recorded stays alive
    wait_for(lambda: "interpolated" in badge(panel))
    assert value(panel, "Batch size") == "32"
    assert not button(panel, "Run").is_enabled()
    assert not button(panel, "Stop").is_enabled()
    lab_ui.run_all(page)
    assert press_run(page.locator(PANEL).last)["outcome"] == "ok"


@pytest.mark.slow
def test_a_card_that_is_not_here_is_predicted_and_kept(page, panel):
    settle(panel)
    device = panel.get_by_label("On", exact=True)
    device.select_option("rtx-4090")
    wait_for(lambda: "reserves" in badge(panel) and badge(panel).startswith("✔ fits"))
    wait_for(lambda: "is not in this machine" in status(panel))
    button(panel, "Keep this prediction").click()
    wait_for(lambda: num_rows(panel) == 1)
    row = first_row(panel)
    assert (row["device"], row["outcome"]) == ("rtx-4090", "○ predicted")
    assert "peak measured" not in row
    device.select_option("other")
    memory = panel.get_by_label("Memory", exact=True)
    memory.fill("12 GiB")
    in_kernel(page, "panel.keep(batch_size=16).outcome")  # what is drawn meanwhile
    wait_for(lambda: num_rows(panel) == 2)
    assert memory.input_value() == "12 GiB", "it is still what was typed"
    memory.press("Tab")
    wait_for(lambda: in_kernel(page, "panel.prediction is not None and panel.prediction.device")
             == "12GiB")  # fmt: skip
    device.select_option("cpu")
    wait_for(lambda: button(panel, "Run").is_enabled())


@pytest.mark.slow
def test_a_recorded_run_is_played_back_and_named_so(page, lab):
    panel = open_panel(page, lab, "recorded.ipynb")
    chosen = panel.get_by_label("On", exact=True)
    assert chosen.locator("option:checked").inner_text().endswith("recorded")
    settle(panel)
    wait_for(lambda: "is another machine" in status(panel))
    advice = panel.locator(".ml-advice")
    box(panel, "Batch size").fill("7")
    wait_for(lambda: "not recorded; the nearest recorded run is batch_size=" in advice.inner_text())
    button(panel, "go there").click()
    wait_for(lambda: "not recorded" not in advice.inner_text())
    found = press_run(panel)
    assert (found["source"], found["outcome"]) == ("recorded", "ok")
    wait_for(lambda: first_row(panel)["device"].endswith("recorded"))
    wait_for(lambda: "recorded " in costs(panel))
    code = pane(panel, "code")
    wait_for(lambda: "memlab.recorded(workload, config, device=" in code.inner_text())


def test_the_whole_quickstart_runs_and_looks_right_in_both_themes(page, lab):
    panel = open_panel(page, lab, "quickstart.ipynb")
    assert result(panel)["outcome"] == "ok"
    box(panel, "Accumulation").fill("4")
    wait_for(lambda: "4 micro-batches of 2" in panel.inner_text())
    wait_for(lambda: "gradient: unchanged" in panel.inner_text())
    press_run(panel)
    settle(panel)
    for width in (1300, 700):
        page.set_viewport_size({"width": width, "height": 1800})
        for dark in (False, True):
            lab_ui.set_theme(page, dark)
            SHOTS.mkdir(parents=True, exist_ok=True)
            panel.screenshot(path=SHOTS / f"panel-{width}-{'dark' if dark else 'light'}.png")
            wait_for(lambda: is_inside(panel))
