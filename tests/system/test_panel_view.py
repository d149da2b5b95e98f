"""`memlab.panel` over a result or a file: what is shown, and how a wrong file is refused."""

import base64
import gzip
import json
import re

import pytest

import memlab
from memlab import Outcome, StepConfig
from memlab._panel import saved_page
from memlab._panel.step_view import MOST_BYTES, StepView
from memlab.errors import ConfigError, WorkloadError
from memlab.prediction import step_file
from memlab.prediction.step_file import packed_result, result_in
from memlab.result import Source
from tests.panel_parts import make_result, opened, until
from tests.store_parts import a_script_run

GIB = 2**30


@pytest.fixture(scope="module")
def result():
    workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
    return memlab.recorded(workload, StepConfig(batch_size=4), "amd-epyc")


@pytest.fixture(scope="module")
def step_page(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "step.html"
    with opened("t4", config=StepConfig(batch_size=8), memory_limit="2 GiB") as panel:
        return panel.save(path)


def test_what_the_panel_knows_of_its_workload_is_not_asked_again(tmp_path, monkeypatch):
    """The question would wait until a run that is measured meanwhile has ended."""
    with opened("t4", config=StepConfig(batch_size=8, accumulation_steps=2)) as panel:
        until(lambda: panel._page.knows_division)
        monkeypatch.setattr("memlab._panel.app.divided_words", lambda _: pytest.fail("asked"))
        assert panel.save(tmp_path / "step.html").stat().st_size > 10_000


def payload(view):
    """Return what the page is given, as it stands in the output of a cell."""
    text = view._repr_mimebundle_()["text/html"]
    start = text.index(saved_page.BEGINS) + len("mount(root, ")
    return json.JSONDecoder().raw_decode(text, start)[0]


def test_a_result_is_shown_with_nothing_to_run(result, monkeypatch):
    monkeypatch.setattr("memlab._panel.app.prewarm", lambda: pytest.fail("a worker"))
    view = memlab.panel(result)
    given = payload(view)
    assert view.result is result
    assert repr(view) == f"<memlab view of {result}>"
    assert (given["workload"], given["where"]) == ("gpt-small", "recorded on amd-epyc")
    assert dict(given["fixed"])["Batch size"] == "4"
    assert [row["peakBytes"] for row in given["runs"]["rows"]] == [result.peak_allocated_bytes]
    assert "device='amd-epyc'" in given["code"]
    compile(given["code"], "code", "exec")
    (file,) = given["steps"]
    shown = result_in(base64.b64decode(file))
    assert shown.timeline.to_dict() == result.timeline.to_dict()


def test_where_no_script_runs_there_are_words_a_picture_and_a_table(result):
    bundle = memlab.panel(result, memory_limit="32MiB")._repr_mimebundle_()
    still = re.search(r'class="ml-still">(.*?)</div>', bundle["text/html"], re.S)[1]
    for part in ("recorded", "data:image/png;base64,iVBOR", "<table", "over 32.0 MiB"):
        assert part in still
    assert bundle["text/plain"].startswith("<memlab view of gpt-small")


def test_what_people_name_is_never_html():
    evil = "</script><img src=x onerror=alert(1)>"
    view = memlab.panel(make_result(workload_name=evil, notes=(evil,), message=evil))
    for text in (view._repr_mimebundle_()["text/html"], view._mime_()[1]):
        assert evil not in text
    assert payload(view)["workload"] == evil


@pytest.mark.parametrize(
    ("asked", "of_result", "shown"),
    [(None, None, ""), (None, GIB, "1 GiB"), ("2GiB", GIB, "2GiB"), (3 * GIB, None, "3 GiB")],
)
def test_the_limit_is_that_which_is_asked_or_of_the_result(asked, of_result, shown):
    view = memlab.panel(make_result(memory_limit_bytes=of_result), memory_limit=asked)
    assert payload(view)["limit"] == shown


def test_a_step_that_ended_early_says_how_and_is_judged_here():
    ended = make_result(Outcome.OUT_OF_MEMORY, device="cuda:0", peak_reserved_bytes=2**21,
                        memory_limit_bytes=GIB, message="out of memory in forward")  # fmt: skip
    told = payload(memlab.panel(ended))["told"]
    assert told["failure"] == {"title": "tiny: out of memory", "sentence": ended.message}
    assert told["fit"]["text"] == "does not fit the limit of 1.00 GiB"
    failed = payload(memlab.panel(make_result(Outcome.FAILED, peak=None)))["told"]
    assert failed["fit"]["text"] == "no peak measured: failed"
    assert payload(memlab.panel(make_result()))["told"]["failure"] is None


def test_what_a_card_has_held_it_can_hold():
    ran = make_result(device="cuda:0", peak_reserved_bytes=3 * GIB, usable_memory_bytes=2 * GIB)
    assert payload(memlab.panel(ran))["usableBytes"] == 3 * GIB
    told = make_result(source=Source.PREDICTED, device="t4", peak_reserved_bytes=3 * GIB,
                       usable_memory_bytes=2 * GIB)  # fmt: skip
    assert payload(memlab.panel(told))["usableBytes"] == 2 * GIB


@pytest.mark.parametrize("asked", [{"device": "t4"}, {"config": StepConfig()}])
def test_what_a_result_says_itself_cannot_be_asked(result, asked):
    (name,) = asked
    with pytest.raises(ConfigError, match=f"^{name}=.* has no effect on a result: leave it out"):
        memlab.panel(result, **asked)


def test_a_run_of_a_script_is_shown_as_its_page(tmp_path):
    run = a_script_run(notes=("<i>",))
    shown = memlab.panel(run)
    assert shown.result is run
    assert repr(shown) == f"<memlab view of {run}>"
    page = shown._repr_mimebundle_()["text/html"]
    assert all(part in page for part in (str(run), "<svg", "&lt;i&gt;", "mount(root, "))
    assert "body { margin" not in page  # which would be that of the notebook
    saved = shown.save(tmp_path / "run.html").read_text(encoding="utf-8")
    assert all(part in saved for part in (str(run), "body { margin", "</html>"))
    with pytest.raises(ConfigError, match=r"memory_limit='1GiB' has no effect on a result"):
        memlab.panel(run, memory_limit="1GiB")


def test_a_wrong_limit_and_a_wrong_workload_are_named(result):
    with pytest.raises(ConfigError, match="memory_limit='8' has no unit"):
        memlab.panel(result, memory_limit="8")
    with pytest.raises(WorkloadError, match=r"workload=5 .*pass memlab\.workloads\.get"):
        memlab.panel(5)


# files


@pytest.mark.slow
def test_a_saved_step_is_opened_with_its_sliders(step_page, tmp_path):
    view = memlab.panel(step_page)
    given = payload(view)
    assert isinstance(view, StepView)
    assert (given["told"], given["limit"], given["where"]) == (None, "2 GiB", "on t4")
    assert given["setting"]["batchSize"] == view.result.config.batch_size == 8
    again = view.save(tmp_path / "again.html")
    assert payload(memlab.panel(again)) == given
    assert "<b>tiny, predicted for t4: " in again.read_text(), "where no script runs"
    assert payload(memlab.panel(str(step_page), memory_limit="1GiB"))["limit"] == "1GiB"


def test_a_saved_result_is_opened_again(result, tmp_path):
    page = memlab.panel(result, memory_limit="1GiB").save(tmp_path / "result.html")
    view = memlab.panel(page)
    assert str(view.result) == str(result)
    assert view.result.timeline.to_dict() == result.timeline.to_dict()
    assert payload(view) == payload(memlab.panel(result, memory_limit="1GiB"))


def test_a_result_as_json_is_opened(result, tmp_path):
    path = tmp_path / "step.json"
    path.write_text(json.dumps(result.to_dict()))
    assert payload(memlab.panel(path)) == payload(memlab.panel(result))
    path.write_text(json.dumps([result.to_dict()]))
    assert str(memlab.panel(path).result) == str(result)


def changed(page, change):
    """Return a saved page in which what it was given is changed."""
    text = page.read_text()
    start = text.index(saved_page.BEGINS) + len("mount(root, ")
    given, end = json.JSONDecoder().raw_decode(text, start)
    change(given)
    return f"{text[:start]}{json.dumps(given, separators=(',', ':'))}{text[end:]}"


def newer_step(given):
    data = gzip.decompress(base64.b64decode(given["steps"][0]))
    data = data.replace(b'"version":1', b'"version":7')
    given["steps"][0] = base64.b64encode(gzip.compress(data)).decode()


def bomb(given):
    given["steps"][0] = base64.b64encode(gzip.compress(bytes(2**20 + 64))).decode()


PAGES = {
    "newer": (lambda p: p.update(version=2), "newer memlab: update memlab"),
    "a newer step": (newer_step, "newer memlab: update memlab"),
    "no steps": (lambda p: p.update(steps=[]), "damaged"),
    "steps that are none": (lambda p: p.update(steps=["banana"]), "damaged"),
    "a step that was cut": (lambda p: p.update(steps=[p["steps"][0][:400]]), "damaged"),
    "a step that unpacks to much": (bomb, "damaged"),
    "no limit": (lambda p: p.pop("limit"), "damaged"),
    "a number as limit": (lambda p: p.update(limit=3), "limit=3"),
    "a text as bytes": (lambda p: p.update(usableBytes="x"), "usableBytes='x'"),
    "runs that are none": (lambda p: p.update(runs={"rows": [1], "columns": []}), "damaged"),
    "a list as version": (lambda p: p.update(version=[]), "damaged"),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_cannot_be_read_is_refused_by_name(name, step_page, tmp_path, monkeypatch):
    monkeypatch.setattr(step_file, "MOST_BYTES", 2**20)
    change, words = PAGES[name]
    path = tmp_path / "page.html"
    path.write_text(changed(step_page, change))
    with pytest.raises(ConfigError, match=f"(?s)^workload=.*{words}.*; allowed is a Workload, a"):
        memlab.panel(path)


FILES = {
    "nothing": (b"", "is no JSON"),
    "a text": (b"banana", "is no JSON"),
    "bytes": (b"\x80\xff", "holds no text"),
    "another page": (b"<!doctype html><p>hello", "is a page that panel.save did not write"),
    "JSON of something else": (b'{"a": 1}', "holds .*, which is no result"),
    "no result": (b"[]", "holds 0 results, and a view shows one"),
    "very deep": (b"[" * 10**5, "is no JSON"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_holds_no_result_is_refused_by_name(name, tmp_path):
    content, words = FILES[name]
    path = tmp_path / "step.json"
    path.write_bytes(content)
    with pytest.raises(
        ConfigError, match=f"(?s)^workload=.*step.json'\\)? {words}.*; allowed is a"
    ):
        memlab.panel(path)


def test_a_result_whose_timeline_does_not_belong_together_is_refused(result, tmp_path):
    path = tmp_path / "step.json"
    for change in ({"phase": [2]}, {"phase": [99] * len(result.timeline)}, {"operator": [[1]]}):
        data = result.to_dict()
        data["timeline"] |= change
        path.write_text(json.dumps(data))
        with pytest.raises(ConfigError, match=r"do not belong together|ValueError"):
            memlab.panel(path)


def test_what_is_no_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file.*; allowed is"):
        memlab.panel(tmp_path / "none.html")
    with pytest.raises(ConfigError, match="it is no file"):
        memlab.panel(tmp_path)
    with pytest.raises(ConfigError, match=r"you may mean memlab\.workloads\.get\('gpt-small'\)"):
        memlab.panel("gpt-small")
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(3 * MOST_BYTES)
    with pytest.raises(ConfigError, match=r"has 192 MiB, more than 64\.0 MiB"):
        memlab.panel(huge)


def test_a_file_of_a_result_that_is_damaged_is_refused():
    content = packed_result(make_result())
    assert str(result_in(content)) == str(make_result())
    for wrong in (b"", content[:-9], content[:20], b"a text", gzip.compress(b"\xff" * 99)):
        with pytest.raises(ConfigError, match="damaged"):
            result_in(wrong)
    text = b'{"format":"other"}'
    with pytest.raises(ConfigError, match="something else"):
        result_in(gzip.compress(len(text).to_bytes(4, "little") + text))
