"""How fast and how calm is the panel in a real browser, and whom does it shut out?

A notebook with one panel is opened in JupyterLab and Chromium, as `tests/system/browser` opens it.

- From a slider to a picture: keys are pressed on each slider in turn, with the rest of a hand
  between them. The time is that from the key to the frame in which the timeline and its words are
  drawn anew. A move that changes no word there is counted apart: two budgets may have the same
  plan.
- From a result to its row: the time from the end of a run in the kernel to its row on the page.
- What moves: the farthest that any box goes in a burst of moves, in pixels.
- Who is shut out: serious findings of axe-core in both themes. And errors of the console.

Without Chromium, playwright and axe-playwright-python it says so. Left out: what a prediction costs
without a browser, which `slider_moves.py` measures.
"""

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat

from benchmarks import report
from tests.system.browser import lab_browser as lab_ui
from tests.system.browser import panel_page as panel_ui

CELL = """
import memlab

workload = memlab.workloads.get("gpt-small")
panel = memlab.panel(workload, device="{device}", config=memlab.StepConfig(batch_size=16))
panel
"""
KERNEL = {"name": "python3", "language": "python", "display_name": "Python 3 (ipykernel)"}
DEVICES = ("cpu", "h200")
SLIDERS = ("Memory budget", "Batch size", "Accumulation")
LAPTOP = {"width": 1366, "height": 768}
NUM_MOVES, NUM_MOVES_QUICK = 20, 5
NUM_BURST, NUM_BURST_QUICK = 500, 50
NUM_RUNS, NUM_RUNS_QUICK = 7, 2
RUN_SAMPLES = 4  # in a step that is run: how long it takes does not matter
REST_SECONDS = 1.0
MOST_MS = 20_000  # a move without a new picture by then counts as that
SAME_MS = 2_000  # after that the kernel is asked whether the picture stays as it is
IS_SHOWN = "panel._page._looked == panel._asked.question and panel.prediction is not None"
GOALS = {"p50 ms": 16.0, "p95 ms": 50.0}
GRAVE = ("serious", "critical")

# the time from the next key to the first change of the picture, once it is on the screen
AWAIT_PICTURE = """most => { window.moved = new Promise(done => {
  const picture = document.querySelector('.ml-live .ml-chart');
  let start = null;
  window.addEventListener('keydown', () => { start = performance.now(); },
                          {capture: true, once: true});
  const end = window.endMove =
    time => { watcher.disconnect(); clearTimeout(timer); done(time); };
  const watcher = new MutationObserver(() => start !== null &&
    requestAnimationFrame(() => end(performance.now() - start)));
  watcher.observe(picture, {subtree: true, attributeFilter: ['aria-label']});
  const timer = setTimeout(() => end(most), most);
}); }"""
NEXT_PICTURE = """most => Promise.race(
  [window.moved, new Promise(done => setTimeout(() => done(null), most))])"""
# a run of the panel notes when its result is there, by the clock that the browser has too
NOTE_RESULTS = """exec('''
import time
if not hasattr(panel, "ended"):
    add = panel._log.add
    def noted(*result):
        panel.ended = time.time()
        return add(*result)
    panel._log.add = noted
    panel.ended = 0.0
''')"""
AWAIT_ROW = """() => { window.listed = new Promise(done => {
  const rows = () => document.querySelectorAll('.ml-live table.ml-runs tbody tr').length;
  const before = rows();
  const watcher = new MutationObserver(() => {
    if (rows() === before) return;
    watcher.disconnect();
    requestAnimationFrame(() => done(Date.now())); });
  watcher.observe(document.querySelector('.ml-live'), {subtree: true, childList: true});
}); }"""
# a remedy's button that comes or goes has no area without it, and moves nothing
WATCH_BOXES = """() => {
  const boxes = [...document.querySelectorAll(
    ['.ml-row', '.ml-answer', '.ml-run', '.ml-chart', '.ml-table'].map(n => '.ml-live ' + n))];
  const place = box => { const at = box.getBoundingClientRect();
    return [at.x, at.y, at.width, at.height]; };
  const before = boxes.map(place);
  const distance = (one, other) => one[2] && other[2] ?
    Math.max(...one.map((value, i) => Math.abs(value - other[i]))) : 0;
  window.farthest = 0;
  const look = () => {
    window.farthest =
      Math.max(window.farthest, ...boxes.map((box, i) => distance(place(box), before[i])));
    window.watching = requestAnimationFrame(look);
  };
  look(); }"""


def moves(page: Any, panel: Any, name: str, count: int) -> dict[str, Any]:
    """Return the times from moves of one slider to their pictures."""
    draw, found = random.Random(name), []
    handle = panel.get_by_role("slider", name=f"{name} slider")
    for _ in range(count):
        handle.focus()
        at, low, high = (float(handle.evaluate(f"e => e.{end}")) for end in ("value", "min", "max"))
        right = at <= low or (at < high and draw.random() < 0.5)
        page.evaluate(AWAIT_PICTURE, MOST_MS)
        page.keyboard.press("ArrowRight" if right else "ArrowLeft")
        taken = page.evaluate(NEXT_PICTURE, SAME_MS)
        if taken is None and panel_ui.in_kernel(page, IS_SHOWN):
            page.evaluate("() => window.endMove(null)")
        if (taken := page.evaluate("() => window.moved")) is not None:
            found.append(taken)
        time.sleep(REST_SECONDS)

    cuts = statistics.quantiles(found, n=20, method="inclusive")
    return {"moves": count, "same picture": count - len(found),
            "p50 ms": statistics.median(found), "p95 ms": cuts[-1],
            "most ms": max(found)}  # fmt: skip


