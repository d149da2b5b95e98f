"""What a reader of the notebooks sees: code that is no part of the story is folded."""

import ast
import json
import shutil
from types import SimpleNamespace

import pytest

import memlab
from memlab.search.largest_batch import LargestBatch
from tests import ROOT
from tests.store_parts import a_result

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SHOWS_SOMETHING = {"print", "display"}


def cells_of(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def source_of(cell):
    return "".join(cell["source"])


def is_folded(cell):
    return cell["metadata"].get("jupyter", {}).get("source_hidden") is True


def is_parameters(cell):
    return "parameters" in cell["metadata"].get("tags", [])


def calls(cell):
    """Return the functions that a code cell calls, as they are written."""
    nodes = ast.walk(ast.parse(source_of(cell)))
    return {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}


def is_plumbing(cell):
    """Whether a cell takes parameters, asserts, writes JSON or changes where modules are found."""
    has_assert = any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(source_of(cell))))
    ends = ("json.dumps", "Path(out_json).write_text", "sys.path.insert")
    return is_parameters(cell) or has_assert or any(c.endswith(ends) for c in calls(cell))


def shows_something(cell):
    """Whether a code cell leaves an output: it prints, or ends in a value."""
    last = ast.parse(source_of(cell)).body[-1]
    prints = any(name.rpartition(".")[2] in SHOWS_SOMETHING for name in calls(cell))
    ends_in_value = isinstance(last, ast.Expr) and not source_of(cell).rstrip().endswith(";")
    returns_nothing = ast.unparse(last).startswith("finished.save(")
    return prints or (ends_in_value and not returns_nothing)


def code_cells(path):
    return [cell for cell in cells_of(path) if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_plumbing_is_folded_and_says_what_it_is(path):
    plumbing = [cell for cell in code_cells(path) if is_plumbing(cell)]
    assert sum(map(is_parameters, plumbing)) == 1
    for cell in plumbing:
        assert is_folded(cell), source_of(cell)
    # the first line is all that JupyterLab shows of a folded cell
    for cell in filter(is_folded, code_cells(path)):
        assert source_of(cell).startswith("# "), source_of(cell)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_one_folded_cell_at_the_end_asserts_the_claim_writes_json_and_shows_nothing(path):
    checking = [cell for cell in code_cells(path) if "assert " in source_of(cell)]
    assert len(checking) == 1
    assert is_folded(checking[0])
    assert "out_json" in source_of(checking[0])
    assert not shows_something(checking[0])
    # after it stands at most the picture that answers the question
    assert checking[0] in code_cells(path)[-2:]


def test_the_quickstart_begins_with_its_panel_and_ends_with_a_picture():
    parameters, panel, *_, last = code_cells(ROOT / "notebooks" / "00_quickstart.ipynb")
    assert is_parameters(parameters)
    assert "memlab.panel" in calls(panel)
    assert source_of(panel).splitlines()[-1] == "panel"
    assert calls(last) == {"memlab.plots.timeline"}


WHY = "not finished after 2 min, because other programs keep the processor busy"
LATE = {"outcome": memlab.Outcome.TIMED_OUT, "message": WHY, "timeline": None}
BEGIN_OTHERWISE = {
    "10_lengths_and_long_runs",  # predict_lengths raises by itself
    "13_sweeps",  # a sweep goes on after a step that is not ok
    "c04_three_numbers",  # replays an allocator, and runs no step
    "c13_which_line",  # runs scripts
    "c16_your_script",  # likewise
    "c11_why_can_four_bits_cost_more",  # compare_base raises by itself
    "c12_which_batch_ends_the_run",  # predict_lengths raises by itself
}


@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if path.stem not in BEGIN_OTHERWISE], ids=lambda p: p.stem
)
def test_a_step_that_is_not_ok_ends_a_notebook_with_its_sentence(path, monkeypatch):
    late = a_result(**LATE)
    for name in ("predict", "measure"):
        monkeypatch.setattr(memlab, name, lambda *_, **__: late)
    monkeypatch.setattr(memlab, "largest_batch", lambda *_, **__: LargestBatch.of(late, 1))
    monkeypatch.setattr(memlab, "ladder", lambda *_, **__: [late])
    monkeypatch.setattr(memlab, "panel", lambda *_, **__: SimpleNamespace(run=lambda: late))
    monkeypatch.setattr(shutil, "which", lambda *_: None)  # Inductor would compile for a minute
    code = "\n".join(map(source_of, code_cells(path)))
    with pytest.raises(memlab.MemlabError, match=WHY):
        exec(compile(code, path.stem, "exec"), {"__name__": "__main__"})


def test_results_that_are_ok_come_back_and_any_other_raises_its_sentence():
    fine, late = a_result(), a_result(**LATE)
    report = memlab.VerifyReport(ok=False, outcome="timed_out", why=WHY, device="cpu")
    for given in (fine, [fine, fine], {"a": fine}, []):
        assert memlab.require_ok(given) is given
    for given in (late, [fine, late], {"a": fine, "b": late}, [fine, report], report):
        with pytest.raises(memlab.MemlabError, match=WHY):
            memlab.require_ok(given)
