"""JupyterLab and Chromium for the browser tests, screenshots of both themes in build/ui.

A test without a browser skips and says how to get one; with MEMLAB_REQUIRE_BROWSER=1 it fails.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest

from memlab._panel.runs import FILE_NAME
from tests import ROOT
from tests.system.browser import lab_browser, panel_page
from tests.system.browser.pages import IS_TRACED, Pages

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

# what a panel has from its kernel, by the name that preact gives to what it has drawn in an element
KNOWN = """
() => [...document.querySelectorAll("*")].filter((one) => one.__k).map((one) => {
  const source = one.__k.__k?.[0]?.props?.source;
  return source && {
    asked: source.model?.get("asked"), answer: source.answer, fields: source.store.state.fields,
    trouble: source.trouble, isCurrent: source.isCurrent, opened: source.opened,
    recorded: [...(source.recorded?.keys() ?? [])], wanted: [...(source.wanted ?? [])],
    families: [...(source.families ?? [])], known: [...(source.known ?? [])],
    waiting: source.outbox?.waiting, now: performance.now(),
  };
})
"""

QUICK = "panel.ipynb"
"""Its page, kernel and worker go on from test to test; each test begins by running all cells."""

SHOW = """
panel = memlab.panel(workload, device="cpu")
panel
"""

VIEWS = (
    """
result = memlab.measure(workload, memlab.StepConfig(batch_size=4), "cpu", repeats=1)
memlab.panel(result)
""",
    """
shown = memlab.panel(workload, device="t4", config=memlab.StepConfig(batch_size=8))
shown.save("step.html")
shown.close()
memlab.panel("step.html")
""",
)

OWN_OPERATOR = """
import torch
from torch import nn
import memlab


def build_model():
    if not hasattr(torch.ops.demo, "counted"):
        library = torch.library.Library("demo", "FRAGMENT")
        library.define("counted(Tensor x) -> Tensor")
        library.impl("counted", lambda x: x.clone(), "CPU")
        build_model.kept = library
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))


def compute_loss(model, batch):
    torch.ops.demo.counted(batch[0])  # of which fake tensors know nothing
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


workload = memlab.Workload(
    name="own-operator",
    build_model=build_model,
    make_batch=lambda n: (torch.ones(n, 64), torch.zeros(n, dtype=torch.long)),
    compute_loss=compute_loss,
)
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

FINETUNE = """
import memlab

workload = memlab.workloads.finetune("llama-tiny", adapter="lora", rank=8, base="nf4", tokens=128)
panel = memlab.panel(workload, device="rtx-4060")
panel
"""


