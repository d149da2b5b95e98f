"""pyproject, the environment files, the Makefile and CI say the same thing."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import memlab
from memlab._util import torch_found
from tests import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
TARGETS = [
    "lab", "quick", "test", "test-all", "test-deps",
    "notebooks", "course", "lint", "bench", "docs", "docs-links", "picture", "clean",
]  # fmt: skip


def requirements(lines: list[str]) -> dict[str, SpecifierSet]:
    """Return packages with their versions; memlab's own extras are those that they name."""
    found = {}
    for each in map(Requirement, lines):
        if each.name == PROJECT["name"]:
            found |= requirements([line for extra in each.extras for line in EXTRAS[extra]])
        else:
            found[canonicalize_name(each.name)] = each.specifier
    return found


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("file", ["environment.yml", "binder/environment.yml"])
def test_conda_brings_the_python_that_the_tested_set_is_for(file):
    found = yaml.safe_load((ROOT / file).read_text())
    assert found["channels"] == ["conda-forge"]
    python, pip, *rest = found["dependencies"]
    minor = re.search(r"Python (3\.\d+)", (ROOT / "constraints.txt").read_text())[1]
    assert (python, pip) == (f"python={minor}", "pip")
    assert rest in ([], [{"pip": ["-c constraints.txt", "-e .[course]"]}])
    devcontainer = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert devcontainer["image"] == f"python:{minor}"


def test_binder_installs_the_course_as_it_is_tested():
    text = (ROOT / "binder" / "postBuild").read_text()
    assert "-c constraints.txt" in text
    assert "-e '.[course]'" in text


def test_the_broken_kernels_are_refused():
    kernel = requirements(PROJECT["dependencies"])["ipykernel"]
    assert not kernel.contains("7.0.1")
    assert kernel.contains("6.29.0")
    assert kernel.contains("7.4.0")


def test_the_tested_set_covers_every_dependency_within_its_range():
    pinned = {canonicalize_name(name): version for name, version in pins().items()}
    lines = [*PROJECT["dependencies"], *itertools.chain(*EXTRAS.values())]
    for name, specifier in requirements(lines).items():
        assert specifier.contains(pinned[name]), name
    assert pinned["torch"] == "2.13.0"


def test_the_tested_set_names_versions_only_and_no_cuda():
    assert len(pins()) > 50
    for name, version in pins().items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), f"{name}=={version}"
        assert not name.startswith(("nvidia", "cuda", "triton")), name


def test_the_version_comes_from_one_file():
    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT
    assert f"## {memlab.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == memlab.__version__


def test_every_address_of_the_repository_is_that_of_pyproject():
    address = PROJECT["urls"]["Repository"]
    owner = address.removeprefix("https://github.com/").removesuffix("/memlab")
    for file in ("pyproject.toml", "README.md"):
        named = re.findall(
            r"(?:github\.com|/gh|/github)/([\w.-]+)/memlab", (ROOT / file).read_text()
        )
        assert set(named) == {owner}, file
    # until there is an address, a name that no account can have, so that the lines lead to nobody's
    assert owner == "THE_OWNER" or re.fullmatch(r"[a-zA-Z\d](-?[a-zA-Z\d])*", owner)


def test_an_index_gets_a_readme_without_links_to_files():
    hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (ROOT / "README.md").read_text()
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    links = re.findall(r"\]\(([^)\s]+)", text)
    assert f"{PROJECT['urls']['Repository']}/raw/v$HFPR_VERSION/docs/red_to_green.gif" in links
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_the_readme_is_one_page():
    prose = re.sub(r"^```.*?^```", "", (ROOT / "README.md").read_text(), flags=re.S | re.M)
    assert len(prose.split()) <= 900  # what is longer has a page in docs/


@pytest.mark.parametrize("file", sorted((ROOT / ".github" / "workflows").glob("*.yml")))
def test_a_workflow_may_do_little_ends_and_runs_what_make_knows(file):
    text = file.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]
    assert all(job.get("timeout-minutes", "uses" in job) for job in workflow["jobs"].values())
    for used in re.findall(r"uses: (\S+)", text):
        assert re.search(r"@(v|release/v)\d+$", used) or used.startswith(("./", "docker://")), used
    for target in re.findall(r"run: make (\S+)", text):
        assert make("-n", target).returncode == 0, target


def test_a_workflow_tests_every_python_that_is_allowed():
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    minors = [f"3.{minor}" for minor in range(20)]
    allowed = [each for each in minors if each in SpecifierSet(PROJECT["requires-python"])]
    for job in ("versions", "wheel"):
        assert jobs[job]["strategy"]["matrix"]["python"] == allowed
    oldest, newest = map(SpecifierSet, jobs["versions"]["strategy"]["matrix"]["torch"])
    torch = requirements(PROJECT["dependencies"])["torch"]
    assert [f"2.{minor}.0" in oldest for minor in (10, 11, 12)] == [False, True, False]
    assert str(newest) in str(torch).split(",")
    assert ">=2.11" in str(torch).split(",")


@pytest.mark.parametrize("file", ["LICENSE", "CONTRIBUTING.md", ".gitignore", "SECURITY.md"])
def test_a_file_that_people_look_for_is_there(file):
    assert (ROOT / file).read_text().strip()


