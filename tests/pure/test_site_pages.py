"""docs/pages.py, which puts the pages of the site together; Sphinx is not needed for it."""

import importlib.util
import json
import posixpath
import re
from dataclasses import fields

import pytest

import memlab
from memlab.config import StepConfig
from memlab.devices.cards import every_card
from memlab.techniques.registry import EVERY
from tests import ROOT
from tests.site_parts import QUESTIONS


def loaded():
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = loaded()
EXTRAS = {"integrations.estimator.StepClassifier", "integrations.lightning_recorder.step_recorder"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of all pages, as `make docs` makes it."""
    made = tmp_path_factory.mktemp("site")
    pages.main(made)
    return made


def entries(folder):
    """Return every page that a table of contents names, as often as it does."""
    stems = {p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.*")}
    found = []
    for page in folder.rglob("*.md"):
        place = page.relative_to(folder).parent.as_posix()
        text = page.read_text()
        for table in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            for line in filter(None, table.splitlines()):
                if not line.startswith(":"):
                    name = re.sub(r".*<(.*)>", r"\1", line)
                    path = posixpath.normpath(posixpath.join(place, name))
                    pattern = re.escape(path).replace(r"\*", "[^/]*")
                    pattern = pattern.replace(r"\[01\]", "[01]")
                    matching = [stem for stem in stems if re.fullmatch(pattern, stem)]
                    assert matching, f"{page}: {line} is no page"
                    found += matching
    return found


def test_every_page_is_in_one_table_of_contents(folder):
    sources = [*folder.rglob("*.md"), *folder.rglob("*.ipynb")]
    names = {path.relative_to(folder).with_suffix("").as_posix() for path in sources}
    assert len(names) > 100
    assert sorted(entries(folder)) == sorted(names - {"docs/index"})


def test_every_public_name_stands_with_one_verb():
    named = [name for names in pages.VERBS.values() for name in names]
    assert sorted(named) == sorted({*memlab.__all__, *EXTRAS} - {"__version__"})


def test_the_reference_has_every_field_technique_card_and_error(folder):
    reference = folder / "reference"
    text = (reference / "step_config.md").read_text()
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == [f.name for f in fields(StepConfig)]
    assert "Default: `8`" in text
    cards = (reference / "cards.md").read_text()
    assert [card.name for card in every_card() if f"`{card.name}`" not in cards] == []
    for technique in EVERY:
        page = (reference / "techniques" / f"{technique.fields[0]}.md").read_text()
        assert [row.saves for row in technique.savings if row.saves not in page] == []
    assert "memlab.errors.UnsupportedError" in (reference / "errors.md").read_text()
    assert "## memlab recommend" in (reference / "commands.md").read_text()


def test_a_technique_shows_its_plain_pytorch_or_says_why_it_has_none(folder):
    techniques = folder / "reference" / "techniques"
    assert "accumulation_steps=2" in (techniques / "batch_size.md").read_text()
    assert "inplace=True cannot be exported" in (techniques / "inplace.md").read_text()
    assert "clip_grad_norm" in (techniques / "max_grad_norm.md").read_text()


def test_the_page_of_environment_variables_has_those_that_memlab_reads():
    files = (ROOT / "memlab").rglob("*.py")
    read = {name for file in files for name in re.findall(r'"(MEMLAB_[A-Z_]+)"', file.read_text())}
    page = (ROOT / "docs" / "environment.md").read_text()
    assert set(re.findall(r"^\| `(MEMLAB_[A-Z_]+)`", page, re.MULTILINE)) == read


def test_words_are_of_pages_and_techniques_that_are_there(folder):
    assert set(pages.WORDS["titles"]) == {technique.fields[0] for technique in EVERY}
    head = (folder / "docs" / "sharding.md").read_text().splitlines()[1]
    assert "FSDP, memory" in json.loads(head)["myst"]["html_meta"]["keywords"]
    notebook = json.loads((folder / "notebooks" / "c04_three_numbers.ipynb").read_text())
    assert "nvidia, smi" in notebook["metadata"]["myst"]["html_meta"]["keywords"]
    for question in QUESTIONS:
        name = question["page"]
        assert (folder / f"{name}.md").exists() or (folder / f"{name}.ipynb").exists()


def test_a_notebook_is_shown_as_it_was_run(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "EXECUTED", tmp_path)
    assert all(path.parent.name == "notebooks" for path in pages.notebooks())
    (tmp_path / "01_predict.ipynb").write_text("{}")
    assert [p for p in pages.notebooks() if p.parent == tmp_path] == [tmp_path / "01_predict.ipynb"]


def test_a_notebook_keeps_what_a_page_without_a_kernel_can_show(tmp_path):
    def cell(source, outputs=(), **metadata):
        return {"metadata": metadata, "source": [source], "outputs": [{"data": o} for o in outputs]}

    widget = {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "Panel"}
    cells = [
        cell("out_json = ''", jupyter={"source_hidden": True}),
        cell("out_json = 'of/this/machine'", tags=["injected-parameters"]),
        cell("panel", [widget, {"text/html": "shown"}]),
        cell("chapter.check('1.1', ...)", [{"text/plain": "right"}]),
    ]
    cells[2]["outputs"][1]["metadata"] = {"image/png": {"alt": "peak 36.6 MiB"}}
    source, copy = tmp_path / "a.ipynb", tmp_path / "copy" / "a.ipynb"
    source.write_text(json.dumps({"metadata": {"widgets": {}}, "cells": cells}))
    pages._copy_notebook(source, copy)
    made = json.loads(copy.read_text())
    assert made["metadata"] == {}
    assert "of/this/machine" not in copy.read_text()
    assert [cell["metadata"]["tags"] for cell in made["cells"]] == [["hide-input"], [], []]
    said = [output["data"] for cell in made["cells"] for output in cell["outputs"]]
    assert said == [{"text/html": "shown"}]
    assert made["cells"][1]["metadata"]["mystnb"] == {"image": {"alt": "peak 36.6 MiB"}}
