"""Operators run alone against the same operators in a real training step, byte for byte."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memlab
from memlab import StepConfig
from memlab._util.units import GIB, KIB, MIB
from memlab.cost_model.calibration import calibrate, overhead_seconds
from memlab.cost_model.cost_store import Store
from memlab.devices.operators import (
    RNN_BACKWARD,
    TensorSpec,
    build,
    signature_of,
    smaller,
    tensors_of,
    to_text,
)
from memlab.memory.meter import Meter, record
from memlab.techniques.step import build_step, set_seed
from memlab.trace import Phase
from tests.models import blocks, ignored_labels
from tests.processor import has_bf16_kernels

aten = torch.ops.aten
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    """Other work on the machine makes threads wait for one another, and costs the tests minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class InPlace(TorchDispatchMode):
    """Marks each dispatched operator in the profile and keeps its outputs' addresses."""

    def __init__(self, meter):
        super().__init__()
        self.meter, self.calls = meter, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        signature = signature_of(func, args, kwargs or {})
        self.meter.mark(len(self.calls), Phase.FORWARD, 0)
        outputs = func(*args, **(kwargs or {}))
        self.meter.mark(-1, Phase.FORWARD, 0)
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        self.calls.append((signature, [t.untyped_storage().data_ptr() for t in tensors]))
        return outputs


def in_place(run):
    """Return {signature: {(output bytes, peak, kept)}} as `run` really allocates."""
    meter = Meter()
    mode = InPlace(meter)
    trace = record(lambda: run(mode), meter, CPU)
    events = defaultdict(list)
    for interval, address, nbytes in zip(trace.interval, trace.address, trace.nbytes, strict=True):
        events[trace.intervals[interval].step].append((int(address), int(nbytes)))
    seen = defaultdict(set)
    for number, (signature, outputs) in enumerate(mode.calls):
        live, peak = {}, 0
        for address, nbytes in events[number]:
            if nbytes > 0:
                live[address] = nbytes
                peak = max(peak, sum(live.values()))
            else:
                live.pop(address, None)
        output_bytes = tuple(live.pop(address, 0) for address in outputs)
        seen[signature].add((output_bytes, peak, sum(live.values())))
    return seen


def alone(signatures, **options):
    settings = {"timed": False, "store": None, "max_bytes": GIB} | options
    return calibrate(signatures, **settings)


def differences(run):
    """Return the operators that cost something else alone, or nothing at all."""
    seen = {s: costs for s, costs in in_place(run).items() if not s[0].startswith("profiler.")}
    costs = alone(seen)
    assert len(seen) > 0
    assert costs.reasons == {}
    return {
        to_text(signature): (expected, costs[signature])
        for signature, expected in seen.items()
        if expected
        != {
            (
                costs[signature].output_bytes,
                costs[signature].peak_bytes,
                costs[signature].kept_bytes,
            )
        }
    }


ZOO = [("gpt-small", 2), ("resnet-digits", 8), ("lstm-text", 4), ("vit-digits", 4)]


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize(("name", "batch_size"), ZOO)
def test_operators_of_a_real_step_cost_the_same_alone(name, batch_size, precision):
    if (name, precision) == ("lstm-text", "bf16-mixed") and not has_bf16_kernels():
        pytest.skip(
            "this CPU has no LSTM in bf16; test_foreseen_values has that a prediction says so"
        )
    config = StepConfig(batch_size=batch_size, precision=precision)

    def run(mode):
        step = build_step(memlab.workloads.get(name, dropout=0.1), config, CPU)
        step()
        set_seed(0)
        with mode:
            step()

    assert differences(run) == {}


@pytest.mark.parametrize("workload", [blocks(norm=True, dropout=0.3), ignored_labels()])
@pytest.mark.parametrize("optimizer", ["sgd-momentum", "adam"])
def test_operators_of_small_models_cost_the_same_alone(workload, optimizer):
    def run(mode):
        step = build_step(workload, StepConfig(batch_size=6, optimizer=optimizer), CPU)
        with mode:
            step()
            step()

    assert differences(run) == {}


def test_operators_that_models_outside_the_zoo_use():
    def run(mode):
        x = torch.randn(4, 6, 10, 10, requires_grad=True)
        index = torch.randint(10, (4, 6, 10, 10))
        embedding = torch.randn(50, 8, requires_grad=True)
        with mode:
            pooled, _ = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
            picked = x.gather(3, index).scatter_add(2, index, x)[:, torch.tensor([0, 2])]
            normed = torch.nn.functional.group_norm(x, 2)
            up = torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear")
            wide = torch.nn.functional.unfold(x, 3).cumsum(1).sort(dim=-1).values
            strided = x.detach().as_strided((4, 3, 8), (600, 1, 2)) * 2  # elements overlap
            drawn = torch.nn.functional.dropout(x, 0.5) + torch.empty(10).bernoulli_(0.5)
            rows = torch.nn.functional.embedding(index[0, 0], embedding)
            parts = (pooled, picked, normed, up, wide, strided, drawn, rows.softmax(-1))
            sum(part.float().mean() for part in parts).backward()
            lists = [x.detach(), embedding.detach()]
            torch._foreach_mul_(torch._foreach_sqrt(torch._foreach_add(lists, 1.0)), 0.5)
            torch.where(x > 0, x, -x).topk(3)

    assert differences(run) == {}


