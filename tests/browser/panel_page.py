"""The panel on a page: opened, pressed, and read as a person reads it."""

import json
import time

from tests.browser import lab_browser as lab_ui


def open_panel(page, lab, name):
    lab_ui.open_notebook(page, lab, name)
    lab_ui.lab_command(page, "application:toggle-left-area")
    lab_ui.run_all(page, timeout=300_000)
    panel = page.locator(".memlab-panel").last
    panel.wait_for()
    panel.scroll_into_view_if_needed()
    return panel


def press_run(panel, timeout=60):
    """Press Run and wait for the new row; return the result that the page holds as JSON."""
    before = num_rows(panel)
    button(panel, "Run").click()
    wait_for(lambda: num_rows(panel) > before, timeout)
    wait_for(lambda: button(panel, "Run").is_enabled(), timeout)
    return shown_json(panel)


def num_rows(panel):
    return panel.locator("table.memlab-runs tbody tr").count()


def first_row(panel):
    heads = panel.locator("table.memlab-runs thead th").all_inner_texts()
    cells = panel.locator("table.memlab-runs tbody tr").first.locator("td").all_inner_texts()
    return dict(zip(heads, cells, strict=True))


def shown_json(panel):
    return json.loads(panel.locator("code.memlab-json").text_content())


def button(panel, name):
    return panel.get_by_role("button", name=name, exact=True)


def status(panel):
    return panel.locator("[role=status]").inner_text()


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


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
