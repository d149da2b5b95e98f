"""Snapshots against hand-counted stories: peaks, categories, late traces, leaks, fragmentation."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.cuda import _memory_viz

import memlab
from memlab._util.units import MIB
from memlab.integrations.snapshot_blocks import RunPhase, phase_of, place_of
from memlab.integrations.snapshot_file import Frame
from tests.snapshot_parts import (
    ADAM,
    BACKWARD,
    BASE,
    BUILD,
    CPP_BACKWARD,
    FORWARD,
    KEPT,
    RECOMPUTE,
    SCRIPT,
    SITE,
    UPDATE,
    ZERO_GRAD,
    Card,
    brute_force,
    dump,
    fragmented,
    frames,
    training,
)


@pytest.fixture
def opened(tmp_path):
    """Return a function that writes a snapshot and opens it."""

    def open_it(snapshot, **options):
        if isinstance(snapshot, Card):
            snapshot = snapshot.snapshot()
        return memlab.open_snapshot(dump(tmp_path / "snapshot.pickle", snapshot), **options)

    return open_it


def as_stack(made):
    return tuple(Frame(frame["filename"], frame["line"], frame["name"]) for frame in made)


# peak and categories


def test_a_known_training_has_its_known_peak_and_categories(opened):
    found = opened(training())
    assert found.peak_allocated_bytes == 25 * MIB
    assert {name: size // MIB for name, size in found.peak_by_category.items() if size} == {
        "parameters": 4, "optimizer_state": 8, "activations": 8, "gradients": 4, "temporaries": 1,
    }  # fmt: skip
    assert found.peak_reserved_bytes == 64 * MIB
    assert found.end_allocated_bytes == 12 * MIB
    assert (found.num_steps, found.steps_by) == (5, "updates of the optimizer")
    assert found.told_fraction == 1.0
    assert found.leaks == ()


def test_holdings_name_the_stacks_and_sum_to_the_peak(opened):
    found = opened(training())
    assert sum(held.nbytes for held in found.peak_holdings) == found.peak_allocated_bytes
    places = {held.category: held.place for held in found.peak_holdings}
    assert places["activations"] == "model.py:12 forward > linear.py:125 forward"
    assert places["optimizer_state"] == "train.py:24 train > adamw.py:130 _init_group"
    (state,) = [held for held in found.peak_holdings if held.category == "optimizer_state"]
    assert (state.stack, state.num_blocks, state.nbytes) == (as_stack(ADAM), 2, 8 * MIB)


def test_the_timeline_is_what_each_event_leaves_live(opened):
    card = training(2)
    found = opened(card)
    assert found.timeline.total_bytes.tolist() == brute_force(card.events)
    assert len(found.timeline) == len(card.events) + 1
    assert found.timeline.bytes_by_category.shape[1] == len(found.timeline.categories) == 8


@pytest.mark.parametrize(
    ("stack", "phase"),
    [
        (BUILD, RunPhase.BUILD),
        (FORWARD, RunPhase.FORWARD),
        (RECOMPUTE, RunPhase.BACKWARD),
        (CPP_BACKWARD, RunPhase.BACKWARD),
        (ADAM, RunPhase.OPTIMIZER),
        (SCRIPT, RunPhase.OTHER),
        (frames("C:\\site\\torch\\optim\\sgd.py:3 step", "C:\\train.py:1 <module>"),
         RunPhase.OPTIMIZER),
        (frames(f"{SITE}/torch/nn/functional.py:3 gelu", "/train.py:2 closure",
                f"{SITE}/torch/optim/lbfgs.py:330 step", "/train.py:1 <module>"), RunPhase.FORWARD),
        (frames("/me/ops.py:3 backward", f"{SITE}/torch/autograd/function.py:315 apply"),
         RunPhase.BACKWARD),
    ],
)  # fmt: skip
def test_a_stack_tells_its_phase(stack, phase):
    assert phase_of(as_stack(stack)) is phase


def test_cpp_stacks_tell_backward_too(opened):
    card = Card()
    card.segment(0, 20 * MIB)
    card.alloc(0, MIB, FORWARD)
    card.alloc(MIB, MIB, CPP_BACKWARD)
    card.alloc(2 * MIB, MIB, SCRIPT)
    found = opened(card)
    by_category = {name: size for name, size in found.peak_by_category.items() if size}
    assert by_category == {"activations": MIB, "gradients": MIB, "unknown": MIB}
    assert "empty stack" not in " ".join(found.notes)


def test_a_script_of_plain_functions_is_told_by_what_backward_frees(opened):
    card = Card()
    card.segment(0, 20 * MIB)
    for _ in range(3):
        card.alloc(0, 4 * MIB, SCRIPT)
        card.alloc(4 * MIB, MIB, SCRIPT)
        card.alloc(8 * MIB, 2 * MIB, BACKWARD)
        card.free(0, BACKWARD)
        card.alloc(12 * MIB, MIB, UPDATE)
        card.free(12 * MIB, UPDATE)
        card.free(8 * MIB, ZERO_GRAD)
        card.free(4 * MIB, SCRIPT)
    found = opened(card)
    assert found.num_steps == 3
    assert {name: size // MIB for name, size in found.peak_by_category.items() if size} == {
        "activations": 4, "gradients": 2, "unknown": 1,
    }  # fmt: skip


def test_what_cannot_be_told_is_unknown_and_said(opened):
    card = Card()
    card.segment(0, 20 * MIB)
    card.alloc(0, MIB, SCRIPT)
    card.alloc(MIB, MIB, SCRIPT)
    card.free(MIB, SCRIPT)
    snapshot = card.snapshot()
    for event in snapshot["device_traces"][0]:
        del event["frames"]
    for block in snapshot["segments"][0]["blocks"]:
        block.pop("frames", None)
    found = opened(snapshot)
    assert found.peak_by_category["unknown"] == found.peak_allocated_bytes == 2 * MIB
    assert found.told_fraction == 0.0
    assert any("2 allocations have no stack" in note for note in found.notes)
    assert found.peak_holdings[0].place == "stack not recorded"


def test_a_block_counts_what_it_takes_if_that_is_known(opened):
    card = Card()
    card.segment(0, 2 * MIB, kind="small")
    card.alloc(0, 100)  # 512 by rounding
    card.alloc(4096, 700, taken=1536)  # the rest of its hole was too small to be split off
    assert opened(card).peak_allocated_bytes == 512 + 1536


def test_memory_on_another_stream_is_reserved_until_its_free_is_completed(opened):
    card = Card()
    card.segment(0, 20 * MIB)
    card.alloc(0, 4 * MIB)
    card.free(0, SCRIPT, awaits=True)
    card.out_of_memory(18 * MIB, 0)
    found = opened(card)
    assert found.end_allocated_bytes == 0
    assert found.fragmentation.largest_hole_bytes == 16 * MIB
    assert found.out_of_memory[0].usable_hole_bytes == 16 * MIB


# a trace that begins late


@pytest.mark.parametrize("most_events", [1, 3, 10, 30, 59])
def test_a_late_trace_is_the_end_of_the_whole_one(opened, most_events):
    card = training(4, leaks=True)
    whole = opened(card)
    late = opened(card.snapshot(most_events=most_events))
    expected = whole.timeline.total_bytes[-most_events - 1 :]
    assert late.timeline.total_bytes.tolist() == expected.tolist()
    assert late.timeline.reserved_bytes.tolist() == [64 * MIB] * (most_events + 1)
    assert any("begins late" in note for note in late.notes)


def test_what_is_older_than_the_trace_is_told_by_the_stack_of_its_block(opened):
    card = training(4)
    found = opened(card.snapshot(most_events=8))
    assert found.peak_by_category["parameters"] == 4 * MIB
    assert found.peak_by_category["optimizer_state"] == 8 * MIB


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 3 * MIB), st.booleans()), min_size=1,
                max_size=80), st.integers(1, 200), st.booleans())  # fmt: skip
def test_any_trace_gives_back_what_was_live(tmp_path_factory, story, most_events, requests):
    card = Card()
    card.segment(0, 64 * MIB)
    for slot, size, awaits in story:
        address = slot * 4 * MIB
        state = card.live.get(address, {}).get("state")
        if state is None:
            card.alloc(address, size)
        elif state == "active_allocated":
            card.free(address, awaits=awaits and requests)
    total = brute_force(card.events)
    snapshot = card.snapshot(most_events=min(most_events, len(card.events)))
    if not requests:  # recorded with skip_actions=["free_requested"]
        events = snapshot["device_traces"][0]
        if events[0]["action"] == "free_completed":
            del events[0]  # its request was cut off, and it is no event of a block any more
        snapshot["device_traces"] = [[e for e in events if e["action"] != "free_requested"]]
        total = [total[-1]]
    found = memlab.open_snapshot(dump(tmp_path_factory.mktemp("snap") / "s.pickle", snapshot))
    measured = found.timeline.total_bytes.tolist()
    assert measured == total[-len(measured) :] or not requests
    assert measured[-1] == total[-1] == found.end_allocated_bytes


def test_without_history_the_state_at_the_end_is_shown(opened):
    found = opened({**training().snapshot(), "device_traces": [[]]})
    assert (found.num_events, found.num_steps) == (0, 0)
    assert found.peak_allocated_bytes == found.end_allocated_bytes == 12 * MIB
    assert found.peak_by_category["optimizer_state"] == 8 * MIB
    assert any("No history was recorded" in note for note in found.notes)


def test_a_long_trace_is_thinned_and_its_peak_stays(opened, monkeypatch):
    card = training(6, leaks=True)
    whole = opened(card)
    monkeypatch.setattr("memlab.integrations.snapshot.MOST_INSTANTS", 16)
    thinned = opened(card)
    assert len(thinned.timeline) <= 16
    assert thinned.peak_allocated_bytes == whole.peak_allocated_bytes
    assert thinned.timeline.total_bytes.max() == whole.peak_allocated_bytes
    assert dict(thinned.peak_by_category) == dict(whole.peak_by_category)
    assert any("thinned" in note for note in thinned.notes)


# leaks


def test_a_leak_is_named_by_its_stack(opened):
    found = opened(training(8, leaks=True))
    (leak,) = found.leaks
    assert leak.stack == as_stack(KEPT)
    assert leak.place == "train.py:30 keep"
    assert leak.bytes_at_step_ends == tuple(n * MIB for n in range(2, 9))
    assert (leak.growth_bytes, leak.bytes_per_step, leak.num_blocks) == (6 * MIB, MIB, 6)
    assert found.peak_allocated_bytes == 25 * MIB + 8 * MIB


def test_what_shrinks_again_is_no_leak(opened):
    card = training(1)
    card.alloc(50 * MIB, MIB, KEPT)
    card = training(1, card=_without_state(card))
    assert opened(card).leaks == ()


def _without_state(card):
    for address in list(card.live):
        card.free(address, SCRIPT)
    card.drop_segment(0)
    return card


def test_too_few_steps_for_a_leak_are_said(opened):
    found = opened(training(4, leaks=True))
    assert found.leaks == ()
    assert any("Too few steps to recognise a leak: it takes 5" in note for note in found.notes)


def test_steps_are_told_by_annotations_where_the_optimizer_allocates_nothing(opened):
    card = Card()
    card.segment(0, 20 * MIB)
    annotations = []
    for step in range(6):
        card.alloc(step * MIB, MIB, KEPT)
        named = {"device": 0, "time_us": card.clock + 1, "name": "Optimizer.step#AdamW.step"}
        annotations += [{**named, "stage": stage} for stage in ("START", "END")]
    found = opened(card.snapshot(external_annotations=annotations))
    assert (found.num_steps, found.steps_by) == (6, "annotations Optimizer.step")
    assert found.leaks[0].bytes_per_step == MIB


def test_without_an_optimizer_steps_are_backward_passes(opened):
    card = Card()
    card.segment(0, 64 * MIB)
    for step in range(6):
        card.alloc(0, MIB, FORWARD)
        card.alloc((step + 1) * MIB, MIB, CPP_BACKWARD)
        card.free(0, CPP_BACKWARD)
    found = opened(card)
    assert (found.num_steps, found.steps_by) == (6, "backward passes")


# fragmentation


def test_fragmentation_at_an_out_of_memory_is_counted(opened):
    (moment,) = opened(fragmented()).out_of_memory
    assert (moment.allocated_bytes, moment.reserved_bytes) == (20 * MIB, 40 * MIB)
    assert (moment.free_bytes, moment.num_holes) == (20 * MIB, 3)
    assert moment.non_releasable_bytes == 20 * MIB
    assert moment.usable_hole_bytes == moment.largest_hole_bytes == 10 * MIB
    assert (moment.requested_bytes, moment.device_free_bytes) == (12 * MIB, 2 * MIB)
    assert moment.is_cause
    assert "Fragmentation is the cause" in str(moment)
    assert "expandable_segments" in str(moment)


@pytest.mark.parametrize(
    ("request_bytes", "free", "said"),
    [(30 * MIB, 2 * MIB, "is not the cause"), (12 * MIB, 50 * MIB, "a limit on this process")],
)
def test_another_cause_is_said(opened, request_bytes, free, said):
    (moment,) = opened(fragmented(request_bytes, free)).out_of_memory
    assert not moment.is_cause
    assert said in str(moment)


def test_the_moment_is_told_although_the_file_was_written_later(opened):
    card = fragmented()
    for address in list(card.live):
        card.free(address, SCRIPT)
    card.drop_segment(100 * MIB)
    card.segment(200 * MIB, 30 * MIB)
    card.alloc(0, 20 * MIB)
    found = opened(card)
    (moment,) = found.out_of_memory
    assert (moment.allocated_bytes, moment.reserved_bytes) == (20 * MIB, 40 * MIB)
    assert (moment.num_holes, moment.usable_hole_bytes) == (3, 10 * MIB)
    assert found.fragmentation.reserved_bytes == 50 * MIB
    assert found.fragmentation.releasable_bytes == 30 * MIB


def test_a_small_hole_of_another_pool_or_stream_serves_no_large_request(opened):
    card = Card()
    card.segment(0, 20 * MIB, stream=7)
    card.segment(100 * MIB, 2 * MIB, kind="small")
    card.out_of_memory(2 * MIB, 0)
    (moment,) = opened(card).out_of_memory
    assert (moment.free_bytes, moment.usable_free_bytes) == (22 * MIB, 0)
    assert not moment.is_cause


def test_pages_of_an_expandable_segment_are_one_range(opened):
    card = Card()
    card.segment(0, 20 * MIB, expandable=True)
    card.alloc(0, 20 * MIB)
    card.free(0, SCRIPT)
    card.out_of_memory(64 * MIB, 0)
    snapshot = card.snapshot()
    # later the upper half was unmapped
    event = dict(snapshot["device_traces"][0][0])
    snapshot["device_traces"][0].append(
        {**event, "action": "segment_unmap", "addr": BASE + 10 * MIB, "size": 10 * MIB}
    )
    snapshot["segments"][0].update(total_size=10 * MIB)
    snapshot["segments"][0]["blocks"][0]["size"] = 10 * MIB
    (moment,) = opened(snapshot).out_of_memory
    assert (moment.num_holes, moment.largest_hole_bytes) == (1, 20 * MIB)


# PyTorch's own reader


def test_totals_are_those_of_pytorchs_own_reader(opened):
    snapshot = fragmented().snapshot()
    said = _memory_viz.segsum(snapshot)
    found = opened(snapshot).fragmentation
    assert f"segments: {len(found.segments)}\n" in said
    assert f"total_reserved: {_memory_viz.Bytes(found.reserved_bytes)}\n" in said
    assert f"total_allocated: {_memory_viz.Bytes(found.allocated_bytes)}\n" in said
    assert f"total_free: {_memory_viz.Bytes(found.free_bytes)} " in said
    assert sum(map(_memory_viz.calc_active, snapshot["segments"])) == found.allocated_bytes


# other forms of the file


def test_segments_alone_as_old_pytorch_wrote_them(opened):
    segment = {"device": 0, "address": 0, "total_size": 2 * MIB, "stream": 0, "blocks": [
        {"size": 1024, "state": "active_allocated",
         "history": [{"real_size": 900, "frames": FORWARD}]},
        {"size": 2 * MIB - 1024, "state": "inactive"}]}  # fmt: skip
    found = opened([segment])
    assert found.peak_allocated_bytes == 1024
    assert found.peak_holdings[0].stack == as_stack(FORWARD)
    assert any('no "device_traces"' in note for note in found.notes)


def test_a_trace_without_segments_is_shown_without_reserved_bytes(opened):
    snapshot = training().snapshot()
    del snapshot["segments"]
    found = opened(snapshot)
    assert found.peak_allocated_bytes == 25 * MIB
    assert found.peak_reserved_bytes is None
    assert found.fragmentation is None
    assert any('no "segments"' in note for note in found.notes)


def test_unknown_keys_are_passed_over_and_missing_ones_counted(opened):
    snapshot = training().snapshot(future={"a": [1, 2.5, None, True]})
    events = snapshot["device_traces"][0]
    for event in events:
        event |= {"user_metadata": "step 1", "compile_context": "N/A", "pool_id": (0, 0)}
    nameless = {name: value for name, value in events[-1].items() if name != "size"}
    events += [nameless, {**events[-1], "action": "defragment"}]
    found = opened(snapshot)
    assert found.peak_allocated_bytes == 25 * MIB
    assert '1 events have no "size" and are left out.' in found.notes
    assert any("'defragment'" in note for note in found.notes)


def test_pinned_memory_and_annotations_of_pytorch_2_14_are_said_and_count_for_no_card(opened):
    host = training().snapshot()
    for host_segments in (host["segments"], [], None, [{"total_size": "?"}, 3]):
        snapshot = training().snapshot(
            host_segments=host_segments, host_traces=host["device_traces"][0]
        )
        events = snapshot["device_traces"][0]
        events.insert(1, {"action": "annotate", "addr": events[0]["addr"], "frames": [],
                          "user_metadata": "weights", "time_us": 1})  # fmt: skip
        found = opened(snapshot)
        assert found.peak_allocated_bytes == 25 * MIB
        assert not found.other_devices
        notes = "\n".join(found.notes)
        assert "1 events 'annotate' put a word on a tensor and change no memory" in notes
        assert ("64.0 MiB of pinned memory of the host" in notes) == bool(
            host_segments and host_segments == host["segments"]
        )


def test_a_device_is_chosen_by_its_events_or_by_its_number(opened):
    snapshot = training().snapshot()
    snapshot["device_traces"] = [[], snapshot["device_traces"][0]]
    for segment in snapshot["segments"]:
        segment["device"] = 1
    snapshot["segments"].append({"device": 3, "address": 0, "total_size": 2 * MIB, "stream": 0,
                                 "blocks": []})  # fmt: skip
    found = opened(snapshot)
    assert (found.device, found.other_devices) == (1, (3,))
    assert opened(snapshot, device=3).peak_allocated_bytes == 0
    with pytest.raises(memlab.MemlabError, match=r"device=2 is not in .* holds device 1, 3"):
        opened(snapshot, device=2)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_that_pytorch_may_use_is_read(tmp_path, protocol):
    path = dump(tmp_path / "s.pickle", training(leaks=True).snapshot(), protocol)
    assert memlab.open_snapshot(path).peak_allocated_bytes == 30 * MIB


# what a person sees


def test_the_page_of_text_says_what_there_is(opened):
    text = str(opened(training(8, leaks=True)))
    for said in ("peak: 33.0 MiB allocated, 64.0 MiB reserved",
                 "8 steps (updates of the optimizer)", "who holds the peak",
                 "model.py:12 forward > linear.py:125 forward", "what grows from step to step",
                 "1.00 MiB  train.py:30 keep"):  # fmt: skip
        assert said in text
    assert repr(opened(fragmented())).count("Fragmentation is the cause") == 1


def test_the_table_of_a_notebook_is_escaped(opened):
    card = Card()
    card.segment(0, 2 * MIB)
    card.alloc(0, 512, frames("/me/<b>.py:1 <lambda>"))
    page = opened(card)._repr_html_()
    assert "&lt;b&gt;.py:1 &lt;lambda&gt;" in page
    assert "<b>" not in page


def test_the_place_of_a_stack_is_the_persons_own_line():
    assert place_of(as_stack(UPDATE)) == "train.py:24 train > adam.py:400 _multi_tensor_adam"
    assert place_of(as_stack(SCRIPT)) == "train.py:22 train"
    assert place_of(as_stack(CPP_BACKWARD)) == "at::native::mm"
    assert place_of(as_stack([*CPP_BACKWARD, *SCRIPT])) == "train.py:22 train"


# the same by brute force


def holes_of(card):
    """Return the free ranges of a card now, segment by segment."""
    found = []
    for segment in card.segments:
        at, end = segment["start"], segment["start"] + segment["size"]
        for address in sorted(a for a in card.live if at <= a < end):
            found.append(address - at)
            at = address + card.live[address]["size"]
        found.append(end - at)
    return sorted(hole for hole in found if hole)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 23), st.integers(1, 4 * MIB), st.booleans()), max_size=90),
       st.integers(1, 150))  # fmt: skip
def test_any_out_of_memory_is_seen_as_it_was(tmp_path_factory, story, most_events):
    card, expected = Card(), []
    for slot, size, special in story:
        base = slot // 6 * 100 * MIB
        address = base + slot % 6 * 4 * MIB
        segment = [s for s in card.segments if s["start"] == base]
        state = card.live.get(address, {}).get("state")
        inside = [a for a in card.live if base <= a < base + 24 * MIB]
        if special and slot % 3 == 0:
            card.out_of_memory(size, 7)
            allocated = sum(b["size"] for b in card.live.values()
                            if b["state"] == "active_allocated")  # fmt: skip
            reserved = sum(s["size"] for s in card.segments)
            expected.append((len(card.events), allocated, reserved, holes_of(card)))
        elif not segment:
            card.segment(base, 24 * MIB)
        elif special and not inside:
            card.drop_segment(base)
        elif state is None:
            card.alloc(address, size)
        elif state == "active_allocated":
            card.free(address, awaits=special)
    kept = min(most_events, len(card.events))
    if not card.segments and not kept:
        return
    first = len(card.events) - kept
    snapshot = card.snapshot(most_events=kept)
    found = memlab.open_snapshot(dump(tmp_path_factory.mktemp("snap") / "s.pickle", snapshot))
    moments = [(m.allocated_bytes, m.reserved_bytes,
                sorted(hole for segment in m.segments for hole in segment.holes))
               for m in found.out_of_memory]  # fmt: skip
    assert moments == [tuple(rest) for at, *rest in expected if at > first]
    assert sorted(hole for s in found.fragmentation.segments for hole in s.holes) == holes_of(card)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(-2, 3), min_size=3, max_size=3), min_size=5, max_size=12))
def test_leaks_are_what_never_shrinks_and_grows_three_times(tmp_path_factory, steps):
    card, held, series = Card(), ([], [], []), [[], [], []]
    card.segment(0, 4096 * MIB)
    stacks = [frames(f"/me/train.py:{line} keep") for line in range(3)]
    address = 0
    for changes in steps:
        for line, change in enumerate(changes):
            for _ in range(change):
                card.alloc(address, MIB, stacks[line])
                held[line].append(address)
                address += MIB
            for _ in range(min(-change, len(held[line]))):
                card.free(held[line].pop(0), SCRIPT)
        for stack in (SCRIPT, UPDATE):  # a batch, and what the update takes
            card.alloc(4000 * MIB, MIB, stack)
            card.free(4000 * MIB, stack)
        for line in range(3):
            series[line].append(len(held[line]) * MIB)
    expected = set()
    for line in range(3):
        grown = [b - a for a, b in pairwise(series[line][1:])]
        if min(grown) >= 0 and sum(g > 0 for g in grown) >= 3:
            expected.add((line, tuple(series[line][1:])))
    path = dump(tmp_path_factory.mktemp("snap") / "s.pickle", card.snapshot())
    found = memlab.open_snapshot(path).leaks
    assert {(leak.stack[0].line, leak.bytes_at_step_ends) for leak in found} == expected
