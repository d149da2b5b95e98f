"""The loss by a package: against PyTorch's own cross entropy, and its bytes counted by hand.

trl's loss runs on a CPU, so it is measured. Liger's and cut cross-entropy consist of Triton
kernels: where these packages are installed, their bytes are predicted for a card.
"""

import math
import os
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from memlab import MemlabError, StepConfig
from memlab.config import LossKernel
from memlab.techniques.loss import fused_loss
from memlab.techniques.registry import check, is_refused
from memlab.techniques.step import build_step, set_seed
from memlab.techniques.technique import Setup, in_words
from memlab.trace import Phase
from memlab.tracing import fake_cuda
from memlab.tracing.tracker import Tracker, record_fake
from tests import ROOT
from tests.import_parts import needs_trl
from tests.loss_parts import (
    FEATURES,
    GPT,
    LOSSES,
    NO_HEAD,
    UNUSED,
    Head,
    assert_same_loss,
    labels_of,
)
from tests.models import ignored_labels, made_of, run_gradients
from tests.predictions import assert_predicted

TRL = {"loss_kernel": "chunked-nll"}


def with_kernel(model, kernel):
    fused_loss.apply(model, LossKernel(kernel))
    return model


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"smoothed", "in fp64"}))
def test_loss_and_gradients_are_those_of_pytorch(name, ignored, bias):
    needs_trl()
    assert_same_loss(
        LOSSES[name], partial(with_kernel, kernel="chunked-nll"), labels_of((4, 5), ignored), bias
    )


def test_verify_holds_it_against_the_loss_as_built():
    needs_trl()
    workload = ignored_labels()
    whole = run_gradients(workload, StepConfig(batch_size=7))
    found = run_gradients(workload, StepConfig(batch_size=7, accumulation_steps=3, **TRL))
    size = torch.stack([g.norm() for g in whole.values()]).norm()
    for name in whole:  # tokens that do not count are weighted over micro-batches
        assert (found[name] - whole[name]).norm() <= 1e-5 * size, name


@pytest.mark.slow
def test_it_is_predicted_as_it_is_measured():
    needs_trl()
    config = StepConfig(batch_size=8, **TRL)
    # a ten thousandth of its peak of more than 8 MiB
    _, measured = assert_predicted(GPT.workload("gpt"), config, within=800)
    assert measured.peak_allocated_bytes >= 8_000_000
    assert any("trl" in note for note in measured.notes)