def test_a_matrix_product_is_counted_by_hand():
    x, y = torch.ones(10, 20), torch.ones(20, 30)
    (cost,) = alone([signature_of(aten.mm.default, (x, y), {})]).values()
    assert (cost.output_bytes, cost.peak_bytes, cost.kept_bytes) == ((1200,), 1200, 0)
    assert cost.seconds is None
    assert not cost.extrapolated


def lstm_backward(workspace_bytes, steps=5, size=8):
    """Return the signatures of an LSTM layer's forward and backward, the latter as given."""

    def run(mode):
        lstm = torch.nn.LSTM(size, size)
        with mode:
            lstm(torch.ones(steps, 3, size))[0].sum().backward()

    seen = in_place(run)
    (signature,) = [s for s in seen if s[0] == RNN_BACKWARD]
    workspace = TensorSpec(torch.uint8, (workspace_bytes,), (1,))
    return signature, (signature[0], (*signature[1][:-1], workspace), signature[2])


def test_an_lstm_runs_backward_though_fake_tensors_give_it_no_workspace():
    real, fake = lstm_backward(workspace_bytes=0)
    costs = alone([real, fake])
    assert costs.reasons == {}
    assert costs[real] == costs[fake]
    assert costs[real].peak_bytes > 0


def test_an_lstm_that_is_too_large_runs_over_fewer_time_steps():
    """Its kernel does not look whether weights have the size of the state, and would crash."""
    _, fake = lstm_backward(workspace_bytes=0, steps=80, size=64)  # the weights are its largest
    specs, fewer = tensors_of(fake), tensors_of(smaller(fake, 0.5)[0])
    assert {(one.shape, other.shape) for one, other in zip(specs, fewer, strict=True)} == {
        *[(one.shape, one.shape) for one in specs if len(one.shape) < 3],
        ((80, 3, 64), (40, 3, 64)),
    }

    whole, cut = alone([fake]), alone([fake], max_bytes=420 * KIB)
    assert cut[fake].extrapolated
    assert not whole[fake].extrapolated
    assert cut[fake].output_bytes == whole[fake].output_bytes
    assert cut[fake].peak_bytes == pytest.approx(whole[fake].peak_bytes, rel=0.01)


def test_norms_run_backward_though_fake_tensors_say_bf16_of_their_statistics():
    x, weight = torch.ones(8, 16, 4, 4, dtype=torch.bfloat16), torch.ones(16)

    def call(dtype):
        saved = torch.ones(16, dtype=dtype)
        args = (x, x, weight, weight, weight, saved, saved, True, 1e-5, [True] * 3)
        return signature_of(aten.native_batch_norm_backward.default, args, {})

    costs = alone([call(torch.float32), call(torch.bfloat16)])
    assert costs.reasons == {}
    assert costs[call(torch.float32)] == costs[call(torch.bfloat16)]


def test_whole_numbers_that_divide_are_not_zero():
    x = torch.ones(4, dtype=torch.int64)
    signature = signature_of(aten.remainder.Tensor, (x, x), {})
    assert alone([signature])[signature].output_bytes == (32,)


def test_what_cannot_run_alone_says_why():
    unknown = ("nowhere.operator.default", (), ())
    wrong = ("aten.mm.default", (TensorSpec(torch.float32, (2, 3), (3, 1)),) * 2, ())
    good = ("aten.relu.default", (TensorSpec(torch.float32, (2, 3), (3, 1)),), ())
    costs = alone([unknown, wrong, good])
    assert costs[unknown] is None
    assert costs[wrong] is None
    assert costs[good].output_bytes == (24,)
    assert "AttributeError" in costs.reasons[unknown]
    assert "RuntimeError" in costs.reasons[wrong]
    assert set(costs.reasons) == {unknown, wrong}


LARGE = [
    (aten.relu.default, (torch.ones(400, 300),), 400 * 300 * 4),
    (aten.mm.default, (torch.ones(1000, 100), torch.ones(100, 50)), 1000 * 50 * 4),
    (aten.mm.default, (torch.ones(100, 1000).t(), torch.ones(100, 50)), 1000 * 50 * 4),
    (aten.cat.default, ([torch.ones(500, 90), torch.ones(500, 30)], 1), 500 * 120 * 4),
    (aten.zeros_like.default, (torch.ones(2**16, dtype=torch.int64),), 2**19),
    (aten._foreach_add.Scalar, ([torch.ones(300, 100), torch.ones(50_000)], 1), 120_000),
]


