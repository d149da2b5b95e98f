"""The watch over a run: what it finds, what it writes, and that nothing is left behind."""

import os
import pickle
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
import torch
from torch.optim import optimizer as torch_optimizer

import memlab
from memlab.integrations import watch as watching
from memlab.integrations.watch import LEAST_RESIDENT, Growth
from tests import ROOT

MIB = 2**20


def found(series, least=LEAST_RESIDENT):
    growth = Growth(least)
    for nbytes in series:
        growth.add(int(nbytes))
        if growth.found:
            return growth.since
    return 0


def train(num_steps, after=lambda step: None):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)


def fails(step):
    raise MemoryError("full")


def hooks():
    return dict(torch_optimizer._global_optimizer_post_hooks)


def steps(num=2000):
    return np.arange(num)


def test_a_planted_growth_is_found_with_the_step_in_which_it_began():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, MIB / 10, 2000)
    assert found(1000 * MIB + steps() * MIB / 2 + noise) == 11
    late = np.maximum(steps() - 500, 0) * MIB / 2
    assert found(1000 * MIB + late + noise) in range(481, 512)


@pytest.mark.parametrize("seed", range(30))
def test_noise_plateaus_and_slow_drift_are_no_growth(seed):
    rng = np.random.default_rng(seed)
    level = 1000 * MIB
    assert not found(level + rng.normal(0, 50 * MIB, 2000))
    assert not found(level + 300 * MIB * (1 - np.exp(-steps() / 15)) + rng.normal(0, MIB, 2000))
    assert not found(np.maximum.accumulate(level + rng.normal(0, 50 * MIB, 2000)))  # never returned
    assert not found(level + steps() * MIB / 20)  # less than 1 MiB in ten steps
    assert not found(level + 100 * MIB * np.sin(steps() / 20))  # an evaluation now and then


def test_a_quiet_run_leaves_nothing_behind(tmp_path, capsys):
    before, state = hooks(), torch.get_rng_state()
    with memlab.watch(tmp_path / "w") as watched:
        assert len(hooks()) == len(before) + 1
        with watched:  # entered twice
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
            optimizer.step()
        assert len(hooks()) == len(before) + 1
    assert hooks() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert not (tmp_path / "w").exists()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error", [MemoryError("no more"), RuntimeError("not enough memory: 8")])
def test_an_error_is_written_down_and_passed_on_unchanged(tmp_path, error):
    def fail(step):
        if step == 2:
            raise error

    with pytest.raises(type(error)) as raised, memlab.watch(tmp_path) as watched:
        train(5, fail)
    assert raised.value is error
    text = watched.files[0].read_text()
    assert "step 4" in text
    assert str(error) in text
    assert "in fail" in text


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
def test_other_errors_are_not_written(tmp_path, kind):
    before = hooks()
    with pytest.raises(kind), memlab.watch(tmp_path) as watched:
        raise kind
    assert watched.files == []
    assert hooks() == before


def test_a_passed_limit_is_written_once(tmp_path):
    with memlab.watch(tmp_path, memory_limit="1MiB") as watched:
        train(5)
    (path,) = watched.files
    assert "more than memory_limit=1.00 MiB" in path.read_text()


def test_a_folder_that_cannot_be_made_does_not_end_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MemoryError), memlab.watch(tmp_path / "file", memory_limit=1) as watched:
        train(3, fails)
    assert watched.files == []


def test_what_is_not_allowed_is_said_before_the_run():
    for bad in ({"folder": 3}, {"memory_limit": "much"}):
        with pytest.raises(memlab.MemlabError, match=next(iter(bad))):
            memlab.watch(**bad)
    with pytest.raises(memlab.MemlabError, match="library"):
        memlab.watch().callback("keras")


def test_steps_of_another_thread_and_of_a_second_optimizer(tmp_path):
    with memlab.watch(tmp_path, memory_limit=1) as watched:
        thread = threading.Thread(target=train, args=(3,))
        thread.start()
        thread.join()
    assert len(watched.files) == 1


@pytest.fixture
def card(monkeypatch):
    """Stand in for CUDA's caching allocator; return what was called and how it is told."""
    seen = types.SimpleNamespace(calls=[], held=MIB, tell=None)

    def dump(path):
        seen.calls.append("dump")
        frame = {"filename": "/torch/nn/functional.py", "line": 7, "name": "linear"}
        event = {"action": "alloc", "addr": 4096, "size": 1000, "stream": 0, "frames": [frame]}
        with open(path, "wb") as file:
            pickle.dump({"segments": [], "device_traces": [[event]]}, file, protocol=4)

    watching._observed.cache_clear()
    monkeypatch.setattr(watching, "on_cuda_start", lambda call: call())
    monkeypatch.setattr(watching, "on_out_of_memory", lambda tell: setattr(seen, "tell", tell))
    monkeypatch.setattr(watching, "is_history_recorded", lambda: "record" in seen.calls)
    monkeypatch.setattr(watching, "record_history", lambda n: seen.calls.append("record"))
    monkeypatch.setattr(watching, "stop_history", lambda: seen.calls.append("stop"))
    monkeypatch.setattr(watching, "dump_history", dump)
    monkeypatch.setattr(watching, "_allocator", lambda *_: seen.held)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    yield seen
    watching._observed.cache_clear()


