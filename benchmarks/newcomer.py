"""How long does a newcomer take to a first green panel, and can they go on from there?

The first three chapters of the course are opened in JupyterLab and Chromium, an empty cache, as a
server gives them to somebody who follows a link. Read: the seconds from the address to the panel,
and until it says that the step fits, with the drags for that. Then each exercise is answered in its
cell, and the link at the end of a chapter opens the next one in the same page.

    python -m benchmarks.newcomer --out newcomer.json
"""

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from tests.system.browser import lab_browser as lab_ui
from tests.system.browser import panel_page as panel_ui

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
FIRST, NUM_CHAPTERS = "c00_can_this_card.ipynb", 3
WEIGHTS = "4 * (784 * 512 + 512 + 512 * 10 + 10)"
ANSWERS = {
    "0.1": "panel.config",
    "0.2": "StepConfig(batch_size=256, memory_budget=0.0)",
    "1.1": "4 * (1024 * 4096 + 4096)",
    "1.2": f"2 * {WEIGHTS} + 4 * 4",
    "1.3": f"3 * {WEIGHTS} + 16 + 4 * 5130 + 2048 * (784 * 4 + 8) + 3 * 2048 * 512 * 4 + 8",
    "2.1": "(mine, config, memlab.predict(mine, config, 'cpu').peak_allocated_bytes)",
    "2.2": "784 * 4 + 8 + 3 * 512 * 4",
}
FITS = "✔ fits"
MOST_DRAGS = 8
ANSWER = """([number, answer]) => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  const asks = `chapter.check("${number}", `;
  const at = notebook.widgets.findIndex(cell => cell.model.sharedModel.source.includes(asks));
  const model = notebook.widgets[at].model.sharedModel;
  const [before] = model.source.split(asks);
  model.setSource(before + asks + answer + ')');
  notebook.activeCellIndex = at;
  return window.jupyterapp.commands.execute('notebook:run-cell')
    .then(() => notebook.widgets[at].outputArea.node.innerText); }"""
FINISH = """() => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  const at = notebook.widgets.findIndex(cell =>
    cell.model.sharedModel.source.includes('chapter.finish('));
  notebook.activeCellIndex = at;
  return window.jupyterapp.commands.execute('notebook:run-cell').then(() => {
    const link = notebook.widgets[at].outputArea.node.querySelector('a');
    link.click(); return link.innerText; }); }"""
PATH = "() => window.jupyterapp.shell.currentWidget.context.path"


def to_green(page: Any, url: str) -> dict[str, Any]:
    """Follow the address of the first chapter and move its panel until the step fits."""
    start = time.perf_counter()
    lab_ui.open_notebook(page, url, FIRST)
    opened = time.perf_counter() - start
    lab_ui.lab_command(page, "notebook:run-all-cells")
    panel = page.locator(panel_ui.PANEL).last
    panel.wait_for()
    panel.scroll_into_view_if_needed()
    panel_ui.settle(panel)
    seen, drags = time.perf_counter() - start, 0
    slider = panel_ui.slider(panel, "Accumulation")
    while not panel_ui.badge(panel).startswith(FITS) and drags < MOST_DRAGS:
        slider.press("ArrowRight")
        panel_ui.settle(panel)
        drags += 1
    return {
        "opened s": opened, "panel s": seen, "green s": time.perf_counter() - start,
        "drags": drags, "says": panel_ui.badge(panel),
    }  # fmt: skip


def answered(page: Any, chapter: int) -> list[str]:
    """Answer the exercises of a chapter in its cells; return what memlab says of each."""
    lab_ui.run_all(page) if chapter else page.wait_for_function(lab_ui.ALL_RUN)
    numbers = [number for number in ANSWERS if number.startswith(f"{chapter}.")]
    return [page.evaluate(ANSWER, [number, ANSWERS[number]]).strip() for number in numbers]


def main() -> None:
    """Follow the link, move the panel, and answer three chapters."""
    from playwright.sync_api import sync_playwright

    given, before = report.options(__file__, __doc__ or ""), report.environment()
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        folder = Path(place, "lab")
        shutil.copytree(NOTEBOOKS, folder)
        browser = playwright.chromium.launch(executable_path=lab_ui.CHROMIUM, args=lab_ui.ARGUMENTS)
        with lab_ui.jupyter_lab(folder, Path(place, "cache")) as url:
            page = browser.new_context(viewport={"width": 1366, "height": 1500}).new_page()
            page.set_default_timeout(1000 * lab_ui.PATIENCE_SECONDS)
            found: dict[str, Any] = {"first": to_green(page, url), "chapters": []}
            for chapter in range(NUM_CHAPTERS):
                start = time.perf_counter()
                row = {"chapter": chapter, "said": answered(page, chapter)}
                row["s"] = time.perf_counter() - start
                if chapter + 1 < NUM_CHAPTERS:
                    path = page.evaluate(PATH)
                    row["next"] = page.evaluate(FINISH)
                    panel_ui.wait_for(lambda path=path: page.evaluate(PATH) != path)
                    page.wait_for_function(lab_ui.KERNEL_IDLE)
                found["chapters"].append(row)
        browser.close()
    report.show("from the address to green", [found["first"]])
    report.show("the chapters after it", found["chapters"])
    report.write(given, before, found)


if __name__ == "__main__":
    main()
