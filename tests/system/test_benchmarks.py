"""The parts of the benchmarks that are not timing, and one small real comparison of meters."""

import ast
import dataclasses
import gc
import itertools
import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import (
    accuracy,
    attacks,
    host_pace,
    independent,
    latency,
    meter,
    out_of_memory,
    overhead,
    peers,
    power,
    recommend,
    recommend_peers,
    recompute,
    recompute_checks,
    report,
    slider_moves,
    waiting,
)
from benchmarks.recompute_points import BY_HAND, OURS, Point, area, dominating, judge
from memlab import Outcome, StepConfig, StepResult, measure, predict
from memlab.config import PRESET_POLICIES
from memlab.cost_model.power import slowdown
from memlab.techniques.step import build_step, set_seed
from tests.models import IN, OUT, blocks, linear

BENCHMARKS = Path(report.__file__).parent


def memory(ts, address, size, total, device=0):
    arguments = {"Addr": address, "Bytes": size, "Total Allocated": total, "Device Type": device}
    return {"name": "[memory]", "ph": "i", "ts": ts, "args": arguments}


def definition(workload):
    return workload.build_model, workload.make_batch, workload.compute_loss


def test_peaks_are_read_step_by_step_from_a_chrome_trace():
    steps = [
        {"name": f"{independent.STEP} {i}", "ph": "X", "ts": ts, "dur": 10.0}
        for i, ts in ((1, 10.0), (2, 30.0))
    ]
    changes = [
        memory(5.0, 1, 100, 100),  # stands before any step
        memory(6.0, 2, 999, 1099),
        memory(7.0, 2, -999, 100),  # a peak outside of the steps
        memory(12.0, 3, 50, 150),
        memory(13.0, 9, -70, 150),  # was never seen to be allocated
        memory(14.0, 3, -51, 100),  # a size that a free tells is not believed
        memory(15.0, 4, 512, 512, device=1),
        memory(25.0, 5, 7, 107),
        memory(35.0, 3, 20, 127),
        memory(50.0, 6, 1000, 1127),
    ]
    peaks = independent.peaks_of_steps([*changes[::-1], *steps])
    assert peaks == {
        "peak_1": 150, "allocator_peak_1": 150, "peak_2": 127, "allocator_peak_2": 127,
    }  # fmt: skip


