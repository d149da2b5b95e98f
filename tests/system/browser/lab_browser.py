"""Drives a real JupyterLab in the system's Chromium through Playwright, offline.

* `--LabApp.expose_app_in_browser` gives `window.jupyterapp`; commands go through it, not menus.
* Widgets live once the panel's own root class is on the page; an idle kernel alone is not enough.
* A notification about Jupyter news covers the lower right corner unless `fetchNews` is "false".
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from tests import ROOT

PATIENCE_SECONDS = 300
"""For whatever is waited for. It ends a hang; a busy machine takes its time."""

CHROMIUM = os.environ.get("MEMLAB_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
ARGUMENTS = [
    "--no-sandbox",  # root in a container
    "--disable-dev-shm-usage",  # containers have a small /dev/shm
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    "--no-first-run",
    "--no-default-browser-check",
    "--metrics-recording-only",
    "--hide-scrollbars",
    "--mute-audio",
    "--force-color-profile=srgb",  # the same pixels everywhere
    "--font-render-hinting=none",
]

KERNEL_IDLE = """() => { const w = window.jupyterapp.shell.currentWidget;
  return !!(w && w.context && w.context.isReady && w.sessionContext.isReady
            && w.sessionContext.session && w.sessionContext.session.kernel
            && w.sessionContext.session.kernel.status === 'idle'); }"""
ALL_RUN = """() => { const w = window.jupyterapp.shell.currentWidget;
  const cells = [...w.content.model.cells];
  const error = cells.flatMap(c => c.type === 'code' ? c.outputs.toJSON() : [])
                     .find(o => o.output_type === 'error');
  if (error) return error.ename + ': ' + error.evalue;
  return cells.every(c => c.type !== 'code' || c.sharedModel.source.trim() === ''
                          || c.executionCount != null)
         && w.sessionContext.session.kernel.status === 'idle'; }"""


@contextlib.contextmanager
def jupyter_lab(root: pathlib.Path, cache: pathlib.Path) -> Iterator[str]:
    """Serve `root` with settings and data of its own on a free loopback port; yield the address.

    The same server has Notebook 7 below /notebooks and Voila below /voila, if they are installed.
    `cache` is memlab's cache, where the panels of this server keep their past.
    """
    command = [
        *("jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port={port}"),
        *("--ServerApp.port_retries=0", "--IdentityProvider.token=", "--ServerApp.password="),
        *("--ServerApp.disable_check_xsrf=True", "--ServerApp.terminals_enabled=False"),
        *(f"--ServerApp.root_dir={root}", "--LabApp.extension_manager=readonly"),
        *("--LabApp.expose_app_in_browser=True", "--JupyterNotebookApp.expose_app_in_browser=True"),
        # Voila has an older JupyterLab in it, in which the part of Notebook 7 fails
        "--VoilaConfiguration.extension_denylist=['@jupyter-notebook/lab-extension']",
    ]
    with server(command, "/api/status", cache) as url:
        try:
            yield url
        finally:
            shut_down_sessions(url)


@contextlib.contextmanager
def server(command: list[str], status: str, cache: pathlib.Path) -> Iterator[str]:
    """Run a module of Python that serves on "{port}", and yield its address once it is up.

    Args:
        command: the module and its arguments.
        status: path of the address that answers then.
        cache: memlab's cache for its kernels.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        private = pathlib.Path(folder)
        with (private / "server.log").open("w+") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *(part.format(port=port) for part in command)],
                env=_environment(private, cache),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                _wait_until_up(url + status, process, private / "server.log")
                yield url
            finally:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)


def _environment(private: pathlib.Path, cache: pathlib.Path) -> dict[str, str]:
    settings = private / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(
        '{"fetchNews": "false", "checkForUpdates": false}'
    )
    # two saves at once end in a dialog about a file that has changed, which nobody answers
    documents = private / "settings" / "@jupyterlab" / "docmanager-extension"
    documents.mkdir(parents=True)
    (documents / "plugin.jupyterlab-settings").write_text('{"autosave": false}')
    package = str(ROOT)
    environment = {
        **os.environ,
        "MEMLAB_CACHE": str(cache),
        "JUPYTER_CONFIG_DIR": f"{private}/config",
        "JUPYTER_DATA_DIR": f"{private}/data",
        "JUPYTER_RUNTIME_DIR": f"{private}/runtime",
        "IPYTHONDIR": f"{private}/ipython",
        "JUPYTERLAB_SETTINGS_DIR": f"{private}/settings",
        "JUPYTERLAB_WORKSPACES_DIR": f"{private}/workspaces",
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
    }
    environment.pop("JUPYTER_TOKEN", None)
    return environment


def _wait_until_up(url: str, process: "subprocess.Popen[bytes]", log: pathlib.Path) -> None:
    start = time.monotonic()
    while True:
        if process.poll() is not None or time.monotonic() - start > PATIENCE_SECONDS:
            raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")
        try:
            _request(url, seconds=10)
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.1)


def _request(url: str, method: str = "GET", seconds: float = 60) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=seconds) as r:
        return bytes(r.read())


def shut_down_sessions(url: str, but: str | None = None) -> None:
    """End every kernel of the server, save that of this notebook."""
    with contextlib.suppress(OSError, ValueError):
        for session in json.loads(_request(f"{url}/api/sessions")):
            if session["path"] != but:
                _request(f"{url}/api/sessions/{session['id']}", "DELETE")


def open_notebook(page: Any, url: str, name: str, place: str = "lab/tree") -> None:
    """Open a notebook in a fresh workspace and wait for its kernel."""
    page.goto(f"{url}/{place}/{name}?reset", wait_until="domcontentloaded")
    page.wait_for_function("() => window.jupyterapp")
    page.evaluate("() => window.jupyterapp.restored.then(() => true)")
    page.wait_for_function(KERNEL_IDLE)


def run_all(page: Any) -> None:
    """Run every cell and wait for the last."""
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")
    ended = page.wait_for_function(ALL_RUN).json_value()
    assert ended is True, f"a cell raised {ended}"


def lab_command(page: Any, name: str, arguments: dict[str, Any] | None = None) -> None:
    """Execute a command of JupyterLab."""
    page.evaluate(
        "([name, a]) => window.jupyterapp.commands.execute(name, a).then(() => true)",
        [name, arguments or {}],
    )


def set_theme(page: Any, dark: bool) -> None:
    """Change JupyterLab's theme and wait until the page is drawn in it."""
    theme = f"JupyterLab {'Dark' if dark else 'Light'}"
    lab_command(page, "apputils:change-theme", {"theme": theme})
    page.wait_for_function(
        "light => document.body.dataset.jpThemeLight === light", arg="false" if dark else "true"
    )
    # JupyterLab covers the page with its starting screen while it loads a theme
    page.wait_for_selector("#jupyterlab-splash", state="detached")
    wait_until_drawn(page)


def wait_until_drawn(page: Any) -> None:
    """Wait until the browser has drawn the page as it is now, with its fonts."""
    page.evaluate(
        "() => document.fonts.ready.then(() => new Promise("
        "done => requestAnimationFrame(() => requestAnimationFrame(() => done(true)))))"
    )


def loopback_only(context: Any, url: str, blocked: list[str]) -> None:
    """Abort and note every request that is not for this server; the list must stay empty."""

    def decide(route: Any) -> None:
        if route.request.url.startswith((url, "data:", "blob:")):
            route.continue_()
        else:
            blocked.append(route.request.url)
            route.abort()

    context.route("**/*", decide)
