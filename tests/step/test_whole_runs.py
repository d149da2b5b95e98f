"""Whole runs: against the real allocator, hand counts, `generate` itself, and plain training."""

import copy
import inspect
import json
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from memlab import Evaluation, Generation, MemlabError, StepConfig, TrainingRun, Workload, workloads
from memlab._util.units import format_bytes
from memlab.api import measure_run, predict_run
from memlab.devices.cards import Target, card
from memlab.memory.meter import Meter, record
from memlab.memory.replay import AllocatorSettings
from memlab.prediction import predict_run as recorded_run
from memlab.prediction import predict_run as repeats
from memlab.prediction.predict import notes_of_recording, predict_in_process
from memlab.prediction.predict_run import predict_run_in_process
from memlab.prediction.run_spec import RunSpec
from memlab.prediction.run_stages import ReplayedRun, evaluate, generate
from memlab.result import Source
from memlab.runtime.measure_run import measure_run_in_process
from memlab.techniques.step import build_step
from memlab.trace import Phase
from memlab.tracing.recording import OpTrace
from memlab.workloads.generation_caches import CACHE_ARGUMENTS, cache_argument
from tests.models import linear

CPU = Target(kind="cpu", card=None, name="cpu")
RANDOM = torch.get_rng_state().nbytes
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 256,
}  # fmt: skip


def predicted(workload, run, config=None, target=CPU, limit=None):
    config = config or StepConfig(batch_size=4)
    asked = RunSpec(workload=workload, config=config, run=run, seed=0, memory_limit=limit)
    return predict_run_in_process(asked, target, report=lambda _: None)


def measured(workload, run, config=None, limit=None):
    config = config or StepConfig(batch_size=4)
    asked = RunSpec(workload=workload, config=config, run=run, seed=0, memory_limit=limit)
    return measure_run_in_process(asked, torch.device("cpu"), report=lambda _: None)


def on_t4(workload, run, config=None, limit=None):
    return predicted(workload, run, config, Target(kind="cuda", card=card("t4"), name="t4"), limit)


def peaks(result):
    assert result.outcome == "ok", result.message
    return {str(stage.name): stage.peak_allocated_bytes for stage in result.stages}


def llama(tmp_path, adapter="lora", base="fp32", **changed):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | changed))
    return workloads.finetune(file, adapter=adapter, rank=4, base=base, tokens=32)


def no_mark(phase, number):
    """Mark nothing."""


def test_every_stage_of_a_vision_model_is_predicted_to_the_byte():
    workload = workloads.get("resnet-digits", hidden_sizes=(8, 16), depths=(1, 1))
    evaluation = Evaluation(batch_size=16, num_samples=160, keep_outputs="concatenated")
    run = TrainingRun(evaluate=evaluation, save=True, ema=True)
    told, real = predicted(workload, run), measured(workload, run)
    assert peaks(told) == peaks(real)
    for name in ("evaluation", "step"):
        assert told.stage(name).bytes_by_category == real.stage(name).bytes_by_category
    assert told.worst.name == real.worst.name


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_quantized_model_with_an_adapter_evaluates_and_generates(tmp_path, cache):
    pytest.importorskip("bitsandbytes")
    workload = llama(tmp_path, base="nf4")
    run = TrainingRun(
        evaluate=Evaluation(batch_size=8, num_samples=80, keep_outputs="list"),
        generate=Generation(batch_size=4, prompt_tokens=8, new_tokens=16, cache=cache),
    )
    told, real = peaks(predicted(workload, run)), peaks(measured(workload, run))
    assert told.keys() == real.keys()
    del real["build"]  # bitsandbytes quantizes layer by layer, which fake tensors do not show
    for name, nbytes in real.items():
        assert told[name] == pytest.approx(nbytes, rel=0.01), name


