"""The panel on a page: opened, pressed, and read as a person reads it."""

import json
import time

from tests.system.browser import lab_browser as lab_ui

POLL_SECONDS = 0.05
"""Between two looks at a page. Each look keeps the page from its own work for a moment."""

PANEL = ".ml-live"


def open_panel(page, lab, name):
    lab_ui.open_notebook(page, lab, name)
    return run_cells(page)


def close_panel(page):
    """Close the panel that an earlier run of the quick notebook has left in its kernel."""
    in_kernel(page, "'panel' in globals() and panel.close()")


def run_cells(page):
    """Run all cells beside no sidebar, as if for the first time, and return the last panel."""
    page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
    lab_ui.lab_command(page, "notebook:clear-all-cell-outputs")
    lab_ui.run_all(page)
    panel = page.locator(PANEL).last
    panel.wait_for()
    panel.scroll_into_view_if_needed()
    return panel


def press_run(panel):
    """Press Run and wait for the new row; return the result that the kernel has."""
    before = num_rows(panel)
    button(panel, "Run").click()
    wait_for(lambda: num_rows(panel) > before)
    wait_for(lambda: button(panel, "Run").is_enabled())
    return result(panel)


def result(panel):
    """Return the last result of the kernel's panel, without its timeline."""
    return in_kernel(
        panel.page, "{k: v for k, v in panel.result.to_dict().items() if k != 'timeline'}"
    )


def num_rows(panel):
    return panel.locator("table.ml-runs tbody tr").count()


def first_row(panel):
    """Return the cells of the newest run by their headings; nothing while there is no run.

    They are read in one go: what is read cell by cell can be of two tables.
    """
    heads, cells = panel.evaluate(
        """panel => {
          const table = panel.querySelector('table.ml-runs');
          const texts = (place, name) => [...(place?.querySelectorAll(name) ?? [])]
            .slice(0, -1).map(cell => cell.innerText.trim());
          return table ? [texts(table.querySelector('thead'), 'th'),
                          texts(table.querySelector('tbody tr'), 'td')] : [[], []]; }"""
    )
    return dict(zip(heads, cells, strict=True)) if cells else {}


def button(panel, name):
    return panel.get_by_role("button", name=name, exact=True)


def box(panel, label):
    """Return the box of a number or a text."""
    return panel.get_by_label(label, exact=True)


def slider(panel, label):
    return panel.get_by_role("slider", name=f"{label} slider")


def value(panel, label):
    return box(panel, label).input_value()


def radio(panel, label):
    return panel.get_by_role("radio", name=label, exact=True)


def status(panel):
    return " ".join(panel.locator(".ml-status").inner_text().split())


def costs(panel):
    return panel.locator(".ml-costs").inner_text()


def badge(panel):
    """Return whether the step fits, as it is said."""
    return " ".join(panel.locator(".ml-badge").inner_text().split())


def chart_label(panel):
    """Return the picture in words."""
    return panel.locator(".ml-chart").get_attribute("aria-label") or ""


def pane(panel, name):
    """Open a pane by its button, and return it."""
    button(panel, name).click()
    return panel.locator(".ml-pane").last


def settle(panel):
    """Wait until the exact prediction of what is on screen is there, and drawn."""
    wait_for(lambda: panel.get_attribute("data-exact") == "true")
    wait_for(lambda: panel.locator(".ml-chart canvas").count() > 0)


def tops(panel, names):
    return [round(panel.locator(name).first.bounding_box()["y"]) for name in names]


def is_inside(locator):
    """Whether nothing of an element is wider than its place."""
    return locator.evaluate("e => e.scrollWidth <= e.clientWidth + 1")


def wait_for(condition, seconds=lab_ui.PATIENCE_SECONDS):
    """Wait for a state of the page; never for a time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(POLL_SECONDS)


def in_kernel(page, expression):
    """Return the value of a Python expression in the notebook's kernel, as a cell would."""
    code = f"import json as _j; print(_j.dumps({expression}))"
    return json.loads(
        page.evaluate(
            """code => new Promise((done, failed) => {
              const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
              const future = kernel.requestExecute({code, store_history: false});
              let text = '';
              future.onIOPub = m => {
                if (m.header.msg_type === 'stream') text += m.content.text;
                if (m.header.msg_type === 'error') failed(m.content.evalue);
              };
              future.done.then(() => done(text));
            })""",
            code,
        )
    )