TRAINER = """
import tempfile

import torch
import transformers

import memlab

model = transformers.BertForSequenceClassification(
    transformers.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32,
    )
)
arguments = transformers.TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=4, gradient_accumulation_steps=2, bf16=True,
    use_cpu=True, report_to=[],
)
samples = [{"input_ids": torch.ones(16, dtype=torch.long), "labels": 0} for _ in range(64)]
given = memlab.from_trainer(transformers.Trainer(model, arguments, train_dataset=samples))
memlab.panel(given.workload, config=given.config, device="cpu")
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(pathlib.Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.browser)


def need_installed(package: str) -> None:
    """Skip the test if a package is not there, or fail it where nothing may be skipped."""
    if importlib.util.find_spec(package) is None:
        _lack(f"{package} is not installed")


def _lack(what: str) -> None:
    if os.environ.get("MEMLAB_REQUIRE_BROWSER") == "1":
        pytest.fail(f"{what}; run: make test-deps")
    pytest.skip(f"{what}; run: make test-deps")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if lab_browser.CHROMIUM is None:
        _lack("there is no Chromium on this machine")
    need_installed("playwright")
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
    """Write the quickstart, its beginning and its panel, and the small ones above."""
    notebook = nbformat.read(QUICKSTART, as_version=4)
    parameters = notebook.cells[1]
    assert "quick: bool = False" in parameters.source
    parameters.source = parameters.source.replace("quick: bool = False", "quick: bool = True")
    nbformat.write(notebook, folder / "quickstart.ipynb")
    notebook.cells = [cell for cell in notebook.cells if _is_for_the_panel(cell)]
    nbformat.write(notebook, folder / "short.ipynb")
    _write(folder / QUICK, TINY, SHOW)
    _write(folder / "recorded.ipynb", RECORDED, "panel")
    _write(folder / "failing.ipynb", FAILING)
    _write(folder / "trainer.ipynb", TRAINER)
    _write(folder / "finetune.ipynb", FINETUNE)
    _write(folder / "views.ipynb", TINY, *VIEWS)
    _write(folder / "unrecorded.ipynb", OWN_OPERATOR, SHOW)
    _write(folder / "two.ipynb", TINY, "a = memlab.panel(workload)\na", "b = memlab.panel()\nb")


def _is_for_the_panel(cell: nbformat.NotebookNode) -> bool:
    """Whether a cell of the quickstart is text, or code that its panel needs."""
    return cell.cell_type == "markdown" or any(
        text in cell.source for text in ("quick: bool", "memlab.panel(", "panel.run(")
    )


def _write(path: pathlib.Path, *sources: str) -> None:
    v4 = nbformat.v4
    kernel = {"name": "python3", "language": "python", "display_name": "Python 3 (ipykernel)"}
    cells = [v4.new_code_cell(source.strip()) for source in sources]
    nbformat.write(v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


@pytest.fixture(scope="session")
def pages(browser: Any, lab: str) -> Iterator[Pages]:
    """What opens the pages of the tests."""
    made = Pages(browser, lab)
    yield made
    made.close()


@pytest.fixture
def page(
    lab: str,
    folder: pathlib.Path,
    cache: pathlib.Path,
    pages: Pages,
    request: pytest.FixtureRequest,
) -> Iterator[Any]:
    """A page that may talk to the server alone; `blocked` and `errors` must stay empty.

    It is that of the test before if both are tests of the quick notebook and that one passed.
    """
    is_quick = "panel" in request.fixturenames
    made = pages.take(again=is_quick)
    if pages.is_new:
        _write_notebooks(folder)  # as they are without outputs, whatever the last test saved
        (cache / FILE_NAME).unlink(missing_ok=True)  # and panels without a past
    yield made
    report = getattr(request.node, "report_of_call", None)
    passed = report is not None and report.passed
    is_kept = is_dialog_open = False
    try:
        if passed:
            is_dialog_open = is_quick and made.locator(".jp-Dialog").count() > 0
            is_clean = not (made.blocked or made.errors)
            is_kept = is_quick and is_clean and not is_dialog_open
        else:
            _show_failure(made, f"failed-{request.node.name}")
    finally:
        if not is_kept:
            pages.close()
        lab_browser.shut_down_sessions(lab, but=QUICK if passed else None)
    assert made.blocked == [], "a request left the machine"
    assert made.errors == [], "an error on the page"
    assert not is_dialog_open, "a dialog was left open"


def _show_failure(page: Any, name: str) -> None:
    """Keep what a page looks like, what its panels know, and its trace if there is one."""
    page.screenshot(path=SHOTS / f"{name}.png")
    with contextlib.suppress(Exception):  # a page that hangs, or has no panel
        (SHOTS / f"{name}.json").write_text(
            json.dumps([page.errors, page.evaluate(KNOWN)], indent=1)
        )
    if IS_TRACED:
        page.context.tracing.stop(path=SHOTS / f"{name}.zip")


@pytest.fixture
def panel(page: Any, pages: Pages, lab: str, cache: pathlib.Path) -> Any:
    """The panel of the quick notebook without a past, all cells run."""
    if pages.is_new:
        lab_browser.open_notebook(page, lab, QUICK)
    panel_page.close_panel(page)  # of the test before, which may write what it still has to
    (cache / FILE_NAME).unlink(missing_ok=True)
    return panel_page.run_cells(page)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    setattr(item, f"report_of_{report.when}", report)