def test_what_generation_allocates_is_what_generate_does(tmp_path):
    # many prompts, so that the cache decides
    settings = Generation(batch_size=64, prompt_tokens=4, new_tokens=24)
    step = build_step(llama(tmp_path), StepConfig(batch_size=1), "cpu")
    ids = torch.randint(256, (64, 4))

    def traced(act):
        trace = record(act, Meter(), torch.device("cpu"))
        return int(np.cumsum(trace.nbytes).max())

    def real():
        step.model.eval()
        found = step.model.generate(
            input_ids=ids.clone(), attention_mask=torch.ones_like(ids), max_new_tokens=24,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        assert found.shape == (64, 28)
        step.model.train()

    own = traced(lambda: generate(step, settings, 24, no_mark))
    # 2 layers, 2 heads of 16 for keys and for values, fp32
    cache = 2 * 2 * 2 * 16 * 4 * 64 * 27
    assert own > cache
    assert own == pytest.approx(traced(real), rel=0.01)


def test_a_cache_is_as_large_as_counted_by_hand(tmp_path):
    a_token = 2 * 2 * 2 * 16 * 4 * 4  # layers, keys and values, heads, width, bytes, prompts
    ids_and_mask = 4 * 8 * 4 * 64 + 4 * 256 * 4
    for kind in ("static", "dynamic"):
        settings = Generation(batch_size=4, prompt_tokens=8, new_tokens=56, cache=kind)
        found = predicted(llama(tmp_path), TrainingRun(generate=settings))
        held = found.stage("generation").bytes_by_category["KV cache"]
        if kind == "static":
            # room for all 64; the peak is the prefill, in which no id has been chosen yet
            assert held == pytest.approx(64 * a_token, abs=ids_and_mask)
        else:
            # the last token is not passed on; the old keys or values of one layer stand beside
            # the new ones
            one = 62 * a_token // 4
            assert 62 * a_token <= held - one <= 63 * a_token + ids_and_mask


@pytest.mark.parametrize("name", CACHE_ARGUMENTS)
def test_a_cache_is_passed_by_the_name_that_transformers_gives_it(tmp_path, monkeypatch, name):
    llamas = pytest.importorskip("transformers").LlamaForCausalLM
    run = TrainingRun(generate=Generation(batch_size=4, prompt_tokens=8, new_tokens=8))
    expected = peaks(predicted(llama(tmp_path), run))
    original, here = llamas.forward, cache_argument(llamas)
    signature = inspect.signature(original)

    def forward(self, **given):
        return original(self, **{here if key == name else key: x for key, x in given.items()})

    forward.__signature__ = signature.replace(
        parameters=[
            each.replace(name=name) if each.name == here else each
            for each in signature.parameters.values()
        ]
    )
    monkeypatch.setattr(llamas, "forward", forward)
    assert cache_argument(llamas) == name
    assert peaks(predicted(llama(tmp_path), run)) == expected


def test_an_evaluation_counted_by_hand():
    # 64 -> 4096 numbers for 8 samples: the output is most of it
    model, batch = nn.Linear(64, 4096, bias=False), (torch.zeros(8, 64), torch.zeros(8, 4096))
    workload = Workload.from_module(model, batch, lambda out, target: out.sum())
    weight, x, out = 4 * 64 * 4096, 4 * 8 * 64, 4 * 8 * 4096
    target = out
    stands = weight + x + target  # the step's own batch
    by_hand = {
        "none": x + target + out,
        # the inputs of all but the last batch are gone, their labels are not
        "list": 10 * (out + target) + x,
        # nine batches beside ten, and the last one
        "concatenated": (9 + 10) * (out + target) + x + target + out,
    }
    for keep, held in by_hand.items():
        settings = Evaluation(batch_size=8, num_samples=80, keep_outputs=keep)
        run, config = TrainingRun(evaluate=settings), StepConfig(batch_size=8, optimizer="sgd")
        found = peaks(measured(workload, run, config))["evaluation"]
        assert peaks(predicted(workload, run, config))["evaluation"] == found
        assert 0 <= found - stands - held <= 16, keep  # the loss, and its sum


def test_evaluation_and_generation_leave_training_alone(tmp_path):
    config = StepConfig(batch_size=4)
    for workload in (
        workloads.get("resnet-digits", hidden_sizes=(8,), depths=(1,)),
        llama(tmp_path, adapter="none", attention_dropout=0.5),
    ):
        states = []
        for is_between in (False, True):
            step = build_step(workload, config, "cpu")
            step.model.get_submodule("").training = True
            frozen = next(m for m in step.model.modules() if not list(m.children()))
            frozen.eval()  # a module that a person has frozen stays so
            step.set_seed(0)
            step()
            if is_between:
                evaluate(step, Evaluation(batch_size=3), 2, no_mark)
                if hasattr(step.model, "generate"):
                    generate(step, Generation(prompt_tokens=4, new_tokens=3), 3, no_mark)
            assert not frozen.training
            assert sum(not m.training for m in step.model.modules()) == 1
            step.set_seed(0)
            loss = step()
            states.append((loss, copy.deepcopy(step.model.state_dict())))
        (loss, plain), (other_loss, other) = states
        assert loss == other_loss
        assert all(torch.equal(plain[name], other[name]) for name in plain)


@pytest.mark.slow
def test_batches_that_were_not_recorded_are_those_that_would_have_been(monkeypatch, tmp_path):
    run = TrainingRun(
        evaluate=Evaluation(batch_size=2, num_samples=22, keep_outputs="concatenated"),
        generate=Generation(batch_size=2, prompt_tokens=4, new_tokens=12),
    )
    traces = []
    real = recorded_run.RunRecording.trace
    monkeypatch.setattr(
        recorded_run.RunRecording, "trace",
        lambda self, own: traces.append(real(self, own)) or traces[-1],
    )  # fmt: skip
    few = on_t4(llama(tmp_path), run)
    monkeypatch.setattr(recorded_run, "MOST_BATCHES", 11)
    monkeypatch.setattr(recorded_run, "MOST_TOKENS", 12)
    every = on_t4(llama(tmp_path), run)
    assert peaks(few) == peaks(every)
    assert np.array_equal(np.abs(traces[0].nbytes), np.abs(traces[-1].nbytes))
    assert few.stages == every.stages


@pytest.mark.slow
def test_on_a_card_one_allocator_serves_the_whole_run(tmp_path):
    workload = workloads.get("gpt-small", num_layers=1, sequence_length=128)
    config = StepConfig(batch_size=4)

    def run(keep, **changed):
        settings = Evaluation(batch_size=8, num_samples=400, keep_outputs=keep, **changed)
        return TrainingRun(evaluate=settings)

    joined, listed = (on_t4(workload, run(keep), config) for keep in ("concatenated", "list"))
    # each longer tensor finds no free segment that is large enough
    assert joined.peak_reserved_bytes > 3 * joined.peak_allocated_bytes
    assert joined.peak_reserved_bytes > listed.peak_reserved_bytes
    paged = on_t4(workload, run("concatenated"), StepConfig(batch_size=4, expandable_segments=True))
    assert paged.peak_reserved_bytes < joined.peak_reserved_bytes
    # nothing is given back, so the step afterwards stands beside what the evaluation left
    after = joined.stage("step afterwards")
    assert after.peak_reserved_bytes >= joined.stage("evaluation").peak_reserved_bytes
    often = on_t4(workload, run("concatenated", to_host_every=4), config)
    assert often.stage("evaluation").peak_allocated_bytes < joined.peak_allocated_bytes / 2

    limit = int(1.3 * joined.stage("step").peak_reserved_bytes)
    judged = on_t4(workload, run("concatenated"), config, limit)
    assert [str(s.name) for s in judged.stages if not s.fits] == ["evaluation"]
    assert "evaluation does not fit" in str(judged)
    assert "does not fit" in judged._repr_html_()


def test_a_stage_that_does_not_fit_is_left_out_of_the_replay():
    found = on_t4(linear(), TrainingRun(save=True))
    assert found.fits is None
    trace = _trace_of_three_stages()
    replayed = ReplayedRun(trace, ["first step", "evaluation", "step"], AllocatorSettings())
    limit = 60 * 2**20
    assert [replayed.fits(name, limit) for name in ("first step", "evaluation", "step")] == [
        True, False, True,
    ]  # fmt: skip


def _trace_of_three_stages():
    """Return a run that allocates and frees 30, 90 and 40 MiB."""
    from memlab.trace import Interval, Trace

    sizes = np.array([30, -30, 90, -90, 40, -40], np.int64) * 2**20
    count = len(sizes)
    return Trace(
        address=np.array([1, 1, 2, 2, 3, 3]), nbytes=sizes,
        interval=np.array([0, 0, 1, 1, 2, 2], np.int32), operator=np.zeros(count, np.int32),
        in_operator=np.ones(count, bool), module=np.full(count, -1, np.int32),
        intervals=tuple(Interval(step=n, phase=Phase.FORWARD) for n in range(3)),
        operators=("aten::empty",), modules=(), parameters={}, leftover_bytes=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(Evaluation, batch_size=0), "batch_size=0 is below 1"),
        (partial(Evaluation, keep_outputs="all"), "allowed is one of 'none', 'concatenated'"),
        (partial(Evaluation, keep_outputs="list"), "add num_samples"),
        (partial(Evaluation, to_host_every=2), "does nothing with keep_outputs='none'"),
        (partial(Generation, new_tokens=0), "new_tokens=0 is below 1"),
        (partial(Generation, cache="paged"), "allowed is one of 'dynamic', 'static'"),
        (partial(TrainingRun, evaluate=8), "Evaluation"),
        (partial(TrainingRun, save="yes"), "save='yes' is not a bool"),
    ],
)
def test_a_wrong_value_is_named(make, words):
    with pytest.raises(MemlabError, match=words):
        make()