def test_the_independent_side_imports_nothing_of_memlab():
    tree = ast.parse((BENCHMARKS / "independent.py").read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert "torch" in names
    assert not [name for name in names if name.split(".")[0] in ("memlab", "benchmarks")]


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_the_bare_loop_trains_as_memlab_does(accumulation_steps):
    workload = blocks()
    bare = independent.BareStep(*definition(workload), 6, accumulation_steps)
    config = StepConfig(batch_size=6, accumulation_steps=accumulation_steps)
    step = build_step(workload, config, "cpu", seed=independent.SEED)
    set_seed(0)
    for _ in range(2):
        assert bare() == pytest.approx(step(), rel=1e-6)
    pairs = zip(bare.model.parameters(), step.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.slow
def test_the_meters_agree_on_a_small_model():
    row = meter.compare(linear(), accumulation_steps=1, batch_size=16)
    assert (row["difference"], row["equal"]) == (0, True)
    assert row["independent bytes"] == row["allocator's count"]
    weight, batch = 4 * IN * OUT, 4 * 16 * IN
    assert row["memlab bytes"] > 4 * weight + batch  # weight, gradient, two moments
    assert abs(row["its error %"]) < 1


def test_rounds_are_paired_and_every_order_comes_equally_often():
    called = []
    timers = {name: lambda name=name: called.append(name) or float(len(called)) for name in "abc"}
    seconds = overhead.rounds(timers, 12)
    orders = [tuple(called[i : i + 3]) for i in range(0, len(called), 3)]
    assert {order: orders.count(order) for order in orders} == dict.fromkeys(
        itertools.permutations("abc"), 2
    )
    assert all(len(values) == 12 for values in seconds.values())


@pytest.mark.parametrize(("factor", "goal"), [(1.0, "met"), (1.2, "MISSED"), (0.8, "MISSED")])
def test_the_overhead_goal_is_judged_by_the_interval(factor, goal):
    bare = [1.0 + 0.01 * (i % 5) for i in range(30)]
    seconds = {"memlab": [factor * s for s in bare], "bare": bare, "bare again": bare}
    row = overhead.compare(seconds)
    assert (row["goal"], row["ratio"], row["A/A ratio"]) == (goal, pytest.approx(factor), 1.0)


def test_the_interval_holds_the_median_and_narrows_with_more_values():
    few, many = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0] * 40
    (low, high), (low_many, high_many) = map(report.median_interval, (few, many))
    assert low <= 3.0 <= high
    assert high_many - low_many < high - low
    assert report.median_interval(few) == (low, high)


def test_what_a_measurement_spends_beyond_its_steps_is_told_between_reports():
    texts = [
        "building m", "measuring memory, first step", "measuring memory, step with optimizer state",
        "building m again, without the meter", "warm-up 1 of 1", "timing step 1 of 2",
        "timing step 2 of 2, 1.5 s a step",
    ]  # fmt: skip
    times = [1.0, 3.0, 10.0, 20.0, 24.0, 30.0, 31.5]
    result = StepResult(
        outcome="ok", message="", source="measured", device="cpu", versions={},
        config=StepConfig(), workload_name="m", step_seconds_all=(1.5, 5.0),
    )  # fmt: skip
    reports = list(zip(times, texts, strict=True))
    spent = waiting.beyond_steps(result, 0.5, reports, 37.0, metered_step=6.0)
    # 36.5 in all, less metered steps of 7 and 6, a warm-up of 6, timed steps of 6.5
    assert list(spent.values()) == pytest.approx([0.5, 2.0, 4.0, 4.0, 0.5])


@pytest.mark.slow
def test_the_reports_that_waiting_reads_are_what_measure_says():
    spent = waiting.in_the_worker(linear(), metered_step=0.0)
    # on a busy machine reports come late, and one part is told at the cost of the next
    assert len(spent) == 5
    assert 0 < sum(spent.values()) < 60, spent


def test_timed_parts_count_each_function_without_the_others_and_leave_nothing_behind():
    collect = gc.collect
    with waiting.timed_parts() as seconds:
        result = measure(linear(), StepConfig(), "cpu", repeats=3, warmup=1, isolate=False)
    assert result.outcome == "ok", result.message
    assert gc.collect is collect
    assert {name: len(spans) for name, spans in seconds.items()} == {
        "build step": 2, "step": 2 + 1 + 3, "profile start": 1, "profile stop": 1,
        "event tree and marks": 1, "tree walk": 1, "trace from events": 1, "classification": 2,
        "gc.collect": len(seconds["gc.collect"]),
    }  # fmt: skip
    assert all(span >= 0 for spans in seconds.values() for span in spans)


@pytest.mark.parametrize(
    ("change", "goal"),
    [
        ({}, "met"),
        ({"worker MiB": 351.0}, "MISSED"),
        ({"here MiB": 149.0}, "MISSED"),
        ({"worker pid": 8}, "MISSED"),
        ({"as expected": 9}, "MISSED"),
    ],
)
def test_out_of_memory_is_judged_by_memory_worker_and_outcomes(change, goal):
    first = {"runs": 0, "as expected": 0, "worker pid": 7, "here MiB": 200.0, "worker MiB": 300.0}
    last = first | {"runs": 10, "as expected": 10, "worker MiB": 349.0}
    assert out_of_memory.judge([first, last | change])["goal"] == goal


def test_a_cycle_of_out_of_memory_is_half_accounted():
    assert len(out_of_memory.CYCLE) == 10
    assert out_of_memory.CYCLE.count("accounted limit") == 5
    assert out_of_memory.provoke("failed allocation") == "out_of_memory"


def test_a_table_aligns_numbers_to_the_right():
    rows = [{"name": "a", "bytes": 1234567, "ratio": 1.5}, {"name": "long", "bytes": 1}]
    assert report.table(rows).splitlines() == [
        "name      bytes  ratio",
        "----  ---------  -----",
        "a     1,234,567  1.500",
        "long          1      -",
    ]


def test_accuracy_covers_the_goal_in_models_and_configs():
    cases = accuracy.cases(quick=False)
    assert len(cases) >= 200
    assert len({case.workload.name for case in cases}) >= 10
    assert len({(case.workload.name, case.config) for case in cases}) == len(cases)
    configs = [case.config for case in cases]
    assert {1, 2, 3} <= {config.batch_size for config in configs}
    assert {1, 2, 3, 5} <= {config.accumulation_steps for config in configs}
    assert {"as-built", "bf16-mixed", "bf16", "fp16-mixed"} <= {str(c.precision) for c in configs}
    assert "blocks" in {str(config.checkpointing) for config in configs}


def test_numbers_are_written_with_what_they_depend_on(tmp_path, capsys):
    given = report.Options(quick=True, out=tmp_path / "new" / "numbers.json")
    report.write(given, report.environment(), {"rows": [{"a": 1}]})
    written = json.loads(given.out.read_text())
    assert written["rows"] == [{"a": 1}]
    assert written["versions"]["torch"] == torch.__version__
    assert written["quick"] is True
    assert "load average at start" in capsys.readouterr().out


def test_a_fresh_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="nothing of the kind"):
        report.fresh_python("raise ValueError('nothing of the kind')")


