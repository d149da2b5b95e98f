"""The suite that records a card, on a CPU: what it wants, writes, goes on from and puts up with."""

import argparse
import copy
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu_suite import __main__ as suite
from benchmarks.gpu_suite import bench, card, cases, tasks, visit
from memlab import Outcome, StepConfig
from memlab._util.units import GIB
from memlab.cli import device_visit
from memlab.devices.cards import resolve
from memlab.devices.operators import signature_of
from memlab.errors import WorkloadError
from memlab.store.recorded import read_record
from memlab.store.records import Kind, read_lines
from memlab.workloads.language import Gpt
from tests import ROOT
from tests.suite_parts import TINY, tiny

TORCH = torch.__version__


def visited(monkeypatch, folder, wanted, minutes=10.0):
    """Run the suite over these cases and return its status."""
    monkeypatch.setenv("MEMLAB_CACHE", str(folder / "unused"))  # which the suite replaces
    monkeypatch.setattr(cases, "small", lambda: wanted)
    monkeypatch.setattr(suite, "BEGUN", time.monotonic())
    monkeypatch.setitem(device_visit.REPEATS, "cpu", 1)
    return suite.main(
        ["--out", str(folder), "--device", "cpu", "--small", "--minutes", str(minutes)]
    )


def only(folder):
    (path,) = folder.glob("*.jsonl")
    return path


def outcomes(folder):
    runs = read_lines(only(folder)).of(Kind.RUN)
    return [run["result"]["outcome"] for run in runs]


@pytest.mark.parametrize("monai", [True, False])
def test_a_card_gets_hundreds_of_eager_configs_and_a_dozen_compiled_ones(monkeypatch, monai):
    monkeypatch.setattr(cases, "is_here", lambda name: monai or not name.startswith(cases.MONAI))
    found = cases.on_card()
    runs = {case.key(TORCH): case for case in found if case.kind is Kind.RUN}
    groups = Counter(case.group for case in runs.values())
    assert groups["compile"] <= 12
    eager = [case for case in runs.values() if case.group not in ("compile", "again")]
    assert len(eager) >= 200
    assert groups["again"] == cases.NUM_AGAIN
    first = {case.key(TORCH) for case in eager}
    again = [case for case in runs.values() if case.group == "again"]
    assert {case.key(TORCH).replace("|again|", "||") for case in again} <= first
    models = {case.workload for case in eager}
    assert {"gpt2-medium", "llama-1b", "vit-large", "resnet-50", "lstm-large"} <= models
    assert ({"vnet", "densenet-121"} <= models) == monai
    assert {case.kind for case in found} == set(Kind) - {Kind.VISIT}
    fields = {name for case in eager for name in str(case.config).split(", ")}
    assert {"offload_activations=True", "optimizer=adafactor", "memory_budget=0.5"} <= fields
    assert {"vit-large", "lstm-large"} <= {c.workload for c in eager if c.holdout} < models


