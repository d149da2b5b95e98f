"""Weights in the host's memory against the plain step: the same bits, and bytes counted by hand.

On a CPU nothing is offloaded; here the check is off, and weights go to other memory of the CPU.
"""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import memlab
from memlab import MemlabError, Outcome, StepConfig, Workload
from memlab.devices.cards import resolve
from memlab.prediction.predict import predict_in_process
from memlab.runtime.measure import measure_in_process
from memlab.runtime.verify import verify_in_process
from memlab.techniques import every
from memlab.techniques.offload import offloading
from memlab.techniques.offload.offloading import Offloader
from memlab.techniques.script import script
from memlab.techniques.step import build_step
from memlab.tracing import fake_cuda
from tests.models import blocks
from tests.offload_parts import DEPTH, SAMPLES, WIDTH, Queue, chain, predicted
from tests.weight_offload_parts import (
    CPU,
    OFFLOADED,
    WORKLOADS,
    after_updates,
    gpt,
    mute,
    odd,
    plan_of,
)

WEIGHT = WIDTH * WIDTH * 4


def in_place():
    return Workload(
        name="in place",
        build_model=lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1)),
        make_batch=lambda n: torch.randn(n, 1, 6, 6),
        compute_loss=lambda model, x: model(x).square().mean(),
    )


TOGETHER = [
    {},
    {"checkpointing": "blocks"},
    {"checkpointing": "blocks", "checkpoint_policy": "keep-matmuls"},
    {"checkpointing": "blocks", "checkpoint_policy": "recompute-pointwise"},
    {"memory_budget": 0.5},
    {"memory_budget": 0.0, "offload_activations": True},
    {"optimizer_in_backward": True},
    {"optimizer_in_backward": True, "offload_optimizer": True, "offload_activations": True},
    {"accumulation_steps": 2, "offload_activations": True, "offload_fraction": 0.5},
    {"offload_optimizer": True, "optimizer": "sgd-momentum"},
    {"optimizer": "adafactor"},
    {"precision": "bf16-mixed", "memory_budget": 0.3},
    {"precision": "bf16-master", "offload_optimizer": True},
    {"precision": "bf16-stochastic", "optimizer_in_backward": True},
    {"init_on_meta": True},
]


@pytest.mark.parametrize("fields", TOGETHER, ids=str)
@pytest.mark.parametrize("name", WORKLOADS)
def test_updates_are_those_of_the_plain_step(possible, name, fields):
    workload, config = WORKLOADS[name](), StepConfig(batch_size=4, **fields)
    on_the_device = dataclasses.replace(
        config,
        offload_optimizer=False,
        offload_activations=False,
        offload_fraction=1.0,
        optimizer_in_backward=config.optimizer_in_backward,
    )
    expected = after_updates(workload, on_the_device)
    losses, weights = after_updates(workload, dataclasses.replace(config, **OFFLOADED))
    assert losses == expected[0]
    for path, weight in weights.items():
        assert torch.equal(weight, expected[1][path]), path


@pytest.mark.parametrize("fields", [{}, {"optimizer_in_backward": True}], ids=str)
def test_a_recompute_fetches_no_more_weights_than_it_uses(possible, monkeypatch, fields):
    come, here, most = offloading._Weight.come, [], [0]

    def counted(weight):
        come(weight)
        here[:] = {id(w): w for w in (*here, weight) if w.copy is not None}.values()
        most[-1] = max(most[-1], len(here))

    monkeypatch.setattr(offloading._Weight, "come", counted)
    for depth in (4, 8):
        workload = memlab.workloads.get("vit-digits", num_layers=depth, hidden_size=32, num_heads=2)
        config = StepConfig(batch_size=2, checkpointing="blocks", **fields, **OFFLOADED)
        step = build_step(workload, config, CPU)
        most.append(0)
        for _ in range(2):  # the first recompute looks at all that its module can reach
            step()
    assert most[1] == most[2] > 0


def test_a_reentrant_checkpoint_reads_weights_in_backward(possible):
    expected = after_updates(odd(reentrant=True), StepConfig(batch_size=4))
    losses, weights = after_updates(odd(reentrant=True), StepConfig(batch_size=4, **OFFLOADED))
    assert losses == expected[0]
    assert all(torch.equal(weights[name], value) for name, value in expected[1].items())