def burst(page: Any, panel: Any, count: int) -> float:
    """Return how many pixels any box moves while keys are pressed on the sliders without rest."""
    draw = random.Random(0)
    page.evaluate(WATCH_BOXES)
    for _ in range(count):
        handle = panel.get_by_role("slider", name=f"{draw.choice(SLIDERS)} slider")
        handle.evaluate("e => e.focus({preventScroll: true})")  # what scrolls is no shift
        page.keyboard.press(draw.choice(["ArrowLeft", "ArrowRight"]))
    page.wait_for_timeout(1000 * REST_SECONDS)
    farthest: float = page.evaluate(
        "() => { cancelAnimationFrame(window.watching); return window.farthest; }"
    )
    return farthest


def result_to_row(page: Any, panel: Any) -> float:
    """Return the seconds from the end of a run in the kernel to its row on the page."""
    panel_ui.in_kernel(page, NOTE_RESULTS)
    page.evaluate(AWAIT_ROW)
    panel_ui.button(panel, "Run").click()
    shown_ms: float = page.evaluate("() => window.listed")
    panel_ui.wait_for(panel_ui.button(panel, "Run").is_enabled)
    ended: float = panel_ui.in_kernel(page, "panel.ended")
    return shown_ms / 1000 - ended


def findings(page: Any) -> int:
    """Return how many serious findings axe-core has in both themes."""
    from axe_playwright_python.sync_playwright import Axe

    count = 0
    for dark in (False, True):
        lab_ui.set_theme(page, dark)
        found = Axe().run(page, panel_ui.PANEL).response["violations"]
        count += sum(len(rule["nodes"]) for rule in found if rule["impact"] in GRAVE)
    lab_ui.set_theme(page, dark=False)
    return count


def is_on_one_screen(page: Any, panel: Any) -> bool:
    """Return whether four sliders, badge, Run and timeline are seen at once on a laptop."""
    page.set_viewport_size(LAPTOP)
    panel.evaluate("panel => panel.scrollIntoView({block: 'start'})")
    page.wait_for_timeout(1000 * REST_SECONDS)
    names = (".ml-main", ".ml-badge", ".ml-chart", ".ml-run-buttons")
    boxes = [panel.locator(name).first.bounding_box() for name in names]
    return all(box["y"] >= 0 and box["y"] + box["height"] <= LAPTOP["height"] for box in boxes)


def measured(
    browser: Any, device: str, cache: Path, *, quick: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row for each slider, and what else was found, of a panel for a device."""
    with tempfile.TemporaryDirectory() as folder:
        cell = nbformat.v4.new_code_cell(CELL.format(device=device).strip())
        notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": KERNEL})
        nbformat.write(notebook, Path(folder) / "panel.ipynb")
        with lab_ui.jupyter_lab(Path(folder), cache) as url:
            page = browser.new_context(viewport={"width": 1300, "height": 1500}).new_page()
            page.set_default_timeout(1000 * lab_ui.PATIENCE_SECONDS)
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda said: errors.extend([said.text] * (said.type == "error")))
            lab_ui.open_notebook(page, url, "panel.ipynb")
            lab_ui.run_all(page)
            panel = page.locator(panel_ui.PANEL).last
            panel_ui.settle(panel)
            page.wait_for_timeout(1000 * REST_SECONDS)

            count = NUM_MOVES_QUICK if quick else NUM_MOVES
            rows = [{"on": device, "slider": s, **moves(page, panel, s, count)} for s in SLIDERS]
            found: dict[str, Any] = {"on": device}
            found["farthest move px"] = burst(page, panel, NUM_BURST_QUICK if quick else NUM_BURST)
            if device == "cpu":
                for name, samples in (("Accumulation", 1), ("Batch size", RUN_SAMPLES)):
                    panel_ui.box(panel, name).fill(str(samples))
                panel_ui.settle(panel)
                count = NUM_RUNS_QUICK if quick else NUM_RUNS
                seconds = [result_to_row(page, panel) for _ in range(count)]
                found["result to row, median s"] = statistics.median(seconds)
            found["serious findings of axe-core"] = findings(page)
            found["on one laptop screen"] = is_on_one_screen(page, panel)
            found["errors of the console"] = len(errors)
            return rows, found


def main() -> None:
    """Measure the panel for this CPU and for a card that is not here."""
    from playwright.sync_api import sync_playwright

    given, before = report.options(__file__, __doc__ or ""), report.environment()
    rows, others = [], []
    with tempfile.TemporaryDirectory() as cache, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=lab_ui.CHROMIUM, args=lab_ui.ARGUMENTS)
        for device in DEVICES:
            of_sliders, found = measured(browser, device, Path(cache), quick=given.quick)
            rows += [
                {
                    **row,
                    "goal": report.verdict(all(row[key] <= most for key, most in GOALS.items())),
                }
                for row in of_sliders
            ]
            others.append(found)
        browser.close()

    report.show("from a key on a slider to the picture on the page", rows)
    for found in others:
        report.show(f"the page of a panel for {found['on']}", [found])
    report.write(given, before, {"moves": rows, "pages": others})


if __name__ == "__main__":
    main()