def test_settings_that_are_not_implemented_are_named():
    run = TrainingRun(generate=Generation())
    with pytest.raises(MemlabError, match="sharding='none'"):
        predict_run(linear(), StepConfig(batch_size=4, sharding="ddp", world_size=2), "t4")
    with pytest.raises(MemlabError, match="loss_chunks=1"):
        predict_run(linear(), StepConfig(batch_size=4, loss_chunks=2), "t4", run=run)
    settings = Evaluation(num_samples=8, keep_outputs="list", to_host_every=2)
    with pytest.raises(MemlabError, match="the device is the host"):
        measure_run(linear(), StepConfig(batch_size=4), "cpu", run=TrainingRun(evaluate=settings))


def test_what_a_model_cannot_do_is_an_outcome_with_a_remedy(tmp_path):
    generating = TrainingRun(generate=Generation(prompt_tokens=200, new_tokens=100))
    keeping = TrainingRun(evaluate=Evaluation(num_samples=8, keep_outputs="list"))
    cases = [
        (linear(), generating, "has no method generate()"),
        (llama(tmp_path), generating, "has 256 positions; allowed are at most 256"),
        (workloads.get("plain-mlp"), generating, "causal language model of transformers"),
        (workloads.get("lstm-text", hidden_size=16, sequence_length=8), keeping, "loss alone"),
    ]
    for workload, run, words in cases:
        for result in (predicted(workload, run), measured(workload, run)):
            assert result.outcome == "unsupported", result.message
            assert words in result.message
            assert result.worst is None
            assert str(result).startswith("unsupported")
            with pytest.raises(MemlabError, match="its outcome is unsupported: "):
                result.stage("step")


