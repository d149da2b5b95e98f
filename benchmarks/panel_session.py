"""What does a person wait for in a panel besides its sliders, and what does the kernel pay?

A notebook with one panel is opened in JupyterLab and Chromium, as `tests/system/browser` opens it.

- From a cell to its panel, with a warm worker: until a slider can be moved; until there is an exact
  picture.
- From another precision or length, predicted in the kernel, to the first new picture or word, and
  to the exact picture. What was predicted ahead counts: a hand rests between two choices.
- *Fit for me*: until the first setting that fits is on screen, and until the search has ended.
- What the kernel pays for one frame's move after another: memory and processor time of its process
  and threads, without workers.
- A saved page without a kernel: the time from a move to its picture, drawn, and the frames that
  took twice their time, also two in a row.

    python -m benchmarks.panel_session --quick --out panel_session.json
"""

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

import memlab
from benchmarks import report
from benchmarks.panel_page import KERNEL
from tests.system.browser import lab_browser as lab_ui
from tests.system.browser import panel_page as panel_ui

CELL = """
import memlab

panel = memlab.panel(memlab.workloads.{workload}, device="{device}", memory_limit={limit!r},
                     config=memlab.StepConfig(batch_size={batch}))
panel
"""
ASKED = {"precision": ("fp32", "bf16-mixed", "bf16"), "length": ("64", "128", "256")}
FITS = (
    ("get('gpt-small')", "t4", "2 GiB", 256),
    ("get('vit-digits')", "t4", "1 GiB", 4096),
    ("finetune('llama-1b', tokens=2048, adapter='lora', base='bf16')", "rtx-4060", None, 16),
)
NUM_MOVES, NUM_MOVES_QUICK = 1_000, 100
REST_SECONDS = 2.0
FRAME_MS = 1000 / 60
KERNEL_PAYS = (
    "[__import__('time').process_time(), "
    "int(open('/proc/self/statm').read().split()[1]) * 4096 / 2**20]"
)
# one input event a frame; its picture is drawn when the message after that frame arrives
MOVE_ALONG = """async ([count, frame]) => {
  const handles = [...document.querySelectorAll('.ml-row input[type=range]:enabled')];
  const picture = document.querySelector('.ml-chart');
  const set = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set;
  const next = () => new Promise(done => requestAnimationFrame(done));
  const painted = () => new Promise(done => { const channel = new MessageChannel();
    channel.port1.onmessage = () => done(performance.now()); channel.port2.postMessage(0); });
  const times = []; let late = 0, twice = 0, wasLate = false, last = await next();
  for (let move = 0; move < count; move += 1) {
    const handle = handles[move % handles.length];
    const [at, low, high] = [handle.value, handle.min, handle.max].map(Number);
    const by = at <= low ? 1 : at >= high ? -1 : (move * 7919) % 3 ? 1 : -1;
    set.call(handle, at + by);
    const before = picture.getAttribute('aria-label'), start = performance.now();
    handle.dispatchEvent(new Event('input', {bubbles: true}));
    const shown = await next(), end = await painted();
    if (picture.getAttribute('aria-label') !== before) times.push(end - start);
    const isLate = shown - last > 2 * frame;
    late += isLate; twice += isLate && wasLate; wasLate = isLate; last = shown;
  }
  return [times, late, twice]; }"""


def opened(browser: Any, folder: Path, cache: Path, **values: Any) -> Iterator[Any]:
    """Yield a page of JupyterLab with a notebook of one panel that is not run yet."""
    cell = nbformat.v4.new_code_cell(CELL.format(**values).strip())
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": KERNEL})
    nbformat.write(notebook, folder / "panel.ipynb")
    with lab_ui.jupyter_lab(folder, cache) as url:
        page = browser.new_context(viewport={"width": 1366, "height": 1500}).new_page()
        page.set_default_timeout(1000 * lab_ui.PATIENCE_SECONDS)
        lab_ui.open_notebook(page, url, "panel.ipynb")
        yield page
        page.close()


def seconds_to(start: float, panel: Any, is_there: Any) -> float:
    """Wait for a state of the page; return the seconds since `start`."""
    panel_ui.wait_for(is_there)
    return time.perf_counter() - start


def opening(page: Any) -> dict[str, float]:
    """Run the cell; return the seconds until it can be used, and until its exact picture."""
    panel = page.locator(panel_ui.PANEL).last
    slider = panel_ui.slider(panel, "Batch size")
    start = time.perf_counter()
    lab_ui.lab_command(page, "notebook:run-all-cells")
    usable = seconds_to(start, panel, lambda: slider.count() and slider.is_enabled())
    picture = panel.locator(".ml-chart canvas")
    first = seconds_to(start, panel, lambda: picture.count() > 0)
    panel_ui.settle(panel)
    return {"controls s": usable, "picture s": first, "exact s": time.perf_counter() - start}


