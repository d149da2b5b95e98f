"""The rules of docs/architecture.md that a program can check: floors, names, import, units."""

import ast
import inspect
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import memlab
from tests import ROOT

PACKAGE = ROOT / "memlab"
FILES = sorted(PACKAGE.rglob("*.py"))

# A file imports only from floors below its own, and on its own floor only from those before it.
# A name that ends in a slash is a room; its files may import one another.
FLOORS = [
    ["errors", "_version", "_util/"],
    ["trace", "config", "workload", "result", "loading", "running"],
    ["devices/"],
    ["techniques/", "workloads/"],
    ["memory/", "tracing/", "cost_model/"],
    ["prediction/", "runtime/"],
    ["store/", "api"],
    ["search/", "integrations/"],
    ["figures/", "plots"],
    ["_panel/", "course/", "cli/", "__main__"],
]
MOST_LINES = 800  # a file holds one idea whole
ORDER = {name: rank for rank, name in enumerate(itertools.chain(*FLOORS))}

ONLY_IN = {
    "click": {"cli/"},
    "ipywidgets": {"_panel/"},
    "monai": {"workloads/"},
    "sklearn": {"workloads/"},
    "transformers": {"workloads/"},
    "yaml": {"integrations/"},
}
NOT_ON_IMPORT = (
    "IPython",
    "click",
    "ipywidgets",
    "matplotlib",
    "monai",
    "pandas",
    "seaborn",
    "sklearn",
    "transformers",
)
PUBLIC_MODULES = {"course", "plots", "workloads"}


def place(parts: tuple[str, ...]) -> str:
    """Return the name in FLOORS of a module path below memlab."""
    return f"{parts[0]}/" if (PACKAGE / parts[0]).is_dir() else parts[0]


def place_of_file(path: Path) -> str:
    return place(path.relative_to(PACKAGE).with_suffix("").parts)


def imported(path: Path, root: Path = PACKAGE) -> Iterator[tuple[str, ...]]:
    """Yield the dotted name of each import of a file, wherever it stands, as a tuple of parts."""
    package = ("memlab", *path.relative_to(root).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple((node.module or "").split(".")) if node.module else ()
            yield from ((*base, alias.name) for alias in node.names)


def upward_imports(path: Path, own: str, root: Path = PACKAGE) -> list[str]:
    """Return the imports of a file that its floor does not allow."""
    found = []
    for parts in imported(path, root):
        if parts[0] != "memlab":
            continue
        target = place(parts[1:]) if len(parts) > 1 else "memlab itself"
        if target == own and own.endswith("/"):
            continue
        if target not in ORDER or ORDER[target] >= ORDER[own]:
            found.append(".".join(parts))
    return found


def unit_factors(tree: ast.AST) -> list[int]:
    """Return the lines that multiply or divide by 1024, 1e9, 2**20 and the like."""
    units = {base**n for base in (1024, 1000) for n in (1, 2, 3, 4)} | {1e-6, 1e-9}

    def is_unit(node: ast.expr) -> bool:
        if not any(isinstance(inner, ast.Name | ast.Call) for inner in ast.walk(node)):
            try:
                return eval(ast.unparse(node)) in units  # constants only, such as 2**20
            except TypeError:
                return False
        return False

    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv)
        and (is_unit(node.left) or is_unit(node.right))
    ]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=900
    )


@pytest.mark.parametrize("room", [name for floor in FLOORS for name in floor if name[-1] == "/"])
def test_the_door_of_a_room_names_its_files_and_no_others(room):
    folder = PACKAGE / room
    door = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    named = set(re.findall(r"`(\w+\.py)`", door))
    there = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    assert named == there


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_floors_below(path):
    if path == PACKAGE / "__init__.py":
        # a list of names, and little else
        assert len(path.read_text().splitlines()) <= len(memlab.__all__) + 32
        return
    own = place_of_file(path)
    assert own in ORDER, f"{own} has no floor: give it one in FLOORS and in docs/architecture.md"
    assert upward_imports(path, own) == []


def test_the_floor_check_sees_an_upward_import_in_every_form(tmp_path):
    forms = {
        "import memlab.api": ["memlab.api"],
        "from memlab import api": ["memlab.api"],
        "from memlab.api import measure": ["memlab.api.measure"],
        "from .api import measure": ["memlab.api.measure"],
        "def f():\n    from . import api": ["memlab.api"],
        "import memlab": ["memlab"],
        "from memlab import StepConfig": ["memlab.StepConfig"],
        "from memlab import workloads\nfrom memlab.errors import MemlabError\nimport torch": [],
    }
    for source, expected in forms.items():
        path = tmp_path / "meter.py"
        path.write_text(source)
        assert upward_imports(path, "memory/", tmp_path) == expected, source


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_heavy_library_is_imported_in_its_place_only(library):
    importers = {place_of_file(p) for p in FILES if any(i[0] == library for i in imported(p))}
    assert importers <= ONLY_IN[library]


