"""What doctor says: of devices by wrong names, of full disks, of errors, of techniques."""

import errno
import io
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import memlab
from memlab import StepConfig
from memlab.__main__ import main
from memlab._util.units import GIB, MIB
from memlab.cli import device_visit, doctor, verdict
from memlab.cli.device_visit import CPU, Bench, Case
from memlab.cli.doctor import DoctorVisit, RecordKeeper
from memlab.cli.verdict import SettingPair
from memlab.devices.cards import card
from memlab.errors import ConfigError, DeviceError
from memlab.store import recorded
from memlab.store.records import Kind, append, read_lines
from memlab.techniques.compilation import is_compiled
from tests import ROOT
from tests.record_parts import VISIT, result, run

FACTS = {"device": "t4", "title": "Tesla T4", "type": "cuda"}


def test_without_arguments_there_is_a_short_help(capsys):
    assert main([]) == 0
    assert "doctor" in capsys.readouterr().out
    assert main(["docter"]) == 2
    assert "No such command 'docter'" in capsys.readouterr().err


def test_it_needs_torch_numpy_and_cloudpickle_alone():
    code = """
import sys
for name in ("IPython", "click", "ipywidgets", "matplotlib", "pandas", "seaborn", "sklearn",
             "transformers"):
    sys.modules[name] = None
import contextlib, io
from memlab.__main__ import main
from memlab.cli import doctor
import torch
with contextlib.redirect_stderr(io.StringIO()):
    assert main(["doctor", "--device", "none"]) == 2
assert doctor.main and doctor.about_machine() and doctor.settings_for("cuda")
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("options", [["--minutes", "0"], ["--minutes", "nan"], ["--fast"]])
def test_a_wrong_option_is_said_with_status_two(options, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *options])
    assert ended.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_a_card_by_a_wrong_name_is_answered_with_the_nearest_ones(capsys):
    assert main(["doctor", "--device", "rtx-4091"]) == 2
    said = capsys.readouterr().err
    assert "device='rtx-4091' is not in this machine; allowed here is 'cpu'" in said
    assert "The nearest cards that memlab knows: 'rtx-4090'" in said


def test_a_card_that_is_elsewhere_is_left_to_predictions():
    with pytest.raises(DeviceError, match=r"allowed here is 'cpu'.*predict\(.*'h200'\) needs no"):
        doctor.device_here("NVIDIA H200")
    assert doctor.device_here("cpu") == CPU


def test_a_machine_without_a_card_says_why():
    *_, last = doctor.about_machine()
    assert last.startswith("card: none (")
    assert "Everything below is about the processor" in last


@pytest.fixture
def occupied(monkeypatch):
    """Return a function that sets how much of a card is free, and returns the card."""

    def set_free(free):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 24 * GIB))
        return torch.device("cuda", 0)

    return set_free


def test_half_of_what_is_free_on_a_card_is_left_to_others(occupied):
    assert doctor.room_on(occupied(20 * GIB)) == doctor.MOST_BYTES
    assert doctor.room_on(occupied(2 * GIB)) == GIB
    with pytest.raises(DeviceError, match="cuda:0 has only 300 MiB free"):
        doctor.room_on(occupied(300 * MIB))


def test_a_driver_that_does_not_answer_is_a_sentence(monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA.")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    with pytest.raises(DeviceError, match=r"cuda:0 does not answer \(CUDA error: out of memory\)$"):
        doctor.room_on(torch.device("cuda", 0))


def test_a_record_is_added_to_where_it_is_of_the_same_device(tmp_path):
    path = tmp_path / "new" / "mine.jsonl"
    for _ in range(2):
        RecordKeeper(path).begin(FACTS)
    lines = read_lines(path)
    assert [line["device"] for line in lines.of(Kind.VISIT)] == ["t4", "t4"]
    assert lines.damage == ""


REFUSED = {
    "another device": (lambda path: append(path, Kind.VISIT, {**VISIT, "device": "h200"}),
                       "is a record of 'h200', and this is 't4'"),
    "another schema": (lambda path: path.write_text('{"schema":99,"kind":"visit"}\n'), "schema=99"),
    "no record": (lambda path: path.write_text("my thesis\n"), "is not a record"),
    "a folder": (lambda path: path.mkdir(), "is a folder"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_is_something_else_is_refused_and_left_as_it_is(tmp_path, kind):
    path = tmp_path / "mine.jsonl"
    make, said = REFUSED[kind]
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ConfigError, match=f"--out .*{said}"):
        RecordKeeper(path).begin(FACTS)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_half_a_record_is_taken_up_where_it_is_good(tmp_path):
    path = tmp_path / "mine.jsonl"
    append(path, Kind.VISIT, VISIT)
    append(path, Kind.RUN, run().to_line())
    half = path.read_bytes()[:-20]
    path.write_bytes(half)
    RecordKeeper(path).begin(FACTS)
    lines = read_lines(path)
    assert [line["kind"] for line in lines.content] == ["visit", "visit"]
    assert (lines.damage, path.with_suffix(".damaged").exists()) == ("", True)


@pytest.mark.parametrize("path", ["mine.json", "here", "file/mine.jsonl"])
def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path, path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--device", "cpu", "--out", str(tmp_path / path)]) == 2
    assert f"--out {tmp_path / path}" in capsys.readouterr().err


def test_too_little_disk_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 * MIB))
    with pytest.raises(ConfigError, match=r"the disk has 3.00 MiB free; allowed is at least 16"):
        RecordKeeper(tmp_path / "mine.jsonl").begin(FACTS)


def test_a_disk_that_fills_up_ends_the_record_at_its_last_whole_line(monkeypatch, tmp_path):
    path = tmp_path / "mine.jsonl"
    keeper = RecordKeeper(path)
    keeper.begin(FACTS)

    def full(path, kind, line):
        with path.open("a") as file:
            file.write('{"schema":1,"kind":"ru')
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(doctor, "append", full)
    for _ in range(2):
        keeper.add(Kind.RUN, run().to_line())
    assert "cannot be written (No space left on device)" in keeper.said
    assert [line["kind"] for line in read_lines(path).content] == ["visit"]
    assert read_lines(path).damage == ""
    assert [kind for kind, _ in keeper.lines] == ["visit", "run", "run"]  # for the verdict
    (said,) = doctor._about_record(keeper, tmp_path, is_card=True)
    assert "holds what was measured until then" in said


def pair(told=100, true=100, *, width=0.05, seconds=(1.0, 1.0), group="grid", batch=1, **facts):
    case = Case(workload="plain-mlp", config=StepConfig(batch_size=batch), group=group)
    unsure = {"peak_allocated_bytes": width, "step_seconds": width}
    predicted = result(peak_allocated_bytes=told, step_seconds=seconds[0], uncertainty=unsure)
    measured = result(peak_allocated_bytes=true, step_seconds=seconds[1], **facts)
    return SettingPair(case=case, predicted=predicted, measured=measured)


def test_errors_and_coverage_are_counted_over_what_was_compared():
    pairs = [pair(100, 100), pair(104, 100), pair(80, 100), pair(1, 9, group="again"),
             pair(1, 9, outcome="out_of_memory")]  # fmt: skip
    found = verdict.score(pairs, "allocated")
    assert found.errors == pytest.approx((0.0, 0.04, -0.2))
    assert (found.median, found.held) == (pytest.approx(0.04), 2)
    assert verdict.score(pairs, "reserved") is None
    assert verdict.score(pairs[3:], "allocated") is None


def words_of(pairs, **more):
    scores = [found for what in verdict.FIELDS if (found := verdict.score(pairs, what))]
    return " ".join(verdict.words(scores, pairs, **({"is_card": False} | more)))


def test_the_verdict_says_what_to_do():
    good = words_of([pair()] * 10)
    assert "in the settings that were tried" in good
    assert "Time: predictions are good here" in good
    bad = words_of([pair(80, 100, seconds=(1.0, 4.0), batch=n) for n in range(1, 5)])
    assert "Measure before you rely on them, and please send the record" in bad
    assert "uncertainty of allocated holds in 0 of 4 settings; it should in 90%" in bad
    assert "Furthest off: plain-mlp, batch_size=4: allocated -20.0 %" in bad
    assert "no more than an order of settings" in bad
    rough = words_of([pair(seconds=(1.2, 1.0))] * 4)
    assert "which setting is faster" in rough
    assert "no datasheet of this card" in words_of([pair(seconds=(None, 1.0))], is_card=True)
    assert "nothing can be said" in words_of([])


def test_times_of_a_busy_machine_are_not_judged():
    twice = [pair(seconds=(1.0, 2.0)), pair(seconds=(1.0, 3.0), group="again")]
    assert "two readings differ by 50 %" in words_of(twice)
    busy = words_of([pair(seconds=(1.0, 3.0), others_share=0.6)])
    assert "other programs used 60 % of the processors" in busy
    assert "uncertainty of time" not in busy
    assert "uncertainty of time" in words_of([pair(seconds=(1.0, 3.0), others_share=0.0)])


def test_a_table_marks_what_lies_beyond_the_stated_uncertainty():
    rows = verdict.settings_table([pair(104, 100), pair(80, 100)])
    assert "+4.00 %" in rows[1]
    assert "-20.0 % !" in rows[2]
    assert "!" not in rows[1]
    assert "reserved" not in rows[0]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_about_forty_settings_of_models_that_need_torch_alone(monkeypatch, kind):
    monkeypatch.setattr(doctor, "has_transformers", lambda: False)
    found = doctor.settings_for(kind)
    assert 38 <= len(found) <= 44
    assert {case.workload for case in found[:4]} == set(doctor.data()["models"][kind])
    assert not any(is_compiled(case.config) for case in found)
    keys = [case.key("") for case in found]
    assert len(set(keys)) == len(keys)
    first = {key.replace("|again|", "||") for key in keys if "|again|" in key}
    assert len(first) == 4
    assert first < set(keys)
    monkeypatch.setattr(doctor, "has_transformers", lambda: True)
    assert {case.workload for case in doctor.settings_for(kind)} - {
        case.workload for case in found
    } == {"gpt-small"}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_models_of_the_settings_train_without_any_other_package(monkeypatch, kind):
    for name in ("transformers", "sklearn", "ipywidgets", "matplotlib", "pandas"):
        monkeypatch.setitem(sys.modules, name, None)
    for case in doctor.settings_for(kind)[:4]:
        small = {"hidden_size": 64} if "hidden_size" in case.options else {}
        workload = memlab.workloads.get(case.workload, **case.options | small)
        loss = workload.compute_loss(workload.build_model(), workload.make_batch(2))
        loss.backward()
        assert loss.isfinite()


def test_every_technique_is_tried_or_refused_in_its_own_words():
    def measure(workload, config, limit):
        asked.append((workload.name, config))
        if limit is not None:
            return result(config, outcome="out_of_memory")
        if config.precision == "fp16-mixed":
            return result(config, outcome="crashed", message="SIGSEGV")
        return result(config)

    asked = []
    configs = doctor.settings()
    assert next(iter(configs)) == "the plain step"
    assert [is_compiled(config) for config in configs.values()][-2:] == [True, True]
    found = dict(doctor.tried(configs, CPU, None, measure))
    assert found.keys() - configs.keys() == {"an out-of-memory and the step after it"}
    assert configs.keys() <= found.keys()
    assert found["fp16-mixed"] == "crashed: SIGSEGV"
    assert "no caching allocator" in found["expandable segments"]
    assert "tensor cores" in found["fp8-mixed"]
    assert [name for name, why in found.items() if not why][:2] == [
        "an out-of-memory and the step after it", "the plain step",
    ]  # fmt: skip
    assert {name for name, config in asked if config.channels_last} == {"plain-convnet"}


def test_formats_that_a_card_lacks_are_refused_by_its_name():
    fine = lambda workload, config, limit: result(  # noqa: E731
        config, outcome="out_of_memory" if limit else "ok"
    )
    cuda = torch.device("cuda", 0)
    found = dict(doctor.tried(doctor.settings(), cuda, card("t4"), fine))
    assert "T4" in found["tf32"]
    assert found["offload activations"] == ""


def test_running_out_of_memory_that_ends_otherwise_is_said():
    for outcomes, said in ((["ok"], "ok under a limit"), (["out_of_memory", "crashed"], "crashed")):
        left = iter(outcomes)
        _, why = next(doctor.tried({}, CPU, None, lambda *_: result(outcome=next(left))))  # noqa: B023
        assert said in why


def visit_of(monkeypatch, end, limit=None, peak=7, outcome="ok"):
    bench = Bench(device=CPU, target=None)
    told = result(peak_reserved_bytes=peak, peak_allocated_bytes=7, outcome=outcome)
    monkeypatch.setattr(Bench, "predict", lambda self, case, seconds: told)
    monkeypatch.setattr(
        Bench, "measure", lambda self, case, *more, **rest: (result(outcome=outcome), None)
    )
    here = DoctorVisit(bench=bench, keeper=RecordKeeper(None), end=end, tell=lambda text: None,
                       limit_bytes=limit)  # fmt: skip
    here.compare(doctor.settings_for("cpu")[:3])
    return here


def test_a_step_that_would_take_what_others_need_is_left_out(monkeypatch):
    here = visit_of(monkeypatch, float("inf"), limit=GIB, peak=2 * GIB)
    assert len(here.left_out) == 3
    assert all("uses at most 1.00 GiB of the card" in said for said in here.left_out)
    assert (here.pairs, here.keeper.lines) == ([], [])


def test_what_there_is_no_time_for_is_said(monkeypatch):
    assert visit_of(monkeypatch, 0.0).left_out == ["3 of 3 settings were left out: time was over."]
    here = visit_of(monkeypatch, float("inf"))
    assert [each.is_compared for each in here.pairs] == [True] * 3
    assert here.left_out == []
    assert [kind for kind, _ in here.keeper.lines] == ["run"] * 3
    assert json.dumps(here.keeper.lines[0][1])


def test_a_card_that_stops_answering_ends_the_visit_and_says_so(monkeypatch):
    monkeypatch.setattr(device_visit, "is_broken", lambda device: True)
    here = visit_of(monkeypatch, float("inf"), outcome="failed")
    (said,), (pair,) = here.left_out, here.pairs
    assert "does not answer this process any more" in said
    assert pair.why_not.startswith("measured, failed")


@pytest.fixture
def measured(monkeypatch):
    """Return a function that examines a device, with results that are made up."""
    monkeypatch.setattr(Bench, "predict", lambda self, case, seconds: result(case.config))
    monkeypatch.setattr(doctor, "bench_of", lambda device, kind: kind(device=device, target=None))
    monkeypatch.setattr(DoctorVisit, "operators", lambda self, cases: None)

    def examine(path, measure, device=CPU, home=None):
        monkeypatch.setattr(Bench, "measure", measure)
        cases = doctor.settings_for("cpu")[:3]
        keeper = RecordKeeper(path)
        home = home or path.parent
        return doctor.examine(device, keeper, home, seconds=100, wanted=cases, configs={})

    monkeypatch.setattr(doctor.api, "measure_only", lambda *_, **__: result(outcome="failed"))
    return examine


def test_ctrl_c_keeps_what_was_measured(measured, tmp_path, capsys):
    def measure(self, case, *more, **rest):
        if case.workload == "plain-mlp":
            raise KeyboardInterrupt
        return result(case.config), None

    path = tmp_path / "mine.jsonl"
    assert measured(path, measure) == 0
    runs = read_lines(path).of(Kind.RUN)
    assert [line["workload"] for line in runs] == ["plain-transformer", "plain-convnet"]
    said = capsys.readouterr().out
    assert "Ctrl-C ended the visit. What was measured until then is kept." in said
    assert "plain-convnet, batch_size=4" in said
    assert "Verdict" in said
    assert "summary" in read_lines(path).content[-1]


def test_a_card_that_is_full_is_said_and_the_processor_examined(
    measured, occupied, tmp_path, capsys
):
    occupied(100 * MIB)
    assert measured(
        tmp_path / "mine.jsonl", lambda self, case, *_, **__: (result(case.config), None),
        device=torch.device("cuda", 0), home=tmp_path / "home",
    ) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert "cuda:0 has only 100 MiB free" in said
    assert "What follows is about the processor." in said
    assert "Techniques on cpu" in said
    assert f"Put it into {tmp_path / 'home'}" in said
    assert read_lines(tmp_path / "mine.jsonl").content[0]["type"] == "cpu"


def test_without_a_place_nothing_is_written(measured, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keeper = RecordKeeper(None)
    monkeypatch.setattr(Bench, "measure", lambda self, case, *_, **__: (result(), None))
    cases = doctor.settings_for("cpu")[:1]
    doctor.examine(CPU, keeper, tmp_path / "home", seconds=100, wanted=cases, configs={})
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().out
    assert "Nothing was written. With --out FILE.jsonl" in said
    assert str(tmp_path / "home") in said


def test_the_command_keeps_nothing_of_what_memlab_learned(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMLAB_CACHE", str(tmp_path))
    seen = []

    def examine(device, keeper, home, seconds):
        seen.append((home, seconds, recorded.own_folder()))
        return 0

    monkeypatch.setattr(doctor, "examine", examine)
    assert main(["doctor", "--device", "cpu", "--minutes", "2"]) == 0
    ((home, seconds, meanwhile),) = seen
    assert (home, seconds) == (tmp_path / "records", 120)
    assert meanwhile != home
    assert not meanwhile.parent.exists()
    assert recorded.own_folder() == home
    assert list(tmp_path.iterdir()) == []


def test_progress_goes_to_a_terminal_alone():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        line = doctor.ProgressLine(stream)
        line("measuring a rather long setting" * 9)
        line("next")
        line("")
    assert file.getvalue() == ""
    assert "\n" not in terminal.getvalue()
    assert all(len(text) <= 78 for text in terminal.getvalue().split("\r"))
    assert terminal.getvalue().endswith(f"\r{' ' * 4}\r")


def test_the_driver_is_asked_where_its_library_is_installed(monkeypatch):
    library = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlSystemGetDriverVersion=lambda: b"550.54",
        nvmlDeviceGetHandleByIndex=lambda index: f"index {index}",
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=used[handle]),
    )
    used = {"index 3": 1, "GPU-5": 2, "index 1": 3}
    monkeypatch.setattr(device_visit, "nvml", lambda: library)
    assert device_visit.version() == "550.54"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    assert [device_visit.used_bytes(torch.device("cuda", i)) for i in (0, 1)] == [1, 2]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert device_visit.used_bytes(torch.device("cuda", 1)) == 3


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_card_on_which_a_worker_cannot_run_a_step_is_not_used_by_this_process(
    monkeypatch, kind, capsys
):
    crashed = result(outcome="crashed", message="SIGSEGV in forward")
    monkeypatch.setattr(doctor.api, "measure_only", lambda *_, **__: crashed)
    monkeypatch.setattr(doctor, "of_device", lambda device: card("t4"))
    configs = {doctor.PLAIN: StepConfig(), "adafactor": StepConfig(optimizer="adafactor")}
    goes_on = doctor._try(
        torch.device(kind), None, configs, float("inf"), lambda text: None, isolate=True
    )
    assert goes_on == (kind == "cpu")  # there each step has a worker of its own
    said = capsys.readouterr().out
    assert "the plain step; adafactor: crashed: SIGSEGV in forward" in said
    assert ("No step runs on cuda" in said) == (kind == "cuda")


def test_what_there_was_no_time_to_try_is_said():
    configs = {name: StepConfig() for name in ("a", "b")}
    assert doctor._about_tries({"a": ""}, configs) == [
        "works: a", "not tried, for want of time: b",
    ]  # fmt: skip