@pytest.mark.slow
def test_a_window_that_fills_during_generation_is_not_continued(tmp_path):
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    workload = llama(tmp_path, **mistral, sliding_window=16)
    filling = TrainingRun(generate=Generation(prompt_tokens=8, new_tokens=16))
    assert "a sliding window of 16 tokens" in predicted(workload, filling).message
    real = TrainingRun(generate=Generation(batch_size=4, prompt_tokens=20, new_tokens=12))
    assert peaks(predicted(workload, real)) == peaks(measured(workload, real))


def test_quantized_weights_are_not_averaged(tmp_path):
    pytest.importorskip("bitsandbytes")
    result = predicted(llama(tmp_path, base="nf4"), TrainingRun(ema=True))
    assert "would average as numbers" in result.message


@pytest.mark.slow
def test_techniques_of_training_do_nothing_in_an_evaluation(tmp_path):
    evaluation = Evaluation(batch_size=4, num_samples=16, keep_outputs="list")
    run = TrainingRun(
        evaluate=evaluation, generate=Generation(batch_size=2, prompt_tokens=8, new_tokens=8)
    )
    plain, recomputed = (
        predicted(llama(tmp_path), run, StepConfig(batch_size=4, checkpointing=how))
        for how in ("none", "blocks")
    )
    for name in ("evaluation", "generation"):
        assert peaks(plain)[name] == peaks(recomputed)[name]
    half = StepConfig(batch_size=4, precision="bf16-mixed")
    assert peaks(predicted(llama(tmp_path), run, half)) == peaks(
        measured(llama(tmp_path), run, half)
    )


