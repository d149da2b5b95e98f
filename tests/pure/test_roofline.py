import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memlab.cost_model import roofline
from memlab.cost_model.roofline import KernelCall
from memlab.devices import cards
from memlab.devices.operators import TensorSpec, signature_of

aten = torch.ops.aten
H100, T4, A100 = (cards.find(name) for name in ("h100", "t4", "a100-80"))


def spec(tensor):
    return TensorSpec(tensor.dtype, tuple(tensor.shape), tensor.stride())


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        outputs = tuple(spec(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        self.calls.append(KernelCall(signature_of(func, args, kwargs or {}), outputs))
        return result


def record(function):
    with Recorder() as recorder:
        function()
    return recorder.calls


def call(func, *args, **kwargs):
    """Return the record of one operator on meta tensors."""
    (only,) = record(lambda: func(*args, **kwargs))
    return only


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def flops(recorded):
    return roofline.work_of(recorded.signature, recorded.outputs).flops


def num_bytes(recorded):
    return roofline.work_of(recorded.signature, recorded.outputs).num_bytes


def bound(recorded, card=H100, **options):
    return roofline.step_time([recorded], card, **options).lower_bound_seconds


def total_flops(function):
    return sum(map(flops, record(function)))


def test_a_backward_may_be_given_no_gradient():
    """Attention over frozen weights in 4 bits has one, and its other tensors tell the format."""
    x, sums = torch.zeros(4, 2, 32, 16, dtype=torch.bfloat16), torch.zeros(4, 2, 32)
    func = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    some, none = (
        roofline.work_of(
            signature_of(func, (grad, x, x, x, x, sums, 0.0, True), {}), (spec(x),) * 3
        )
        for grad in (x, None)
    )
    assert none.dtype == some.dtype == torch.bfloat16
    assert none.flops == some.flops > 0
    assert none.num_bytes == some.num_bytes - x.nbytes


def test_a_linear_layer_counts_as_by_hand():
    layer, x = torch.nn.Linear(7, 5, device="meta"), meta(3, 7)
    once = 2 * 3 * 7 * 5
    assert total_flops(lambda: layer(x)) == once
    # backward: the weight's gradient alone, since the input needs none
    assert total_flops(lambda: layer(x).sum().backward()) == 2 * once
    x.requires_grad_()
    assert total_flops(lambda: layer(x).sum().backward()) == 3 * once


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_convolution_counts_as_by_hand_in_every_number_of_groups(groups):
    layer = torch.nn.Conv2d(4, 8, 3, padding=1, stride=2, groups=groups, device="meta")
    x = meta(2, 4, 10, 10)
    once = 2 * 2 * (5 * 5) * 8 * (4 // groups) * 9  # samples, positions, out, in, kernel
    assert total_flops(lambda: layer(x)) == once
    assert total_flops(lambda: layer(x).sum().backward()) == 2 * once
    x.requires_grad_()
    assert total_flops(lambda: layer(x).sum().backward()) == 3 * once


def test_a_transposed_convolution_counts_input_positions():
    layer, x = torch.nn.ConvTranspose2d(4, 8, 2, stride=2, device="meta"), meta(2, 4, 5, 5)
    x.requires_grad_()
    assert total_flops(lambda: layer(x).sum().backward()) == 3 * 2 * 2 * (5 * 5) * 4 * 8 * 4


def test_attention_counts_two_products_forward_and_five_backward():
    q = k = v = meta(2, 4, 6, 8)
    pair = 2 * (2 * 4) * 6 * 6 * 8  # one product of (6, 8) by (8, 6) for each head
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    forward = call(attention.default, q, k, v)
    assert flops(forward) == 2 * pair
    log_sum = meta(2, 6, 4)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert flops(call(backward, q, q, k, v, q, log_sum, 0.0, False)) == 5 * pair
    causal = call(attention.default, q, k, v, 0.0, True)
    assert flops(causal) == 2 * pair * 21 // 36  # 1 + 2 + ... + 6 of 36 pairs
    # on CUDA every head of queries counts, though two share one of keys
    func, keys = aten._scaled_dot_product_flash_attention.default, meta(2, 2, 6, 8)
    signature = signature_of(func, (q, keys, keys, 0.0, True), {})
    assert roofline.work_of(signature, (spec(q),)).flops == 2 * pair * 21 // 36


def test_a_fused_rnn_counts_each_weight_once_a_token():
    x, hidden = meta(5, 3, 4), meta(1, 3, 6)
    weights = [meta(24, 4), meta(24, 6), meta(24), meta(24)]
    once = 2 * 15 * 24 * (4 + 6)
    layer = (aten.mkldnn_rnn_layer.default, (x, *weights, hidden, hidden, False, [], 2, 6, 1))
    signature = signature_of(layer[0], (*layer[1], True, False, False, True), {})
    assert roofline.work_of(signature, (spec(meta(5, 3, 6)),)).flops == once
    rest = (2, 6, 0, 1, False, 0.0, True, False, [], None)
    signature = signature_of(
        aten._cudnn_rnn.default, (x, weights, 4, None, hidden, hidden, *rest), {}
    )
    assert roofline.work_of(signature, (spec(meta(5, 3, 6)),)).flops == once
    for mask, times in ((True, 2), (False, 1)):
        gradients = (x, weights, 4, meta(10), hidden, hidden, meta(5, 3, 6), meta(5, 3, 6))
        gradients += (None, None, *rest, meta(7), [True, False, False, mask])
        signature = signature_of(aten._cudnn_rnn_backward.default, gradients, {})
        assert roofline.work_of(signature, (spec(x),)).flops == times * once


def test_every_fused_attention_names_its_arguments_as_counted():
    kinds = ("flash", "efficient", "cudnn")
    packets = [
        f"_scaled_dot_product_{kind}_attention{end}" for kind in kinds for end in ("", "_backward")
    ]
    packets = [getattr(aten, name) for name in packets]
    for packet in packets:
        names = {argument.name for argument in packet.default._schema.arguments}
        assert {"query", "key", "value"} <= names, packet


def test_pointwise_and_reductions_are_bytes_alone():
    x = meta(10, 20)
    add = call(aten.add.Tensor, x, meta(10, 20))
    assert (flops(add), num_bytes(add)) == (0, 3 * 800)
    assert num_bytes(call(aten.sum.default, x)) == 800 + 4
    assert num_bytes(call(aten.relu_.default, x)) == 2 * 800
    assert num_bytes(call(aten._to_copy.default, x, dtype=torch.bfloat16)) == 800 + 400
    row = TensorSpec(torch.float32, (10,), (1,))  # of an operator of another process
    assert roofline.work_of(("elsewhere.op.default", (row, (row,)), ()), (row,)).num_bytes == 120


def test_expanded_dimensions_count_once_and_views_nothing():
    row = meta(1, 20)
    assert num_bytes(call(aten.add.Tensor, meta(10, 20), row.expand(10, 20))) == 800 + 80 + 800
    for view in (
        call(aten.view.default, row, [20]),
        call(aten.t.default, row),
        call(aten._unsafe_view.default, row, [20]),
        call(aten.empty_like.default, row),
    ):
        assert (flops(view), num_bytes(view), bound(view)) == (0, 0, 0.0)


def test_what_is_overwritten_or_asked_for_its_shape_is_not_read():
    x = meta(10, 20)
    assert num_bytes(call(aten.zeros_like.default, x)) == 800
    assert num_bytes(call(aten.copy_.default, x, meta(10, 20))) == 2 * 800
    assert num_bytes(call(aten.zero_.default, x)) == 800
    assert num_bytes(call(aten.mul.out, x, meta(10, 20), out=meta(10, 20))) == 3 * 800


def test_a_lookup_reads_its_rows_and_not_the_table():
    table, index = meta(50_000, 4), meta(3, dtype=torch.int64)
    looked_up = num_bytes(call(aten.embedding.default, table, index))
    assert looked_up < 400
    assert looked_up >= 2 * 3 * 4 * 4 + 3 * 8


def test_a_fused_optimizer_reads_four_and_writes_three():
    many = [[meta(1000) for _ in range(2)] for _ in range(4)]
    steps = [meta() for _ in range(2)]
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    options |= {"amsgrad": False, "maximize": False}
    signature = signature_of(aten._fused_adamw_.default, (*many, [], steps), options)
    assert roofline.work_of(signature, ()).num_bytes == 7 * 8000 + 8


def test_no_product_beats_the_speed_of_light_and_a_thin_one_waits_for_memory():
    a = meta(4096, 4096, dtype=torch.bfloat16)
    product = call(aten.mm.default, a, a)
    assert bound(product) >= 138.9e-6
    assert bound(product) == pytest.approx(2 * 4096**3 / 989.4e12)
    assert bound(product, A100) == pytest.approx(2 * 4096**3 / 312e12)
    assert bound(product, T4) == pytest.approx(2 * 4096**3 / 8.1e12)  # without bf16, as fp32
    half = call(aten.mm.default, a.to(torch.float16), a.to(torch.float16))
    assert bound(half, T4) == pytest.approx(2 * 4096**3 / 65e12)
    thin = call(aten.mm.default, meta(1, 4096, dtype=torch.bfloat16), a)
    assert bound(thin) == pytest.approx((4096**2 + 2 * 4096) * 2 / 3.35e12)
    assert roofline.step_time([product], cards.find("24GiB")) is None  # of unknown speed


def test_fp32_products_take_tf32_units_only_when_told_and_convolutions_always():
    a = meta(4096, 4096)
    product = call(aten.mm.default, a, a)
    assert bound(product) == pytest.approx(2 * 4096**3 / 66.9e12)
    assert bound(product, tf32_matmul=True) == pytest.approx(2 * 4096**3 / 494.7e12)
    assert bound(product, T4, tf32_matmul=True) == pytest.approx(2 * 4096**3 / 8.1e12)
    layer, x = torch.nn.Conv2d(256, 256, 3, padding=1, device="meta"), meta(32, 256, 56, 56)
    (convolution,) = (c for c in record(lambda: layer(x)) if flops(c))
    assert bound(convolution) == pytest.approx(flops(convolution) / 494.7e12)
    assert bound(convolution, tf32_matmul=True) == bound(convolution)
    # without TF32 by Winograd's algorithm, with a quarter of the products at least
    assert bound(convolution, T4) == pytest.approx(flops(convolution) / 4 / 8.1e12)


@pytest.mark.parametrize(("name", "fp32"), [("p100", 9.3e12), ("p4", 5.5e12)])
def test_without_tensor_cores_fp16_products_are_summed_in_fp32_at_its_rate(name, fp32):
    card = cards.find(name)  # the arithmetic of fp16 itself is at 2 and at 1/64 of that
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        a = meta(4096, 4096, dtype=dtype)
        assert bound(call(aten.mm.default, a, a), card) == pytest.approx(2 * 4096**3 / fp32)


@given(
    m=st.integers(1, 5000),
    n=st.integers(1, 5000),
    k=st.integers(1, 5000),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    name=st.sampled_from(cards.names()),
    tf32=st.booleans(),
)
def test_the_estimate_is_never_below_the_bound(m, n, k, dtype, name, tf32):
    card = cards.find(name)
    product = call(aten.mm.default, meta(m, k, dtype=dtype), meta(k, n, dtype=dtype))
    times = roofline.step_time([product, product], card, tf32_matmul=tf32)
    assert 0 < times.lower_bound_seconds <= times.estimate_seconds
    assert times.lower_bound_seconds == 2 * bound(product, card, tf32_matmul=tf32)
    fastest = max(
        p for p in (card.fp32_flops_per_second, card.tf32_flops_per_second,
                    card.fp16_flops_per_second) if p
    )  # fmt: skip
    assert times.lower_bound_seconds >= 2 * 2 * m * n * k / fastest
    moved = (m * k + k * n + m * n) * dtype.itemsize
    assert times.lower_bound_seconds >= 2 * moved / card.memory_bytes_per_second


def test_small_operators_cost_their_launches():
    small = call(aten.relu.default, meta(10))
    view = call(aten.t.default, meta(3, 4))
    times = roofline.step_time([small, view, small._replace(num_kernels=3)], H100)
    assert times.estimate_seconds == pytest.approx(4 * roofline.LAUNCH_SECONDS)


def block(x, weights):
    for weight in weights:
        x = x + torch.relu(x @ weight) * 0.5
    return x.sum()


def test_three_thousand_operators_take_less_than_30_ms():
    weights = [meta(64, 64).requires_grad_() for _ in range(300)]
    calls = record(lambda: block(meta(16, 64), weights).backward())
    assert len(calls) > 3000
    taken = []
    for _ in range(5):  # the least: a busy machine empties the caches of a processor
        roofline.work_of.cache_clear()
        begin = time.thread_time()
        times = roofline.step_time(calls[:3000], H100)
        taken.append(time.thread_time() - begin)
    assert min(taken) < 0.03
    assert times.estimate_seconds > 0


def test_narrow_factors_added_to_a_wide_matrix_are_multiplied_as_narrow_ones():
    low = torch.bfloat16
    wide, a, b = meta(8, 16), meta(8, 32, dtype=low), meta(32, 16, dtype=low)
    add = aten.addmm.dtype_out
    found = roofline.work_of(
        signature_of(add, (wide, a, b, torch.float32), {"out": wide}), (spec(wide),)
    )
    assert (found.flops, found.dtype) == (2 * 8 * 32 * 16, low)


def four_bit(rows, outputs=64, columns=128, block=64):
    """Return the record of a product with a weight in 4 bits."""
    packed = meta(outputs * columns // 2, 1, dtype=torch.uint8)
    scales = meta(outputs * columns // block)
    x = meta(rows, columns, dtype=torch.bfloat16)
    product = torch.ops.bitsandbytes.gemm_4bit.default
    return call(product, x, packed, [outputs, columns], scales, block, "nf4")


def test_a_weight_in_4_bits_is_widened_and_then_multiplied_as_one_in_16():
    pytest.importorskip("bitsandbytes")
    rows, outputs, columns = 256, 64, 128
    plain = call(
        aten.mm.default,
        meta(rows, columns, dtype=torch.bfloat16),
        meta(columns, outputs, dtype=torch.bfloat16),
    )
    found, dense = (roofline.work_of(one.signature, one.outputs) for one in (four_bit(rows), plain))
    widened, product = found.parts
    weight = outputs * columns
    assert (found.flops, found.dtype) == (2 * rows * weight, torch.bfloat16)
    assert (product,) == dense.parts
    assert widened.read_bytes == weight // 2 + 4 * weight // 64 + 2 * weight
    # a few rows are multiplied by the weight as it is
    assert [part.group for part in roofline.work_of(*four_bit(4)[:2]).parts] == ["product"]

    half = meta(4096, 4096, dtype=torch.bfloat16)  # many rows are never faster in 4 bits
    slow, fast = (
        roofline.step_time([one], A100).estimate_seconds
        for one in (four_bit(4096, 4096, 4096), call(aten.mm.default, half, half))
    )
    assert fast < slow < 2 * fast


def test_bytes_are_multiplied_at_twice_the_rate_of_fp16_since_turing():
    pytest.importorskip("bitsandbytes")
    size = 8192
    eight, half = (meta(size, size, dtype=dtype) for dtype in (torch.int8, torch.float16))
    product = torch.ops.bitsandbytes.int8_linear_matmul.default
    seconds = 2 * size**3 / A100.fp16_flops_per_second
    assert bound(call(product, eight, eight), A100) == pytest.approx(seconds / 2)
    assert bound(call(aten.mm.default, half, half), A100) == pytest.approx(seconds)
