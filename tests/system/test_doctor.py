"""Doctor from start to end: on a replayed card, every step of the CUDA path, and on this CPU."""

import gc

import pytest
import torch

import memlab
from memlab import StepConfig, measure, workloads
from memlab._util.units import GIB, KIB
from memlab.cli import device_visit, doctor
from memlab.cli.device_visit import Case
from memlab.cli.doctor import RecordKeeper
from memlab.errors import DeviceError
from memlab.store import recorded
from memlab.store.recorded import read_record
from memlab.store.records import Kind
from memlab.techniques.offload import offloading
from tests.replayed_cuda import Event, ReplayedCuda, Stream, replayed

TINY = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "sequence_length": 8}
CONFIGS = {"the plain step": StepConfig(batch_size=4), "fp8": StepConfig(precision="fp8-mixed")}


def transformer(batch_size, **fields):
    config = StepConfig(batch_size=batch_size)
    return Case(workload="plain-transformer", options=TINY, config=config, **fields)


@pytest.mark.slow
def test_doctor_from_start_to_end_on_a_replayed_card(monkeypatch, tmp_path, capsys):
    """One setting is out of memory, since other programs take the card meanwhile."""
    cuda = ReplayedCuda(others_bytes=2 * GIB)
    show = doctor.ProgressLine.__call__

    def taken(self, text):
        is_last = text.startswith("measuring") and text.endswith("batch_size=3")
        cuda.others_bytes = cuda.total_bytes - 200 * KIB if is_last else 2 * GIB
        show(self, text)

    monkeypatch.setattr(doctor.ProgressLine, "__call__", taken)
    path = recorded.own_folder() / "replayed.jsonl"
    wanted = [transformer(4), transformer(4, group="again"), transformer(3), transformer(2)]
    with replayed(monkeypatch, cuda):
        device = doctor.device_here("RTX 4090")
        status = doctor.examine(
            device, RecordKeeper(path), path.parent, seconds=600, wanted=wanted, configs=CONFIGS,
            isolate=False,
        )  # fmt: skip
        try:
            known = recorded.target_for("cuda", StepConfig())
            found = memlab.predict(_workload(), StepConfig(batch_size=4), "cuda")
        finally:
            path.rename(tmp_path / path.name)

    said = capsys.readouterr().out
    assert (status, str(device)) == (0, "cuda:0")
    assert "NVIDIA GeForce RTX 4090, memlab knows it as 'rtx-4090'; 22.0 GiB of 24.0 GiB" in said
    assert "driver not known (nvidia-ml-py is missing)" in said
    assert "works: an out-of-memory and the step after it; the plain step" in said
    assert "batch_size=3: measured, out_of_memory: out of memory" in said
    assert "With the times of this card's own operators" in said

    record = read_record(tmp_path / path.name)
    assert (record.device, record.is_card, record.lines.damage) == ("rtx-4090", True, "")
    outcomes = [str(run.result.outcome) for run in record.runs]
    assert outcomes == ["ok", "ok", "out_of_memory", "ok"]
    assert all(run.result.peak_reserved_bytes for run in record.runs if run.result.step_seconds)
    assert {run.result.memory_limit_bytes for run in record.runs} == {None}
    (operators,) = record.lines.of(Kind.OPERATORS)
    assert operators["num_operators"] > 20
    first = record.lines.of(Kind.VISIT)[0]
    assert (first["memory_bytes"], first["compute_capability"]) == (24 * GIB, [8, 9])
    assert first["process_bytes_by"] == "torch.cuda.mem_get_info"

    assert len(known.costs.operators) == operators["num_operators"]
    assert any("they were timed on NVIDIA GeForce RTX 4090" in note for note in found.notes)
    assert "max_memory_reserved" in cuda.calls
    gc.collect()
    assert (cuda.live, cuda.most_bytes) == (0, cuda.total_bytes)  # nothing is left behind


