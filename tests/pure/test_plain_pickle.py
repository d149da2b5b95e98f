"""A snapshot is read as plain data: what pickle writes is read, anything else is a sentence."""

import copy
import os
import pickle
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memlab
from benchmarks.snapshot import LAYOUTS, write
from memlab._util.units import MIB
from tests.snapshot_parts import FORWARD, SCRIPT, Card, dump, training

numbers = st.integers(-(2**70), 2**70)
plain = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=300)
    | st.lists(numbers, max_size=5).map(tuple),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=40,
)  # fmt: skip


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens bytes as a snapshot."""

    def open_it(data):
        path = tmp_path / "s.pickle"
        path.write_bytes(data)
        return memlab.open_snapshot(path)

    return open_it


@settings(max_examples=200, deadline=None)
@given(st.lists(plain, max_size=3), st.tuples(plain, plain), st.sampled_from([2, 3, 4, 5]))
def test_plain_data_of_any_kind_is_passed_over(tmp_path_factory, values, pair, protocol):
    snapshot = training(2).snapshot(future=[*values, pair])
    path = dump(tmp_path_factory.getbasetemp() / "s.pickle", snapshot, protocol)
    assert memlab.open_snapshot(path).peak_allocated_bytes == 25 * MIB


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_that_pickle_writes_in_parts_is_read_whole(tmp_path, protocol):
    card = training(400)  # more than 1000 events and more than one frame of 64 KiB
    snapshot = card.snapshot()
    snapshot["device_traces"] = copy.deepcopy([[event] for event in card.events[:1200]])
    snapshot["device_traces"][0] = card.events
    found = memlab.open_snapshot(dump(tmp_path / "s.pickle", snapshot, protocol))
    assert (found.num_events, len(found.other_devices)) == (len(card.events), 1199)


class Calls:
    def __init__(self, function, *given):
        self.call = function, given

    def __reduce__(self):
        return self.call


def hostile(tmp_path):
    mark = str(tmp_path / "ran")
    return {
        "os.system": pickle.dumps(Calls(os.system, f"touch {mark}")),
        "eval": pickle.dumps({"segments": [Calls(eval, f"open({mark!r}, 'w')")]}, 2),
        "global": b"cos\nsystem\n(S'touch x'\ntR.",
        "inst": b"(S'touch x'\nios\nsystem\n.",
        "object": pickle.dumps({"segments": memlab.StepConfig(batch_size=2)}),
        "a set by its type": pickle.dumps({1, 2}, 2),
        "persistent id": b"\x80\x04\x8c\x01aQ.",
        "extension": b"\x80\x02\x82\x01.",
        "marks without end": b"\x80\x02" + b"(" * 100_000,
    }


@pytest.mark.parametrize("name", hostile(Path()))
def test_a_pickle_that_calls_something_is_refused_and_not_run(tmp_path, opened, name):
    with pytest.raises(memlab.MemlabError, match=r"s\.pickle"):
        opened(hostile(tmp_path)[name])
    assert not (tmp_path / "ran").exists()


def test_the_refusal_of_a_call_says_that_nothing_ran(tmp_path, opened):
    with pytest.raises(memlab.MemlabError, match=r"would call or import .* run nothing of it"):
        opened(hostile(tmp_path)["os.system"])


def tuples_of_tuples(levels):
    """Return a dict with a key whose hash takes 2**levels steps."""
    pairs = b"".join(b"h%ch%c\x86\x94" % (level, level) for level in range(levels))
    return b"\x80\x04}(]\x94" + pairs.replace(b"h\x00h\x00", b")\x94h\x01h\x01", 1) + b"Nu."


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04]r" + struct.pack("<I", 2**31 - 1) + b".",  # CPython's own reader fills 32 GiB
        b"\x80\x04\x8b" + struct.pack("<I", 2**31 - 1) + b"1.",
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"a.",
        b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".",
        b"\x80\x04" + b"]" * 10**6 + b".",
        b"\x80\x04)" + b"\x85" * 10**6 + b".",
        b"\x80\x04" + b"(" * 10**6,
        b"\x80\x04}" + b"]r\xff\xff\xff\x7f0" + b"N" * 10**6 + b".",
        b"\x80\x04" + b"}" * 10**6 + b".",
        tuples_of_tuples(60),
        b"\x80\x04}()" + b"\x85" * 100_000 + b"Nu.",  # so deep that its hash ends the process
        b"\x80\x04].]" + b"\x94" * 100 + b"h\x63" * 100 + b"e.",
        b"\x80\x04}\x94h\x00h\x00s.",  # a dict as a key of itself
        b"\x80\x04K\x01h\x05.",
        b"\x80\x04u.", b"\x80\x04.", b"\x80\x04K\x01e.", b"\x80\x04K\x01(K\x02u.", b"\x80",
    ],
)  # fmt: skip
def test_bytes_that_only_an_attacker_writes_are_refused_at_once(opened, data):
    with pytest.raises(memlab.MemlabError, match=r"s\.pickle"):
        opened(data)


def shared_blocks():
    block = {"address": 1, "size": 512, "state": "active_allocated", "frames": []}
    segment = {"device": 0, "address": 1, "total_size": 2 * MIB, "blocks": [block] * 3000}
    return {"segments": [segment] * 3000, "device_traces": []}


def shared_events():
    event = {"action": "alloc", "addr": 1, "size": 512}
    return {"segments": [], "device_traces": [[event] * 2000] * 3000}


@pytest.mark.parametrize("value", [shared_blocks(), shared_events()])
def test_a_file_that_repeats_itself_without_end_is_refused(tmp_path, value):
    with pytest.raises(memlab.MemlabError, match=r"again and again"):
        memlab.open_snapshot(dump(tmp_path / "s.pickle", value))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_that_is_cut_off_anywhere_is_refused(opened, protocol):
    data = pickle.dumps(training(1).snapshot(), protocol)
    for end in range(1, len(data)):
        with pytest.raises(memlab.MemlabError, match=r"ends in the middle, after .* write it ag"):
            opened(data[:end])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_file_is_a_sentence_or_a_snapshot(tmp_path_factory, data):
    whole = bytearray(pickle.dumps(training(2).snapshot(), 4))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(2, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.pickle"
    path.write_bytes(bytes(whole))
    try:
        said = str(memlab.open_snapshot(path))
    except memlab.MemlabError as error:
        said = str(error)
    assert "damaged.pickle" in said


WRONG = (None, -1, 0, 2**62, -(2**63), 1.5, float("inf"), float("nan"), "", "oom", [], {}, [[]],
         (1, 2), True, {"action": "alloc"}, {"filename": "a", "name": "b"})  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_wrong_value_anywhere_is_a_sentence_or_a_snapshot(tmp_path_factory, data):
    # a copy, since all stories share the dicts of their frames
    snapshot = copy.deepcopy(training(3).snapshot(external_annotations=[{"time_us": 5}]))
    inside, key = snapshot, "segments"
    for _ in range(data.draw(st.integers(0, 6))):
        if not isinstance(inside[key], dict | list) or not inside[key]:
            break
        inside = inside[key]
        key = data.draw(st.sampled_from([*inside] if isinstance(inside, dict) else
                                        range(len(inside))))  # fmt: skip
    inside[key] = data.draw(st.sampled_from(WRONG))
    path = dump(tmp_path_factory.getbasetemp() / "damaged.pickle", snapshot)
    try:
        said = memlab.open_snapshot(path)._repr_html_()
    except memlab.MemlabError as error:
        said = str(error)
    assert "damaged.pickle" in said


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty; call torch.cuda.memory._record_memory_history"),
        (b'{"segments": []}', "is no pickle that PyTorch writes; allowed is a file that torch"),
        (b"PK\x03\x04 a checkpoint", "is no pickle"),
        (b"cos\nsystem\n(S'touch x'\ntR.", "is no pickle that PyTorch writes"),
        (pickle.dumps({"model": 1}), 'is a pickle without "segments" and "device_traces"'),
        (pickle.dumps(7), 'is a pickle without "segments"'),
        (pickle.dumps({"segments": [], "device_traces": []}), "holds no event and no segment"),
        (pickle.dumps({"segments": [], "device_traces": [[], []]}), "_record_memory_history()"),
        (pickle.dumps({"segments": [{"blocks": []}]}), 'something has no "total_size"'),
        (pickle.dumps({"segments": 3, "device_traces": [3]}), "not of the form of a snapshot"),
        (pickle.dumps({"device_traces": [[1, 2]]}), "a trace that is no list of events"),
        (pickle.dumps({"device_traces": [[{"action": "alloc", "addr": 2**63, "size": 1}]]}),
         "is not of the form of a snapshot (OverflowError"),
        (pickle.dumps({"device_traces": [[{"action": "alloc", "addr": 1, "size": -1}]]}),
         "a size of -1 bytes"),
        (pickle.dumps({"segments": [{"total_size": 2**60, "blocks": []}]}), "which no card has"),
        (pickle.dumps({"device_traces": [[{"action": "alloc", "addr": 1, "size": 1,
                                           "frames": ["f"]}]]}), "no list of frames"),
    ],
)  # fmt: skip
def test_what_is_no_snapshot_is_a_sentence(opened, data, said):
    with pytest.raises(memlab.MemlabError) as caught:
        opened(data)
    assert "s.pickle" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (3.5, "is no path"),
        (None, "is no path"),
        ("no/such.pickle", "does not exist; call torch.cuda.memory._record_memory_history"),
        ("/", "is no regular file"),
        ("/dev/zero", "is no regular file"),
        ("", "is no regular file"),
        ("a\0b", "cannot be read"),
    ],
)
def test_what_is_no_file_is_a_sentence(path, said):
    with pytest.raises(memlab.MemlabError, match=said):
        memlab.open_snapshot(path)


def test_a_file_too_large_for_this_machine_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = dump(tmp_path / "s.pickle", training().snapshot())
    size = path.stat().st_size
    for free in (1000, 3 * size):  # the file alone does not fit, or the dicts that it makes do not
        monkeypatch.setattr("memlab.integrations.snapshot_file.available_memory_bytes",
                            lambda free=free: free)  # fmt: skip
        with pytest.raises(memlab.MemlabError, match=r"this machine has .* free.*max_entries"):
            memlab.open_snapshot(path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_files_of_the_benchmark_are_what_pickle_reads(tmp_path, layout):
    path = tmp_path / "s.pickle"
    count = write(path, layout, 400_000)
    (events,) = pickle.loads(path.read_bytes())["device_traces"]
    assert len(events) == count
    found = memlab.open_snapshot(path)
    assert found.num_events == count
    live = {}
    highest = 0
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_requested":
            del live[event["addr"]]
        highest = max(highest, sum(live.values()))
    assert found.peak_allocated_bytes == highest
    if layout != "no stacks":
        stacks = {tuple((f["filename"], f["line"], f["name"]) for f in e["frames"]) for e in events}
        held = {tuple(map(tuple, holding.stack)) for holding in found.peak_holdings}
        assert held <= stacks


def test_a_stack_of_a_thousand_frames_and_more_is_whole(tmp_path):
    card = Card()
    card.segment(0, 2 * MIB)
    card.alloc(0, 512, FORWARD * 300)
    card.alloc(512, 512, FORWARD * 300)
    card.alloc(1024, 512, [*SCRIPT[:1]])
    found = memlab.open_snapshot(dump(tmp_path / "s.pickle", card.snapshot()))
    assert {len(held.stack) for held in found.peak_holdings} == {300 * len(FORWARD), 1}
