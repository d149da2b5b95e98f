"""What pages send to a panel, sense and nonsense, and what they are told and sent by it."""

import gzip
import json
import threading
import time
from contextlib import closing

import pytest
import torch

import memlab
from memlab import StepConfig, workloads
from memlab._panel import job, state
from memlab.prediction.step_file import result_in
from tests.panel_parts import (
    PATIENCE_SECONDS,
    badge,
    fields,
    is_idle,
    line,
    make_result,
    move,
    opened,
    press,
    rested,
    row,
    settled,
    status,
    until,
)

TRAITS = ("catalog", "form", "asked", "answer", "job", "runs", "panes")
PANES = ("code", "fit", "base", "cards", "peak", "ranks")
LINES = ("advice", "more", "optimizer", "ranks", "choices", "size", "about")


@pytest.fixture(scope="module", autouse=True)
def lighter():
    """Measure nothing: a run is known at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            job, "measure", lambda workload, config, device, **_: make_result(
                config=config, device=device, workload_name=workload.name
            )
        )  # fmt: skip
        yield


@pytest.fixture
def panel(nothing_ahead):
    with opened("t4") as made:
        yield made


@pytest.fixture
def sent(panel, monkeypatch):
    """What the page is sent: contents, each with its buffers."""
    found = []
    monkeypatch.setattr(
        panel._told, "send", lambda content, buffers=None: found.append((content, buffers or []))
    )
    return found


def told(panel):
    """Return all that the page is told, which must be plain JSON."""
    return {name: json.loads(json.dumps(getattr(panel._told, name), allow_nan=False))
            for name in TRAITS}  # fmt: skip


def hear(panel, message):
    """Send a message as it is."""
    assert panel._hear(message) is None
    return told(panel)


# moves of a hand


def test_a_move_is_answered_with_who_made_it(panel):
    hear(panel, {"type": "set", "by": "one", "move": 7, "fields": {"batch_size": 4}})
    now = told(panel)
    for trait in ("asked", "answer"):
        assert (now[trait]["by"], now[trait]["move"]) == ("one", 7)
    assert (fields(panel)["batch_size"], panel.config.batch_size) == (4, 4)
    panel.set(batch_size=16)
    now = told(panel)["asked"]
    assert (now["by"], now["move"], now["fields"]["batch_size"]) == ("kernel", 8, 16)


@pytest.mark.slow
def test_two_pages_move_one_panel_and_each_is_told_of_the_other(panel):
    hear(panel, {"type": "set", "by": "one", "move": 3, "fields": {"batch_size": 4}})
    hear(panel, {"type": "set", "by": "two", "move": 1, "fields": {"accumulation_steps": 2}})
    now = told(panel)["asked"]
    assert (now["by"], now["move"]) == ("two", 1)
    assert panel.config == StepConfig(batch_size=4, accumulation_steps=2)
    for view, panes in (("one", ["code"]), ("two", ["peak", "code"]), ("two", [])):
        hear(panel, {"type": "open", "by": view, "panes": panes})
    settled(panel)
    panel.set(batch_size=8)
    settled(panel)
    until(lambda: "batch_size=8" in panel._told.panes["code"][0][1])  # which one still shows


@pytest.mark.parametrize("what", ["a sentence", "a pane"])
def test_what_two_threads_tell_at_once_is_told_of_both(panel, monkeypatch, what):
    tell, begun = panel._told.tell, threading.Event()

    def slow(**traits):
        if threading.current_thread() is first:
            begun.set()
            time.sleep(0.3)
        tell(**traits)

    monkeypatch.setattr(panel._told, "tell", slow)
    show = {
        "a sentence": lambda: panel._page.say("a sentence"),
        "a pane": lambda: panel._page.panes.show(fit={"answer": "a"}),
    }
    first = threading.Thread(target=show[what])
    first.start()
    assert begun.wait(PATIENCE_SECONDS)
    panel._page.panes.show(base={"answer": "b"})
    move(panel, batch_size=4)
    first.join()
    assert told(panel)["answer"]["move"] == told(panel)["asked"]["move"] == 1
    fit = {"fit": {"answer": "a"}} if what == "a pane" else {}
    assert panel._told.panes == {**fit, "base": {"answer": "b"}}


def test_a_wrong_number_stays_as_it_was_typed_until_it_is_right(panel):
    typed = {"batch_size": "12abc", "memory_budget": "nan", "accumulation_steps": "1e9"}
    for name, text in typed.items():
        move(panel, **{name: text})
        assert fields(panel)[name] == text
        assert (line(panel, name)["kind"], panel._told.answer["ready"]) == ("bad", False)
        assert (panel._told.answer["family"], panel._told.answer["steps"]) == (None, [])
        move(panel, **line(panel, name)["remedy"]["fields"])
        assert panel._told.answer["ready"]
    move(panel, batch_size=" 16 ")
    assert fields(panel)["batch_size"] == 16


def test_a_run_measures_what_came_with_the_press(panel):
    move(panel, device="cpu")
    press(panel, "run", move=3, fields={"batch_size": 16, "accumulation_steps": 2})
    until(lambda: panel.result is not None and is_idle(panel))
    assert panel.result.config == StepConfig(batch_size=16, accumulation_steps=2)
    assert (panel._told.answer["source"], row(panel)["batch"]) == ("run", "16")


@pytest.mark.slow
def test_a_prediction_that_is_kept_is_of_what_came_with_the_press(panel):
    press(panel, "run", move=1, fields={"batch_size": 2})
    until(lambda: panel._told.runs["rows"])
    (kept,) = told(panel)["runs"]["rows"]
    assert (kept["isPredicted"], row(panel)["batch"]) == (True, "2")


def test_an_optimizer_of_ones_own_stays_through_moves_and_comes_back(nothing_ahead):
    config = StepConfig(optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    with opened(config=config) as panel:
        assert told(panel)["form"]["own"] == {"optimizer": "own"}
        before = told(panel)["asked"]["fields"]
        assert before["optimizer"] == "own"
        move(panel, **{**before, "batch_size": 4})
        assert panel.config.optimizer is config.optimizer
        move(panel, optimizer="sgd")
        assert (told(panel)["form"]["own"], panel.config.optimizer) == ({}, "sgd")
        move(panel, **before)  # which is how the page undoes
        assert panel.config == config


# what no page sends


NUMBERS = ("batch_size", "accumulation_steps", "memory_budget", "world_size")
WRONG = (
    *("", "x" * 10**4, "1e9", "nan", "inf", "-1", "1_0", True, None, [1], {"a": 1}),
    *(0, -1, 1.5, 2**80, 1e300, float("nan"), float("inf"), -float("inf")),
)


@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:9])
def test_any_value_of_any_number_leaves_a_panel_that_says_what_is_wrong(panel, value):
    for name in (*NUMBERS, "sample_size"):
        hear(panel, {"type": "set", "by": "v", "move": 1,
                     "fields": {"sharding": "zero3", name: value}})  # fmt: skip
        if name != "sample_size" and not panel._told.answer["ready"]:
            said = [line(panel, at) for at in (*NUMBERS[:3], "ranks")]
            assert any(one["kind"] == "bad" and one["text"] for one in said), name
        panel.set(batch_size=8, accumulation_steps=1, memory_budget=1.0, world_size=1)
    assert panel._told.answer["ready"]


SET = {"type": "set", "by": "v", "move": 1}
NONSENSE = {
    "no type": {},
    "unknown type": {"type": "explode"},
    "a list for a type": {"type": ["run"]},
    "no mapping": 3,
    "no page": {"type": "set", "fields": {"batch_size": 2}},
    "no number of a move": {**SET, "move": "many", "fields": {"batch_size": 2}},
    "fields of text": {**SET, "fields": "batch_size"},
    "fields in a list": {**SET, "fields": ["batch_size"]},
    "an unknown field": {**SET, "fields": {"batch": 2, "batch_size": 2}},
    "an unknown workload": {**SET, "fields": {"workload": "nothing", "batch_size": 2}},
    "a list for a workload": {**SET, "fields": {"workload": [], "batch_size": 2}},
    "an unknown precision": {**SET, "fields": {"precision": "fp12", "batch_size": 2}},
    "a list for a choice": {**SET, "fields": {"optimizer": ["sgd"], "batch_size": 2}},
    "a mapping for a choice": {**SET, "fields": {"max_grad_norm": {}, "batch_size": 2}},
    "an own function that is not there": {**SET, "fields": {"optimizer": "own", "batch_size": 2}},
    "an unknown run": {"type": "pin", "run": 9, "name": ""},
    "run 0": {"type": "pin", "run": 0, "name": ""},
    "text for a run": {"type": "pin", "run": "one", "name": ""},
    "no name": {"type": "pin", "run": 1},
    "an unknown run to compare": {"type": "compare", "run": 9},
    "a negative run": {"type": "compare", "run": -1},
    "a list for a run": {"type": "compare", "run": [1]},
    "no panes": {"type": "open", "by": "v"},
    "panes of lists": {"type": "open", "by": "v", "panes": [[]]},
    "a number for steps": {"type": "need", "steps": 3},
    "text for runs": {"type": "need", "runs": ["one"]},
    "no row": {"type": "use", "pane": "fit"},
}


@pytest.mark.parametrize("message", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_a_sentence_and_changes_nothing(panel, message):
    rested(panel)
    before = told(panel)
    now = hear(panel, message)
    assert now["answer"]["status"]["kind"] == state.BAD
    assert len(status(panel)) > 20
    for trait in ("form", "runs", "job"):
        assert now[trait] == before[trait]
    assert now["asked"]["fields"] == before["asked"]["fields"]
    move(panel, batch_size=4)
    assert (panel.config.batch_size, badge(panel)["kind"]) == (4, "open")


@pytest.mark.parametrize(
    "changed",
    [
        {"device": "nothing"}, {"device": 3}, {"device": None}, {"memory_limit": "abc"},
        {"memory_limit": {"a": 1}}, {"memory_limit": 10**400}, {"memory_limit": "nan GiB"},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_header_is_said_below_it_and_can_be_set_right(panel, changed):
    before = {name: fields(panel)[name] for name in changed}
    move(panel, **changed)
    assert (line(panel, "about")["kind"], told(panel)["answer"]["ready"]) == ("bad", False)
    assert line(panel, "about")["text"]
    for kind in ("run", "fit", "stop"):
        press(panel, kind)
    move(panel, **before)
    until(lambda: is_idle(panel))
    assert panel._told.answer["ready"]


def test_choices_of_any_kind_leave_a_panel_that_says_what_is_wrong(nothing_ahead):
    tuned = workloads.finetune("llama-tiny", tokens=16)
    with closing(memlab.panel(tuned, device="t4")) as panel:
        for wrong in ({"rank": [1]}, {"rank": {}}, {"targets": [[]]}, {"rank": "many"},
                      {"adapter": "nothing"}, {"base": 2**80}):  # fmt: skip
            move(panel, choices=wrong)
            now = told(panel)["answer"]
            assert (now["ready"], now["choices"]["kind"]) == (False, "bad"), wrong
            move(panel, **now["choices"]["remedy"]["fields"])
            assert panel._told.answer["ready"], wrong
        for ignored in ({"depth": 2}, {1: 2}, "rank", 3, None):
            move(panel, choices=ignored)
            assert panel._told.answer["ready"], ignored


def test_what_is_not_there_is_neither_used_nor_undone(panel):
    before = told(panel)
    for message in (
        *({"type": "use", "pane": pane, "at": at} for pane in PANES for at in (-1, 0, 99, "x")),
        {"type": "stop"},
        {"type": "clear"},
        {"type": "undoClear"},
        {"type": "compare", "run": 0},
        {"type": "need"},
        {"type": "compareBase"},
        {"type": "open", "by": "v", "panes": ["nothing"]},
    ):
        now = hear(panel, message)
        assert now["asked"]["fields"] == before["asked"]["fields"]
        assert "bug" not in status(panel)


def test_a_closed_panel_does_nothing(panel):
    panel.close()
    press(panel, "run", move=1, fields={"batch_size": 2})
    assert (panel.config.batch_size, panel.result) == (8, None)


# what a page is sent


def header(file):
    data = gzip.decompress(file)
    return json.loads(data[4 : 4 + int.from_bytes(data[:4], "little")])


def test_the_steps_of_what_is_on_screen_are_sent_as_they_are_asked_for(panel, sent):
    settled(panel)
    answer = told(panel)["answer"]
    assert answer["steps"]
    press(panel, "need", steps=[*answer["steps"], 10**6, -1], runs=[])
    assert [content for content, _ in sent] == [
        {"type": "step", "id": number} for number in answer["steps"]
    ]
    for _, (file,) in sent:
        assert header(file)["result"]["workload_name"] == "tiny"
        assert header(file)["result"]["config"]["batch_size"] == 8


def test_a_family_is_the_same_but_for_batch_micro_batches_and_budget(panel):
    families = []
    for changes in (
        *({}, {"batch_size": 16}, {"accumulation_steps": 4}, {"memory_budget": 0.5}),
        *({"optimizer": "sgd"}, {"device": "h200"}, {"workload": "vit-digits"}),
    ):
        move(panel, **changes)
        families.append(panel._told.answer["family"])
    assert len(set(families[:4])) == 1
    assert len(set(families[3:])) == 4


def test_what_holds_the_peak_is_told_while_it_is_open_and_kept_up_to_date(panel):
    settled(panel)
    assert "peak" not in panel._told.panes
    press(panel, "open", panes=["peak"])
    until(lambda: "peak" in panel._told.panes)
    before = told(panel)["panes"]["peak"]
    assert before["sentence"].startswith("peak ")
    assert before["facts"]
    move(panel, batch_size=64)
    settled(panel)
    assert told(panel)["panes"]["peak"]["sentence"] != before["sentence"]


@pytest.mark.slow
def test_a_run_is_sent_as_a_file_and_the_table_as_csv(panel, sent):
    panel.keep(batch_size=4)
    panel._log.add(make_result())  # without a timeline
    press(panel, "need", runs=[1, 2, 3, 0, -1], csv=True)
    (one, (file,)), (other, (without,)), (csv, _) = sent
    assert (one, other) == ({"type": "run", "id": 1}, {"type": "run", "id": 2})
    kept = panel._log.runs[0].result
    assert result_in(file).timeline.to_dict() == kept.timeline.to_dict()
    assert result_in(without).timeline is None
    assert (csv["type"], len(csv["text"].splitlines())) == ("csv", 3)


# in each state a page is told plain JSON of the same shape


@pytest.mark.slow
def test_every_state_is_told_in_plain_json(nothing_ahead):
    with opened("t4") as panel:
        now = told(panel)
        assert (now["runs"]["rows"], now["job"]["running"]) == ([], False)
        shape = now["answer"].keys()
        assert {*LINES, "lines", "fit", "costs", "divided"} <= shape
        press(panel, "open", panes=PANES)

        def check():
            rested(panel)
            now = told(panel)
            assert now["answer"].keys() == shape
            assert set(now["answer"]["lines"]) >= {*NUMBERS[:3], "precision"}

        check()
        settled(panel)
        until(lambda: {"peak", "ranks", "code"} <= panel._told.panes.keys())
        check()
        for changes in (
            {"sharding": "zero3", "world_size": 4},
            {"world_size": "x"},
            {"world_size": 2, "memory_limit": "1 KiB"},
            {"sharding": "none", "compile": True},
            {"compile": False, "memory_budget": 0.5},
            {"device": "cpu", "workload": "gpt-small"},
            {"sample_size": "x"},
            {"workload": "tiny"},
        ):
            move(panel, **changes)
            check()
        settled(panel)
        panel.run(batch_size=4)
        panel.keep(batch_size=2)
        check()
        assert len(told(panel)["runs"]["rows"]) == 2
        press(panel, "pin", run=1, name="the first")
        press(panel, "clear")
        assert told(panel)["runs"]["total"] == 2
        press(panel, "undoClear")
        check()
    told(panel)