def test_out_of_memory_on_a_card_writes_snapshot_answer_and_page(card, tmp_path):
    def fail(step):
        card.tell(0, 8 * MIB, 100 * MIB, 4 * MIB)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 MiB")

    with pytest.raises(torch.OutOfMemoryError), memlab.watch(tmp_path) as watched:
        train(1, fail)
    assert card.calls == ["record", "dump", "stop"]
    text = next(tmp_path.glob("out-of-memory*.txt")).read_text()
    assert "8.00 MiB were requested on device 0" in text
    assert "95.0 MiB held by other processes" in text
    assert "1000 B" in text or "who holds the peak" in text  # of the snapshot, by another process
    assert next(tmp_path.glob("out-of-memory*.html")).read_text().startswith("<!DOCTYPE html>")
    assert len(watched.files) == 3  # text and snapshot, and what left the block
    card.tell(0, 1, 1, 1)  # nobody watches any more
    assert len(watched.files) == 3


def test_a_history_of_somebody_else_is_used_and_left_on(card, tmp_path):
    card.calls.append("record")
    with memlab.watch(tmp_path), memlab.watch(tmp_path):
        pass
    assert card.calls == ["record"]


def test_growth_on_a_card_writes_the_snapshot(card, tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "_answer_elsewhere", lambda *_: None)
    with memlab.watch(tmp_path) as watched:
        train(150, lambda step: setattr(card, "held", card.held + 512))
    assert card.calls == ["record", "dump", "stop"]
    assert "Allocated memory on CUDA has grown since step 11" in watched.files[0].read_text()


def test_broken_attributes_of_torch_do_not_end_the_run(card, tmp_path, monkeypatch):
    def broken(*_):
        raise AttributeError("moved")

    for name in ("is_history_recorded", "record_history", "dump_history", "_allocator"):
        monkeypatch.setattr(watching, name, broken)
    with pytest.raises(MemoryError), memlab.watch(tmp_path) as watched:
        train(3, fails)
    assert "AttributeError: moved" in watched.files[0].read_text()


def test_a_callback_of_lightning_watches_until_the_error(tmp_path):
    pytest.importorskip("lightning")
    before, error = hooks(), MemoryError("full")
    callback = memlab.watch(tmp_path).callback("lightning")
    callback.on_train_start(None, None)
    train(2)
    callback.on_exception(None, None, error)
    assert "step 3" in callback.watch.files[0].read_text()
    assert hooks() == before


def test_a_callback_of_transformers_watches_a_real_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x):
            return {"loss": self.layer(x).sum()}

    before = hooks()
    callback = memlab.watch(tmp_path / "w", memory_limit=1).callback("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, report_to=[], use_cpu=True, save_strategy="no"
    )
    data = [{"x": torch.ones(2)}] * 16
    trainer = transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    assert [path.name.split("-")[0] for path in callback.watch.files] == ["limit"]
    assert hooks() == before


def run_watched(tmp_path, script, *arguments):
    (tmp_path / "beside.py").write_text("value = 3\n")
    (tmp_path / "train.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-m", "memlab", "watch", "--folder", str(tmp_path / "w"), *arguments],
        capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_the_command_runs_a_script_as_python_does(tmp_path):
    script = "import sys, beside\nprint(__name__, sys.argv, beside.value)\nsys.exit(7)\n"
    done = run_watched(tmp_path, script, "train.py", "--lr", "-m", "1")
    assert done.stdout == "__main__ ['train.py', '--lr', '-m', '1'] 3\n"
    assert (done.returncode, done.stderr) == (7, "")


def test_the_command_shows_the_traceback_of_the_script_alone(tmp_path):
    script = "def step():\n    raise MemoryError('full')\nif __name__ == '__main__':\n    step()\n"
    done = run_watched(tmp_path, script, "-m", "train")
    assert done.returncode == 1
    assert done.stderr.endswith("MemoryError: full\n")
    trace = done.stderr.partition("Traceback")[2]
    assert "train.py" in trace
    assert "memlab" not in trace
    assert "runpy" not in trace
    assert "at train.py, line 2" in next((tmp_path / "w").glob("error*.txt")).read_text()


def test_the_command_without_a_script_is_wrong_use(tmp_path):
    done = run_watched(tmp_path, "", "missing.py")
    assert done.returncode == 2
    assert "script='missing.py' is no file" in done.stderr


LEAKING = """
import torch
model, history = torch.nn.Linear(4, 4), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(200):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append(torch.ones(2**18))
"""


def test_a_leak_on_a_cpu_is_written_once_with_what_refers_to_it(tmp_path):
    # In a process of its own: an older one has freed pages to fill before its memory grows.
    done = run_watched(tmp_path, LEAKING, "train.py")
    (path,) = (tmp_path / "w").glob("growth*.txt")
    text = path.read_text()
    assert "has grown since step" in text
    assert "more tensors of float32 (262144,)" in text
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
