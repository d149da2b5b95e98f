"""The notebook runner on tiny notebooks, and long forms; `make course` runs every short form."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from memlab import course
from tests import ROOT
from tests.store_parts import a_result

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WRITE = "import json, pathlib\npathlib.Path(out_json).write_text(json.dumps({'device': device}))"


def write_notebook(path: Path, *sources: str, parameters: str = "device = 'cpu'\nout_json = ''"):
    v4 = nbformat.v4
    first = v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
    cells = [v4.new_markdown_cell("# A question?"), first, *map(v4.new_code_cell, sources)]
    kernel = {"name": "python3", "language": "python", "display_name": "Python 3"}
    nbformat.write(v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "notebooks" / "run.py", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=3600)


@pytest.mark.slow
def test_a_passing_notebook_is_one_line_and_leaves_its_source_alone(tmp_path):
    notebook = write_notebook(tmp_path / "10_fine.ipynb", WRITE)
    before = notebook.read_bytes()
    done = run(notebook, "--out", tmp_path / "out", "--device", "meta")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("ok 10_fine ")
    assert len(done.stdout.splitlines()) == 1
    assert json.loads((tmp_path / "out" / "10_fine.json").read_text()) == {"device": "meta"}
    assert (tmp_path / "out" / "10_fine.ipynb").exists()
    assert notebook.read_bytes() == before


def test_a_failure_names_its_notebook_and_cell_and_the_next_notebook_still_runs(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "silent.json").write_text("{}")  # of an earlier run: it does not count
    (tmp_path / "text.ipynb").write_text("not JSON")
    write_notebook(tmp_path / "bad.ipynb", "a = 1", "assert a == 2, 'a is not 2'", WRITE)
    write_notebook(tmp_path / "dead.ipynb", "import os; os._exit(3)", WRITE)
    write_notebook(tmp_path / "mute.ipynb", WRITE, parameters="out_json = ''")
    write_notebook(tmp_path / "silent.ipynb", "a = 1")
    write_notebook(tmp_path / "good.ipynb", WRITE)
    names = ("bad", "dead", "mute", "silent", "text", "good")
    made = [tmp_path / f"{name}.ipynb" for name in names]
    done = run(*made, "--out", out, "--device", "cpu")
    assert done.returncode == 1
    said = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "failed "))]
    for line, words in zip(
        said,
        (
            "failed bad, code cell 3: AssertionError: a is not 2",
            "failed dead, code cell 2: DeadKernelError: ",
            "failed mute, parameters: 'device' is not declared, only out_json;",
            "failed silent, last cell: it wrote no file to out_json",
            "failed text, unreadable: ",
            "ok good ",
        ),
        strict=True,
    ):
        assert line.startswith(words)
    assert (out / "bad.ipynb").exists()
    assert not (out / "mute.ipynb").exists(), "nothing of it has run"


def test_quick_reaches_a_notebook_that_declares_it_and_no_other(tmp_path):
    write = "import json, pathlib\npathlib.Path(out_json).write_text(json.dumps(quick))"
    declared = write_notebook(
        tmp_path / "10_has.ipynb", write, parameters="quick = False\nout_json = ''"
    )
    other = write_notebook(tmp_path / "20_has_not.ipynb", WRITE)
    done = run(declared, other, "--out", tmp_path / "out", "--quick")
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "out" / "10_has.json").read_text()) is True


def has_short_form(notebook: Path) -> bool:
    return "quick: bool" in notebook.read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize("notebook", filter(has_short_form, NOTEBOOKS), ids=lambda path: path.stem)
def test_its_long_form_runs_too(notebook, tmp_path):
    done = run(notebook, "--out", tmp_path, "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr


def test_results_of_a_chapter_are_those_expected_or_what_changed_is_said(
    tmp_path, monkeypatch, capsys
):
    spec = importlib.util.spec_from_file_location("notebook_runner", ROOT / "notebooks" / "run.py")
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    monkeypatch.setattr(runner, "EXPECTED", tmp_path / "expected")
    notebook, artifact, end = (
        tmp_path / "c1.ipynb",
        tmp_path / "c1.json",
        course.chapter(1).finish(),
    )
    result = a_result()
    moved = dataclasses.replace(result, peak_allocated_bytes=result.peak_allocated_bytes + 1)

    def expect(*results, update=False, **numbers):
        end.save(str(artifact), results, **numbers)
        runner.expect(notebook, artifact, update=update)

    expect(result)  # nothing is expected yet
    expect(result, update=True)
    expect(result)
    for others in ([moved], [result, dataclasses.replace(result, workload_name="other")]):
        with pytest.raises(runner.NotebookError, match="others than expected"):
            expect(*others)
    with pytest.raises(runner.NotebookError, match="peak allocated"):
        expect(moved)
    assert not capsys.readouterr().out
    expect(moved, update=True)
    assert "peak allocated" in capsys.readouterr().out
    expect(moved, seconds=0.5)
    expect(moved, lines=[12, 13], update=True)
    expect(moved, lines=[12, 13], seconds=0.7)
    with pytest.raises(runner.NotebookError, match=r"lines: \[12, 13\] -> \[12, 14\]"):
        expect(moved, lines=[12, 14])


def test_each_chapter_has_what_is_expected_of_it():
    chapters = {path.stem for path in (ROOT / "notebooks").glob("c*.ipynb")}
    assert {path.stem for path in (ROOT / "notebooks" / "expected").glob("*.json")} == chapters