def test_activations_in_place_are_judged_with_weights_in_the_host(possible):
    config = StepConfig(batch_size=4, inplace=True)
    expected = after_updates(in_place(), config)
    losses, weights = after_updates(in_place(), dataclasses.replace(config, **OFFLOADED))
    assert losses == expected[0]
    assert all(torch.equal(weights[name], value) for name, value in expected[1].items())


def test_loss_in_chunks_reads_its_head_when_the_loss_is_taken(possible):
    config = StepConfig(batch_size=4, loss_chunks=3)
    expected = after_updates(gpt(), config)
    losses, weights = after_updates(gpt(), dataclasses.replace(config, **OFFLOADED))
    assert losses == expected[0]
    assert all(torch.equal(weights[name], value) for name, value in expected[1].items())


@pytest.mark.parametrize("name", WORKLOADS)
def test_verify_reads_gradients_and_frozen_weights_where_they_are(possible, name):
    config = StepConfig(batch_size=4, memory_budget=0.5, **OFFLOADED)
    workload = WORKLOADS[name]()
    plan = plan_of(workload, config)
    report = verify_in_process(workload, config, CPU, seed=0, plan=plan, report=mute)
    assert report.ok, str(report)
    assert report.bitwise, str(report)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"memory_budget": 0.3},
        {"optimizer_in_backward": True},
        {"precision": "bf16-mixed", "checkpointing": "blocks"},
    ],
    ids=str,
)
def test_measured_as_predicted(possible, fields):
    workload, config = gpt(), StepConfig(batch_size=4, optimizer="sgd", **fields, **OFFLOADED)
    plan = plan_of(workload, config)
    found = predict_in_process(
        workload, config, resolve("cpu"), seed=0, memory_limit=None, plan=plan, report=mute
    ).result
    measured = measure_in_process(
        workload,
        config,
        CPU,
        repeats=1,
        warmup=0,
        seed=0,
        memory_limit=None,
        plan=plan,
        report=mute,
    )
    assert measured.outcome is found.outcome is Outcome.OK, (measured.message, found.message)
    assert found.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=1e-3)
    assert not any("still held" in note for note in measured.notes)


def test_one_weight_and_the_next_are_on_the_device():
    fields = {"batch_size": 2, "optimizer": "sgd"}
    plain, moved = predicted(chain(), **fields), predicted(chain(), **fields, **OFFLOADED)
    assert plain.peak_by_category["parameters"] >= DEPTH * WEIGHT
    assert moved.peak_by_category["parameters"] < 0.1 * WEIGHT * DEPTH
    assert f"{DEPTH * WEIGHT / 2**20:.2f} MiB of parameters are held" in moved.notes[0]
    # the gradients of all weights, the last of which is there when its update comes
    saved = plain.peak_allocated_bytes - moved.peak_allocated_bytes
    assert saved >= (DEPTH - 3) * WEIGHT
    in_backward = predicted(chain(), **fields, **OFFLOADED, optimizer_in_backward=True)
    assert moved.peak_allocated_bytes - in_backward.peak_allocated_bytes >= (DEPTH - 3) * WEIGHT
    assert in_backward.peak_allocated_bytes < plain.peak_allocated_bytes


def test_each_weight_crosses_the_bus_four_times():
    plain = predicted(chain(), batch_size=2)
    moved = predicted(chain(), batch_size=2, **OFFLOADED)
    # to forward, to backward but for the first layer's, whose input needs no gradient, and to the
    # update and back, which nothing hides
    assert moved.step_seconds - plain.step_seconds >= 2 * DEPTH * WEIGHT / 63e9


def test_streams_copy_in_the_right_order(possible, monkeypatch):
    copy, like = torch.Tensor.copy_, torch.empty_like

    def copy_later(target, source, non_blocking=False):
        if Queue.active is None:
            return copy(target, source)
        Queue.active.waiting.append(lambda: copy(target, source))
        return target.fill_(torch.nan)

    streams = Queue(), Queue()
    monkeypatch.setattr(torch.Tensor, "copy_", copy_later)
    monkeypatch.setattr(torch, "empty_like", lambda t, pin_memory=False, **k: like(t, **k))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Queue())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    for module in (offloading, offloading):
        monkeypatch.setattr(module, "streams_of", lambda _: streams)
    config = StepConfig(batch_size=4, checkpointing="blocks")
    expected = after_updates(gpt(), config)
    losses, weights = after_updates(gpt(), dataclasses.replace(config, **OFFLOADED))
    assert losses == expected[0]
    assert all(torch.equal(weights[name], value) for name, value in expected[1].items())


