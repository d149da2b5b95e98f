"""Offloading against the plain step: the same bits, and what is on the device counted by hand."""

import dataclasses
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import memlab
from memlab import MemlabError, StepConfig, Workload
from memlab.techniques.checkpointing import checkpointing
from memlab.techniques.offload import offload, offloading
from memlab.techniques.offload.offloading import Offloader, offload_state
from memlab.techniques.script import script
from memlab.techniques.step import build_step
from memlab.trace import CATEGORIES, PHASES, Timeline
from memlab.tracing import fake_cuda
from memlab.workloads.language import Gpt
from tests.models import blocks
from tests.offload_parts import DEPTH, SAMPLES, WIDTH, Queue, chain, predicted, tanhs

ONE = SAMPLES * WIDTH * 4  # bytes of one activation


@pytest.mark.slow
def test_activations_wait_on_the_host_and_parameters_stay():
    plain, moved = predicted(chain()), predicted(chain(), offload_activations=True)
    # DEPTH outputs of a tanh, of which each next layer saves the same, and the batch
    assert f"{(DEPTH + 1) * ONE / 2**20:.1f} MiB of activations are held" in moved.notes[0]
    # on the device: two that leave or come, what an operator reads and writes, and the batch
    assert plain.peak_allocated_bytes - moved.peak_allocated_bytes >= (DEPTH - 4) * ONE
    assert moved.peak_by_category["parameters"] == plain.peak_by_category["parameters"]


def test_pinned_memory_is_locked_in_powers_of_two(monkeypatch):
    sizes = {1: 1, 2**20: 2**20, 2**20 + 1: 2**21, 9 * 2**28: 4 * 2**30, 0: 0}
    assert {size: offload.locked_bytes(size) for size in sizes} == sizes
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "pinned_max_round_threshold_mb:1")
    assert offload.locked_bytes(3 * 2**20) == 3 * 2**20
    assert offload.locked_bytes(3 * 2**18) == 2**20


def test_a_result_states_what_is_asked_of_the_host_and_what_is_locked():
    odd = Workload.from_module(
        nn.Sequential(nn.Linear(1100, 1100), *(nn.Tanh() for _ in range(4)), nn.Linear(1100, 1)),
        (torch.zeros(100, 1100), torch.zeros(100, 1)), nn.functional.mse_loss,
    )  # fmt: skip
    config = StepConfig(batch_size=100, optimizer="sgd", offload_activations=True)
    found, plain = memlab.predict(odd, config, "t4"), memlab.predict(odd, StepConfig(), "t4")
    num_saved = 5  # the batch and what each tanh returns, 440,000 bytes each
    assert found.host_bytes == num_saved * 440_000
    assert found.locked_host_bytes == num_saved * 2**19
    assert "PyTorch locks 2.50 MiB for them" in " ".join(found.notes)
    assert "where 2.50 MiB are locked for them" in memlab.explain(found).message
    assert plain.host_bytes is plain.locked_host_bytes is None


def test_a_policy_that_keeps_what_should_be_offloaded_is_said():
    kept = np.zeros((2, len(CATEGORIES)), np.int64)
    kept[:, CATEGORIES.index("activations")] = 300 * 2**20
    zeros = np.zeros(2, np.int32)
    phase = np.full(2, PHASES.index("forward"), np.int8)
    timeline = Timeline(bytes_by_category=kept, phase=phase, micro_batch=zeros, operator=zeros)
    little = offload.HostMemory(8 * 2**20, 8 * 2**20, 8 * 2**20)

    def said(policy, host=little):
        config = StepConfig(
            offload_activations=True, checkpointing="blocks", checkpoint_policy=policy
        )
        return " ".join(offload.notes(config, host, timeline))

    assert "Of 308 MiB of activations only 8.00 MiB were offloaded" in said("keep-matmuls")
    assert "only" not in said("recompute-all")
    assert "only" not in said("keep-matmuls", offload.HostMemory(2**28, 2**28, 2**28))


