"""The reader of plain pickles: what pickle writes comes back, and anything else is a sentence."""

import copy
import os
import pickle
import pickletools
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memlab
from benchmarks.snapshot import LAYOUTS, write
from memlab._util.units import MIB
from memlab.integrations.snapshot_file import CallsError, NotPlainError, PlainReader, TruncatedError
from tests.snapshot_parts import FORWARD, SCRIPT, Card, dump, training

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
    | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner)
    | st.tuples(inner) | st.tuples(inner, inner) | st.tuples(inner, inner, inner, inner),
    max_leaves=40,
)  # fmt: skip


def as_tuples(value):
    """Return a value whose lists are tuples, as the reader may give them."""
    if isinstance(value, list | tuple):
        return tuple(map(as_tuples, value))
    if isinstance(value, dict):
        return {key: as_tuples(inner) for key, inner in value.items()}
    return value


def read(data):
    return PlainReader(data).read()


@settings(max_examples=200, deadline=None)
@given(plain, st.sampled_from([2, 3, 4, 5]))
def test_plain_data_comes_back_as_pickle_reads_it(value, protocol):
    assert as_tuples(read(pickle.dumps(value, protocol))) == as_tuples(value)


@settings(max_examples=30, deadline=None)
@given(st.integers(990, 2100), st.integers(1, 3), st.sampled_from([2, 4]))
def test_lists_that_pickle_writes_in_parts_come_back_whole(length, depth, protocol):
    frame = {"filename": "a.py", "line": 300, "name": "f"}
    value = [frame] * length
    for _ in range(depth):
        value = [value, [frame], [], value]
    assert as_tuples(read(pickle.dumps(value, protocol))) == as_tuples(value)


def test_a_frame_of_the_file_may_begin_between_any_two_opcodes():
    frame = {"filename": "a.py", "line": 3, "name": "f"}
    value = {"x": [[frame] * 1500, {"frames": [frame, frame]}, frame]}
    data = pickle.dumps(value, 4)
    ends = [pos for opcode, _, pos in pickletools.genops(data) if opcode.name != "BINGET"][2:]
    for end in ends:
        parted = data[:end] + b"\x95" + struct.pack("<Q", len(data) - end) + data[end:]
        assert as_tuples(read(parted)) == as_tuples(value)


def test_equal_lists_of_earlier_objects_are_one_object():
    frame = {"filename": "a.py", "line": 3, "name": "f"}
    tables = read(pickle.dumps([{"frames": [frame, frame]} for _ in range(3)]))
    first, second, third = (table["frames"] for table in tables)
    assert list(first) == list(second) == [frame, frame]
    assert second is third


def test_a_dict_is_replaced_also_where_it_is_referred_to():
    shared = {"action": "alloc"}
    reader = PlainReader(pickle.dumps([shared, shared]), lambda table: ("event", len(table)))
    assert reader.read() == [("event", 1), ("event", 1)]


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
def test_a_pickle_that_calls_something_is_refused_and_not_run(tmp_path, name):
    data = hostile(tmp_path)[name]
    with pytest.raises((CallsError, NotPlainError)):
        read(data)
    path = tmp_path / "hostile.pickle"
    path.write_bytes(data)
    with pytest.raises(memlab.MemlabError, match=r"hostile.pickle"):
        memlab.open_snapshot(path)
    assert not (tmp_path / "ran").exists()


def test_the_refusal_of_a_call_says_that_nothing_ran(tmp_path):
    path = tmp_path / "hostile.pickle"
    path.write_bytes(hostile(tmp_path)["os.system"])
    with pytest.raises(memlab.MemlabError, match=r"would call or import .* run nothing of it"):
        memlab.open_snapshot(path)


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
        b"\x80\x04].]" + b"\x94" * 100 + b"h\x63" * 100 + b"e.",
        b"\x80\x04}\x94h\x00h\x00s.",  # a dict as a key of itself
        b"\x80\x04K\x01h\x05.",
        b"\x80\x04u.", b"\x80\x04.", b"\x80\x04K\x01e.", b"\x80\x04K\x01(K\x02u.", b"\x80",
    ],
)  # fmt: skip
def test_bytes_that_only_an_attacker_writes_are_refused_at_once(tmp_path, data):
    path = tmp_path / "s.pickle"
    path.write_bytes(data)
    with pytest.raises(memlab.MemlabError, match=r"s\.pickle"):
        memlab.open_snapshot(path)


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
def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path, protocol):
    data = pickle.dumps(training(1).snapshot(), protocol)
    for end in range(1, len(data)):
        with pytest.raises(NotPlainError):
            read(data[:end])
    path = tmp_path / "s.pickle"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(memlab.MemlabError, match=r"ends in the middle, after .* write it again"):
        memlab.open_snapshot(path)
    with pytest.raises(TruncatedError):
        read(data[:-1])


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
         "is damaged"),
        (pickle.dumps({"device_traces": [[{"action": "alloc", "addr": 1, "size": -1}]]}),
         "a size of -1 bytes"),
        (pickle.dumps({"segments": [{"total_size": 2**60, "blocks": []}]}), "which no card has"),
        (pickle.dumps({"device_traces": [[{"action": "alloc", "addr": 1, "size": 1,
                                           "frames": ["f"]}]]}), "no list of frames"),
    ],
)  # fmt: skip
def test_what_is_no_snapshot_is_a_sentence(tmp_path, data, said):
    path = tmp_path / "s.pickle"
    path.write_bytes(data)
    with pytest.raises(memlab.MemlabError) as caught:
        memlab.open_snapshot(path)
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
    monkeypatch.setattr("memlab.integrations.snapshot_file.available_memory_bytes", lambda: 1000)
    with pytest.raises(memlab.MemlabError, match=r"this machine has 1000 B free.*max_entries"):
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