def test_a_static_cache_of_one_format_refuses_two_in_the_same_words(tmp_path):
    half = StepConfig(batch_size=4, precision="bf16-mixed")
    static = TrainingRun(generate=Generation(prompt_tokens=8, new_tokens=8, cache="static"))
    told, real = (each(llama(tmp_path), static, half) for each in (predicted, measured))
    assert told.outcome == real.outcome == "unsupported"
    assert told.message == real.message
    assert "keys in float32 and values in bfloat16" in real.message
    assert "use cache='dynamic'" in real.message


def test_what_predict_says_of_kernels_a_run_says_with_its_stages(tmp_path):
    pytest.importorskip("transformers")
    config, t4 = StepConfig(batch_size=4), Target(kind="cuda", card=card("t4"), name="t4")
    evaluation = Evaluation(batch_size=4)
    run = TrainingRun(evaluate=evaluation, generate=Generation(prompt_tokens=8, new_tokens=4))
    of_step = predict_in_process(
        llama(tmp_path), config, t4, seed=0, memory_limit=None, report=lambda _: None
    ).result.notes
    [told] = [note for note in of_step if note.startswith("Attention runs in")]
    notes = on_t4(llama(tmp_path), run, config).notes
    [found] = [note for note in notes if note.startswith("Attention runs in")]
    # the batches of the evaluation are as large as the step's; a prompt of 8 tokens holds less
    stages, less = found.removeprefix(f"{told} This is in: ").split("; with ")
    assert stages == "first step, step, evaluation, step afterwards"
    weights = 4 * 8 * 8 * 4  # heads x tokens x tokens x bytes
    assert less == f"{format_bytes(weights)} a call and sample: generation."


def test_kernels_of_triton_are_said_in_the_notes_of_a_run():
    recording = OpTrace()
    recording.launches["mine.kernel"] = 2
    [note] = notes_of_recording(recording, CPU)
    assert "kernel: 2" in note


def test_a_run_that_is_too_long_to_hold_is_refused_with_what_is_allowed(monkeypatch):
    monkeypatch.setattr(repeats, "MOST_ROWS", 1000)

    def evaluating(batches):
        settings = Evaluation(batch_size=2, num_samples=2 * batches, keep_outputs="list")
        return predicted(linear(), TrainingRun(evaluate=settings))

    refused = evaluating(10**6)
    assert refused.outcome == "unsupported"
    assert "evaluate: num_samples / batch_size=1000000 makes a run of" in refused.message
    assert "holds at most 1,000" in refused.message
    most = int(re.search(r"at most (\d+); use that", refused.message)[1])
    assert most > 10
    assert evaluating(most).outcome == "ok"
    assert evaluating(most + 1).outcome == "unsupported"


def test_a_compiled_run_says_what_is_not_known():
    config = StepConfig(batch_size=4, compile=True)
    result = predicted(linear(), TrainingRun(), config)
    assert result.outcome == "unsupported"
    assert result.source is Source.PREDICTED