@pytest.mark.parametrize(("func", "args", "first"), LARGE)
def test_an_operator_too_large_to_run_is_extrapolated_to_its_bytes(func, args, first):
    signature = signature_of(func, args, {})
    exact = alone([signature])[signature]
    cost = alone([signature], max_bytes=128 * KIB)[signature]
    assert not exact.extrapolated
    assert cost.extrapolated
    assert exact.output_bytes[0] == first
    # the tensors of a list are cut to whole rows, each for itself
    error = 0.05 if len(exact.output_bytes) > 1 else 0.0
    assert cost.output_bytes == pytest.approx(exact.output_bytes, rel=error)
    assert cost.peak_bytes == pytest.approx(exact.peak_bytes, rel=error)


def test_an_operator_far_beyond_this_machine_is_known_without_its_memory():
    huge = TensorSpec(torch.float32, (2**20, 2**20), (2**20, 1))  # 4 TiB
    row = TensorSpec(torch.float32, (2**20,), (1,))
    view, add = ("aten.t.default", (huge,), ()), ("aten.relu.default", (huge,), ())
    total = ("aten.add.Tensor", (huge, row), ())
    costs = alone([view, add, total], max_bytes=64 * MIB)
    assert costs[view].output_bytes == (0,)
    assert costs[add].output_bytes == (4 * 2**40,)
    assert costs[add].extrapolated


def test_smaller_cuts_sizes_with_their_tensors():
    x = TensorSpec(torch.float32, (1000, 8), (8, 1))
    text = to_text(smaller(("aten.new_zeros.default", (x, (1000, 4)), ()), 0.1)[0])
    assert text == "aten.new_zeros.default(float32((100, 8), (8, 1)), (100, 4))"
    assert smaller(("aten.relu.default", (x._replace(shape=(1, 8)),), ()), 0.1) is None


def test_costs_come_from_the_store_when_they_are_known(tmp_path):
    signature = signature_of(aten.relu.default, (torch.ones(10),), {})
    first = alone([signature], store=Store(tmp_path))
    assert first[signature].seconds is None
    timed = alone([signature], store=Store(tmp_path), timed=True)
    assert timed[signature].seconds > 0
    for want_time in (True, False):
        seen = []
        again = alone([signature], store=Store(tmp_path), timed=want_time, on_progress=seen.append)
        assert again == timed
        assert seen == []  # nothing was run


def test_progress_is_told_and_the_generator_left_alone():
    x = torch.ones(10)
    calls = [signature_of(aten.bernoulli_.float, (x, p), {}) for p in (0.1, 0.2, 0.3, 0.4)]
    before, seen = torch.get_rng_state(), []
    alone(calls, on_progress=seen.append)
    assert torch.equal(torch.get_rng_state(), before)
    assert seen == [0.25, 0.5, 0.75, 1.0]


def test_what_goes_around_an_operator_is_measured_once(tmp_path):
    seconds = overhead_seconds(Store(tmp_path))
    assert {str(phase) for phase in seconds} == {"forward", "backward", "optimizer"}
    assert all(abs(value) < 1.0 for value in seconds.values())
    assert overhead_seconds(Store(tmp_path)) == seconds


def test_a_function_of_matrices_runs_alone_on_numbers_that_do_not_overflow():
    signature = signature_of(torch.ops.aten.linalg_matrix_exp.default, (torch.empty(256, 256),), {})
    assert build(signature)().isfinite().all()


def test_a_function_of_matrices_that_would_take_too_long_is_not_run():
    name = torch.ops.aten.linalg_householder_product.default
    tall, square = torch.empty(4096, 64, device="meta"), torch.empty(4096, 4096, device="meta")
    short, long = (signature_of(name, (x, x[0]), {}) for x in (tall, square))
    norm = signature_of(torch.ops.aten.linalg_vector_norm.default, (square,), {})
    costs = alone([short, long, norm])
    assert costs[short] is not None
    assert costs[norm] is not None
    assert costs[long] is None
    assert "operations" in costs.reasons[long]


def test_a_stored_cost_of_another_number_of_outputs_is_not_believed(tmp_path):
    operators = (aten.relu.default, aten.neg.default)
    known = {signature_of(operator, (torch.ones(4, 4),), {}): 1 for operator in operators}
    costs = alone(known)
    for wrong in ((), (64,) * 9):
        store = Store(tmp_path)
        store.write({s: replace(c, output_bytes=wrong, peak_bytes=1024) for s, c in costs.items()})
        found = alone(known, store=store, num_outputs=known)
        assert [(c.output_bytes, c.peak_bytes) for c in found.values()] == [((64,), 64)] * 2
        assert [note[:2] for note in store.notes] == ["2 "]
        assert Store(tmp_path).read(known) == found


def test_an_operator_that_really_returns_another_number_than_its_fake_one_is_no_damage(tmp_path):
    relu = signature_of(aten.relu.default, (torch.ones(4, 4),), {})
    store = Store(tmp_path)
    first = alone([relu], store=store, num_outputs={relu: 2})
    assert (
        alone([relu], store=store, num_outputs={relu: 2})[relu].output_bytes
        == first[relu].output_bytes
    )
    assert store.notes == []
