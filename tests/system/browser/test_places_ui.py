"""Wherever widgets run: the panel is shown, a slider moves it, Run measures, nobody else is asked.

JupyterLab has all other tests. VS Code and Colab cannot be run here: a test in
`test_saved_page_ui.py` puts the page into what they document.
"""

import re
import textwrap

import ipywidgets.embed

import memlab
from memlab import StepConfig
from tests.system.browser import lab_browser as lab_ui
from tests.system.browser.conftest import QUICK, TINY, need_installed
from tests.system.browser.pages import Pages
from tests.system.browser.panel_page import (
    PANEL,
    badge,
    button,
    first_row,
    run_cells,
    settle,
    slider,
    value,
    wait_for,
)

VOILAS_OWN = re.compile("^https://cdn.*(fontawesome|mathjax)")  # icons and formulas
MARIMO = """
import marimo

app = marimo.App()


@app.cell
def _():
{cell}
    import marimo

    panel = memlab.panel(workload, device="cpu")
    marimo.ui.anywidget(panel.widget)
    return
"""
# what a page of `ipywidgets.embed` loads: here it does what anywidget does with a saved state
ANYWIDGET = """
addEventListener("load", () => {
  const states = JSON.parse(document.querySelector("[type$='widget-state+json']").text).state;
  for (const view of document.querySelectorAll("[type$='widget-view+json']")) {
    const { state } = states[JSON.parse(view.text).model_id];
    const el = view.parentNode.insertBefore(document.createElement("div"), view);
    document.head.appendChild(document.createElement("style")).textContent = state._css;
    const model = { get: (name) => state[name], on() {}, off() {}, send() {} };
    const blob = new Blob([state._esm], { type: "text/javascript" });
    import(URL.createObjectURL(blob)).then(({ default: { render } }) => render({ model, el }));
  }
});
"""


def picture(panel):
    return panel.locator(".ml-chart canvas").first.evaluate("canvas => canvas.toDataURL()")


def is_alive(panel):
    """Whether the slider moves answer and picture, and Run gives a row."""
    settle(panel)
    before = picture(panel)
    assert "fits" in badge(panel)
    slider(panel, "Batch size").press("PageUp")
    wait_for(lambda: value(panel, "Batch size") == "32")
    wait_for(lambda: picture(panel) != before)
    button(panel, "Run").click()
    wait_for(lambda: first_row(panel).get("outcome", "").endswith("ok"))
    return first_row(panel)["batch"] == "32"


def test_notebook_7(page, lab):
    need_installed("notebook")
    lab_ui.open_notebook(page, lab, QUICK, place="notebooks")
    panel = run_cells(page)
    assert is_alive(panel)
    assert not page.locator(".ml-still").is_visible()


def test_voila(page, lab):
    need_installed("voila")
    page.route(VOILAS_OWN, lambda route: route.fulfill(content_type="text/css"))
    page.goto(f"{lab}/voila/render/{QUICK}")
    panel = page.locator(PANEL)
    assert is_alive(panel)
    assert not page.locator(".ml-still").is_visible()


def test_marimo(browser, tmp_path, cache):
    need_installed("marimo")
    app = tmp_path / "app.py"
    app.write_text(MARIMO.format(cell=textwrap.indent(TINY.strip(), "    ")))
    command = ["marimo", "-q", "run", str(app), "--headless", "--no-token", "--port={port}"]
    with lab_ui.server(command, "/health", cache) as url:
        pages = Pages(browser, url)
        page = pages.take(again=False)
        page.goto(url)
        assert is_alive(page.locator(PANEL))
        assert (page.blocked, page.errors) == ([], [])
        pages.close()


def test_a_page_of_ipywidgets_embed_has_the_step_without_a_kernel(browser, tmp_path):
    file = tmp_path / "embedded.html"
    panel = memlab.panel(memlab.workloads.get("plain-mlp"), config=StepConfig(batch_size=8))
    panel.keep()
    ipywidgets.embed.embed_minimal_html(file, views=[panel.widget])
    panel.close()
    page = browser.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.route(
        re.compile("^https:"),  # require.js, and the script that begins
        lambda route: route.fulfill(
            content_type="text/javascript", body=ANYWIDGET * ("embed-amd" in route.request.url)
        ),
    )
    page.goto(file.as_uri())
    shown = page.locator(".ml")
    shown.locator(".ml-chart canvas").first.wait_for()
    before = badge(shown)
    assert "fits" in before
    slider(shown, "Batch size").press("PageUp")
    wait_for(lambda: badge(shown) != before)
    assert value(shown, "Batch size") == "32"
    assert wrong == []
    page.close()