def accuracy_row(model, truth, predicted, peer, outcome="ok"):
    case = accuracy.Case(workload=dataclasses.replace(linear(), name=model), config=StepConfig())
    row = {"outcome": outcome, "predicted": predicted, "uncertainty %": 2.0, "at": "", "notes": ""}
    return accuracy._row(case, row, ("independent", truth), peer)


def test_errors_are_signed_relative_to_the_truth_and_none_without_one():
    assert accuracy.signed_error(99, 100) == pytest.approx(-1.0)
    assert accuracy.signed_error(None, 100) is None
    assert accuracy.signed_error(99, "it failed") is None
    assert accuracy.spread([-4.0, 1.0, 2.0]) == pytest.approx(
        {"median %": 2.0, "p95 %": 3.8, "max %": 4.0}
    )
    assert set(accuracy.spread([]).values()) == {None}


def test_accuracy_counts_what_neither_side_could_tell_and_judges_the_rest():
    rows = [
        accuracy_row("a", 1000, 1001, 900),
        accuracy_row("a", 1000, 1000, "NotImplementedError: no accumulation. Sorry"),
        accuracy_row("b", 1000, 1040, 1000),
        accuracy_row("b", "one sample", None, "fails too", outcome="failed"),
        accuracy_row("b", "one sample", 500, "fails too"),
    ]
    summary = accuracy.summarise(rows)
    assert [(r["model"], r["cases"], r["within its uncertainty"]) for r in summary] == [
        ("a", 2, 2), ("b", 1, 0), ("all", 3, 2),
    ]  # fmt: skip
    peer = accuracy.beside_peer(rows)[-1]
    assert (peer["cases"], peer["memlab max %"], peer["MemTracker max %"]) == pytest.approx(
        (2, 4.0, 10.0)
    )
    goals = accuracy.judge(rows)
    verdicts = [goals[f"{name} (goal {goal})"] for name, goal in accuracy.GOALS.items()]
    assert verdicts == ["met", "MISSED", "MISSED"]
    assert (goals["cases that cannot run"], goals["predicted all the same"]) == (2, 1)
    assert accuracy.silences(rows) == [
        {"cases": 1, "MemTracker": "NotImplementedError: no accumulation"}
    ]
    assert accuracy.worst(rows)[0]["model"] == "b"