def test_the_source_trains_as_the_step_does():
    needs_trl()
    config, workload = StepConfig(batch_size=4, **TRL), GPT.workload("gpt")
    found = fused_loss.source(Setup(config=config, device=torch.device("cpu")))
    text = "\n".join([*found.imports, *found.functions, *found.model])
    assert not re.search(r"^(from|import) memlab", text, re.MULTILINE)
    set_seed(0)
    model = GPT.build().train()
    exec(text, {"model": model, "__name__": "script"})
    set_seed(0)
    batch = workload.make_batch(4)
    set_seed(0)
    workload.compute_loss(model, batch).backward()
    expected = run_gradients(workload, config)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def test_the_backward_of_an_index_adds_in_place():
    class Indexed(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(16, 256), nn.Linear(256, 8)

        def forward(self, x, mask):
            return self.two(self.one(x)[mask])

    workload = made_of(
        Indexed,
        lambda n: (torch.randn(n, 16), torch.arange(n) % 4 != 0),
        lambda model, batch: model(*batch).square().mean(),
    )
    config = StepConfig(batch_size=1024)
    # a copy would take as much as all rows: half of the peak, which is above 1 MiB
    assert_predicted(workload, config, within=10_000)


def test_what_it_cannot_compute_is_refused():
    needs_trl()
    for name in ("smoothed", "in fp64"):
        with pytest.raises(MemlabError, match="use loss_kernel='as-built'"):
            with_kernel(Head(LOSSES[name]), "chunked-nll")(
                torch.randn(4, 5, FEATURES), labels_of((4, 5))
            )
    model = with_kernel(Head(lambda x, y: x.softmax(-1)[..., 0].mean()), "chunked-nll")
    with pytest.raises(MemlabError, match="loss_kernel: softmax needs all logits"):
        model(torch.randn(4, 5, FEATURES), labels_of((4, 5)))
    with pytest.raises(MemlabError, match=r"Conv1d has no nn\.Linear .*'as-built'"):
        build_step(NO_HEAD, StepConfig(**TRL), "cpu")
    with pytest.raises(
        MemlabError, match="loss_kernel='chunked-nll' does nothing: the output of 1"
    ):
        build_step(UNUSED, StepConfig(**TRL), "cpu")()


def refused(device="cuda", **fields):
    asked = Setup(config=StepConfig(**fields), device=torch.device(device))
    return list(fused_loss.refusals(asked))


REFUSED = [
    {"loss_kernel": "chunked-nll", "loss_chunks": 4},
    {"loss_kernel": "liger", "compile": True},
    {"loss_kernel": "cut", "precision": "fp32"},
    {"loss_kernel": "liger", "precision": "fp16-mixed"},
    {"loss_kernel": "chunked-nll", "sharding": "ddp", "world_size": 2},
]


@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_each_remedy_lifts_its_refusal(fields, monkeypatch):
    monkeypatch.setattr(fused_loss, "find_spec", lambda name: name)
    found = refused(**fields)
    assert len(found) == 1
    for remedy in found[0].remedies:
        assert in_words(remedy) in str(found[0])
        assert not refused(**{**fields, **remedy}), remedy


def test_kernels_of_a_card_and_missing_packages_say_what_to_do(monkeypatch):
    monkeypatch.setattr(fused_loss, "find_spec", lambda name: name)
    with pytest.raises(MemlabError, match=r"Triton kernels.*predict the step for a card"):
        check(StepConfig(loss_kernel="liger"), torch.device("cpu"))
    assert is_refused(StepConfig(loss_kernel="cut"), "cpu")
    assert not is_refused(StepConfig(loss_kernel="cut"), "cuda")
    monkeypatch.setattr(fused_loss, "find_spec", lambda name: None)
    for kernel, install in (("liger", "liger-kernel"), ("cut", "cut-cross-entropy")):
        with pytest.raises(MemlabError, match=f"not installed; use .*pip install {install}"):
            check(StepConfig(loss_kernel=kernel), torch.device("cuda"))
    # found, and it cannot be imported: Liger without Triton
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(MemlabError, match=r"cannot be imported here.*pip install liger-kernel"):
        with_kernel(nn.Sequential(nn.Linear(2, 2)), "liger")


TOKENS, WIDTH, WORDS = 1000, 256, 8000
KERNELS = {"liger": "liger_kernel", "cut": "cut_cross_entropy", "chunked-nll": "trl"}


def recorded(kernel, *, is_frozen):
    """Return what loss and backward allocate on a card, by bytes, and the most held by them."""

    def run(_):
        tracker.mark(0, Phase.BUILD, 0)
        head = nn.Linear(WIDTH, WORDS, bias=False, dtype=torch.bfloat16).to(device)
        head.weight.requires_grad_(not is_frozen)
        hidden = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True)
        labels = torch.zeros(TOKENS, dtype=torch.long, device=device)
        with_kernel(nn.Sequential(head), kernel)
        tracker.mark(0, Phase.FORWARD, 0)
        loss = cross_entropy(head(hidden), labels)
        tracker.mark(0, Phase.BACKWARD, 0)
        loss.backward()

    with fake_cuda.as_cuda((8, 0)) as device:
        tracker = Tracker(device.type)
        recording = record_fake(run, tracker)
    phases = [interval.phase for interval in recording.intervals]
    born = [b.nbytes for b in recording.blocks
            if phases[recording.operators[b.operator].interval] is not Phase.BUILD]  # fmt: skip
    held = most = 0
    for event in recording.events:
        block = recording.blocks[event.block]
        if phases[recording.operators[block.operator].interval] is not Phase.BUILD:
            held += block.nbytes if event.is_birth else -block.nbytes
            most = max(most, held)
    return sorted(n for n in born if n > 16 * TOKENS), most


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_it_allocates_is_what_its_source_says(kernel, is_frozen):
    """Counted in the packages' sources, which the files of memlab quote; all in bf16."""
    if kernel == "chunked-nll":
        needs_trl()
    else:
        pytest.importorskip("triton", reason=f"needs triton and {KERNELS[kernel]}")
        pytest.importorskip(KERNELS[kernel])
    large, most = recorded(kernel, is_frozen=is_frozen)
    of_hidden, of_head = 2 * TOKENS * WIDTH, 2 * WORDS * WIDTH
    if kernel == "liger":
        chunk = 2 ** math.ceil(math.log2(math.ceil(TOKENS / math.ceil(WORDS / WIDTH))))
        assert chunk == 32
        logits = 2 * chunk * WORDS
        expected = [of_hidden, logits, *([] if is_frozen else [of_head])]
    elif kernel == "cut":
        # mean logits; sorted, their order, as int32; locks
        by_class = [4 * WORDS] * 4 + [8 * WORDS]
        expected = [of_hidden, *([] if is_frozen else [of_head])]
        expected += [n for n in by_class if n > 16 * TOKENS]
    else:
        tile = 2 * TOKENS * 32768
        compact = [of_hidden] * 2  # tokens with labels, and their gradient among all tokens
        expected = [tile, tile, *compact, 2 * of_hidden, of_hidden]  # summed in fp32
        expected += [] if is_frozen else [2 * of_head, of_head]
    assert large == sorted(expected)
    assert most <= sum(expected) + 100 * TOKENS


INTERPRETED = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad
from memlab.config import LossKernel
from memlab.techniques.loss import fused_loss

torch.manual_seed(0)
for reduction in ("mean", "sum", "none"):
    head, hidden = nn.Linear(64, 96), torch.randn(4, 8, 64)
    labels = torch.randint(96, (4, 8))
    labels.flatten()[::3] = -100
    shifted = pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)  # as transformers does it
    found = []
    for is_fused in (False, True):
        if is_fused:
            fused_loss.apply(nn.Sequential(head), LossKernel.LIGER)
        given = hidden.clone().requires_grad_()
        loss = cross_entropy(head(given).view(-1, 96), shifted, reduction=reduction)
        loss = loss.square().mean()
        found.append([loss, *torch.autograd.grad(3 * loss, [given, *head.parameters()])])
    for fused, plain in zip(*reversed(found)):
        assert (fused - plain).norm() <= 1e-5 * plain.norm(), reduction
"""


@pytest.mark.slow
def test_ligers_gradients_are_the_plain_ones_in_tritons_interpreter():
    pytest.importorskip("triton", reason="needs triton and liger-kernel")
    pytest.importorskip("liger_kernel")
    given = os.environ | {"TRITON_INTERPRET": "1"}  # read when Triton is imported
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env=given, cwd=ROOT)