def test_what_is_worth_most_comes_first():
    found = cases.on_card()
    models = {case.workload for case in found}
    early = found[: len(found) // 3]
    assert {case.workload for case in early if case.kind is Kind.RUN} == models
    assert all(case.group == "compile" for case in found[-9:])


@pytest.mark.slow
def test_a_visit_that_is_killed_loses_the_run_in_flight_alone(tmp_path):
    code = """
import sys
from benchmarks.gpu_suite import __main__ as suite, cases
from tests.suite_parts import tiny
cases.small = lambda: [tiny(batch_size=n) for n in (2, 3, 4)]
sys.exit(suite.main(["--out", sys.argv[1], "--device", "cpu", "--small", "--minutes", "2"]))
"""
    command = [sys.executable, "-u", "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert "batch_size=2: ok" in process.stdout.readline()
        process.kill()
    assert outcomes(tmp_path) == ["ok"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "batch_size=2" not in done.stdout
    assert "batch_size=4: ok" in done.stdout
    assert outcomes(tmp_path) == ["ok"] * 3
    record = read_record(only(tmp_path))
    assert [run.result.config.batch_size for run in record.runs] == [2, 3, 4]
    *_, last = record.lines.of(Kind.VISIT)
    assert last["summary"]["runs"] == 2
    assert last["summary"]["configs a minute"] > 0


@pytest.mark.slow
def test_a_damaged_record_is_said_and_taken_up_from_where_it_is_good(monkeypatch, tmp_path, capsys):
    wanted = [tiny(batch_size=2), tiny(batch_size=3)]
    assert visited(monkeypatch, tmp_path, wanted) == 0
    path = only(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:100])
    capsys.readouterr()
    assert visited(monkeypatch, tmp_path, wanted) == 0
    said = capsys.readouterr().out
    assert "line 3 is damaged or cut short. Only the 2 lines before it are used" in said
    assert "all lines good" in said
    runs = read_lines(path).of(Kind.RUN)
    assert [run["result"]["config"]["batch_size"] for run in runs] == [2, 3]
    assert path.with_suffix(".damaged").read_bytes() == lines[2][:100]


@pytest.mark.slow
def test_what_fails_is_recorded_and_the_next_case_follows(monkeypatch, tmp_path, capsys):
    measure, arguments_of = device_visit.Bench.measure, bench.SuiteBench.arguments_of

    def limited(self, case, *arguments, **more):
        limit = {"memory_limit": 1000} if case.config.batch_size == 3 else {}
        return measure(self, case, *arguments, **(more | limit))

    def missing(self, case):
        if case.config.batch_size == 4:
            raise WorkloadError("this workload needs transformers, which is not installed")
        return arguments_of(self, case)

    monkeypatch.setattr(device_visit.Bench, "measure", limited)
    monkeypatch.setattr(bench.SuiteBench, "arguments_of", missing)
    wanted = [tiny(batch_size=3), tiny(expandable_segments=True), tiny(batch_size=4)]
    assert visited(monkeypatch, tmp_path, [*wanted, tiny(Kind.VERIFY, batch_size=4), tiny()]) == 0
    assert outcomes(tmp_path) == ["out_of_memory", "unsupported", "failed", "ok"]
    record = read_record(only(tmp_path))
    said = [run.result.message for run in record.runs]
    for words, message in zip(
        ("limit is 1000 B", "no caching allocator", "transformers"), said, strict=False
    ):
        assert words in message
    (verified,) = record.lines.of(Kind.VERIFY)
    assert (verified["outcome"], "transformers" in verified["message"]) == ("failed", True)
    assert record.runs[-1].result.timeline is not None
    assert record.runs[-1].before_reading == device_visit.BEFORE_READING["cpu"]
    assert "2 lines" not in capsys.readouterr().err


def test_operators_that_are_never_prepared_end_with_their_time():
    never = bench.SuiteBench(device=device_visit.CPU, target=resolve("cpu"))
    never.asked[bench.need(tiny(Kind.OPERATORS))] = Future()
    line = tasks.carry_out(never, tiny(Kind.OPERATORS), "v", 0.01)
    assert line["outcome"] == "timed_out"


@pytest.mark.slow
def test_the_other_kinds_of_lines_are_written(monkeypatch, tmp_path):
    monkeypatch.setattr(tasks, "NUM_ROUNDS", 2)
    grown = cases.Case(
        kind=Kind.BOUNDARY, group="", workload="gpt-small", options=TINY,
        config=StepConfig(batch_size=2), setting="512KiB",
    )  # fmt: skip
    wanted = [tiny(Kind.OPERATORS), tiny(Kind.VERIFY), grown, tiny(Kind.ALLOCATOR)]
    assert visited(monkeypatch, tmp_path, wanted) == 0
    lines = read_lines(only(tmp_path))
    (operators,), (verified,) = lines.of(Kind.OPERATORS), lines.of(Kind.VERIFY)
    assert operators["num_operators"] > 20
    assert operators["share_of_step"] == pytest.approx(1.0)
    assert set(operators["overheads"]) == {"forward", "backward", "optimizer"}
    assert verified["report"]["ok"]
    (boundary,), (allocator,) = lines.of(Kind.BOUNDARY), lines.of(Kind.ALLOCATOR)
    assert boundary["recovered"]
    first, second = boundary["rounds"]
    assert boundary["largest_ok"] == [second[0][0]] * 2
    assert [outcome for _, outcome in second] == ["ok", "out_of_memory"]
    assert all(tried in first for tried in second)
    assert allocator["outcome"] == "ok"


@pytest.mark.slow
def test_a_visit_ends_within_its_minutes_and_starts_nothing_that_does_not_fit(
    monkeypatch, tmp_path
):
    assert visited(monkeypatch, tmp_path, [tiny()], minutes=0.1) == 0
    lines = read_lines(only(tmp_path))
    assert [line["kind"] for line in lines.content] == ["visit", "visit"]
    assert lines.content[-1]["summary"]["seconds"] < 6


@pytest.mark.slow
def test_the_way_of_a_card_with_a_cpu_in_its_place(monkeypatch, tmp_path):
    """Measured in this process, models built once, operators asked for ahead and timed here."""
    built = []
    build = Gpt.build
    monkeypatch.setattr(Gpt, "build", lambda spec: built.append(spec) or build(spec))
    monkeypatch.setattr(device_visit.Bench, "is_card", property(lambda self: True))
    monkeypatch.setattr(bench, "alike", copy.deepcopy)  # on a CPU memory must not be shared
    monkeypatch.setattr(device_visit, "used_bytes", lambda device: 3 * GIB)
    here = bench.SuiteBench(device=device_visit.CPU, target=resolve("t4"), at_start_bytes=GIB)
    monkeypatch.setattr(device_visit, "bench_of", lambda device, kind: here)
    half = {"memory_budget": 0.5}
    wanted = [tiny(), tiny(batch_size=3), tiny(Kind.OPERATORS), tiny(Kind.VERIFY, **half)]
    assert visited(monkeypatch, tmp_path, [*wanted, tiny(**half)]) == 0
    record = read_record(only(tmp_path))
    assert [run.result.outcome for run in record.runs] == ["ok"] * 3
    assert [run.process_bytes for run in record.runs] == [2 * GIB] * 3
    assert [run.plan is None for run in record.runs] == [True, True, False]
    assert len(built) == 1
    (operators,), (verified,) = (record.lines.of(kind) for kind in (Kind.OPERATORS, Kind.VERIFY))
    assert verified["report"]["ok"]
    assert operators["num_operators"] > 20
    assert operators["share_of_step"] > 0.9
    assert not operators["overheads"]


@pytest.mark.slow
def test_a_run_that_does_not_end_ends_with_the_minutes(tmp_path):
    code = """
import sys, time
from benchmarks.gpu_suite import __main__ as suite, cases, tasks, visit
from tests.suite_parts import tiny
cases.small = lambda: [tiny()]
visit.FIRST_SECONDS = {"cpu": 0.0}
tasks.carry_out = lambda *arguments: time.sleep(100)
suite.BEGUN, suite.LAST_SECONDS, suite.BELL_SECONDS = time.monotonic(), 0.0, 0.0
sys.exit(suite.main(["--out", sys.argv[1], "--device", "cpu", "--small", "--minutes", "0.12"]))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "the run in flight is lost" in done.stdout
    assert "all lines good" in done.stdout
    assert "summary" in read_lines(only(tmp_path)).content[-1]


@pytest.mark.slow
def test_what_cannot_be_prepared_is_recorded_and_the_next_case_follows(monkeypatch, tmp_path):
    def missing(self, case):
        if case.config.batch_size == 3:
            raise WorkloadError("this workload needs transformers, which is not installed")
        return plain(self, case)

    plain = bench.SuiteBench.arguments_of
    monkeypatch.setattr(bench.SuiteBench, "arguments_of", missing)
    wanted = [tiny(batch_size=3), tiny(Kind.VERIFY, batch_size=3), tiny()]
    assert visited(monkeypatch, tmp_path, wanted) == 0
    assert outcomes(tmp_path) == ["failed", "ok"]
    lines = read_lines(only(tmp_path))
    assert "transformers" in lines.of(Kind.RUN)[0]["result"]["message"]
    (verified,) = lines.of(Kind.VERIFY)
    assert (verified["outcome"], "transformers" in verified["message"]) == ("failed", True)
    never = bench.SuiteBench(device=device_visit.CPU, target=resolve("cpu"))
    never.asked[bench.need(tiny(Kind.OPERATORS))] = Future()
    line = tasks.carry_out(never, tiny(Kind.OPERATORS), "v", 0.01)
    assert line["outcome"] == "timed_out"


def test_the_next_case_is_told_from_those_before(tmp_path):
    facts = {"device": "x", "type": "cuda"}
    this = visit.begin(tmp_path, facts, 8, time.monotonic())
    case = tiny(batch_size=4)
    assert this.estimate(case) == visit.FIRST_SECONDS["cuda"]
    this.note(case, {"outcome": "ok"}, 2.0)
    assert this.estimate(tiny(batch_size=8)) == 4.0
    assert this.estimate(tiny(batch_size=1)) == 2.0
    assert this.is_done(case)
    assert this.estimate(tiny(compile=True)) == visit.COMPILE_SECONDS
    late = tiny(batch_size=5)
    assert not this.note(late, {"outcome": "timed_out"}, 1.0)
    assert not this.is_done(late)


def test_without_a_card_there_is_a_sentence_and_status_two(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert suite.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "no CUDA card" in said
    assert "--device cpu --small" in said
    assert list(tmp_path.iterdir()) == []


def test_a_card_that_others_use_is_refused(monkeypatch, tmp_path, capsys):
    library = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=30 * GIB),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device_visit, "nvml", lambda: library)
    assert suite.main(["--out", str(tmp_path)]) == 2
    assert "in use by others, who hold 30.0 GiB; allowed is 1.00 GiB" in capsys.readouterr().err
    library.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=GIB // 2)
    assert card.refusal("cuda") == ""


def test_the_cases_of_a_card_are_not_run_on_a_cpu(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        suite.main(["--out", str(tmp_path), "--device", "cpu"])
    assert ended.value.code == 2
    assert "--small" in capsys.readouterr().err


def test_a_broken_card_is_left_to_a_new_process(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(suite.os, "execv", lambda path, arguments: called.append(arguments))
    given = argparse.Namespace(out=tmp_path, device="cuda", small=False)
    suite._start_again(given, 90.0)
    (arguments,) = called
    assert arguments[1:3] == ["-m", "benchmarks.gpu_suite"]
    assert arguments[arguments.index("--minutes") + 1] == "1.500"


def test_a_model_that_was_built_once_gives_new_ones_over_the_same_memory():
    model = Gpt(**TINY).build()  # its embedding and its head are one parameter
    copy = bench.alike(model)
    assert copy is not model
    pairs = list(zip(model.named_parameters(), copy.named_parameters(), strict=True))
    assert all(a[0] == b[0] and a[1] is not b[1] for a, b in pairs)
    assert all(a[1].data_ptr() == b[1].data_ptr() for a, b in pairs)
    copy.to("meta")
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_batch_is_raised_until_it_fails_and_the_edge_is_found():
    def run(batch_size):
        return SimpleNamespace(outcome=Outcome.OK if batch_size <= 37 else Outcome.OUT_OF_MEMORY)

    tried = list(tasks._raised(run, 8))
    assert tried[:4] == [(8, "ok"), (16, "ok"), (32, "ok"), (64, "out_of_memory")]
    assert max(b for b, o in tried if o == "ok") >= 37 - 4
    nothing = SimpleNamespace(outcome=Outcome.UNSUPPORTED)
    assert list(tasks._raised(lambda batch_size: nothing, 8)) == [(8, "unsupported")]


def test_operators_are_timed_alone_and_the_first_ones_first():
    x = torch.ones(64, 64)
    product = signature_of(torch.ops.aten.mm.default, (x, x), {})
    rnn = ("aten._cudnn_rnn.default", (), ())
    unknown = ("nowhere.nothing.default", (), ())
    costs, reasons = device_visit.time_operators([rnn, product, unknown], device_visit.CPU, 5.0)
    assert costs.keys() == {product}
    assert 0 < costs[product].seconds < 0.1
    assert reasons.keys() == {rnn, unknown}
    assert device_visit.time_operators([product], device_visit.CPU, -1.0) == ({}, {})


def test_second_readings_are_compared_with_first_ones():
    def run(group, size, allocated, reserved, seconds):
        facts = {"outcome": "ok", "peak_allocated_bytes": allocated}
        facts |= {"peak_reserved_bytes": reserved, "step_seconds": seconds}
        again = "again" if group == "again" else ""
        return {"key": f"run|{again}|gpt||{size}", "group": group, "result": facts}

    runs = [
        run("grid", 1, 100, 2**30, 1.0),
        run("grid", 2, 100, None, 1.0),
        run("again", 1, 100, 2**30 + 21 * 2**20, 1.02),
        run("again", 2, 101, None, 1.5),
        run("again", 3, 1, None, 1.0),
    ]
    found = visit.repeatability(runs)
    assert (found["again"], found["again, allocated the same"]) == (2, 1)
    assert found["again, reserved within a segment"] == 1
    assert found["again, time within 3 %"] == 1
    assert found["again, time, median"] == pytest.approx(0.26)


def test_the_table_says_how_lines_ended():
    lines = [
        {"kind": "visit"},
        {"kind": "run", "group": "grid", "result": {"outcome": "out_of_memory"}},
        {"kind": "run", "group": "grid", "result": {"outcome": "ok"}},
        {"kind": "verify", "report": {"outcome": "failed"}},
    ]
    grid, verified = visit.table(lines)
    assert (grid["of"], grid["lines"], grid["ok"], grid["out of memory"]) == ("grid", 2, 1, 1)
    assert (verified["of"], verified["other"]) == ("verify", 1)