def test_step_times_are_judged_beyond_the_a_a_error_and_may_be_unknown():
    rows = [{"error %": 8.0, "A/A %": 4.0}, {"error %": -8.0, "A/A %": -4.0}]
    assert [row["goal"] for row in accuracy.judge_times(rows)] == ["met", "met"]
    worse = [{**row, "A/A %": 1.0} for row in rows]
    assert [row["goal"] for row in accuracy.judge_times(worse)] == ["MISSED", "met"]
    unknown = [{"error %": None, "A/A %": 1.0}]
    assert {row["goal"] for row in accuracy.judge_times(unknown)} == {"not predicted"}


@pytest.mark.slow
def test_forks_agree_with_fresh_processes_and_say_what_was_raised():
    workload, config = linear(), StepConfig(batch_size=16)
    forks = peers.Forks(libraries=())
    try:
        fresh = meter.independent_peak(workload, batch_size=16)["peak_2"]
        assert peers.independent_peak(forks, workload, config) == fresh
        assert peers.tracker_peak(forks, workload, config) == pytest.approx(fresh, rel=1e-3)
        split = StepConfig(batch_size=16, accumulation_steps=2)
        assert "NotImplementedError" in peers.tracker_peak(forks, workload, split)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            forks(lambda: {"never": 1 // 0})
        assert forks(lambda: {"still": 1}) == {"still": 1}
    finally:
        forks.close()


@pytest.mark.slow
def test_a_case_of_each_truth_is_compared():
    rows = accuracy.compare(
        [
            accuracy.Case(workload=linear(), config=StepConfig(batch_size=16)),
            accuracy.Case(workload=linear(), config=StepConfig(batch_size=16, optimizer="sgd")),
        ],
        libraries=(),
    )
    assert [row["truth by"] for row in rows] == ["independent", "measure"]
    assert all(abs(row["error %"]) < 0.1 for row in rows)
    assert all(abs(row["its error %"]) < 1 for row in rows)


def test_latency_pairs_first_predictions_and_judges_the_median_ratio():
    rounds = [
        {"memlab, cpu": [0.3, 0.1], "MemTracker": [1.0, 1.0]},
        {"memlab, cpu": [0.6, 0.1], "MemTracker": [2.0, 2.0]},
        {"memlab, cpu": [2.0, 0.1], "MemTracker": [1.0, 1.0]},
    ]
    row = latency._cold_row("memlab, cpu", rounds)
    assert (row["first over MemTracker's"], row["goal"]) == (pytest.approx(0.3), "met")
    assert latency._slider_row("x", [0.001] * 9 + [1.0], 5.0)["goal"] == "MISSED"


def test_a_hand_moves_sliders_to_settings_that_the_panel_allows():
    path = list(itertools.islice(slider_moves.hand(seed=1), 200))
    assert {slider for slider, _ in path} == set(slider_moves.SLIDERS)
    before = StepConfig(batch_size=16)
    for slider, config in path:
        moved = {f.name for f in dataclasses.fields(config)
                 if getattr(config, f.name) != getattr(before, f.name)}  # fmt: skip
        assert moved == {slider}
        before = config


def test_a_slider_meets_its_goal_only_if_its_first_answers_are_soon_and_close():
    def line(seconds, peaks):
        found = [
            slider_moves.Move(
                slider="batch_size", held=0.01, seconds=seconds, how="estimate",
                first=_with_peak(peak), exact=_with_peak(1000),
            )
            for peak in peaks
        ]  # fmt: skip
        return slider_moves.row("cpu", "batch_size", found)

    assert line(0.05, [1000] * 19 + [1100])["goal"] == "met"
    assert line(0.05, [1000] * 18 + [1100] * 2)["goal"] == "MISSED"
    assert line(0.2, [1000] * 20)["goal"] == "MISSED"
    assert line(0.05, [960])["largest error %"] == pytest.approx(4.0)


def _with_peak(nbytes):
    return StepResult(
        outcome="ok",
        message="a sentence",
        source="predicted",
        device="cpu",
        config=StepConfig(),
        workload_name="tiny",
        peak_allocated_bytes=nbytes,
    )


@pytest.mark.slow
def test_both_sides_of_latency_run_in_a_fresh_process():
    code = """
from benchmarks import latency
for function, device in latency.SIDES.values():
    function(latency.tiny(), device)
"""
    assert report.fresh_python(code).returncode == 0


def test_the_worker_tells_its_memory():
    result = latency.memlab.predict(latency.tiny(), StepConfig(), "h200")
    assert result.outcome == "ok", result.message
    assert latency.worker_bytes() is None or latency.worker_bytes() > 2**20


def test_the_peers_of_recommend_find_their_batch_by_running_out_of_memory(monkeypatch):
    def measured(workload, config, *rest, **options):
        outcome = Outcome.OUT_OF_MEMORY if config.batch_size > 10 else Outcome.OK
        return SimpleNamespace(outcome=outcome)

    monkeypatch.setattr(recommend_peers.memlab, "measure", measured)
    doubling, falling = (recommend_peers.Trials(linear(), 1, 32) for _ in range(2))
    assert recommend_peers.by_lightning(doubling).accumulation_steps == 4  # 8 of 32 at a time
    assert (doubling.count, doubling.num_out_of_memory) == (4, 1)  # 2, 4, 8, 16
    assert recommend_peers.by_accelerate(falling).micro_batch_size <= 9
    assert (falling.count, falling.num_out_of_memory) == (10, 9)  # 32, 28, 25, ... each 0.9 of it


def test_a_step_with_more_savers_is_told_from_another_one():
    fast, saver, other = {"precision": "bf16-mixed"}, {"inplace": True}, {"loss_chunks": 16}
    assert recommend.is_more((fast, saver, other), (fast, saver, None), 1)
    assert not recommend.is_more((fast, saver, None), (fast, saver, other), 1)
    assert not recommend.is_more((None, saver, other), (fast, saver, None), 1)


# `benchmarks/recompute.py` and its checks


def point(rule, peak, time):
    return Point(rule=rule, setting=str(peak), peak_bytes=peak, time=time, predicted_bytes=peak)


def test_the_area_is_below_the_steps_of_the_points():
    points = [point(OURS, 50, 1.5), point(OURS, 100, 1.0), point(OURS, 80, 1.6)]
    # at 1 until half of the way, then at a half; what is slower and higher changes nothing
    assert area(points, 100, 2.0) == pytest.approx(0.5 * 1.0 + 0.5 * 0.5)
    assert area([point(OURS, 60, 0.9)], 100, 2.0) == pytest.approx(0.6)  # faster than plain


def test_a_peer_dominates_where_both_are_better_by_more_than_the_margin():
    ours = [point(OURS, 100, 1.0)]
    assert dominating(ours, [point(BY_HAND, 97, 0.97)])
    assert not dominating(ours, [point(BY_HAND, 50, 0.99), point(BY_HAND, 99, 0.5)])


def test_a_model_is_judged_by_area_and_dominance():
    ours = [point(OURS, 100, 1.0), point(OURS, 40, 1.2)]
    peers = [point(BY_HAND, 60, 1.3)]
    row = judge("m", [*ours, *peers])
    assert (row["area goal"], row["dominance goal"], row["least, budget"]) == ("met", "met", 0.4)
    row = judge("m", [ours[0], point(OURS, 95, 1.3), point(BY_HAND, 60, 1.2)])
    assert (row["area goal"], row["dominance goal"], row["dominated"]) == ("MISSED", "MISSED", 1)


def test_combinations_are_random_and_the_same_for_a_seed_and_cover_what_is_claimed():
    pairs = recompute_checks.combinations(500, False)
    assert pairs == recompute_checks.combinations(500, False)
    assert pairs[:50] != recompute_checks.combinations(50, False, seed=1)
    configs = [config for _, config in pairs]
    assert {name.endswith("+") for name, _ in pairs} == {True, False}  # with dropout, without
    assert set(PRESET_POLICIES) <= {config.checkpoint_policy for config in configs}
    assert {0.0, 1.0} < {config.memory_budget for config in configs}
    assert {config.accumulation_steps for config in configs} == {1, 2}
    assert {str(config.precision) for config in configs} == {"as-built", "bf16-mixed"}


def test_checks_are_counted_by_precision_and_verdict():
    plain = StepConfig(batch_size=2)
    every = dataclasses.replace(plain, checkpointing="blocks", checkpoint_modules="Linear")
    rows = recompute_checks.verified([("tied", plain), ("tied", every), ("tied", every)])
    assert {row["verdict"]: row["combinations"] for row in rows} == {
        "within tolerance": 1, "same bits as without recomputing": 2,
    }  # fmt: skip


@pytest.mark.slow
def test_saved_bytes_of_a_linear_are_its_loss_alone():
    """Its input is the batch; of the squares autograd keeps what they were made of."""
    on_cpu, on_card = (
        recompute.saved_bytes(predict(linear(), StepConfig(batch_size=8), device))
        for device in ("cpu", "h200")
    )
    assert 0 < on_cpu <= on_card


def test_a_step_timed_against_itself_takes_its_own_time():
    ways = [recompute.Way(OURS, "1", StepConfig(batch_size=4)) for _ in range(2)]
    shares = recompute.times_in_turns(linear(), ways, 3)
    assert shares[0] == 1.0
    assert shares[1] > 0


def test_a_chain_is_solved_and_picked_from():
    row = recompute.solving(2)
    assert row["plans"] > 1
    assert row["chain s"] > 0


# killed processes: what is taken for gone, and what a model is made to do


def test_a_process_is_gone_once_it_has_ended_whether_it_was_counted_or_not(monkeypatch):
    monkeypatch.setattr(attacks, "WAIT_SECONDS", 0.1)
    with subprocess.Popen(attacks.SLEEP) as process:
        assert attacks.is_there(process.pid)
        assert attacks.seconds_until_gone([process.pid]) is None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert attacks.seconds_until_gone([process.pid]) is not None
    assert not attacks.is_there(process.pid)


@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded, says Python 3.12 of a fork
def test_every_kind_of_process_that_is_left_notes_itself(monkeypatch, tmp_path):
    monkeypatch.setenv(attacks.FOLDER, str(tmp_path))
    try:
        for name, leave in attacks.LEAVERS.items():
            if name != "fork":  # this process has threads
                leave()
        while len(found := attacks.noted(tmp_path)) < attacks.NUM_LEFT - 1:
            time.sleep(0.01)
        assert all(map(attacks.is_there, found))
    finally:
        attacks.held.clear()  # ends the loader's workers
        for pid in attacks.noted(tmp_path):
            if attacks.is_there(pid):
                os.kill(pid, 9)


def test_the_pace_of_a_host_is_the_slope_over_operators():
    names = dict(zip(host_pace.OF_ONE_PACE, (100, 200, 300, 400, 500), strict=True))
    lines = [
        {"card": "t4", "format": "fp32", "model": name, "ms": 3 + 0.05 * n, "0.0": 1.0,
         "zeroing ms": 1.0, "operators": n}
        for name, n in names.items()
    ]  # fmt: skip
    lines.append({**lines[0], "model": "vgg11", "ms": 1000.0})
    busy = [{**line, "card": "l4", "0.0": 0.6 * line["ms"]} for line in lines]  # by its kernels
    assert host_pace.paces(lines + busy) == {"t4 fp32": pytest.approx(50)}


def test_watts_and_slower_steps_are_judged():
    """A card that only multiplies: 0.9 of the board predicted, 0.8 drawn, so 12.5 % too much."""
    one = power.Epochs(
        card="a40", network="mine", batch_size=1, mix=np.array([1.0, 0, 0, 0]),
        limits=np.array([0.5, 1.0]), slower=np.array([1.2, 1.0]), drawn=np.array([0.5, 0.8]),
    )  # fmt: skip
    assert power.fitted([one])[0] == pytest.approx(0.8)
    assert power.errors_of_power([(one, np.array([0.9, 0, 0, 0]))]) == pytest.approx([0.125])
    (limited,) = power.under_limits([(one, np.array([0.8, 0, 0, 0]))])
    assert limited.drawn == (0.5, 0.5)
    assert limited.slower == (1.2, pytest.approx(slowdown(0.5, 0.8)))
