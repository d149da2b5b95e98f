"""docs/command_line.md and ci.md: the GitHub Action runs here, and what is said of it is so."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from memlab.cli.commands import memlab as group
from memlab.store.compare import MEMORY_TOLERANCE, TIME_TOLERANCE
from tests import ROOT

PAGE = (ROOT / "docs" / "command_line.md").read_text()
CI = (ROOT / "docs" / "ci.md").read_text()
ACTION = yaml.safe_load(re.search(r"```yaml\n(.*?)```", CI, re.DOTALL)[1])
NOT_HERE = "Install"  # a runner installs, and this machine has it all
TRAIN = """
import torch
from memlab import Workload

WIDTH = 64

def build():
    return torch.nn.Sequential(torch.nn.Linear(32, WIDTH), torch.nn.Linear(WIDTH, 4))

def batch(n):
    return torch.randn(n, 32), torch.randint(4, (n,))

def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

def workload():
    return Workload(name="mine", build_model=build, make_batch=batch, compute_loss=loss)
"""


def git(folder: Path, *words: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def runner(tmp_path):
    """Return a checkout of a pull request as a runner has it, and its environment."""
    theirs, checkout = tmp_path / "theirs", tmp_path / "checkout"
    theirs.mkdir()
    git(theirs, "init", "-q", "-b", "main")
    (theirs / "train.py").write_text(TRAIN)
    git(theirs, "add", ".")
    git(theirs, "commit", "-q", "-m", "train")
    git(tmp_path, "clone", "-q", str(theirs), str(checkout))

    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "memlab").write_text(f'#!/bin/sh\nexec {sys.executable} -m memlab "$@"\n')
    (commands / "memlab").chmod(0o755)
    (tmp_path / "temp").mkdir()
    env = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "MEMLAB_STORE": str(tmp_path / "store.sqlite3"),
        "RUNNER_TEMP": str(tmp_path / "temp"),
        "GITHUB_BASE_REF": "main",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }
    return checkout, env


def run_steps(checkout, env):
    """Run the steps of the action as a runner does; return the exit code of each, by its name."""
    assert ACTION["defaults"]["run"]["shell"] == "bash"
    codes = {}
    for step in ACTION["jobs"]["compare"]["steps"]:
        if "run" not in step or step["name"] == NOT_HERE:
            continue
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=checkout, env=env, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        codes[step["name"]] = done.returncode
        if done.returncode:
            break
    return codes


@pytest.mark.slow
@pytest.mark.parametrize(("width", "code", "said"), [(64, 0, "2 same"), (8192, 1, "2 worse")])
def test_the_action_fails_where_a_branch_costs_more(width, code, said, runner):
    checkout, env = runner
    (checkout / "train.py").write_text(TRAIN.replace("WIDTH = 64", f"WIDTH = {width}"))
    assert run_steps(checkout, env) == {
        "Cost of the base branch": 0, "Cost of this branch": 0, "Compare": code,
    }  # fmt: skip
    assert Path(env["GITHUB_STEP_SUMMARY"]).read_text().startswith(said)
    assert Path(env["RUNNER_TEMP"], "changes.png").read_bytes()[1:4] == b"PNG"


def test_the_page_lists_every_command_and_the_tolerances():
    listed = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert set(listed) == set(group.commands)
    assert f"`--memory-tolerance` ({MEMORY_TOLERANCE}," in PAGE
    assert f"`--time-tolerance` ({TIME_TOLERANCE})" in PAGE
