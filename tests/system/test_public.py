"""What readers are shown is public: notebooks, README and docs name nothing else of memlab."""

import ast
import doctest
import inspect
import json
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import memlab
from memlab.integrations.estimator import StepClassifier
from memlab.integrations.lightning_recorder import step_recorder
from tests import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
OF_THE_INSIDE = {"architecture.md"}
"""Their prose names what is not public, on purpose; their examples do not."""


def public_names() -> Iterator[tuple[str, object]]:
    """Yield every public name with its value, those of public modules too."""
    for name in memlab.__all__:
        value = getattr(memlab, name)
        yield name, value
        if isinstance(value, types.ModuleType):
            yield from ((f"{name}.{inner}", getattr(value, inner)) for inner in value.__all__)


PUBLIC = dict(public_names())
OF_EXTRAS = {
    "integrations.lightning_recorder.step_recorder": step_recorder,
    "integrations.estimator.StepClassifier": StepClassifier,
}
"""Public too, but not by `import *`, since they need libraries of an extra."""

OF_PLOTS = [name for name in PUBLIC if name.startswith("plots.")]
"""One example stands for all, in the docstring of the module."""


def private_names(source: str) -> list[str]:
    """Return what a piece of code names of memlab that is not public."""
    tree = ast.parse(source)
    named, modules = [], {"memlab": ""}  # names in this code, and the modules that they stand for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named += [a.name.partition(".")[2] for a in node.names if a.name.startswith("memlab.")]
        elif isinstance(node, ast.ImportFrom) and node.module == "memlab":
            named += [alias.name for alias in node.names]
            modules |= {
                alias.asname or alias.name: alias.name
                for alias in node.names
                if isinstance(PUBLIC.get(alias.name), types.ModuleType)
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memlab."):
            module = node.module.removeprefix("memlab.")
            named += [f"{module}.{alias.name}" for alias in node.names]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in modules and rest.replace(".", "").isidentifier():
                named.append(".".join(filter(None, (modules[first], rest))))
    return sorted({name for name in named if not is_public(name)})


def is_public(name: str) -> bool:
    """Return whether a dotted name is public, or an attribute of a thing that is."""
    first, _, rest = name.partition(".")
    if name in OF_EXTRAS:
        return True
    if first not in PUBLIC:
        return False
    inside_module = isinstance(PUBLIC[first], types.ModuleType) and rest
    return not inside_module or ".".join(name.split(".")[:2]) in PUBLIC


def examples_of_page(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def cells_of(path: Path, kind: str) -> list[str]:
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS], ids=lambda path: path.name)
def test_an_example_names_only_what_is_public(path):
    examples = cells_of(path, "code") if path in NOTEBOOKS else examples_of_page(path)
    assert examples or path.parent.name == "docs"
    assert [name for source in examples for name in private_names(source)] == []


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS], ids=lambda path: path.name)
def test_prose_names_only_what_is_public(path):
    prose = cells_of(path, "markdown") if path in NOTEBOOKS else [path.read_text()]
    if path.name not in OF_THE_INSIDE:
        named = [name for text in prose for name in re.findall(r"`memlab\.([\w.]+)", text)]
        assert [name for name in named if not is_public(name)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_link_leads_to_a_file(path):
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    files = [link for link in links if not link.startswith("http")]
    assert [link for link in files if not (path.parent / link).exists()] == []


def test_the_moving_picture_is_small():
    assert (ROOT / "docs" / "red_to_green.gif").stat().st_size < 2**20


def test_the_check_sees_a_private_name_in_every_form():
    forms = {
        "import memlab.api": ["api"],
        "import memlab.api as a": ["api"],
        "from memlab import api": ["api"],
        "from memlab.api import predict": ["api.predict"],
        "from memlab.devices.cards import resolve": ["devices.cards.resolve"],
        "import memlab\nmemlab.step.build_step(w, c)": ["step", "step.build_step"],
        "from memlab import workloads\nworkloads.SPECS['a']": ["workloads.SPECS"],
        "from memlab import workloads as w\nw.SPECS": ["workloads.SPECS"],
        "import memlab\nmemlab.plots.np.zeros(3)": ["plots.np", "plots.np.zeros"],
        "import memlab\nmemlab.plots.timeline(memlab.predict(w, c).result)": [],
        "from memlab import StepConfig, workloads\nworkloads.get('a', b=StepConfig())": [],
        "import memlab\nmemlab.Workload.from_module(m, b, f)": [],
    }
    for source, expected in forms.items():
        assert private_names(source) == expected, source


@pytest.mark.parametrize("name", [n for n in PUBLIC if n not in ("__version__", *OF_PLOTS)])
def test_a_public_name_has_an_example(name):
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(PUBLIC[name]) or "")
    assert examples, f"memlab.{name} shows no example in its docstring"


@pytest.mark.parametrize("name", OF_EXTRAS)
def test_a_public_name_of_an_extra_has_an_example(name):
    assert doctest.DocTestParser().get_examples(inspect.getdoc(OF_EXTRAS[name]) or "")


def test_what_is_public_is_seen_by_completion():
    assert set(memlab.__all__) <= set(dir(memlab))


def test_importing_memlab_imports_little_of_torch_distributed():
    # they take a second, and only a step of several ranks needs them
    code = (
        "import sys, torch; before = set(sys.modules); import memlab; "
        "print(*set(sys.modules) - before)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "sympy",
        "transformers",
        "matplotlib",
    }
    late = {f"memlab.{module}" for module in memlab.LATE.values()}
    assert not (heavy | late) & set(said.stdout.split())


def test_what_is_imported_late_is_what_type_checkers_see():
    tree = ast.parse(Path(memlab.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        each.name: (node.module or "").removeprefix("memlab").removeprefix(".") or each.name
        for node in block.body
        for each in node.names
    }
    assert seen == memlab.LATE
