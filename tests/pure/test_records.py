import base64
import dataclasses
import json
import os
import zlib

import numpy as np
import pytest
import torch

import memlab
from memlab import StepConfig, workloads
from memlab.devices import cards
from memlab.devices.operators import OperatorCost, signature_of
from memlab.errors import DeviceError, MemlabError
from memlab.store import recorded, records
from memlab.store.records import (
    Kind,
    RecordedRun,
    append,
    costs_from_line,
    costs_to_line,
    cut_damage,
    read_lines,
)
from memlab.techniques.technique import Plan, Region
from memlab.trace import Phase, Timeline
from tests.record_parts import OPTIONS, VISIT, result, run

COST = OperatorCost(output_bytes=(8, 0), peak_bytes=24, kept_bytes=8, seconds=1.25e-5)
PLAN = Plan(
    regions=(Region(path="h.0", keep=frozenset({("aten.mm.default", 1)})),),
    saved_bytes=1, plain_saved_bytes=2, peak_bytes=3, recompute_seconds=None,
)  # fmt: skip


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    path = tmp_path / "t4.jsonl"
    append(path, Kind.VISIT, VISIT)
    return path


def test_a_run_comes_back_as_it_was_but_for_its_source(file):
    before = run(
        plan=PLAN,
        process_bytes=2**31,
        options={"hidden_sizes": (16, 32)},
        before_reading=("step", "reset_peaks"),
    )
    append(file, Kind.RUN, before.to_line())
    (line,) = read_lines(file).of(Kind.RUN)
    after = RecordedRun.from_line(line, "t4, recorded")
    for field in dataclasses.fields(RecordedRun):
        if field.name != "result":
            assert getattr(after, field.name) == getattr(before, field.name), field.name
    assert (str(after.result.source), after.result.device) == ("recorded", "t4, recorded")
    changed = {"source": "measured", "device": "cuda:0"}
    assert after.result.to_dict() | changed == before.result.to_dict()
    for name in Timeline.__slots__:
        ours, theirs = (getattr(r.result.timeline, name) for r in (after, before))
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)

    append(file, Kind.RUN, run(result=result(timeline=None, peak_holdings=())).to_line())
    after = RecordedRun.from_line(read_lines(file).of(Kind.RUN)[-1], "t4").result
    assert (after.timeline, after.peak_holdings) == (None, ())


def test_what_was_recorded_is_shown_in_one_line_each(file):
    append(file, Kind.RUN, run().to_line())
    (record,) = memlab.recordings()
    assert repr([record]) == f"[{record}]"
    assert repr(record.runs[0]).endswith(str(record.runs[0].result))
    assert len(repr(record.lines)) < 300


def test_costs_come_back_by_signature():
    x = torch.ones(2, 3)
    signature = signature_of(torch.ops.aten.sum.dim_IntList, (x, [0], True), {})
    line = json.loads(json.dumps(costs_to_line({signature: COST})))
    assert costs_from_line(line) == {signature: COST}
    assert line["num_operators"] == 1


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_file_is_read_up_to_where_it_was_cut(file, cut):
    for _ in range(2):
        append(file, Kind.RUN, run().to_line())
    raw = file.read_bytes()
    file.write_bytes(raw[:-cut])
    found = read_lines(file)
    assert len(found.content) == 2
    assert f"{file}, line 3" in found.damage
    assert f"{found.kept_bytes} of {len(raw) - cut} bytes" in found.damage
    cut_damage(found)
    append(file, Kind.RUN, run().to_line())
    assert len(read_lines(file).content) == 3
    assert read_lines(file).damage == ""
    assert file.with_suffix(".damaged").read_bytes() == raw[found.kept_bytes : -cut]


