"""JupyterLab and Chromium for the browser tests, screenshots of both themes in build/ui.

A test without a browser skips and says how to get one; with MEMLAB_REQUIRE_BROWSER=1 it fails.
"""

import importlib.util
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest

from memlab._panel.history import FILE_NAME
from tests import ROOT
from tests.system.browser import lab_browser, panel_page

SHOTS = ROOT / "build" / "ui"
QUICKSTART = ROOT / "notebooks" / "00_quickstart.ipynb"
TINY = """
import torch
from torch import nn
import memlab

workload = memlab.Workload(
    name="tiny-mlp",
    build_model=lambda: nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)),
    make_batch=lambda n: (torch.ones(n, 64), torch.zeros(n, dtype=torch.long)),
    compute_loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
)
"""

NOT_OURS = (
    "Could not restore the debugger state",  # JupyterLab, where a kernel is restarted
    "Error: widget model not found",  # ipywidgets, where a page opens while its panel is closed
)

QUICK = "panel.ipynb"
"""Its kernel and worker go on from test to test; each test begins by running all cells."""

SHOW = """
if "panel" in globals():  # the test before left one
    panel.close()
panel = memlab.panel(workload, device="cpu")
panel
"""

RECORDED = """
import memlab

record = memlab.recordings()[0]
run = record.runs[0]
workload = memlab.workloads.get(run.workload, **run.options)
panel = memlab.panel(workload, device=record.label)
"""


FAILING = """
import torch
from torch import nn
import memlab


class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(9, 2)

    def forward(self, x):
        return self.second(self.first(x))


batch = (torch.zeros(4, 8), torch.zeros(4, 2))
workload = memlab.Workload.from_module(Wrong(), batch, nn.functional.mse_loss)
memlab.panel(workload, device="cpu")
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(pathlib.Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.browser)


def _missing() -> str | None:
    if lab_browser.CHROMIUM is None:
        return "there is no Chromium on this machine; run: make test-deps"
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed; run: make test-deps"
    return None


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if reason := _missing():
        if os.environ.get("MEMLAB_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=lab_browser.CHROMIUM, args=lab_browser.ARGUMENTS
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where the notebooks of the tests lie."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Memlab's cache for all kernels of that JupyterLab."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def lab(browser: Any, folder: pathlib.Path, cache: pathlib.Path) -> Iterator[str]:
    """The address of a JupyterLab over that folder."""
    with lab_browser.jupyter_lab(folder, cache) as url:
        yield url


def _write_notebooks(folder: pathlib.Path) -> None:
    """Write the quickstart, a notebook with a panel that is quick, and one with two panels."""
    nbformat.write(nbformat.read(QUICKSTART, as_version=4), folder / "quickstart.ipynb")
    _write(folder / QUICK, TINY, SHOW)
    _write(folder / "recorded.ipynb", RECORDED, "panel")
    _write(folder / "failing.ipynb", FAILING)
    _write(folder / "two.ipynb", TINY, "a = memlab.panel(workload)\na", "b = memlab.panel()\nb")


def _write(path: pathlib.Path, *sources: str) -> None:
    v4 = nbformat.v4
    kernel = {"name": "python3", "language": "python", "display_name": "Python 3 (ipykernel)"}
    cells = [v4.new_code_cell(source.strip()) for source in sources]
    nbformat.write(v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


@pytest.fixture
def page(
    lab: str,
    folder: pathlib.Path,
    cache: pathlib.Path,
    browser: Any,
    request: pytest.FixtureRequest,
) -> Iterator[Any]:
    """A page that may talk to the server alone; `blocked` and `errors` must stay empty."""
    _write_notebooks(folder)  # as they are without outputs, whatever the last test saved
    (cache / FILE_NAME).unlink(missing_ok=True)  # and panels without a past
    context = browser.new_context(
        viewport={"width": 1300, "height": 1500}, reduced_motion="reduce", color_scheme="light"
    )
    context.tracing.start(screenshots=True, snapshots=True)
    made = context.new_page()
    made.set_default_timeout(1000 * lab_browser.PATIENCE_SECONDS)
    made.blocked, made.errors = [], []
    lab_browser.loopback_only(context, lab, made.blocked)
    made.on("pageerror", lambda error: made.errors.append(str(error)))
    made.on("console", lambda said: made.errors.extend([said.text] * _is_ours(said)))
    yield made
    SHOTS.mkdir(parents=True, exist_ok=True)
    report = getattr(request.node, "report_of_call", None)
    if report is not None and report.failed:
        made.screenshot(path=SHOTS / f"failed-{request.node.name}.png")
        context.tracing.stop(path=SHOTS / f"failed-{request.node.name}.zip")
    else:
        context.tracing.stop()
    context.close()
    passed = report is not None and report.passed
    lab_browser.shut_down_sessions(lab, but=QUICK if passed else None)
    assert made.blocked == [], "a request left the machine"
    assert made.errors == [], "an error on the page"


def _is_ours(said: Any) -> bool:
    """Whether a message of the console is an error that the panel can help."""
    return said.type == "error" and not said.text.startswith(NOT_OURS)


@pytest.fixture
def panel(page: Any, lab: str) -> Any:
    """The panel of the quick notebook, all cells run."""
    return panel_page.open_panel(page, lab, QUICK)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    setattr(item, f"report_of_{report.when}", report)