def test_offloading_a_share_of_the_activations():
    plain, half, none, all_of_it = (
        predicted(chain(), **fields)
        for fields in (
            {},
            {"offload_activations": True, "offload_fraction": 0.5},
            {"offload_activations": True, "offload_fraction": 0.0},
            {"offload_activations": True},
        )
    )
    one = SAMPLES * WIDTH * 4
    assert none.peak_allocated_bytes == plain.peak_allocated_bytes
    assert "0 B of activations" in none.notes[0]
    assert f"{(DEPTH + 2) // 2 * one / 2**20:.1f} MiB of activations are held" in half.notes[0]
    peaks = [r.peak_allocated_bytes for r in (all_of_it, half, plain)]
    assert peaks[1] - peaks[0] >= one
    assert peaks[2] - peaks[1] >= one
    times = [r.step_seconds for r in (plain, half, all_of_it)]
    assert times == sorted(times)


def test_a_tensor_that_stays_is_counted_once(possible):
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(3, 4)
    offloader = Offloader(model, fraction=0.5)
    with offloader:
        model(batch)
    # the batch, and what the tanh saves and the last layer once more
    assert offloader._seen_bytes == 2 * batch.nbytes


def test_it_is_refused_on_a_cpu_compiled_and_with_a_share_of_nothing():
    with pytest.raises(MemlabError, match="offload_parameters=True does nothing on a CPU"):
        build_step(blocks(), StepConfig(**OFFLOADED), "cpu")
    for fields in ({"compile": True}, {"memory_budget": 0.5, "budget_engine": "compile"}):
        with pytest.raises(MemlabError, match="offload_parameters=True with"):
            script(StepConfig(**fields, **OFFLOADED), fake_cuda.device())
    with pytest.raises(MemlabError, match="precision='bf16-mixed'"):
        every.check(StepConfig(precision="fp8-mixed", **OFFLOADED), fake_cuda.device())
    with pytest.raises(MemlabError, match=r"offload_fraction=0\.5 does nothing"):
        StepConfig(offload_fraction=0.5)
    with pytest.raises(MemlabError, match="share of the activations that leave"):
        StepConfig(offload_activations=True, offload_fraction=1.5)


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16-master", "offload_optimizer": True},
        {"loss_chunks": 2, "optimizer_in_backward": True, "offload_optimizer": True},
        {"offload_activations": True, "offload_fraction": 0.5, "checkpointing": "blocks"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["blocks", "attention", "odd", "gpt"])
def test_the_source_is_what_the_step_runs(name, fields):
    if "loss_chunks" in fields and name in ("attention", "odd"):
        pytest.skip("its head does not go into a cross entropy as a module alone")
    results = []
    for more, device in ((OFFLOADED, fake_cuda.device()), ({}, CPU)):
        config = StepConfig(batch_size=8, **(fields if more else without_offload(fields)), **more)
        text = script(config, device).replace("SMALLEST_BYTES = 1 << 18", "SMALLEST_BYTES = 0")
        assert "memlab." not in text
        scope = {}
        exec(text, scope)
        workload = WORKLOADS[name]()
        torch.manual_seed(0)
        batches = [workload.make_batch(8) for _ in range(2)]
        torch.manual_seed(1)
        model, losses = scope["train"](workload.build_model, batches, workload.compute_loss, "cpu")
        with torch.no_grad():  # its weights stay where they are
            workload.compute_loss(copy.deepcopy(model).float(), batches[0])
            workload.compute_loss(model.float(), batches[0])
        results.append((losses, model.state_dict()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], value) for name, value in results[1][1].items())


def without_offload(fields):
    return {name: value for name, value in fields.items() if not name.startswith("offload")}


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{}, {"memory_budget": 0.3, "optimizer_in_backward": True}])
def test_on_a_card_the_gradients_are_the_same_and_memory_falls(fields):
    config = StepConfig(batch_size=64, **fields)
    moved = dataclasses.replace(config, **OFFLOADED)
    assert memlab.verify(chain(), moved, device="cuda").ok
    plain = memlab.measure(chain(), config, device="cuda", repeats=2)
    found = memlab.measure(chain(), moved, device="cuda", repeats=2)
    assert found.outcome is Outcome.OK
    assert found.peak_allocated_bytes < plain.peak_allocated_bytes - (DEPTH - 3) * WEIGHT
