"""A person's script over fake tensors: its bytes, its card, its files, its stages, bad ones."""

import importlib
import json
import multiprocessing.pool
import os
import re
import shutil
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import memlab
from memlab import MemlabError, Outcome, plots
from memlab._util.torch_private.tensors import FakeTensor
from memlab.devices import cards
from memlab.prediction.predict_script import predict_script_in_process
from memlab.prediction.run_result import WITH_WORKSPACES, FaultKind, RunResult
from memlab.running import Progress
from memlab.tracing.person_script import Script
from memlab.tracing.script_sandbox import MARKED

MIB = 2**20
LOOP = """
import argparse, torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=256)
given = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
data = torch.utils.data.TensorDataset(torch.randn(200, 64), torch.randint(0, 10, (200,)))
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True, num_workers={workers},
                                     pin_memory=True)
model = nn.Sequential(nn.Linear(64, given.hidden), nn.ReLU(), nn.Linear(given.hidden, 10))
optimizer = torch.optim.AdamW(model.parameters())
model.to(device)
for epoch in range(2):
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    model.train()
    if right / 200 > 0.99:
        break
    torch.save(model.state_dict(), "out.pt")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder, text, *arguments, device="t4", limit=None, steps=3, writes=False):
    """Run a script in this process, and return its result."""
    file = folder / "train.py"
    file.write_text(textwrap.dedent(text))
    script = Script(path=str(file), arguments=arguments, steps=steps, writes=writes)
    return predict_script_in_process(
        script, cards.resolve(device), memory_limit=limit, report=lambda _: None
    )


def ok(found):
    assert found.outcome is Outcome.OK, found.message
    return found


def test_a_step_counted_by_hand(folder):
    text = """
    import torch
    weight = torch.nn.Parameter(torch.randn(1024, 256, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False)
    for _ in range(5):
        weight.exp().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    found = ok(run(folder, text))
    step = found.stage("step")
    # weight, momentum, the output of exp and its gradient, and the sum
    assert step.peak_allocated_bytes == pytest.approx(4 * MIB, abs=4096)
    assert step.bytes_by_category["optimizer_state"] == MIB
    # cut after the last update, before its gradients are freed
    end = {"parameters": MIB, "optimizer_state": MIB, "gradients": MIB}
    held = found.stage("end").bytes_by_category
    assert {name: nbytes for name, nbytes in held.items() if nbytes >= MIB} == end


@pytest.mark.parametrize(
    "update",
    [
        "weight.data += -0.1 * weight.grad",
        "weight.data = weight.data - 0.1 * weight.grad",
        "torch.sub(weight.detach(), 0.1 * weight.grad, out=weight.detach())",
        "torch.no_grad()(weight.sub_)(0.1 * weight.grad)",
        "weight.detach().sub_(torch.autograd.grad(weight.exp().sum(), weight)[0])",
    ],
)
def test_a_loop_that_updates_its_weights_itself_is_followed(folder, update):
    text = f"""
    import torch
    weight = torch.randn(1024, 256, device="cuda", requires_grad=True)
    for _ in range(100_000):
        weight.exp().sum().backward()
        {update}
        weight.grad = None
    """
    found = ok(run(folder, text))
    assert "step" in [stage.name for stage in found.stages]
    assert found.stage("step").bytes_by_category["parameters"] == MIB
    assert any("training after 3 updates" in note for note in found.notes)


def test_a_model_without_an_optimizer_has_the_kinds_of_one_with_it(folder):
    text = """
    import torch
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()).cuda()
    {made}
    for _ in range(9):
        model(torch.randn(4096, 256, device="cuda")).sum().backward()
        {update}
        model.zero_grad()
    """
    own = "[weight.data.sub_(weight.grad) for weight in model.parameters()]"
    mine = ok(run(folder, text.format(made="", update=own)))
    theirs = ok(run(folder, text.format(
        made="optimizer = torch.optim.SGD(model.parameters(), foreach=False)",
        update="optimizer.step()",
    )))  # fmt: skip
    assert [stage.name for stage in mine.stages] == [stage.name for stage in theirs.stages]
    kinds = [found.stage("step").bytes_by_category for found in (mine, theirs)]
    assert kinds[0]["activations"] == kinds[1]["activations"]
    assert kinds[0]["parameters"] == kinds[1]["parameters"]


def test_updates_in_hooks_of_a_backward_are_one_step(folder):
    text = """
    import torch
    weights = [torch.randn(512, 512, device="cuda", requires_grad=True) for _ in range(3)]
    optimizers = {w: torch.optim.SGD([w], momentum=0.9, foreach=False) for w in weights}
    def update(weight):
        optimizers[weight].step()
        optimizers[weight].zero_grad()
    for weight in weights:
        weight.register_post_accumulate_grad_hook(update)
    for _ in range(100):
        out = torch.ones(512, 512, device="cuda")
        for weight in weights:
            out = (out @ weight).relu()
        out.sum().backward()
    """
    found = ok(run(folder, text))
    assert [stage.name for stage in found.stages] == ["build", "first step", "step", "end"]
    assert any("training after 3 updates" in note for note in found.notes)
    held = found.stage("step").bytes_by_category
    assert held["parameters"] == held["optimizer_state"] == 3 * MIB
    assert held.get("gradients", 0) < MIB  # none outlives its hook


def test_a_checkpoint_that_runs_its_own_backward_is_a_part_of_the_step(folder):
    text = """
    import torch
    from torch.utils.checkpoint import checkpoint
    class Model(torch.nn.Sequential):
        def forward(self, out):
            for layer in self:
                out = checkpoint(layer, out, use_reentrant={})
            return out.relu()
    model = Model(*[torch.nn.Linear(256, 256) for _ in range(3)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), foreach=False)
    for _ in range(9):
        out = torch.randn(4096, 256, device="cuda", requires_grad=True)
        model(out).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    kinds = [ok(run(folder, text.format(is_reentrant))).stage("step").bytes_by_category
             for is_reentrant in (True, False)]  # fmt: skip
    assert kinds[0]["inputs"] == kinds[1]["inputs"]
    assert kinds[0]["activations"] == kinds[1]["activations"]


@pytest.mark.parametrize(
    "attack",
    [
        "delta.data.add_(torch.autograd.grad(loss(delta), delta)[0].sign())",
        "loss(delta).backward(); model.weight.data.clamp_(-1, 1)",
    ],
)
def test_what_is_written_beside_an_optimizer_is_no_update(folder, attack):
    text = f"""
    import torch
    model = torch.nn.Linear(256, 256).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    loss = lambda delta: model(x + delta).square().mean()
    for _ in range(9):
        x = torch.randn(512, 256, device="cuda")
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(7):
            {attack}
        loss(delta.detach()).backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    found = ok(run(folder, text))
    assert any("training after 3 updates" in note for note in found.notes)
    assert found.stage("step").bytes_by_category["optimizer_state"] > 2 * 256 * 256 * 4


def test_that_a_run_ended_with_its_training_is_said_with_the_remedy(folder):
    text = """
    import torch
    model = torch.nn.Linear(256, 4096).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    batches = [torch.randn(64, 256, device="cuda") for _ in range(8)]
    for x in batches:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        kept = [model(x) for x in batches]
    print(torch.cat(kept).shape)
    """
    short = ok(run(folder, text))
    (said,) = [note for note in short.notes if note.startswith("The run ended with its training")]
    assert "--steps N" in said
    assert "evaluation" not in [stage.name for stage in short.stages]

    same = ok(run(folder, text, steps=8))  # which of its updates is the last cannot be known
    assert any("The run ended with its training" in note for note in same.notes)
    whole = ok(run(folder, text, steps=9))
    assert not any("The run ended" in n or "ended early" in n for n in whole.notes)
    assert any("after 3 of the same shapes were not run" in note for note in whole.notes)
    assert whole.stage("evaluation").bytes_by_category["temporaries"] >= 2 * 8 * 64 * 4096 * 4
    assert [fault.kind for fault in whole.faults] == [FaultKind.EVALUATION_KEPT]


def test_two_optimizers_of_one_batch_do_not_end_the_run(folder):
    text = """
    import torch
    from torch.utils.data import DataLoader
    one, other = torch.nn.Linear(64, 64).cuda(), torch.nn.Linear(64, 64).cuda()
    first, second = (torch.optim.Adam(each.parameters()) for each in (one, other))
    loader = DataLoader(torch.randn(64, 64), batch_size=8)
    for epoch in range(2):
        for x in loader:
            for model, optimizer in ((one, first), (other, second)):
                model(x.cuda()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    with torch.no_grad():
        for x in loader:
            one(x.cuda())
    """
    found = ok(run(folder, text))
    assert found.stage("evaluation").peak_allocated_bytes > 0
    assert not any("The run ended" in note for note in found.notes)


def test_a_fifth_epoch_ends_the_run_and_a_note_says_so(folder):
    text = """
    import torch
    from torch.utils.data import DataLoader
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range({epochs}):
        for x in DataLoader(torch.randn(64, 64), batch_size=8):
            model(x.cuda()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.save(model.state_dict(), "last.pt")
    """
    few, many = (ok(run(folder, text.format(epochs=epochs))) for epochs in (4, 9))
    assert [any("The run ended" in note for note in each.notes) for each in (few, many)] == [
        False,
        True,
    ]
    assert [any(stage.name == "saving" for stage in each.stages) for each in (few, many)] == [
        True,
        False,
    ]


def test_stages_lines_and_what_is_assumed_are_told(folder):
    found = ok(run(folder, LOOP.format(workers=2)))
    names = [stage.name for stage in found.stages]
    assert names == ["build", "first step", "step", "evaluation", "end"]
    assert sum(held.nbytes for held in found.lines) == found.peak_allocated_bytes
    lines = (folder / "train.py").read_text().splitlines()
    by_line = {lines[held.line - 1].strip() for held in found.lines if held.file}
    assert "optimizer.step()" in by_line
    assert any("Loops were ended early" in note for note in found.notes)
    assert found.step_seconds > 0
    live, stages = found.timeline.total_bytes, np.array(found.timeline.stages)
    of = stages[found.timeline.stage]
    assert list(dict.fromkeys(stages.tolist())) == names
    highest = {name: int(live[of == name].max()) for name in names[:-1]}
    assert highest == {each.name: each.peak_allocated_bytes for each in found.stages[:-1]}
    assert (np.diff(found.timeline.operator) >= 0).all()
    said = [text.get_text() for text in plots.run_timeline(found).texts]
    assert any(text.startswith("peak ") for text in said)
    assert found.fits is None
    assert sum(found.modules.values()) == found.peak_allocated_bytes
    assert max(found.modules, key=found.modules.get) == "0", "the first Linear is the largest"
    assert all(held.text == lines[held.line - 1].strip() for held in found.lines if held.file)
    data = json.loads(json.dumps(found.to_dict()))
    assert RunResult.from_dict(data).to_dict() == found.to_dict()


def test_a_script_finds_its_card(folder):
    text = """
    import torch
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    properties = torch.cuda.get_device_properties(0)
    assert (properties.major, properties.minor) == torch.cuda.get_device_capability() == (7, 5)
    assert torch._C._cuda_getDriverVersion() >= 12000 and torch.backends.cudnn.version() > 90000
    assert torch.version.cuda >= "12" and torch.cuda.nccl.version() >= (2, 20)
    free, total = torch.cuda.mem_get_info()
    assert 14 * 2**30 < free == total == properties.total_memory
    x = torch.empty(2**20, device=torch.device("cuda:0"))
    assert x.is_cuda and x.device == torch.device("cuda:0") and str(x.device) == "cuda:0"
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 4 * 2**20
    assert torch.cuda.memory_reserved() == 20 * 2**20
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == torch.cuda.memory_allocated() == 0
    y = torch.zeros(3).cuda() + torch.ones(3, device="cuda")
    assert y.cpu().device.type == "cpu" and torch.zeros_like(y).is_cuda
    with torch.autocast("cuda", dtype=torch.float16):
        assert torch.is_autocast_enabled("cuda") and (y[None] @ y[:, None]).dtype == torch.float16
    start, stream = torch.cuda.Event(enable_timing=True), torch.cuda.Stream()
    start.record(); torch.cuda.synchronize()
    with torch.cuda.stream(stream), torch.cuda.device(0):
        assert torch.cuda.current_stream() is stream
    with torch.device("cuda"):
        assert torch.nn.Linear(2, 2).weight.is_cuda
    """
    ok(run(folder, text))
    found = run(folder, "import torch; assert not torch.cuda.is_available()", device="cpu")
    assert ok(found).peak_allocated_bytes == 0
    found = run(folder, "import torch\ntorch.zeros(2).cuda()", device="cpu")
    assert found.outcome is Outcome.UNSUPPORTED
    assert "asks for a CUDA card at train.py, line 2" in found.message
    assert "--device rtx-4060" in found.message


def test_out_of_memory_is_raised_as_pytorch_raises_it_and_can_be_caught(folder):
    text = """
    import torch
    size = 2**28
    while True:
        try:
            x = torch.empty(size, device="cuda")
            break
        except torch.cuda.OutOfMemoryError as error:
            assert "Tried to allocate 1.00 GiB. GPU 0 has a total capacity of" in str(error)
            size //= 4
    assert size == 2**26
    {more}
    """
    ok(run(folder, text.format(more=""), limit=600 * MIB))
    found = run(folder, text.format(more="y = torch.empty(2**27, device='cuda')"), limit=600 * MIB)
    assert found.outcome is Outcome.OUT_OF_MEMORY
    assert "train.py, line 12" in found.message
    assert "Tried to allocate 512 MiB" in found.message


def test_a_script_that_fits_without_workspaces_alone_is_told_so(folder):
    text = """
    import torch
    layer = torch.nn.Linear(512, 512).cuda()
    layer(torch.ones(256, 512, device="cuda")).sum().backward()
    """
    found = ok(run(folder, text, limit=8 * MIB))  # the workspace of cuBLAS alone has more
    assert found.fits is False
    assert str(found).endswith(f"does not fit 8.00 MiB {WITH_WORKSPACES}")
    assert "without which" not in str(ok(run(folder, text, limit=64 * MIB)))


def test_nothing_outside_changes_and_the_script_finds_what_it_wrote(folder):
    (folder / "data").mkdir()
    (folder / "data" / "numbers.txt").write_text("1 2 3")
    text = """
    import json, os, pathlib, shutil, torch
    with open("data/numbers.txt", "a") as file:
        file.write(" 4")
    assert pathlib.Path("data/numbers.txt").read_text() == "1 2 3 4"
    os.makedirs("runs/first")
    torch.save({"weight": torch.ones(4), "epoch": 3}, "runs/first/last.pt")
    loaded = torch.load("runs/first/last.pt")
    assert loaded["epoch"] == 3 and loaded["weight"].shape == (4,)
    assert os.listdir("runs") == ["first"]
    os.rename("runs/first", "runs/second")
    assert sorted(os.listdir("data")) == ["numbers.txt"] and not os.path.exists("runs/first")
    pathlib.Path("log.json").write_text(json.dumps({}))
    os.remove("data/numbers.txt")
    assert not os.path.exists("data/numbers.txt")
    shutil.rmtree("runs")
    """
    ok(run(folder, text))
    assert sorted(each.name for each in folder.iterdir()) == ["data", "train.py"]
    assert (folder / "data" / "numbers.txt").read_text() == "1 2 3"
    ok(run(folder, "open('log.txt', 'w').write('x')", writes=True))
    assert (folder / "log.txt").read_text() == "x"


def test_a_checkpoint_that_may_be_written_is_torchs_own_or_a_mark_that_is_told(folder):
    text = """
    import torch
    torch.save({"epoch": 3, "seen": [torch.arange(4)]}, "data.pt")
    assert torch.load("data.pt")["seen"][0].tolist() == [0, 1, 2, 3]
    """
    found = ok(run(folder, text, writes=True))
    assert MARKED not in found.notes
    kept = torch.load(folder / "data.pt")
    assert (kept["epoch"], kept["seen"][0].tolist()) == (3, [0, 1, 2, 3])

    text += """
    torch.save(torch.nn.Linear(4, 4).cuda().state_dict(), "model.pt")
    assert torch.load("model.pt")["weight"].shape == (4, 4)
    """
    assert ok(run(folder, text, writes=True)).notes.count(MARKED) == 1
    assert (folder / "model.pt").read_bytes().startswith(b"a checkpoint of memlab run")
    assert MARKED not in ok(run(folder, text)).notes  # in a folder of the run


def test_classes_of_torch_are_as_they_were(folder):
    text = """
    import torch
    model = torch.nn.Linear(4, 4).cuda()
    torch.save(model.state_dict(), "model.pt")
    model.load_state_dict(torch.load("model.pt"))
    model(torch.zeros(1, 4, device="cuda")).sum().backward()
    """
    kinds = (
        torch.Tensor, FakeTensor, torch.UntypedStorage, torch.Generator, torch.nn.Module,
        torch.nn.DataParallel, torch.optim.Optimizer, torch.amp.autocast_mode.autocast,
    )  # fmt: skip
    modules = (torch, torch.cuda, torch.cuda.memory, torch.version, torch.autograd, os, shutil)
    ok(run(folder, "import torch"))  # torch sets some things once
    before = [dict(vars(place)) for place in (*kinds, *modules)]
    ok(run(folder, text))
    after = [dict(vars(place)) for place in (*kinds, *modules)]
    changed = [
        (place.__name__, name)
        for place, was, now in zip((*kinds, *modules), before, after, strict=True)
        for name in was.keys() | now.keys()
        if was.get(name) is not now.get(name)
    ]
    assert changed == []
    assert "data_ptr" not in vars(torch.UntypedStorage), "it is inherited"


def test_the_optimizer_has_the_parameters_that_were_moved(folder):
    text = """
    import torch
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    weight = model.weight
    model.cuda().half().float()
    assert model.weight is weight and weight.is_cuda
    assert optimizer.param_groups[0]["params"][0] is weight
    model(torch.zeros(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].is_cuda
    """
    assert ok(run(folder, text)).stage("first step")


def test_a_scaler_a_checkpoint_and_a_backward_of_ones_own_run(folder):
    text = """
    import torch
    from torch.utils.checkpoint import checkpoint

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return 2 * x
        @staticmethod
        def backward(context, gradient):
            return gradient + torch.ones(1, device="cuda") * (gradient.device.type == "cuda")

    model = torch.nn.Linear(64, 64).cuda()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
    updates = 0
    for _ in range(4):
        with torch.autocast("cuda", dtype=torch.float16):
            out = checkpoint(lambda x: model(x).relu(), torch.randn(8, 64, device="cuda"),
                             use_reentrant=False)
            loss = Twice.apply(out).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    """
    found = ok(run(folder, text))
    assert found.stage("step").bytes_by_category["optimizer_state"] > 0


def test_an_evaluation_that_keeps_its_outputs_is_run_to_its_end(folder):
    text = """
    import torch
    model = torch.nn.Linear(16, 1024).cuda()
    loader = torch.utils.data.DataLoader(torch.randn(640, 16), 64)
    kept = []
    with torch.no_grad():
        for x in loader:
            kept.append(model(x.cuda()))
    assert len(kept) == {batches}
    """
    found = ok(run(folder, text.format(batches=10)))
    assert found.peak_allocated_bytes > 10 * 64 * 1024 * 4
    assert any("does not train" in note for note in found.notes)
    dropped = text.replace(
        "kept.append(model(x.cuda()))", "kept.append(model(x.cuda()).sum().item())"
    )
    ok(run(folder, dropped.format(batches=3)))
    # a script that counts what it has evaluated
    counted = ok(run(folder, dropped.format(batches=10)))
    assert any("went on to the end of their data" in note for note in counted.notes)
    assert run(folder, dropped.format(batches=9)).outcome is Outcome.FAILED


BAD = {
    "raise ValueError('no')": (Outcome.FAILED, "ValueError: no (train.py, line 1)"),
    "this is no Python": (Outcome.FAILED, "SyntaxError"),
    "import sys; sys.exit(3)": (Outcome.UNSUPPORTED, "train.py ended itself with exit code 3"),
    "import sys; sys.exit('no data')": (Outcome.UNSUPPORTED, "train.py ended itself: no data"),
    "import os; os._exit(4)": (Outcome.UNSUPPORTED, "exit code 4"),
    "import argparse; argparse.ArgumentParser().parse_args(['--odd'])": (
        Outcome.UNSUPPORTED, "unrecognized arguments: --odd",
    ),
    "import os; os.fork()": (Outcome.FAILED, "does not start processes"),
    "import subprocess; subprocess.run(['true'])": (Outcome.FAILED, "does not start processes"),
    "import urllib.request; urllib.request.urlopen('http://192.0.2.1')": (
        Outcome.FAILED, "no other host is asked",
    ),
    "import socket; socket.getaddrinfo('data.example', 80)": (
        Outcome.FAILED, "no other host is asked",
    ),
    "raise RuntimeError('failed because of this:\\nno package x')": (
        Outcome.FAILED, "failed because of this: no package x (",
    ),
    "import nothing_like_this": (Outcome.FAILED, "nothing_like_this"),
    "import ctypes, os\nos.open.func": (Outcome.FAILED, "AttributeError"),
}  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_a_script_that_cannot_be_run_is_a_sentence(folder, text):
    outcome, part = BAD[text]
    found = run(folder, text)
    assert found.outcome is outcome
    assert part in found.message
    assert "\n" not in found.message


def test_a_script_that_catches_everything_is_ended_all_the_same(folder):
    text = """
    import torch
    weight = torch.nn.Parameter(torch.zeros(4, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    while True:
        try:
            weight.sum().backward()
            optimizer.step()
        except Exception:
            pass
    """
    assert ok(run(folder, text)).stage("step")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_a_thread_raises_is_told(folder):
    text = """
    import threading, torch
    thread = threading.Thread(target=lambda: torch.zeros(4, device="cuda"))
    thread.start()
    thread.join()
    """
    [note] = ok(run(folder, text)).notes
    assert note.startswith("A thread of the script raised ")
    assert "missing in these numbers" in note


def test_a_notebook_runs_cell_by_cell(folder):
    cells = ["%matplotlib inline\nimport torch", "x = torch.empty(2**20, device='cuda')"]
    notebook = {"cells": [{"cell_type": "code", "source": [text]} for text in cells]}
    file = folder / "train.ipynb"
    file.write_text(json.dumps(notebook))
    script = Script(path=str(file))
    found = predict_script_in_process(
        script, cards.resolve("t4"), memory_limit=None, report=lambda _: None
    )
    assert ok(found).peak_allocated_bytes == 4 * MIB
    assert str(found.lines[0]).endswith("cell 2:1")


@pytest.mark.parametrize("updates", [1, 4])
def test_a_power_limit_slows_a_script(folder, updates):
    text = f"""
    import torch
    model = torch.nn.Linear(4096, 4096).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range({updates}):
        model(torch.randn(4096, 4096, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    plain, limited = (ok(run(folder, text, device=card)) for card in ("h100", "h100, 300 W"))
    assert 1.2 < limited.step_seconds / plain.step_seconds < 2.5
    assert limited.peak_allocated_bytes == plain.peak_allocated_bytes
    assert any("Under a power limit of 300 W of 700 W" in note for note in limited.notes)
    assert limited.seconds_uncertainty > plain.seconds_uncertainty


def test_what_a_script_compiles_is_told_with_its_bounds_and_has_no_time(folder):
    rules = importlib.import_module("torch._dynamo.trace_rules")
    rules.get_torch_obj_rule_map.cache_clear()  # it is made of functions that the card replaces
    text = """
    import torch
    model = torch.nn.Linear(1024, 1024).cuda()
    {compiled}
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(512, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    plain, compiled = (
        ok(run(folder, text.format(compiled=line))) for line in ("", "model = torch.compile(model)")
    )
    assert plain.step_seconds
    assert compiled.step_seconds is None
    assert compiled.peak_allocated_bytes == plain.peak_allocated_bytes
    assert compiled.uncertainty > plain.uncertainty
    for said in ("other code of Linear, which is predicted as", "Compiled the run takes from",
                 "compile=True is set in it",
                 "The time of compiled code is not known"):  # fmt: skip
        assert any(said in note for note in compiled.notes)
        assert not any(said in note for note in plain.notes)
    assert not any("is stated ±" in note for note in compiled.notes)
    rules.get_torch_obj_rule_map.cache_clear()  # as the next test finds them


def test_what_a_script_compiles_and_never_trains_is_told_without_words_of_a_step(folder):
    text = """
    import torch
    model = torch.compile(torch.nn.Linear(1024, 1024)).cuda()
    with torch.no_grad():
        out = model(torch.randn(4096, 1024, device="cuda"))
    """
    found = ok(run(folder, text))
    (note,) = [note for note in found.notes if "torch.compile" in note]
    least, most = re.search("takes from ([0-9.]+) MiB to ([0-9.]+) MiB", note).groups()
    assert float(least) <= found.peak_allocated_bytes / MIB * 1.01
    assert found.peak_allocated_bytes / MIB <= float(most) * 1.01
    assert not any("so the step has none" in note for note in found.notes)


def test_it_is_run_from_code_in_a_worker(folder):
    (folder / "train.py").write_text("import torch; torch.zeros(2**20, device='cuda')")
    seen: list[Progress] = []
    found = memlab.run_script("train.py", device="rtx-4090", on_progress=seen.append)
    assert ok(found).fits
    assert found.peak_allocated_bytes == 4 * MIB
    assert seen
    with pytest.raises(MemlabError, match=r"path='nothing.py' is not there"):
        memlab.run_script("nothing.py")
    with pytest.raises(MemlabError, match=r"ends in .py or .ipynb"):
        memlab.run_script("train.txt")
    assert replace(found, stages=()).table() != found.table()


def test_folders_look_as_they_are_and_nothing_behind_a_link_is_removed(folder):
    (folder / "data" / "sub" / "deep").mkdir(parents=True)
    (folder / "data" / "sub" / "deep" / "a.txt").write_text("a")
    (folder / "data" / "b.txt").write_text("b")
    text = """
    import glob, os, pathlib, shutil
    open("data/new.txt", "w").write("1")
    open("new.txt", "w").write("2")
    found = ["data/b.txt", "data/new.txt", "data/sub/deep/a.txt"]
    assert sorted(map(str, pathlib.Path("data").rglob("*.txt"))) == found
    assert [len(files) for _, _, files in os.walk(os.path.abspath("data"))] == [2, 0, 1]
    for entry in os.scandir("data"):
        assert entry.path == "data/" + entry.name and not entry.is_symlink()
        assert os.path.exists(entry) and not os.path.islink(entry.path)
    shutil.copytree("data", "copied")
    assert open("copied/sub/deep/a.txt").read() == "a"
    shutil.rmtree("data")
    assert not os.path.exists("data") and os.getcwd() == os.path.dirname(__file__)
    """
    ok(run(folder, text))
    assert (folder / "data" / "sub" / "deep" / "a.txt").read_text() == "a"
    assert sorted(each.name for each in folder.iterdir()) == ["data", "train.py"]


def test_old_types_a_generator_and_data_parallel_of_the_card(folder):
    text = """
    import torch
    kind = torch.cuda.FloatTensor
    x = kind([[1.0, 2.0]])
    assert isinstance(x, kind) and not isinstance(x, torch.cuda.LongTensor)
    assert x.is_cuda and x.type() == "torch.cuda.FloatTensor" and kind(3, 2).shape == (3, 2)
    assert torch.zeros(2).type(torch.cuda.HalfTensor).dtype is torch.float16
    assert torch.zeros(2).type("torch.cuda.LongTensor").is_cuda
    drawn = torch.Generator(device="cuda").manual_seed(3)
    assert isinstance(drawn, torch.Generator) and drawn.device.type == "cuda"
    assert torch.randn(3, generator=drawn, device="cuda").is_cuda
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()
    assert order == torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()
    model = torch.nn.DataParallel(torch.nn.Linear(2, 2)).cuda()
    assert model(torch.zeros(4, 2)).is_cuda and "module.weight" in model.state_dict()
    weight = model.module.weight
    copy = type(weight)(weight, requires_grad=False)  # as accelerate copies the class of one
    assert isinstance(copy, torch.nn.Parameter) and copy.is_cuda and not copy.requires_grad
    """
    ok(run(folder, text))


RANKS = """
import os, torch, torch.distributed as dist
from torch.distributed import init_process_group

def main(rank, size):
    init_process_group("nccl", rank=rank, world_size=size)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size) == (0, 4)
    model = torch.nn.Linear(1024, 1024, bias=False).to(rank)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.zeros(1, 1024, device=rank)).sum().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
"""


def test_a_script_runs_as_the_first_of_ranks(folder):
    file = folder / "train.py"

    def found(text, ranks, script=RANKS):
        file.write_text(script + text)
        script = Script(path=str(file), ranks=ranks)
        return predict_script_in_process(
            script, cards.resolve("t4"), memory_limit=None, report=lambda _: None
        )

    by_torchrun = "main(int(os.environ['LOCAL_RANK']), int(os.environ['WORLD_SIZE']))"
    spawned = "import torch.multiprocessing as mp; mp.spawn(main, args=(4,), nprocs=4)"
    divided = "torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])"
    plain = found(by_torchrun, 4, RANKS.replace(divided, "model"))
    for made in (found(by_torchrun, 4), found(spawned, 0)):
        step, alone = ok(made).stage("step"), ok(plain).stage("step")
        # the bucket in which the gradients are averaged is as large as they are
        assert step.peak_allocated_bytes - alone.peak_allocated_bytes == 4 * MIB
    assert any("first of 4 ranks" in note for note in plain.notes)
    refused = found(by_torchrun, 0)
    assert refused.outcome is Outcome.UNSUPPORTED
    assert "train.py asks for LOCAL_RANK" in refused.message
    assert "--nproc-per-node" in refused.message
    assert not torch.distributed.is_initialized()


def test_what_a_library_writes_in_c_and_a_module_that_is_written_are_found(folder):
    text = """
    import numpy, os, sqlite3, sys
    assert numpy.genfromtxt("../{above}").tolist() == [1.0, 2.0]  # opened without Python's `open`
    os.makedirs("out")
    connection = sqlite3.connect("out/log.db")
    connection.execute("create table steps (loss)")
    connection.close()
    assert os.path.getsize("out/log.db")
    place = os.environ["HF_MODULES_CACHE"]
    os.makedirs(place + "/made_by_the_script")
    open(place + "/made_by_the_script/__init__.py", "w").write("loss = 3")
    sys.path.append(place)
    import made_by_the_script
    assert made_by_the_script.loss == 3
    """
    above = folder.with_suffix(".txt")
    above.write_text("1 2")
    ok(run(folder, text.format(above=above.name)))
    assert [each.name for each in folder.iterdir()] == ["train.py"]


@pytest.mark.slow
def test_nothing_is_left_of_a_script_that_does_not_end(folder, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    (folder / "train.py").write_text("open('made.txt', 'w').write('x')\nwhile True:\n    pass")
    found = memlab.run_script("train.py", device="t4", timeout_seconds=8, progress=False)
    assert found.outcome is Outcome.TIMED_OUT
    assert not list(folder.glob("memlab-run-*"))
    assert not (folder / "made.txt").exists()


def test_a_sparse_tensor_of_the_host_is_refused_in_one_sentence(folder):
    text = "import torch; torch.eye(3).to_sparse().cuda()"
    found = run(folder, text)
    assert found.outcome is Outcome.UNSUPPORTED
    assert "layout sparse_coo" in found.message


def test_a_loader_without_a_step_and_safetensors_by_name(folder):
    text = """
    import torch
    from safetensors.torch import load_file
    x = torch.zeros(3, device="cuda")
    for _ in torch.utils.data.DataLoader(range(4), 2):
        pass
    assert load_file("weights.safetensors", device="cpu")["a"].tolist() == [1.0, 1.0]
    """
    save_file({"a": torch.ones(2)}, folder / "weights.safetensors")
    assert ok(run(folder, text)).stage("end")


def test_a_pool_of_processes_does_its_work_in_the_script(folder):
    text = """
    import concurrent.futures, multiprocessing.pool, torch

    seen = []
    with multiprocessing.Pool(4, seen.append, ("begun",)) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
        assert sorted(pool.imap_unordered(abs, [-1, 2])) == list(pool.imap(abs, [1, 2])) == [1, 2]
        assert pool.starmap(pow, [(2, 3)]) == [8]
        assert pool.starmap_async(pow, [(2, 3)]).get(timeout=3) == [8]
        found = pool.apply_async(abs, (-3,), callback=seen.append)
        found.wait()
        assert found.ready() and found.successful() and found.get() == pool.apply(abs, (-3,)) == 3
        failed = pool.apply_async(abs, ("no number",))
        assert not failed.successful()
        try:
            failed.get()
        except TypeError:
            seen.append("raised")
    pool.close()
    pool.join()
    assert multiprocessing.pool.ThreadPool(2).map(abs, [-1]) == [1]
    with concurrent.futures.ProcessPoolExecutor(2, initializer=seen.append, initargs=(1,)) as pool:
        assert list(pool.map(abs, [-1, 2], chunksize=2)) == [1, 2]
        assert pool.submit(pow, 2, exp=3).result() == 8
    assert seen == ["begun", 3, "raised", 1], seen
    kept = torch.ones(4, device="cuda")
    """
    own = multiprocessing.pool.Pool.__init__
    said = [note for note in ok(run(folder, text)).notes if "pool of processes" in note]
    assert len(said) == 1
    assert multiprocessing.pool.Pool.__init__ is own


def test_tensors_lie_on_the_card_by_default_where_a_script_says_so(folder):
    text = """
    import numpy, torch

    torch.set_default_device("cuda")
    model = torch.nn.Linear(3, 3)
    model(torch.zeros(2, 3)).sum().backward()
    assert model.weight.is_cuda
    torch.set_default_device("cpu")
    assert not torch.zeros(3).is_cuda
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    assert torch.zeros(3).is_cuda and torch.Tensor(2, 3).is_cuda and torch.Tensor([1.0]).is_cuda
    torch.set_default_tensor_type("torch.FloatTensor")
    assert not torch.Tensor(2, 3).is_cuda and not torch.zeros(3).is_cuda
    bag = torch.nn.EmbeddingBag(10, 4)
    bag.weight.data = torch.tensor(numpy.ones((10, 4), dtype=numpy.float32))
    weight = bag.cuda().weight
    assert weight.is_cuda
    copy = type(weight)(weight.to("cuda"), **weight.__dict__)  # as accelerate copies the class
    with torch.inference_mode():
        assert torch.ones(3).to(dtype=torch.float16, device="cuda").is_cuda
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    """
    ok(run(folder, text))
    assert not torch.zeros(1).is_cuda
    assert type(torch.Tensor(2)) is torch.Tensor


GENERATION = """
import torch

class Model(torch.nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.table, self.kept = torch.nn.Embedding(64, 1024), []

    def forward(self, ids):
        Model.calls += 1
        found = self.table(ids)
        {keeps}
        return found @ self.table.weight.T

    @torch.no_grad()
    def generate(self, ids):
        for _ in range(60):
            ids = torch.cat([ids, self(ids[:, -8:])[:, -1:].argmax(-1)], 1)

model = Model().cuda()
model.generate(torch.zeros(4, 8, dtype=torch.long, device="cuda"))
assert Model.calls {calls}, Model.calls
"""


def test_a_generation_goes_on_only_while_its_model_keeps_something(folder):
    plain = ok(run(folder, GENERATION.format(keeps="", calls="< 10")))
    keeping = "self.kept.append(found)"
    kept = ok(run(folder, GENERATION.format(keeps=keeping, calls="== 60")))
    assert [stage.name for stage in plain.stages] == ["build", "generation"]
    # 59 of 60 outputs of the table are held beside the last one
    grown = kept.peak_allocated_bytes - plain.peak_allocated_bytes
    num_ids = 4 * 68 * 2  # before and after a token is joined to them
    assert 0 <= grown - 59 * (4 * 8 * 1024) * 4 <= num_ids * 8


def test_boxes_are_all_kept_where_it_is_not_known_which_overlap(folder):
    text = """
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    @torch.library.register_fake("torchvision::nms")
    def kept(dets, scores, iou_threshold):
        return dets.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)

    boxes = torch.rand(300, 4, device="cuda")
    kept = torch.ops.torchvision.nms(boxes, boxes[:, 0], 0.5)
    assert boxes[kept].shape == (300, 4)
    """
    (folder / "train.py").write_text(textwrap.dedent(text))
    found = ok(memlab.run_script("train.py", device="t4", progress=False))
    assert any("no box overlaps another" in note for note in found.notes)


def test_a_checkpoint_is_found_in_a_buffer_a_copy_and_on_its_own_device(folder):
    text = """
    import io, shutil, torch

    data, weight = torch.arange(3), torch.nn.Linear(4, 4).cuda().weight
    buffer = io.BytesIO()
    torch.save({"data": data, "weight": weight}, buffer)
    with open("first.pt", "wb") as file:
        file.write(buffer.getvalue())
    shutil.copy("first.pt", "second.pt")
    data += 1
    found = torch.load("second.pt")
    assert found["data"].tolist() == [0, 1, 2], "what lies on the host is real"
    assert found["weight"].is_cuda and isinstance(found["weight"], torch.nn.Parameter)
    with open("second.pt", "rb") as file:
        assert not torch.load(file, map_location="cpu")["weight"].is_cuda
    """
    ok(run(folder, text))


def test_a_script_may_save_before_it_trains(folder):
    saves = """
    import torch
    model = torch.nn.Linear(512, 512).cuda()
    torch.save(model.state_dict(), "first.pt")
    """
    trains = """
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(5):
        model(torch.ones(2, 512, device="cuda")).sum().backward()
        optimizer.step()
    """
    assert [stage.name for stage in ok(run(folder, saves)).stages] == ["end"]
    names = [stage.name for stage in ok(run(folder, saves + trains)).stages]
    assert names[:2] == ["build", "first step"]


def test_sparse_gradients_and_counts_up_to_a_number_are_followed(folder):
    text = """
    import torch

    bag = torch.nn.EmbeddingBag(1000, 64, mode="sum", sparse=True).cuda()
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    ids, offsets = torch.arange(6).cuda(), torch.tensor([0, 3]).cuda()
    for _ in range(5):
        optimizer.zero_grad()
        loss = bag(ids, offsets).sum()
        assert torch.bincount(loss.detach().view(1).long(), minlength=9).shape == (9,)
        loss.backward()
        optimizer.step()
    """
    found = ok(run(folder, text))
    step = found.stage("step")
    assert step.peak_allocated_bytes < 2 * 1000 * 64 * 4  # no dense gradient
    assert any("minlength" in note for note in found.notes)


def test_what_is_made_again_has_no_values_on_a_cpu_either(folder):
    text = """
    import torch

    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        values = [model(torch.ones(2, 4)).sum().item() for _ in range(9)]
    assert values == [1.0] * 9, values
    """
    ok(run(folder, text, device="cpu"))


def test_a_while_loop_that_only_values_end_is_left(folder):
    text = """
    import torch

    class Halved(torch.nn.Module):
        def forward(self, x):
            return x / 2

    model = torch.nn.Linear(8, 8).cuda()
    for place in ("cpu", "cuda"):  # values that follow from data are followed
        with torch.no_grad():
            x, rounds = torch.tensor([1024.0]).to(place), 0
            while x > 1:
                x, rounds = Halved()(x), rounds + 1
        assert rounds == 10, rounds
    optimizer = torch.optim.SGD(model.parameters())
    x, rounds, small = torch.randn(4, 8).cuda(), 0, 0
    while True:
        rounds += 1
        y = model(x)
        small += sum(bool(each < 0) for each in y[0])  # in no `while` of its own
        if (y - x).norm() < 1e-3:
            break
        x = y.detach()
    assert (rounds, small) == (101, 0), (rounds, small)
    while y.norm().item() > 1e-3:
        y = y / 2
    y.sum().backward()
    optimizer.step()
    """
    found = ok(run(folder, text))
    assert any("assumed True after 100 rounds of a loop" in note for note in found.notes)