def test_plots_do_not_import_torch():
    floor = next(names for names in FLOORS if "plots" in names)
    plotting = [path for path in FILES if place_of_file(path) in floor]
    assert "torch" not in {parts[0] for path in plotting for parts in imported(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_units_converts_units(path):
    if path != PACKAGE / "_util" / "units.py":
        lines = unit_factors(ast.parse(path.read_text()))
        assert lines == [], f"convert with memlab._util.units instead, in lines {lines}"


def test_the_unit_check_sees_factors_and_leaves_layer_sizes_alone():
    for source in ("x / 2**20", "x * 1024", "x // (1 << 30)", "1e3 * x", "x / 1024**2", "x / 1e-6"):
        assert unit_factors(ast.parse(source)) == [1], source
    for source in ("hidden(size=1024)", "seed % 2**32", "x * 512", "lr = 1e-3", "x * scale"):
        assert unit_factors(ast.parse(source)) == [], source


@pytest.mark.slow
def test_no_import_order_turns_a_public_name_into_a_module():
    # what memlab imports from elsewhere is imported once; each order is then a process of its own
    done = run_python("""
import importlib, json, os, pkgutil, random, sys, types
import cloudpickle, ipywidgets, matplotlib.pyplot, pandas, torch

def turned(seed):
    import memlab
    found = pkgutil.walk_packages(memlab.__path__, "memlab.")
    names = [module.name for module in found if "__main__" not in module.name]
    random.Random(seed).shuffle(names)
    for name in names:
        importlib.import_module(name)
    public = {name: getattr(memlab, name) for name in memlab.__all__}
    return [name for name, value in public.items() if isinstance(value, types.ModuleType)]

for seed in range(3):
    if os.fork() == 0:
        print(json.dumps(turned(seed)), flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(f"seed {seed} raised")
""")
    assert done.returncode == 0, done.stderr
    said = [set(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(said) == 3
    assert all(names <= PUBLIC_MODULES for names in said)


def test_no_module_bears_the_name_of_a_public_function():
    submodules = {path.stem for path in PACKAGE.iterdir()}
    assert submodules & set(memlab.__all__) <= PUBLIC_MODULES


def test_import_is_silent_and_light():
    done = run_python("""
import json, logging, sys
import torch
handlers, level = list(logging.root.handlers), logging.root.level
import memlab
assert (logging.root.handlers, logging.root.level) == (handlers, level), "logging was set"
assert not torch.cuda.is_initialized(), "CUDA was started"
sys.exit(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
""")
    *warnings, modules = done.stderr.splitlines()
    assert (done.stdout, warnings) == ("", [])
    assert "memlab" in json.loads(modules)
    assert set(json.loads(modules)) & set(NOT_ON_IMPORT) == set()


@pytest.mark.parametrize("name", [n for n in memlab.__all__ if n != "__version__"])
def test_a_public_name_has_a_docstring(name):
    value = getattr(memlab, name)
    doc = inspect.getdoc(value) or ""
    assert len(doc.split()) >= 3
    assert not doc.startswith(f"{name}("), "the signature that dataclass writes is not a docstring"


def test_no_two_classes_have_one_name():
    names = Counter(
        node.name.lstrip("_")
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_house_is_small():
    rooms = [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert len(rooms) <= 16  # 15 of the library, and the course


def test_what_lies_outside_of_the_rooms_is_little():
    assert len(list(PACKAGE.glob("*.py"))) <= 12  # `__main__` among them


def test_no_file_is_too_long_to_read():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in [*FILES, *(ROOT / "benchmarks").rglob("*.py")]
    }
    assert {path: n for path, n in lengths.items() if n > MOST_LINES} == {}


def test_every_module_says_what_it_is():
    for path in FILES:
        doc = ast.get_docstring(ast.parse(path.read_text()))
        assert doc or not path.read_text().strip(), f"{path.relative_to(ROOT)} has no docstring"


def test_each_test_lies_in_a_tier_and_none_imports_another():
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    tiers = {path.relative_to(ROOT / "tests").parts[0] for path in files}
    assert tiers == {"pure", "step", "matrix", "system"}
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            is_import = re.match(r"\s*(from|import) tests\b", line)
            assert not (is_import and "test_" in line), f"{path.relative_to(ROOT)}: {line.strip()}"