def test_a_batch_that_is_interpolated_does_not_repeat_what_another_holds_in_the_host():
    config = StepConfig(batch_size=SAMPLES, optimizer="sgd", offload_activations=True)
    one, other = memlab.predict_batches(chain(), config, [SAMPLES, 3 * SAMPLES], "h200")
    assert "interpolated" in other.message
    assert "held in host memory" in " ".join(one.notes)
    assert "held in host memory" not in " ".join(other.notes)


def test_copies_take_the_time_of_the_bus_or_hide_behind_kernels():
    plain, moved = predicted(chain()), predicted(chain(), offload_activations=True)
    on_the_bus = 2 * (DEPTH + 1) * ONE / 63e9
    assert on_the_bus < moved.step_seconds < plain.step_seconds + 2 * on_the_bus
    slower = memlab.predict(
        chain(), StepConfig(batch_size=SAMPLES, offload_activations=True), device="t4"
    )
    assert slower.step_seconds > moved.step_seconds + on_the_bus


def test_a_copy_that_the_model_makes_saves_nothing():
    class Naive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = tanhs()

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                x = x.cpu().to(layer.weight.device) if isinstance(layer, nn.Linear) else x
            return x

    plain = predicted(chain())
    naive = predicted(chain(build_model=Naive))
    assert naive.peak_allocated_bytes >= plain.peak_allocated_bytes
    assert naive.step_seconds > plain.step_seconds


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 2), ("sgd-momentum", 1)])
def test_the_optimizers_state_waits_on_the_host(optimizer, copies):
    plain = predicted(chain(), optimizer=optimizer, batch_size=2)
    moved = predicted(chain(), optimizer=optimizer, batch_size=2, offload_optimizer=True)
    state = copies * plain.peak_by_category["parameters"]
    assert plain.peak_by_category["optimizer_state"] >= state
    assert moved.peak_by_category["optimizer_state"] < 0.01 * state
    num_bytes = copies * DEPTH * (WIDTH + 1) * WIDTH * 4
    assert f"{num_bytes / 2**20:.2f} MiB of optimizer state are held" in moved.notes[0]
    assert moved.peak_allocated_bytes < plain.peak_allocated_bytes - 0.5 * state


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"checkpointing": "blocks"},
        {"memory_budget": 0.5},
        {"precision": "bf16-mixed", "accumulation_steps": 2},
        {"precision": "fp16-mixed", "optimizer": "sgd-momentum"},
        {"loss_chunks": 4},
    ],
    ids=str,
)
def test_it_goes_with_the_other_techniques(fields):
    gpt = Gpt(num_layers=3, hidden_size=128, num_heads=2, sequence_length=64, vocab_size=4000)
    fields = {"batch_size": 32, "optimizer": "adamw", **fields}
    plain = predicted(gpt.workload("gpt"), **fields)
    moved = predicted(
        gpt.workload("gpt"), **fields, offload_activations=True, offload_optimizer=True
    )
    assert moved.peak_allocated_bytes < plain.peak_allocated_bytes
    assert moved.peak_reserved_bytes < plain.peak_reserved_bytes


def test_on_a_cpu_and_compiled_it_is_refused():
    for field in ("offload_activations", "offload_optimizer"):
        config = StepConfig(**{field: True})
        with pytest.raises(MemlabError, match=f"{field}=True does nothing on a CPU"):
            build_step(blocks(), config, "cpu")
        assert memlab.predict(blocks(), config, device="cpu").outcome == "unsupported"
    compiled = StepConfig(offload_activations=True, compile=True)
    with pytest.raises(MemlabError, match="compile=False"):
        script(compiled, fake_cuda.device())


@pytest.fixture
def moves_all(monkeypatch):
    """Move tensors on the CPU too: to other memory of the CPU."""
    monkeypatch.setattr(offloading, "_is_worth_it", lambda tensor: True)


def gradients(model, offloader, batch, backward=torch.Tensor.backward):
    torch.manual_seed(1)
    with offloader or torch.enable_grad():
        loss = model(batch).square().mean()
    backward(loss)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("kind", ["plain", "checkpointed", "dropout", "shared"])