def _workload():
    return workloads.get("plain-transformer", **TINY)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "fp16-mixed"},
        {"precision": "tf32"},
        {"precision": "bf16-mixed", "accumulation_steps": 2},
        {"offload_activations": True},
        {"offload_parameters": True},
        {"offload_optimizer": True},
        {"expandable_segments": True},
        {"checkpointing": "blocks"},
        {"optimizer_in_backward": True},
    ],
    ids=str,
)
def test_techniques_run_through_on_a_replayed_card(monkeypatch, fields):
    cuda = ReplayedCuda()
    # hooks of autograd see tensors as they are kept in a replay: on the CPU, which pins no memory
    own = torch.empty_like
    unpinned = lambda *given, pin_memory=False, **more: own(*given, **more)  # noqa: E731
    monkeypatch.setattr(torch, "empty_like", unpinned)
    monkeypatch.setattr(offloading, "_is_worth_it", lambda tensor: cuda.holds(tensor))
    monkeypatch.setattr(offloading, "streams_of", lambda device: (Stream(), Stream()))
    config = StepConfig(**{"batch_size": 64} | fields)
    with replayed(monkeypatch, cuda):
        found = measure(workloads.get("plain-mlp"), config, "cuda", repeats=1, isolate=False)
        measure(_workload(), StepConfig(), "cuda", repeats=1, isolate=False)  # as it was before
    assert found.outcome == "ok", found.message
    assert found.peak_reserved_bytes >= found.peak_allocated_bytes > 0
    if "offload_activations" in fields:
        assert {"current_stream", "stream"} <= cuda.calls
    if "expandable_segments" in fields:
        assert {"expandable_segments:True", "expandable_segments:False"} <= cuda.calls


def test_a_card_that_an_error_has_broken_is_noticed(monkeypatch):
    cuda = ReplayedCuda()
    with replayed(monkeypatch, cuda):
        device = torch.device("cuda", 0)
        assert not device_visit.is_broken(device)
        cuda.broken = RuntimeError("CUDA error: device-side assert triggered")
        assert device_visit.is_broken(device)
        with pytest.raises(DeviceError, match=r"does not answer \(CUDA error: device-side"):
            doctor.room_on(device)


def test_what_is_replayed_is_as_documented(monkeypatch):
    cuda = ReplayedCuda(total_bytes=GIB)
    with replayed(monkeypatch, cuda):
        cuda.reset_peak_memory_stats()
        x = torch.ones(1000, device="cuda")
        y = x * 2
        assert cuda.memory_allocated() == 2 * 4096
        del x, y
        stats = cuda.memory_stats()
        assert stats["allocated_bytes.all.current"] == 0
        assert stats["allocated_bytes.all.peak"] == cuda.max_memory_allocated() == 2 * 4096
        cuda.set_per_process_memory_fraction(0.5)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.ones(GIB // 2, dtype=torch.uint8, device="cuda").add(1)
        begin, end = Event(enable_timing=True), Event(enable_timing=True)
        begin.record()
        end.record()
        assert 0 < begin.elapsed_time(end) < 1000
        with pytest.raises(RuntimeError, match="enable_timing"):
            Event().elapsed_time(end)
        with pytest.raises(AssertionError):
            Stream().wait_event(Event())
        with pytest.raises(AttributeError, match="is not replayed"):
            cuda.jiterator  # noqa: B018


@pytest.mark.slow
def test_doctor_on_this_cpu_over_two_settings(tmp_path, capsys, monkeypatch):
    store = tmp_path / "own.sqlite3"
    monkeypatch.setenv("MEMLAB_STORE", str(store))
    path = tmp_path / "mine.jsonl"
    plain = {"the plain step": StepConfig(batch_size=4)}
    wanted = [transformer(4), transformer(2)]
    device = torch.device("cpu")
    status = doctor.examine(
        device, RecordKeeper(path), tmp_path, seconds=600, wanted=wanted, configs=plain
    )
    assert status == 0
    assert not store.exists()  # it writes its record and nothing else
    said = capsys.readouterr().out
    assert "works: an out-of-memory and the step after it; the plain step" in said
    assert "allocated         2           0 %" in said
    record = read_record(path)
    assert [str(run.result.outcome) for run in record.runs] == ["ok", "ok"]
    costs = recorded.target_of(record, tf32=False).costs
    assert len(costs.operators) > 20
    assert set(costs.overheads) == {"forward", "backward", "optimizer"}
