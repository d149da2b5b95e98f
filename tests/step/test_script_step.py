"""`memlab.from_script`: the step of a script as a workload, with the peak that it has there."""

import dataclasses
import weakref
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import memlab
from memlab._util.functions import replaced
from memlab.errors import MemlabError
from memlab.tracing.person_script import Script
from memlab.tracing.script_workload import (
    LossCall,
    Of,
    Ref,
    Samples,
    ScriptLoss,
    ScriptModel,
    TensorForm,
    digest_of,
    undivided,
    variants,
)
from tests import ROOT

SCRIPTS = ROOT / "benchmarks" / "step_scripts"
CARD = "rtx-4090"
OUTPUT, TARGET = Ref(Of.OUTPUT), Ref(Of.BATCH, 1)
SMALL = """
import torch
bias = torch.ones(4)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 3.0))
    def forward(self, x):
        return self.layer(x) * self.scale + self.added
    @property
    def added(self):
        return sum([bias for _ in range(1)])
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Model().to(device)
data = torch.randn(1000, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x = data[:8].to(device)
    loss = model(x).square().sum() / 8
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def call(function, *args):
    return LossCall(function=function, args=args, kwargs={}, is_autocast=False, has_grad=True)


def loss_of(*calls):
    return ScriptLoss(
        args=(Ref(Of.BATCH, 0),), kwargs={}, calls=calls, loss=Ref(Of.CALL, len(calls) - 1), kept=()
    )


def written(folder, text=SMALL):
    path = Path(folder) / "train.py"
    path.write_text(text)
    return path


def of(path, **options):
    return memlab.from_script(path, progress=False, **options)


# What needs no worker.


def test_a_loss_is_computed_for_any_batch_size():
    view = call(torch.Tensor.view, OUTPUT, Samples(5), 7)
    flat = call(torch.Tensor.reshape, TARGET, Samples(5))
    program = loss_of(view, flat, call(cross_entropy, Ref(Of.CALL, 0), Ref(Of.CALL, 1)))
    model = torch.nn.Linear(3, 7)
    for n in (2, 3):
        x, y = torch.randn(n, 5, 3), torch.randint(0, 7, (n, 5))
        expected = cross_entropy(model(x).flatten(0, 1), y.flatten())
        assert torch.equal(program(model, (x, y)), expected)


def test_a_value_that_the_script_holds_lives_until_the_graph_is_freed():
    freed = []
    program = loss_of(call(torch.exp, OUTPUT), call(torch.sum, Ref(Of.CALL, 0)))
    program = dataclasses.replace(program, kept=(OUTPUT,))
    model = torch.nn.Linear(3, 3)

    def note(module, args, out):
        weakref.finalize(out, freed.append, True)

    model.register_forward_hook(note)
    loss = program(model, (torch.randn(2, 3),))
    assert not freed
    loss.backward()
    del loss
    assert freed


def test_numbers_that_are_multiples_of_the_batch_size_are_tried():
    view = call(torch.Tensor.view, OUTPUT, 64, 12)
    tried = [each.args[1:] for each in variants(view, 8)]
    assert tried[:2] == [(64, 12), (Samples(8), 12)]
    divided = call(torch.Tensor.div, OUTPUT, 8)
    assert next(iter(variants(divided, 8))).args[1] == Samples(1)


@pytest.mark.parametrize(("by", "is_mean"), [(4, True), (3, False)])
def test_a_division_by_the_backward_passes_is_no_part_of_the_loss(by, is_mean):
    program = loss_of(call(torch.sum, OUTPUT), call(torch.Tensor.div, Ref(Of.CALL, 0), by))
    left, found = undivided(program, 4)
    assert found is is_mean
    assert len(left.calls) == (1 if is_mean else 2)


def test_values_of_a_batch_are_in_the_range_that_was_seen():
    def made(dtype, low, high, **options):
        form = TensorForm(shape=(5,), dtype=dtype, low=low, high=high, is_channels_last=False)
        return form.made(50)

    tokens = made(torch.int64, -100, 9)
    assert tokens.shape == (50, 5)
    assert tokens.min() >= 0
    assert tokens.max() == 9
    assert (made(torch.int64, 0, 1) == 1).all()  # a mask
    pixels = made(torch.float32, 0.0, 2.0)
    assert pixels.min() >= 0
    assert 1 < pixels.max() <= 2


def small_model(path, **changes):
    facts = {
        "script": Script(path=str(path)), "digest": digest_of(path), "folder": str(path.parent),
        "card": None, "has_card": True, "outline": ("Model", 2, 20),
    }  # fmt: skip
    return ScriptModel(**(facts | changes))


def test_a_model_is_that_of_the_script_before_its_first_step(tmp_path):
    text = SMALL + "\nopen('finished.txt', 'w').write('it ran on')"
    model = small_model(written(tmp_path, text))()
    assert type(model).__name__ == "Model"
    assert all(each.grad is None and each.device.type == "cpu" for each in model.parameters())
    assert model(torch.zeros(1, 4)).shape == (1, 4)  # with the global that its forward reads
    assert "data" not in model.forward.__globals__  # which it does not
    assert not (tmp_path / "finished.txt").exists()


def test_a_batch_that_is_moved_by_cuda_is_on_the_host_where_a_card_is_predicted(tmp_path):
    text = SMALL.replace("data[:8].to(device)", "data[:8].cuda()")
    with replaced([(torch.Tensor, "cuda", lambda *_, **__: 1 / 0)]):  # a prediction has its own
        model = small_model(written(tmp_path, text))()
    assert {each.device.type for each in model.parameters()} == {"cpu"}


def test_a_script_that_has_changed_or_never_calls_its_model_is_refused(tmp_path):
    path = written(tmp_path)
    with pytest.raises(MemlabError, match=r"train\.py has changed; call memlab\.from_script again"):
        small_model(path, digest="another")()
    with pytest.raises(MemlabError, match="ended before it called its model"):
        small_model(path, outline=("Other", 1, 1))()
    path.write_text("raise KeyError('nothing')")
    with pytest.raises(MemlabError, match="raised KeyError before it called its model"):
        small_model(path)()


# Whole scripts, in workers.


def test_a_small_script_is_a_workload_with_a_report(tmp_path):
    path = written(tmp_path)
    given = of(path, device="cpu")
    assert str(given.config) == "batch_size=8, optimizer=sgd"
    assert given.workload.name == "train.py"
    fields = {each.name: each for each in given.fields}
    assert fields["loss"].value == "square, sum, div"
    assert fields["optimizer.lr"] in given.not_imported
    # the division is by the samples, whatever their number
    model = given.workload.build_model()
    batch = given.workload.make_batch(5)
    expected = model(batch[0]).square().sum() / 5
    assert torch.equal(given.workload.compute_loss(model, batch), expected)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow  # three workers
@pytest.mark.parametrize("name", ["viewed", "gpt", "groups"])
def test_the_peak_is_that_of_the_script(name):
    path = SCRIPTS / f"{name}.py"
    run = memlab.run_script(path, device=CARD, progress=False)
    given = of(path, device=CARD)
    found = memlab.predict(given.workload, given.config, CARD, progress=False)
    step = next(each for each in run.stages if each.name == "step")
    assert found.peak_allocated_bytes == step.peak_allocated_bytes


@pytest.mark.slow  # three workers
@pytest.mark.parametrize(("name", "arguments"), [("gpt", []), ("arguments", ["--width", "32"])])
def test_the_step_is_measured(name, arguments):
    path = SCRIPTS / f"{name}.py"
    given = of(path, arguments=arguments, device="cpu")
    measured = memlab.measure(given.workload, given.config, "cpu", repeats=1, progress=False)
    predicted = memlab.predict(given.workload, given.config, "cpu", progress=False)
    memlab.require_ok([measured, predicted])
    assert predicted.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.01)


TWO = SMALL.replace("for step", "other = torch.optim.SGD(model.parameters(), lr=1)\nfor step")
REFUSED = {
    "updates with 2 optimizers": TWO.replace(
        "    optimizer.step()", "    optimizer.step()\n    other.step()"
    ),
    "makes a loss of 2 calls of models": SMALL.replace(
        "model(x).square()", "(model(x) + model(-x)).square()"
    ),
    "calls backward more than once for a forward pass": SMALL.replace(
        "    loss.backward()", "    loss.backward(retain_graph=True)\n    loss.backward()"
    ),
    "has no training step": "import torch\nprint(torch.ones(2))",
    "computes its loss for 8 samples only: add fails for 9": SMALL.replace(
        "model(x).square()", "(model(x) + torch.ones(4, 4).flatten()[:8, None]).square()"
    ),
}


@pytest.mark.slow  # a worker each
@pytest.mark.parametrize("said", list(REFUSED))
def test_what_is_no_step_of_a_workload_is_refused_in_a_sentence(tmp_path, said):
    with pytest.raises(MemlabError, match=said):
        of(written(tmp_path, REFUSED[said]), device="cpu")


def test_a_file_that_is_no_script_is_refused():
    with pytest.raises(MemlabError, match=r"path='nothing\.py' is not there"):
        of("nothing.py")