def test_gradients_are_the_same_bits(moves_all, kind):
    torch.manual_seed(0)
    parts = [nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8)]
    model = nn.Sequential(*parts, nn.Dropout(0.5)) if kind == "dropout" else nn.Sequential(*parts)
    if kind == "shared":
        model = nn.Sequential(parts[0], model)
    batch = torch.randn(6, 8)
    expected = gradients(model, None, batch)
    if kind == "checkpointed":
        model = nn.Sequential(*(nn.Sequential(part) for part in parts))
        checkpointing.apply(model, StepConfig(checkpointing="blocks"), compiled=False)
    offloader = Offloader(model)
    for _ in range(2):
        found = gradients(model, offloader, batch)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert offloader.host_bytes == 0
    assert offloader.peak_host_bytes > 0


def test_streams_copy_in_the_right_order(moves_all, monkeypatch):
    """Copies read tensors that are still there, and are made before anyone reads the copy."""
    copy, like = torch.Tensor.copy_, torch.empty_like

    def copy_later(target, source, non_blocking=False):
        if Queue.active is None:
            return copy(target, source)
        places = weakref.ref(target), weakref.ref(source)

        def run():
            both = [place() for place in places]
            assert both[1] is not None, "its memory was given back before it was copied"
            if both[0] is not None:
                copy(*both)

        Queue.active.waiting.append(run)
        return target.fill_(torch.nan)

    streams = Queue(), Queue()
    monkeypatch.setattr(torch.Tensor, "copy_", copy_later)
    monkeypatch.setattr(torch, "empty_like", lambda t, pin_memory=False, **k: like(t, **k))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Queue())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(offloading, "streams_of", lambda _: streams)
    model = nn.Sequential(*(p for _ in range(6) for p in (nn.Linear(8, 8), nn.Tanh())))
    batch = torch.randn(4, 8)
    expected = gradients(model, None, batch)
    for _ in range(2):
        found = gradients(model, Offloader(model), batch)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_graph_may_be_run_twice(moves_all):
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(3, 4)

    def twice(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    expected = [2 * gradient for gradient in gradients(model, None, batch)]
    found = gradients(model, Offloader(model), batch, twice)
    torch.testing.assert_close(found, expected)


def test_what_was_changed_since_is_saved_again(moves_all):
    scale, offset = torch.ones(4, requires_grad=True), torch.arange(4.0)
    with Offloader(nn.Linear(1, 1)):
        first = scale * offset
        with torch.no_grad():
            offset += 1  # autograd would refuse; the copy holds what was saved
        second = scale * offset
        nn.functional.relu(offset.neg_(), inplace=True)
        third = scale * offset
    (first + second + third).sum().backward()
    assert scale.grad.tolist() == [1.0, 3.0, 5.0, 7.0]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_updates_are_the_same_bits(kind):
    states = []
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        groups = [
            {"params": model[0].parameters()},
            {"params": [*model[2].parameters()], "lr": 0.1},
        ]
        momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(groups, lr=0.01, **momentum)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
        if is_offloaded:
            offload_state(optimizer)
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
        states.append([*model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_the_source_is_what_the_step_runs():
    config = StepConfig(offload_activations=True, offload_optimizer=True, loss_chunks=2)
    text = script(config, fake_cuda.device())
    assert "memlab." not in text
    scope = {}
    exec(text, scope)
    # where nothing can be moved it trains as the plain step
    plain = {}
    exec(script(StepConfig(loss_chunks=2), "cpu"), plain)
    workload, found = blocks(), []
    for train in (scope["train"], plain["train"]):
        torch.manual_seed(0)
        batches = [workload.make_batch(8) for _ in range(2)]
        model, losses = train(workload.build_model, batches, workload.compute_loss, "cpu")
        found.append((losses, [*model.state_dict().values()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.gpu
def test_on_a_card_the_gradients_are_the_same_and_memory_falls():
    config = StepConfig(batch_size=SAMPLES, offload_activations=True, offload_optimizer=True)
    assert memlab.verify(chain(), config, device="cuda").ok
    moved = memlab.measure(chain(), config, device="cuda", repeats=2)
    plain = memlab.measure(
        chain(), dataclasses.replace(config, offload_activations=False), device="cuda", repeats=2
    )
    assert moved.peak_allocated_bytes < plain.peak_allocated_bytes - (DEPTH - 4) * ONE
