"""The command line as a person runs it: real steps of a small model, real processes."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib

import pytest
from click.testing import CliRunner

import memlab
from memlab import StepResult
from memlab.__main__ import main
from memlab.cli.commands import memlab as group
from tests import ROOT

MINE = """
import torch
from memlab import Workload

def build():
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))

def batch(n):
    return torch.randn(n, 32), torch.randint(4, (n,))

def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

def workload():
    return Workload(name="mine", build_model=build, make_batch=batch, compute_loss=loss)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine_cli.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MEMLAB_STORE", str(tmp_path / "store.sqlite3"))
    return tmp_path


def run(*words, code=0):
    done = CliRunner().invoke(group, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout


def test_the_console_script_is_the_same_as_the_module():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    entry = importlib.metadata.EntryPoint("memlab", scripts["memlab"], "console_scripts")
    assert entry.load() is main


@pytest.mark.parametrize("does", ["os.system('echo child')", "os.write(1, b'library')"])
def test_only_the_answer_is_on_stdout_whoever_prints(does, tmp_path):
    (tmp_path / "talks.py").write_text(f"import os, sys\n{does}\ndef leave(): sys.exit(0)\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "memlab", "predict", "talks:leave", "--json"],
        capture_output=True, text=True, cwd=tmp_path, env=env, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "child" in done.stderr or "library" in done.stderr
    assert "talks:leave cannot be called without arguments: SystemExit: 0" in done.stderr


@pytest.mark.slow
def test_a_prediction_of_ones_own_file_from_its_folder(folder):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    words = [sys.executable, "-m", "memlab", "predict", "mine_cli:workload", "--device", "t4"]
    done = subprocess.run(
        [*words, "--batch-size", "16", "--json"],
        capture_output=True, text=True, cwd=folder, env=env, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = StepResult.from_dict(json.loads(done.stdout))
    assert (result.workload_name, result.config.batch_size) == ("mine", 16)
    assert result.peak_by_category["parameters"] >= 4 * (32 * 64 + 64 + 64 * 4 + 4)
    assert result.timeline is not None

    small = subprocess.run(
        [*words, "--memory-limit", "4KiB"],
        capture_output=True, text=True, cwd=folder, env=env, timeout=600,
    )  # fmt: skip
    assert (small.returncode, "does not fit" in small.stdout) == (1, True)


@pytest.mark.slow
def test_a_step_is_measured_verified_and_exported(folder):
    result = StepResult.from_dict(json.loads(run(
        "measure", "mine_cli:workload", "--device", "cpu", "--repeats", 2, "--json",
        "--accumulation-steps", 2,
    )))  # fmt: skip
    assert result.config.accumulation_steps == 2
    assert len(result.step_seconds_all) == 2
    assert len(memlab.results()) == 1

    report = json.loads(run("verify", "mine_cli:workload", "--device", "cpu", "--json",
                            "--accumulation-steps", 2))  # fmt: skip
    assert (report["ok"], report["same_as_full_batch"]) == (True, "yes")

    run("export", "mine_cli:workload", "--device", "cpu", "--out", "train.py")
    done = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 10
    data = json.loads(run("export", "mine_cli:workload", "--device", "cpu", "--json"))
    assert data["source"] == (folder / "train.py").read_text()


@pytest.mark.slow
def test_a_sweep_is_stored_and_compared_with_the_next_one(folder):
    words = ("sweep", "mine_cli:workload", "--device", "t4", "--batch-size", "4,8",
             "--accumulation-steps", "1,16")  # fmt: skip
    data = json.loads(run(*words, "--json"))
    assert [each["config"]["batch_size"] for each in data["results"]] == [4, 8]
    assert [each["settings"]["accumulation_steps"] for each in data["refused"]] == [16, 16]
    assert len(memlab.results()) == 2
    assert json.loads(run(*words, "--json"))["num_reused"] == 2  # it goes on where it was

    (folder / "old.json").write_text(json.dumps(data))
    assert "2 same" in run("compare", "old.json", folder / "store.sqlite3")

    grown = MINE.replace("64", "8192")
    (folder / "grown_cli.py").write_text(grown)
    (folder / "new.json").write_text(run("sweep", "grown_cli:workload", *words[2:], "--json"))
    said = run("compare", "old.json", "new.json", code=1)
    assert "2 worse" in said
    assert "mine on t4 (predicted), batch_size=4: peak allocated +" in said


@pytest.mark.slow
def test_what_is_recommended_fits_and_a_limit_below_all_is_said(folder):
    words = ("recommend", "mine_cli:workload", "--device", "t4", "--allow", "accumulation-steps")
    data = json.loads(run(*words, "--memory-limit", "64MiB", "--top", 2, "--json"))
    best = StepResult.from_dict(data["recommendations"][0]["result"])
    assert best.fit == "fits"
    assert best.peak_reserved_bytes <= data["limit_bytes"] == 64 * 2**20

    said = run(*words, "--memory-limit", "4KiB", code=1)
    assert "nothing that was tried fits 4.00 KiB" in said
    assert "takes at least" in said