def asked(panel: Any, what: str, count: int) -> tuple[list[float], list[float]]:
    """Choose values in a drawn order; return the seconds to their first words and to the exact."""
    draw, first, exact = random.Random(what), [], []
    values, last = ASKED[what], ""
    for _ in range(count):
        value = draw.choice([one for one in values if one != last])
        before, last = (panel_ui.chart_label(panel), panel_ui.badge(panel)), value
        start = time.perf_counter()
        if what == "precision":
            panel_ui.radio(panel, value).check(force=True)
        else:
            panel_ui.box(panel, "Sequence length").fill(value)
        first.append(seconds_to(start, panel, lambda before=before: before != (
            panel_ui.chart_label(panel), panel_ui.badge(panel))))  # fmt: skip
        panel_ui.settle(panel)
        exact.append(time.perf_counter() - start)
        time.sleep(REST_SECONDS)
    return first, exact


def fit(panel: Any) -> dict[str, Any]:
    """Press *Fit for me*; return the seconds to a setting that fits, and to the end."""
    assert "not fit" in panel_ui.badge(panel), panel_ui.badge(panel)
    start = time.perf_counter()
    panel_ui.button(panel, "Fit for me").click()
    found = seconds_to(start, panel, lambda: "fits" in panel_ui.badge(panel))
    stop = panel_ui.button(panel, "Stop")
    end = seconds_to(start, panel, lambda: not stop.count() or stop.is_disabled())
    return {"first that fits s": found, "best s": end, "found": panel_ui.status(panel)}


def along(page: Any, count: int) -> dict[str, Any]:
    """Move the sliders, one move a frame; return the times to the drawn picture."""
    times, late, twice = page.evaluate(MOVE_ALONG, [count, FRAME_MS])
    cuts = statistics.quantiles(times, n=20, method="inclusive")
    return {"moves": count, "with another picture": len(times), "p50 ms": statistics.median(times),
            "p95 ms": cuts[-1], "late frames": late, "two in a row": twice}  # fmt: skip


def session(browser: Any, folder: Path, cache: Path, *, quick: bool) -> dict[str, Any]:
    """Return what one panel of the quickstart's model takes, in the order of a person."""
    count = NUM_MOVES_QUICK if quick else NUM_MOVES
    values = {"workload": "get('gpt-small')", "device": "cpu", "limit": None, "batch": 16}
    found: dict[str, Any] = {}
    for page in opened(browser, folder, cache, **values):
        found["opening, cold"] = opening(page)
        panel_ui.in_kernel(page, "panel.close()")
        lab_ui.lab_command(page, "notebook:clear-all-cell-outputs")
        found["opening, warm worker"] = opening(page)
        panel = page.locator(panel_ui.PANEL).last
        time.sleep(5 * REST_SECONDS)
        for what in ASKED:
            first, exact = asked(panel, what, 4 if quick else 10)
            cuts = [statistics.quantiles(some, n=20, method="inclusive")[-1]
                    for some in (first, exact)]  # fmt: skip
            found[what] = {"choices": len(first), "first p50 s": statistics.median(first),
                           "first p95 s": cuts[0], "exact p50 s": statistics.median(exact),
                           "exact p95 s": cuts[1]}  # fmt: skip
        time.sleep(5 * REST_SECONDS)  # for what is predicted ahead
        along(page, 20)
        time.sleep(REST_SECONDS)
        before = panel_ui.in_kernel(page, KERNEL_PAYS)
        moved = along(page, count)
        time.sleep(REST_SECONDS)
        after = panel_ui.in_kernel(page, KERNEL_PAYS)
        found["a move a frame, with a kernel"] = moved
        found["kernel during these"] = {
            "processor s": after[0] - before[0], "grew MiB": after[1] - before[1]}  # fmt: skip
    return found


def saved(browser: Any, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Return how a saved page keeps up with one move a frame."""
    workload = memlab.workloads.get("gpt-small")
    panel = memlab.panel(workload, device="t4", config=memlab.StepConfig(batch_size=16))
    file = panel.save(folder / "step.html")
    panel.close()
    page = browser.new_page(viewport={"width": 1366, "height": 900})
    page.goto(file.as_uri())
    page.wait_for_selector(".ml-chart canvas")
    along(page, 20)
    found = along(page, NUM_MOVES_QUICK if quick else NUM_MOVES)
    page.close()
    return {"file KiB": file.stat().st_size / 1024, **found}


def main() -> None:
    """Measure one session, the searches, and a saved page."""
    from playwright.sync_api import sync_playwright

    given, before = report.options(__file__, __doc__ or ""), report.environment()
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=lab_ui.CHROMIUM, args=lab_ui.ARGUMENTS)
        cache, folder = Path(place) / "cache", Path(place) / "notebooks"
        folder.mkdir()
        found = session(browser, folder, cache, quick=given.quick)
        found["saved page"] = saved(browser, Path(place), quick=given.quick)
        for workload, device, limit, batch in FITS:
            values = {"workload": workload, "device": device, "limit": limit, "batch": batch}
            for page in opened(browser, folder, cache, **values):
                opening(page)
                time.sleep(5 * REST_SECONDS)
                name = f"Fit for me, {workload} on {device}, {limit}"
                found[name] = fit(page.locator(panel_ui.PANEL).last)
        browser.close()

    for name, row in found.items():
        report.show(name, [row])
    report.write(given, before, found)


if __name__ == "__main__":
    main()
