"""What is wrong in a person's script: found with its line and its effect, and only if it happened.

More planted faults and clean scripts are in `benchmarks/script_faults.py`.
"""

import json
import textwrap

import pytest

from memlab import Outcome
from memlab.devices import cards
from memlab.prediction.predict_script import predict_script_in_process
from memlab.prediction.run_result import FaultKind
from memlab.tracing.person_script import Script

MIB = 2**20
HEAD = """
import copy, torch
from torch import nn
more = [part for _ in range(4) for part in (nn.GELU(), nn.Linear(1024, 1024))]
model = nn.Sequential(nn.Linear(512, 1024), *more).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(2560, 512), 512)
kept = []
"""
STEP = """
for x in loader:
    optimizer.zero_grad()
    out = model(x.cuda())
    loss = out.pow(2).mean()
    loss.backward()
    optimizer.step()
    {more}
"""


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """Return the faults of a script: kind and text of the line, with the fault."""
    monkeypatch.chdir(tmp_path)

    def find(text):
        file = tmp_path / "train.py"
        file.write_text(textwrap.dedent(HEAD) + textwrap.dedent(text))
        found = predict_script_in_process(
            Script(path=str(file)), cards.resolve("t4"), memory_limit=None, report=lambda _: None
        )
        assert found.outcome is Outcome.OK, found.message
        assert json.dumps(found.to_dict())
        lines = file.read_text().splitlines()
        assert all(str(fault) in found.table() for fault in found.faults)
        return {(each.kind, lines[each.line - 1].strip()): each for each in found.faults}

    return find


LONGER = """longer = out.detach()
    for _ in range(4):
        longer = torch.cat([longer, out.detach()], 1)"""  # within a step, and nothing of the last


@pytest.mark.parametrize(
    "more", ["print(loss.item())", "kept.append(loss.detach())", "del out", LONGER]
)
def test_a_clean_loop_has_none(faults, more):
    assert not faults(STEP.format(more=more))


def test_batches_that_lie_beside_those_of_two_steps_before_are_no_growth(faults):
    found = faults("""
    older = last = None
    for x in loader:
        x = x.cuda()
        older, last = last, x
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    """)
    assert {kind for kind, _ in found} == {FaultKind.LAST_STEP}


def test_a_loss_and_an_output_that_keep_their_graph(faults):
    [(kind, line)] = faults("total = 0\n" + STEP.format(more="total += loss"))
    assert (kind, line) == (FaultKind.KEPT_GRAPH, "total += loss")
    [((kind, line), fault)] = faults(STEP.format(more="kept.append(out)")).items()
    assert (kind, line) == (FaultKind.KEPT_GRAPH, "out = model(x.cuda())")
    assert (fault.nbytes, fault.per) == (512 * 1024 * 4, "step")
    assert fault.after_bytes < fault.before_bytes


def test_tensors_that_are_kept_in_training_and_in_evaluation(faults):
    [((kind, _), fault)] = faults(STEP.format(more="kept.append(out.detach().clone())")).items()
    assert (kind, fault.nbytes) == (FaultKind.GROWTH, 512 * 1024 * 4)
    text = """
    with torch.no_grad():
        for x in loader:
            kept.append(model(x.cuda()){more})
    """
    [((kind, _), fault)] = faults(text.format(more="")).items()
    assert (kind, fault.per, fault.stage) == (FaultKind.EVALUATION_KEPT, "batch", "evaluation")
    assert fault.nbytes == 512 * 1024 * 4
    # five outputs at the end of it; without them the activations of one batch hold the most
    assert fault.before_bytes - fault.after_bytes >= 2 * fault.nbytes
    assert not faults(text.format(more=".cpu()"))


def test_an_evaluation_with_a_graph_is_tried_without(faults):
    text = (
        STEP.format(more="del out, loss") + "\nmodel.eval()\nfor x in loader:\n    model(x.cuda())"
    )
    [((kind, line), fault)] = faults(text).items()
    assert (kind, line, fault.stage) == (FaultKind.UNUSED_GRAPH, "model(x.cuda())", "evaluation")
    # nine outputs are saved for a backward; without it two stand at a time
    assert fault.before_bytes - fault.after_bytes == 7 * 512 * 1024 * 4


def test_gradients_that_are_never_zeroed_or_late(faults):
    never = STEP.format(more="").replace("    optimizer.zero_grad()\n", "")
    assert list(faults(never)) == [(FaultKind.NEVER_ZEROED, "optimizer.step()")]
    zeroed = never.replace("    loss.backward", "    optimizer.zero_grad()\n    loss.backward")
    [((kind, line), fault)] = faults(zeroed).items()
    assert (kind, line) == (FaultKind.GRADIENTS_LATE, "optimizer.step()")
    assert fault.nbytes == 4 * (512 * 1024 + 1024 + 4 * (1024 * 1024 + 1024))


def test_weights_that_nobody_uses(faults):
    text = "model = copy.deepcopy(model)\n" + STEP.format(more="")
    found = faults(text)
    assert (FaultKind.OTHER_PARAMETERS, HEAD.strip().splitlines()[4]) in found
    [((kind, line), fault)] = faults("ema = copy.deepcopy(model)\n" + STEP.format(more="")).items()
    assert (kind, line) == (FaultKind.UNUSED_COPY, "ema = copy.deepcopy(model)")
    assert fault.before_bytes - fault.after_bytes == fault.nbytes
    used = (
        "with torch.no_grad():\n        [m.lerp_(w, 0.1) for m, w in zip(ema, model.parameters())]"
    )
    text = "ema = [w.detach().clone() for w in model.parameters()]\n" + STEP.format(more=used)
    assert not faults(text)
    assert not faults("model(next(iter(loader)).cuda()).pow(2).mean().backward()")  # no update


def test_a_graph_that_is_retained_counts_only_if_it_is_not_needed(faults):
    text = STEP.format(more="").replace("backward()", "backward(retain_graph=True)")
    [(kind, line)] = faults(text)
    assert (kind, line) == (FaultKind.RETAINED_GRAPH, "loss.backward(retain_graph=True)")
    again = "loss.backward(retain_graph=True)\n    out.sum().backward()"
    assert not faults(text.replace("loss.backward(retain_graph=True)", again))
