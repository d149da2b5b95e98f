"""A script's peak on this CPU, over fake tensors and by a meter outside of memlab."""

import os
import subprocess
import sys

import pytest

from benchmarks.script_peaks import METER
from memlab import Outcome
from memlab.devices import cards
from memlab.prediction.predict_script import predict_script_in_process
from memlab.tracing.person_script import Script

LOOP = """
import torch
data = torch.utils.data.TensorDataset(torch.randn(200, 64), torch.randint(0, 10, (200,)))
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    print(sum((model(x).argmax(1) == y).sum().item() for x, y in loader))
"""
WIDE_EVALUATION = """
import torch
model = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(2, 1, 28, 28)).sum().backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    model(torch.randn(64, 1, 28, 28))
"""  # whose kernels take memory of their own, at a size that no step has

RECURRENT_EVALUATION = """
import torch
model = torch.nn.LSTM(28, 64, batch_first=True)
model(torch.randn(16, 28, 28))[0].sum().backward()
with torch.no_grad():
    model(torch.randn(1000, 28, 28))
"""  # whose kernel has a workspace with gradients, and another without them


OWN_DATA = """
import numpy, torch
class Made(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, _):
        of_list, of_array = torch.tensor(list(range(30_000))) + 0, torch.tensor(numpy.arange(9_000))
        return of_list, of_array, torch.from_numpy(numpy.arange(50_000))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for of_list, *_ in torch.utils.data.DataLoader(Made(), batch_size=None):
    optimizer.zero_grad()
    model(of_list[:4].float()).mean().backward()
    optimizer.step()
"""  # which makes more while it loads than its step holds, in this process
PER_SAMPLE = """
import torch
from torch.func import functional_call, grad, vmap
net = torch.nn.Sequential(torch.nn.Linear(20, 128), torch.nn.ReLU(), torch.nn.Linear(128, 5))
weights = {name: weight.detach() for name, weight in net.named_parameters()}
def loss(weights, x, y):
    return torch.nn.functional.cross_entropy(functional_call(net, weights, (x[None],)), y[None])
gradients = vmap(grad(loss), in_dims=(None, 0, 0))
for _ in range(3):
    found = gradients(weights, torch.randn(64, 20), torch.randint(0, 5, (64,)))
    for name, each in found.items():
        weights[name] -= 0.1 * each.mean(0)
"""  # whose model is called on wrappers of torch.func, which have no storage


@pytest.mark.parametrize(
    "text", [LOOP, WIDE_EVALUATION, RECURRENT_EVALUATION, OWN_DATA, PER_SAMPLE]
)
def test_the_bytes_are_those_of_a_meter_outside_of_memlab(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "meter.py").write_text(METER)
    script = Script(path=str(tmp_path / "train.py"), steps=100)
    found = predict_script_in_process(
        script, cards.resolve("cpu"), memory_limit=None, report=lambda _: None
    )
    assert found.outcome is Outcome.OK, found.message
    said = subprocess.run(
        [sys.executable, "meter.py", "train.py"], capture_output=True, text=True, check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    peak = int(said.stdout.split("peak ")[1])
    assert found.peak_allocated_bytes == pytest.approx(peak, abs=256)