@pytest.mark.parametrize("file", [".ci/run", "binder/postBuild", "binder/start"])
def test_a_script_is_executable_and_stops_at_the_first_error(file):
    assert os.access(ROOT / file, os.X_OK)
    text = (ROOT / file).read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text


def test_ci_lints_tests_and_lets_no_browser_test_skip():
    lines = (ROOT / ".ci/run").read_text().splitlines()
    *first, course, site, tests = lines[-5:]
    assert first == ["make test-deps", "MEMLAB_REQUIRE_BROWSER=1 make lint"]
    assert (course, site) == ("make course", "make docs")
    assert tests == "MEMLAB_REQUIRE_BROWSER=1 make test"


def test_each_notebook_runs_once_from_the_wheel():
    numbers = [path.stem.partition("_")[0] for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    command = make("-n", "course").stdout
    runs = re.findall(r"\$run ([0-9c ]+) --copy", command)
    assert len(runs) == 2
    assert sorted(" ".join(runs).split()) == numbers
    assert "[course]" in command


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_how_to_do_it(target):
    done = make("-n", target)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_lab_listens_on_loopback_with_its_token_and_passes_arguments_on():
    command = make("-n", "lab", "ARGS=--no-browser").stdout
    assert "--ip=127.0.0.1" in command
    assert "--no-browser" in command
    assert "token" not in command
    assert ("--allow-root" in command) == (os.getuid() == 0)


FAKE_PYTHON = """#!/bin/sh
case "$*" in
  *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$0" .venv/bin/jupyter ;;
  *"-m pip"*) echo "a line of pip" >>pip.log; exit "${PIP_ENDS_WITH:-0}" ;;
  lab*) echo "the address" ;;
esac
"""


def fake_set_up(folder: Path) -> str:
    """Write what `make lab` needs into a folder, with a Python that installs nothing."""
    for file in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, folder)
    python = folder / "fake-python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return f"PYTHON={python}"


def test_lab_is_one_line_a_stage_and_says_where_to_look(tmp_path):
    done = make("lab", fake_set_up(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, *stages, start, hint, address = done.stdout.splitlines()
    assert "2 to 10 minutes" in first
    assert "3 GB" in first
    assert [re.sub(r" \.\.\.+ \d+ s$", "", stage) for stage in stages] == [
        "creating .venv",
        "installing PyTorch (the largest part)",
        "installing memlab with JupyterLab and what its notebooks need",
    ]
    assert "browser in a few seconds" in start
    assert "If no browser opens" in hint
    assert address == "the address"

    again = make("lab", cwd=tmp_path)
    assert again.stdout.splitlines() == [start, hint, address]


def test_a_set_up_that_fails_says_so_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    python = fake_set_up(tmp_path)
    monkeypatch.setenv("PIP_ENDS_WITH", "1")
    failed = make("lab", python, cwd=tmp_path)
    assert failed.returncode != 0
    assert failed.stdout.splitlines()[-1] == "installing PyTorch (the largest part) ... failed"
    monkeypatch.delenv("PIP_ENDS_WITH")
    assert make("lab", python, cwd=tmp_path).stdout.splitlines()[-1] == "the address"


@pytest.mark.parametrize("version", ["3.10.4", "3.15.0"])
def test_make_says_which_python_it_needs(tmp_path, version):
    for file in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, tmp_path)
    python = tmp_path / "old-python"
    major, minor, patch = version.split(".")
    python.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "Python {version}" && exit 0\n'
        f"exec {sys.executable} -c "
        f'"import sys; sys.version_info = ({major}, {minor}, {patch})\n$2"\n'
    )
    python.chmod(0o755)
    done = make("lab", f"PYTHON={python}", cwd=tmp_path)
    assert done.returncode != 0
    assert "memlab needs Python 3.11 to 3.14" in done.stdout
    assert f"Python {version}" in done.stdout
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("installed", "remedy"),
    [
        (None, "a newer one is installed, so restart"),
        ("2.9.1", 'pip install "torch>=2.11", and restart'),
    ],
)
def test_an_older_pytorch_is_refused_in_a_sentence(tmp_path, installed, remedy):
    """A hosted notebook may have imported its own before pip replaced it."""
    (tmp_path / "torch.py").write_text('__version__ = "2.9.1+cu126"\n')
    if installed:
        (tmp_path / "torch-2.9.1.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: torch\nVersion: {installed}\n"
        (tmp_path / "torch-2.9.1.dist-info" / "METADATA").write_text(text)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", "import memlab"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ImportError: memlab needs PyTorch 2.11 or newer, and this process runs 2.9.1"
    )
    assert remedy in last


def test_the_oldest_pytorch_is_told_in_one_place():
    assert requirements(PROJECT["dependencies"])["torch"].contains(torch_found.OLDEST)
    assert not requirements(PROJECT["dependencies"])["torch"].contains("2.10.9")


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # without what is handed down by the make that may be running these tests
    ours = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARGS", "DEVICE", "PYTHON")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(["make", *arguments], cwd=cwd, env=env, capture_output=True, text=True)