@pytest.mark.parametrize("where", ["json", "packed"])
def test_a_damaged_line_ends_the_reading(file, where):
    for _ in range(3):
        append(file, Kind.RUN, run().to_line())
    lines = file.read_bytes().splitlines(keepends=True)
    if where == "json":
        lines[2] = lines[2][:50] + b"\x00\xff" + lines[2][52:]
    else:
        line = json.loads(lines[2])
        packed = bytearray(base64.b64decode(line["packed"]["timeline"]))
        packed[len(packed) // 2] ^= 1
        line["packed"]["timeline"] = base64.b64encode(packed).decode()
        lines[2] = json.dumps(line).encode() + b"\n"
    file.write_bytes(b"".join(lines))
    found = read_lines(file)
    assert (len(found.content), found.kept_bytes) == (2, len(lines[0] + lines[1]))
    assert "line 3 is damaged" in found.damage
    (record,) = memlab.recordings()
    assert (len(record.runs), record.lines.damage) == (1, found.damage)


def test_another_schema_is_refused_with_a_remedy(file):
    with file.open("a") as opened:
        opened.write('{"schema":99,"kind":"run"}\n')
    with pytest.raises(MemlabError, match=r"line 2: schema=99; allowed is 1: .*newer"):
        memlab.recordings()


def test_a_recorded_run_is_played_back(file):
    config = StepConfig(batch_size=4, precision="bf16-mixed")
    first, last = (result(config, peak_allocated_bytes=size) for size in (1, 2))
    for each in (first, last):
        append(file, Kind.RUN, run(result=each).to_line())
    workload = workloads.get("gpt-small", **OPTIONS)
    for name in ("t4", "Tesla T4", "t4, recorded"):
        found = memlab.recorded(workload, config, name)
        assert (found.outcome, found.source, found.device) == ("ok", "recorded", "t4, recorded")
        assert (found.config, found.peak_allocated_bytes) == (config, 2)


def test_what_is_not_recorded_is_unsupported_and_names_the_nearest(file):
    for batch_size, precision in (
        (1, "fp32"),
        (8, "fp32"),
        (8, "bf16"),
        (64, "fp32"),
        (99, "bf16"),
    ):
        config = StepConfig(batch_size=batch_size, precision=precision)
        append(file, Kind.RUN, run(config).to_line())
    found = memlab.recorded(workloads.get("gpt-small", **OPTIONS), StepConfig(batch_size=16), "t4")
    assert (found.outcome, found.source) == ("unsupported", "recorded")
    assert found.message.endswith("are: batch_size=8; batch_size=64; batch_size=1")
    other = memlab.recorded(workloads.get("gpt-small"), StepConfig(batch_size=8), "t4")
    assert "gpt-small of these sizes is not recorded on t4" in other.message
    assert "num_layers=1" in other.message


def test_a_device_without_a_record_is_refused(file):
    with pytest.raises(DeviceError, match="device='h200' has no record; allowed is one of 't4'"):
        memlab.recorded(workloads.get("gpt-small"), StepConfig(), "h200")


def test_what_is_set_aside_is_not_fitted(file):
    append(file, Kind.RUN, run(holdout=True).to_line())
    append(file, Kind.RUN, run(group="again").to_line())
    (record,) = memlab.recordings()
    assert [r.holdout for r in record.runs] == [True, False]
    assert [r.group for r in record.fitting] == ["again"]


def test_a_recorded_target_holds_what_operators_cost_there(file):
    x = torch.ones(2, 3)
    signature = signature_of(torch.ops.aten.mm.default, (x, x.T), {})
    slower = dataclasses.replace(COST, seconds=1.0)
    for tf32, cost in ((False, COST), (True, slower)):
        line = {"visit": "v", "tf32": tf32, "overheads": {"forward": 2e-6}}
        append(file, Kind.OPERATORS, line | costs_to_line({signature: cost}))
    (record,) = memlab.recordings()
    target = recorded.target_of(record, tf32=True)
    assert (target.kind, target.name, target.card.memory_bytes) == ("cuda", "t4, recorded", 2**33)
    assert target.costs.operators == {signature: slower}
    assert target.costs.overheads == {Phase.FORWARD: 2e-6}


BOMB = base64.b64encode(zlib.compress(bytes(2**28 + 1), 1)).decode()
DAMAGES = {
    "a negative size": {"result": {"peak_allocated_bytes": -1}},
    "a size of 400 digits": {"result": {"peak_allocated_bytes": 10**400}},
    "a size as text": {"result": {"peak_allocated_bytes": "12"}},
    "a bool for a size": {"result": {"first_step_peak_bytes": True}},
    "a negative time": {"result": {"step_seconds": -1.0}},
    "a time as text": {"result": {"step_seconds": "fast"}},
    "a peak that is not made of its parts": {"result": {"peak_by_category": {"parameters": 3}}},
    "a time that is none of its times": {
        "result": {"step_seconds": 1e5, "step_seconds_all": [1.0, 2.0]}
    },
    "a share above 1": {"result": {"others_share": 1.5}},
    "no result": {"result": None},
    "an outcome that is none": {"result": {"outcome": "perhaps"}},
    "a config that cannot be": {"result": {"config": {"batch_size": 0}}},
    "options that are none": {"options": [1]},
    "options of no workload": {"options": {"num_layers": "many"}},
    "a workload that is none": {"workload": ["gpt-small"]},
    "nothing packed": {"packed": {}},
    "a list for what is packed": {"packed": {"holdings": BOMB[:40], "timeline": None}},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_that_cannot_be_is_dropped_with_a_note_and_the_others_are_played(file, damage):
    append(file, Kind.RUN, run(result=result(StepConfig(batch_size=4))).to_line())
    line = run(result=result(StepConfig(batch_size=8))).to_line()
    change = DAMAGES[damage]
    if isinstance(change.get("result"), dict):
        change = {"result": line["result"] | change["result"]}
    append(file, Kind.RUN, line | change)
    workload = workloads.get("gpt-small", **OPTIONS)
    found = memlab.recorded(workload, StepConfig(batch_size=4), "t4")
    assert found.outcome == "ok"
    assert any("damaged" in note and str(file) in note for note in found.notes)
    assert memlab.recorded(workload, StepConfig(batch_size=8), "t4").outcome == "unsupported"


@pytest.mark.parametrize(
    "text",
    [b"\xff\xfe", b"[" * 100_000, b'{"schema":1,"kind":"run","kind":"run"}', b"NaN", b"3",
     b'{"schema":1,"kind":"run","x":NaN}', b'{"schema":1,"kind":"run","packed":[]}',
     b'{"schema":1,"kind":"run","packed":{"a":3}}',
     b'{"schema":1,"kind":"run","packed":{"a":"' + BOMB.encode() + b'"}}'],
    ids=lambda text: str(text[:24]),
)  # fmt: skip
def test_a_line_that_is_no_record_is_damage_and_never_an_error(file, text):
    append(file, Kind.RUN, run().to_line())
    with file.open("ab") as opened:
        opened.write(text + b"\n")
    lines = read_lines(file)
    assert len(lines.of(Kind.RUN)) == 1
    assert "damaged or cut short" in lines.damage


def test_rows_of_costs_that_cannot_be_are_left_out():
    x = torch.ones(2, 3)
    signatures = [signature_of(torch.ops.aten.mm.default, (x[:n], x.T), {}) for n in (1, 2)]
    line = costs_to_line(dict.fromkeys(signatures, COST))
    rows = json.loads(records.unpacked(line["packed"]["costs"]))
    first = next(iter(rows))
    rows = {
        first: rows[first],
        "no signature(": rows[first],
        list(rows)[1]: [[1], -5, 0, 0.1, False],
    }
    packed = {"costs": records.pack(json.dumps(rows).encode())}
    assert list(costs_from_line(line | {"packed": packed})) == signatures[:1]


@pytest.fixture
def own(file, tmp_path, monkeypatch):
    """Return the folder of a person's own records; one record ships, that of a T4."""
    append(file, Kind.RUN, run().to_line())
    monkeypatch.setenv("MEMLAB_CACHE", str(tmp_path / "cache"))
    folder = recorded.own_folder()
    folder.mkdir(parents=True)
    return folder


def written(path, **facts):
    append(path, Kind.VISIT, {"visit": "2026-01-01T00:00:00Z", **VISIT, **facts})
    append(path, Kind.RUN, run(result=result(StepConfig(batch_size=4))).to_line())
    return path


def test_a_persons_own_record_comes_beside_those_that_ship(own):
    written(own / "mine.jsonl", device="h200", title="NVIDIA H200")
    shipped, mine = memlab.recordings()
    assert (shipped.name, shipped.is_own) == ("t4", False)
    assert (mine.name, mine.is_own, mine.label) == ("h200", True, "h200, recorded")
    workload = workloads.get("gpt-small", **OPTIONS)
    assert memlab.recorded(workload, StepConfig(batch_size=4), "h200").outcome == "ok"


def test_a_second_record_of_a_device_has_a_name_of_its_own(own):
    for name in ("a", "b"):
        written(own / f"{name}.jsonl")
    assert [record.name for record in memlab.recordings()] == ["t4", "t4-own", "t4-own-2"]
    workload = workloads.get("gpt-small", **OPTIONS)
    found = memlab.recorded(workload, StepConfig(batch_size=4), "t4-own")
    assert (found.outcome, found.device) == ("ok", "t4-own, recorded")
    assert memlab.recorded(workload, StepConfig(batch_size=4), "t4").outcome == "unsupported"
    assert recorded.target_of(recorded.record_of("t4-own"), tf32=False).card.name == "t4"


OTHERS = {
    "another schema": (b'{"schema":99,"kind":"visit"}\n', "schema=99; allowed is 1"),
    "no record": (b"a,b\n1,2\n", "its first line is not the beginning of a record"),
    "nothing": (b"", "its first line is not the beginning of a record"),
    "half a line": (b'{"schema":1,"kind":"vis', "its first line is not the beginning"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_file_that_is_no_record_is_a_sentence_and_takes_nothing_away(own, other):
    content, said = OTHERS[other]
    (own / "other.jsonl").write_bytes(content)
    found = memlab.recordings()
    assert [record.name for record in found] == ["t4"]
    (note,) = found.notes
    assert said in note
    assert "other.jsonl" in note
    assert note in repr(found)
    with pytest.raises(DeviceError, match=r"has no record; .*other\.jsonl"):
        memlab.recorded(workloads.get("gpt-small"), StepConfig(), "h200")


def test_no_pipe_or_folder_among_the_records_keeps_anybody_waiting(own):
    os.mkfifo(own / "pipe.jsonl")
    (own / "folder.jsonl").mkdir()
    found = memlab.recordings()
    assert [record.name for record in found] == ["t4"]
    folder, pipe = sorted(found.notes)
    assert "folder.jsonl is not used" in folder
    assert "pipe.jsonl is not used" in pipe


@pytest.mark.parametrize("device", ["", {"a": 1}, None])
def test_a_device_without_a_name_is_no_record(own, device):
    (own / "odd.jsonl").write_text(json.dumps({**VISIT, "schema": 1, "kind": "visit",
                                               "device": device}) + "\n")  # fmt: skip
    found = memlab.recordings()
    assert [record.name for record in found] == ["t4"]
    assert "odd.jsonl" in found.notes[0]


@pytest.mark.parametrize("size", [None, 0, "much"])
def test_a_record_that_does_not_know_its_memory_is_of_the_card_as_it_is_sold(own, size):
    written(own / "odd.jsonl", device="rtx-3090", memory_bytes=size)
    target = recorded.target_of(recorded.record_of("rtx-3090"), tf32=False)
    assert target.card.memory_bytes == cards.find("rtx-3090").memory_bytes


def test_half_a_record_is_used_up_to_the_damage_and_says_so(own):
    path = written(own / "half.jsonl", device="h200")
    path.write_bytes(path.read_bytes()[:-9])
    found = memlab.recordings()
    assert [record.name for record in found] == ["t4", "h200"]
    assert "line 2 is damaged or cut short" in found.notes[0]
    assert found[1].notes == found.notes


def test_a_folder_of_own_records_that_is_a_file_is_as_good_as_none(own):
    own.rmdir()
    own.write_text("")
    assert [record.name for record in memlab.recordings()] == ["t4"]


class Here:
    """A card of this machine, as `torch.cuda.get_device_properties` tells of it."""

    name, total_memory, major, minor, multi_processor_count = "Tesla T4", 15 * 2**30, 7, 5, 40


@pytest.fixture
def t4_here(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator",
                        lambda check_available=False: torch.device("cuda"))  # fmt: skip
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Here)


def test_a_card_of_this_machine_takes_its_operators_from_the_persons_record(own, t4_here):
    config = StepConfig()
    assert recorded.target_for("cuda", config).costs is None
    written(own / "another.jsonl", device="h200", title="NVIDIA H200")
    assert recorded.target_for("cuda", config).costs is None
    x = torch.ones(2, 3)
    signature = signature_of(torch.ops.aten.mm.default, (x, x.T), {})
    path = written(own / "mine.jsonl")
    line = {"visit": "v", "tf32": False, "overheads": {}}
    append(path, Kind.OPERATORS, line | costs_to_line({signature: COST}))
    for device in ("cuda", "cuda:0", None, torch.device("cuda", 0)):
        costs = recorded.target_for(device, config).costs
        assert costs.operators == {signature: COST}
        assert str(path) in costs.origin
    assert recorded.target_for("cuda", StepConfig(precision="tf32")).costs is None
    assert recorded.target_for("t4", config).costs is None  # any card of this name
    path.rename(own.parent.parent / "elsewhere.jsonl")
    assert recorded.target_for("cuda", config).costs is None
