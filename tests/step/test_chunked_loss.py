"""The chunked loss against PyTorch's own cross entropy, its bytes against the allocator."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import memlab
from memlab import MemlabError, Outcome, StepConfig
from memlab.techniques.loss import chunked_loss
from memlab.techniques.loss.logits import ChunkedHead, LazyLogits
from memlab.techniques.step import build_step
from memlab.workloads.language import Gpt, Lstm
from tests.loss_parts import (
    CLASSES,
    FEATURES,
    GPT,
    LOSSES,
    NO_HEAD,
    UNUSED,
    Head,
    assert_same_loss,
    labels_of,
)
from tests.models import blocks, ignored_labels, made_of, run_gradients


def chunked(num_chunks=3):
    return lambda model: chunked_loss.apply(model, num_chunks)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_pytorch(name, ignored, bias):
    assert_same_loss(LOSSES[name], chunked(), labels_of((4, 5), ignored), bias)


@pytest.mark.parametrize("num_chunks", [1, 2, 7, 20, 1000])
def test_any_number_of_chunks_gives_the_same(num_chunks):
    assert_same_loss(LOSSES["mean"], chunked(num_chunks), labels_of((4, 5), ignored=True))


def test_only_what_needs_a_gradient_gets_one():
    model = Head(LOSSES["mean"])
    model.head.weight.requires_grad_(False)
    chunked_loss.apply(model, 2)
    hidden = torch.randn(4, 5, FEATURES)
    model(hidden, labels_of((4, 5))).backward()
    assert model.head.weight.grad is None
    assert model.head.bias.grad is not None


REFUSED = {
    "softmax": lambda x, y: x.softmax(-1)[..., 0].mean(),
    "tanh": lambda x, y: cross_entropy((30 * torch.tanh(x / 30)).flatten(0, 1), y.flatten()),
    "argmax": lambda x, y: cross_entropy(x.flatten(0, 1), y.flatten()) + x.argmax(-1).sum(),
    "of some classes": lambda x, y: cross_entropy(x[..., :9].flatten(0, 1), y.flatten() % 9),
    "mixed up": lambda x, y: cross_entropy(x.mT.reshape(-1, CLASSES), y.flatten()),
    "class weights": lambda x, y: cross_entropy(
        x.flatten(0, 1), y.flatten(), weight=torch.ones(CLASSES)
    ),
    "probabilities": lambda x, y: cross_entropy(x.flatten(0, 1), torch.ones(20, CLASSES)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_whole_logits_is_refused(name):
    model = Head(REFUSED[name])
    chunked_loss.apply(model, 2)
    with pytest.raises(MemlabError, match="loss_chunks=1"):
        model(torch.randn(4, 5, FEATURES), labels_of((4, 5)))


def test_a_model_without_a_head_or_a_loss_is_refused():
    with pytest.raises(MemlabError, match=r"Conv1d has no nn\.Linear"):
        build_step(NO_HEAD, StepConfig(loss_chunks=2), "cpu")
    with pytest.raises(MemlabError, match="compile=False"):
        build_step(blocks(), StepConfig(loss_chunks=2, compile=True), "cpu")
    with pytest.raises(MemlabError, match=r"the output of 1, .* was not used in a cross"):
        build_step(UNUSED, StepConfig(loss_chunks=2), "cpu")()
    squared = memlab.measure(
        dataclasses.replace(blocks(), compute_loss=lambda m, b: m(b[0]).square().mean()),
        StepConfig(loss_chunks=2), device="cpu", isolate=False, repeats=1,
    )  # fmt: skip
    assert squared.outcome is Outcome.UNSUPPORTED
    assert "square" in squared.message


def test_the_head_is_what_transformers_says_and_else_the_last_linear():
    model = GPT.build()
    assert chunked_loss.find_head(model)[0] == "lm_head"
    wrapped = nn.Sequential(model, nn.Linear(2, 2))
    assert chunked_loss.find_head(wrapped)[0] == "0.lm_head"
    assert chunked_loss.find_head(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))[0] == "1"


def models_own_loss(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 300, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "llama":
        config = transformers.LlamaConfig(**sizes, hidden_size=16, intermediate_size=32)
        return transformers.LlamaForCausalLM(config)
    if name == "bert":
        config = transformers.BertConfig(**sizes, hidden_size=16, intermediate_size=32)
        return transformers.BertForMaskedLM(config)
    config = transformers.T5Config(
        vocab_size=300,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_a_model_that_computes_its_own_loss_is_chunked(name):
    def loss(model, tokens):
        labels = tokens.clone()
        labels[:, :3] = -100
        return model(input_ids=tokens, labels=labels).loss

    workload = made_of(
        lambda: models_own_loss(name), lambda n: torch.randint(300, (n, 12)), loss, name=name
    )
    # dropout draws the same numbers: the head draws none
    plain = run_gradients(workload, StepConfig(batch_size=3))
    chunked = run_gradients(workload, StepConfig(batch_size=3, loss_chunks=4))
    size = torch.stack([g.norm() for g in plain.values()]).norm()
    for path, expected in plain.items():
        assert (chunked[path] - expected).norm() <= 1e-5 * size, path


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"accumulation_steps": 3},
        {"precision": "bf16-mixed"},
        {"precision": "bf16"},
        {"precision": "fp16-mixed", "batch_size": 2},
        {"checkpointing": "blocks"},
        {"memory_budget": 0.4},
    ],
    ids=str,
)
def test_verify_holds_it_against_the_whole_loss(config):
    config = StepConfig(**{"batch_size": 4, "loss_chunks": 5, **config})
    report = memlab.verify(GPT.workload("gpt"), config, device="cpu")
    assert report.ok, report
    # sums in another order: were it zero, the reference would be chunked too
    assert report.global_relative_error > 0


def test_tokens_that_do_not_count_are_weighted_over_micro_batches():
    workload = ignored_labels()
    whole = run_gradients(workload, StepConfig(batch_size=7))
    config = StepConfig(batch_size=7, accumulation_steps=3, loss_chunks=4)
    found = run_gradients(workload, config)
    for name in whole:
        torch.testing.assert_close(found[name], whole[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [GPT, Lstm(hidden_size=16, sequence_length=32, vocab_size=2000)])
def test_logits_are_never_whole_and_the_prediction_knows(spec):
    workload = spec.workload("words")
    peaks = {}
    for num_chunks in (1, 8):
        config = StepConfig(batch_size=16, loss_chunks=num_chunks)
        measured = memlab.measure(workload, config, device="cpu", repeats=1)
        predicted = memlab.predict(workload, config, device="cpu")
        assert measured.outcome is Outcome.OK, measured.message
        error = abs(predicted.peak_allocated_bytes / measured.peak_allocated_bytes - 1)
        assert error <= predicted.uncertainty["peak_allocated_bytes"]
        peaks[num_chunks] = measured.peak_allocated_bytes
    logits = 16 * 32 * 2000 * 4
    if isinstance(spec, Gpt):  # at the peak the plain step holds two of three, chunks an eighth
        assert peaks[1] - peaks[8] >= 1.5 * logits
    assert peaks[8] < 0.6 * peaks[1]


def test_logits_say_what_they_are_without_being_made():
    linear = nn.Linear(FEATURES, CLASSES)
    with torch.autocast("cpu", torch.bfloat16):
        logits = ChunkedHead(linear, 2)(torch.randn(4, 5, FEATURES))
    assert isinstance(logits, torch.Tensor)
    assert type(logits) is LazyLogits
    assert (logits.shape, logits.dtype) == ((4, 5, CLASSES), torch.bfloat16)
    assert (logits.size(-1), logits.numel(), logits.dim()) == (CLASSES, 20 * CLASSES, 3)
    assert logits.float().transpose(1, 2).shape == (4, CLASSES, 5)
    assert logits.unsqueeze(0).squeeze(0)[1:, ..., :].shape == (3, 5, CLASSES)
