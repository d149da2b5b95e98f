import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memlab.cost_model import batch_norm, roofline
from memlab.cost_model.power import sustained
from memlab.cost_model.roofline import (
    Factors,
    Ideal,
    KernelCall,
    combined,
    whole_tiles,
)
from memlab.devices import cards
from memlab.devices.operators import TensorSpec, signature_of

aten = torch.ops.aten
FP16, BF16 = torch.float16, torch.bfloat16


def meta(*shape, dtype=torch.float32, channels_last=False):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device="meta", memory_format=layout)


def call(func, *args):
    result = func(*args)
    outputs = [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]
    specs = tuple(TensorSpec(x.dtype, tuple(x.shape), x.stride()) for x in outputs)
    return KernelCall(signature_of(func, args, {}), specs)


def parts(recorded):
    return roofline.work_of(recorded.signature, recorded.outputs).parts


def seconds(recorded, card, **options):
    return roofline.step_time([recorded], cards.card(card), **options).estimate_seconds


def convolution(x, weight, groups=1):
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    return call(aten.convolution.default, x, weight, *rest)


# rows of benchmarks/data/operator_ms.csv: card, rows, columns, inner size, measured milliseconds
PRODUCTS = [
    ("v100-pcie-32", 32768, 1280, 5120, 31.195),
    ("v100-pcie-32", 4096, 1280, 5120, 3.959),
    ("a100-pcie-40", 8192, 2560, 7680, 19.810),
    ("a100-pcie-40", 1536, 2048, 6144, 2.451),
    ("t4", 32768, 1280, 3840, 78.753),
    ("p4", 8192, 1280, 3840, 17.369),
    ("p100", 2048, 2048, 6144, 7.178),
]


@pytest.mark.parametrize(("card", "rows", "columns", "inner", "milliseconds"), PRODUCTS)
def test_products_take_about_as_long_as_they_took(card, rows, columns, inner, milliseconds):
    product = call(aten.mm.default, meta(rows, inner), meta(inner, columns))
    assert 1e3 * seconds(product, card) == pytest.approx(milliseconds, rel=0.25)


# the fastest products in bf16 that stas00/ml-engineering found: card, rows, columns, inner size,
# TFLOP/s (memlab/devices/cards.toml)
FASTEST = [
    ("a100-80", 1024, 10240, 5120, 271.2),
    ("a100-pcie-80", 2048, 5120, 6144, 252.9),
    ("h100", 2048, 2048, 13312, 794.5),
    ("h200", 2048, 2048, 13312, 794.5),
    ("b200", 1792, 16128, 3072, 1745.0),
]


@pytest.mark.parametrize(("card", "rows", "columns", "inner", "teraflops"), FASTEST)
def test_the_fastest_product_takes_what_it_took(card, rows, columns, inner, teraflops):
    left, right = (meta(*shape, dtype=BF16) for shape in ((rows, inner), (inner, columns)))
    flops = 2 * rows * columns * inner
    found = flops / seconds(call(aten.mm.default, left, right), card) / 1e12
    assert found == pytest.approx(teraflops, rel=2e-3)


@given(
    name=st.sampled_from(["a100-40", "h100", "h100-pcie", "l40s", "t4", "v100-32"]),
    rows=st.integers(1, 20_000),
    columns=st.integers(1, 20_000),
    inner=st.integers(1, 20_000),
)
def test_no_product_is_faster_than_any_that_was_timed_on_a_data_centre_card(
    name, rows, columns, inner
):
    card = cards.card(name)
    product = call(aten.mm.default, meta(rows, inner, dtype=FP16), meta(inner, columns, dtype=FP16))
    reached = 2 * rows * columns * inner / seconds(product, name) / card.fp16_flops_per_second
    # whole tiles waste a little of the product that was timed; another may waste less
    assert reached < 1.06 * card.reached.product_share


def test_tensor_cores_alone_have_such_a_share():
    card = cards.card("h100")
    bare = dataclasses.replace(card, reached=None)

    def times(dtype, peak):
        (part,) = parts(call(aten.mm.default, *(meta(8192, 8192, dtype=dtype),) * 2))
        return [roofline.time_and_draw(part, dtype, each, peak)[0] for each in (card, bare)]

    on_cuda_cores = times(torch.float32, card.fp32_flops_per_second)
    assert on_cuda_cores[0] == on_cuda_cores[1]
    in_tf32 = times(torch.float32, card.tf32_flops_per_second)
    in_half = times(FP16, card.fp16_flops_per_second)
    assert in_tf32[0] > in_tf32[1]
    assert in_half[0] > in_half[1]
    assert cards.card("rtx-3090").reached is cards.card("p100").reached is None


@pytest.mark.parametrize(
    ("card", "forward", "backward"), [("a100-80", 0.70, 0.63), ("h100", 0.35, 0.34)]
)
def test_flash_attention_reaches_what_its_authors_say(card, forward, backward):
    q = meta(2, 32, 8192, 128, dtype=BF16)
    rows = meta(2, 32, 8192)
    seeds = torch.empty((), dtype=torch.int64, device="meta")
    flash = aten._scaled_dot_product_flash_attention
    outputs = (TensorSpec(BF16, tuple(q.shape), q.stride()),)
    ahead = KernelCall(signature_of(flash.default, (q, q, q, 0.0, True), {}), outputs)
    given = (q, q, q, q, q, rows, None, None, 8192, 8192, 0.0, True, seeds, seeds)
    back = signature_of(aten._scaled_dot_product_flash_attention_backward.default, given, {})
    for recorded, share in ((ahead, forward), (KernelCall(back, 3 * outputs), backward)):
        flops = roofline.work_of(recorded.signature, recorded.outputs).flops
        peak = cards.card(card).bf16_flops_per_second
        assert flops / seconds(recorded, card) / peak == pytest.approx(share, rel=1e-3)


@pytest.mark.parametrize(
    ("card", "shape", "milliseconds"),
    [
        ("a100-pcie-40", (786432, 2048), 14.2269),
        ("v100-pcie-32", (32768, 3072), 1.46694),
        ("t4", (65536, 4096), 13.20379),
    ],
)
def test_a_large_sum_takes_about_as_long_as_it_took(card, shape, milliseconds):
    found = 1e3 * seconds(call(aten.add.Tensor, meta(*shape), meta(*shape)), card)
    assert found == pytest.approx(milliseconds, rel=0.05)


@pytest.mark.parametrize(("dtype", "kernels"), [(torch.float32, 1), (FP16, 2), (BF16, 2)])
def test_batch_normalization_reads_its_input_twice(dtype, kernels):
    """With a weight of 16 bits it takes as long for an element as one of 32 bits."""
    x = meta(8, 16, 32, 32, dtype=FP16)
    vector = meta(16, dtype=dtype)
    forward = call(
        aten.native_batch_norm.default, x, vector, vector, vector, vector, True, 0.1, 1e-5
    )
    work = roofline.work_of(forward.signature, forward.outputs)
    (part,) = work.parts
    assert part.group == "batch_norm"
    assert part.read_bytes == round(work.num_bytes * batch_norm.PASSES["forward"] * kernels)
    assert part.read_bytes >= kernels * 3 * x.numel() * 2
    by_running = call(
        aten.native_batch_norm.default, x, vector, vector, vector, vector, False, 0.1, 1e-5
    )
    work = roofline.work_of(by_running.signature, by_running.outputs)
    assert [part[:3] for part in work.parts] == [("stream", 0, work.num_bytes)]


def test_half_precision_convolutions_copy_what_is_not_channels_last():
    for dtype, is_last, copies in ((FP16, False, 2), (FP16, True, 0), (torch.float32, False, 0)):
        x = meta(4, 32, 16, 16, dtype=dtype, channels_last=is_last)
        (part,) = parts(convolution(x, meta(64, 32, 3, 3, dtype=dtype)))
        assert part.layout_bytes == copies * 2 * (4 * 32 + 4 * 64) * 16 * 16
        assert part.flops == 2 * 4 * 16 * 16 * 64 * 32 * 9


@pytest.mark.parametrize(
    ("groups", "is_last", "group"),
    [(32, False, "depthwise_forward"), (4, False, "grouped_first"), (4, True, "grouped_last")],
)
def test_convolutions_in_groups_are_kinds_of_their_own(groups, is_last, group):
    x = meta(2, 32, 8, 8, dtype=FP16, channels_last=is_last)
    (part,) = parts(convolution(x, meta(32, 32 // groups, 3, 3, dtype=FP16), groups))
    assert part.group == group


@pytest.mark.parametrize(
    ("window", "stride", "dilation", "dtype", "card", "group"),
    [
        (3, 1, 1, torch.float32, "t4", "convolution_winograd"),
        (3, 1, 1, torch.float32, "rtx-3090", "convolution"),  # TF32 on tensor cores
        (3, 1, 1, FP16, "t4", "convolution"),
        (3, 2, 1, torch.float32, "t4", "convolution_fp32"),
        (3, 1, 2, torch.float32, "gtx-1080-ti", "convolution_fp32"),
        (1, 1, 1, torch.float32, "v100-32", "convolution_fp32"),
        (5, 1, 1, torch.float32, "t4", "convolution_fp32"),
        (3, 1, 1, FP16, "gtx-1080-ti", "convolution_winograd"),  # without tensor cores
        (1, 1, 1, BF16, "t4", "convolution_fp32"),
        (3, 1, 1, torch.float64, "t4", "convolution"),
    ],
)
def test_convolutions_on_cuda_cores_are_kinds_of_their_own(
    window, stride, dilation, dtype, card, group
):
    x, weight = meta(2, 32, 16, 16, dtype=dtype), meta(32, 32, window, window, dtype=dtype)
    same = dilation * (window - 1) // 2
    how = ([stride] * 2, [same] * 2, [dilation] * 2, False, [0, 0], 1)
    y = aten.convolution.default(x, weight, None, *how)
    forward = signature_of(aten.convolution.default, (x, weight, None, *how), {})
    mask = [True, True, False]
    backward = signature_of(aten.convolution_backward.default, (y, x, weight, None, *how, mask), {})
    on = cards.card(card)
    for signature, results in ((forward, (y,)), (backward, (x, weight))):
        made = tuple(TensorSpec(dtype, tuple(out.shape), out.stride()) for out in results)
        found = roofline.work_of(signature, made).parts
        assert {roofline.group_of(part, dtype, on) for part in found} == {group}
        assert all(roofline.half_width_of(part, dtype, on) == 0 for part in found) == (
            (group == "convolution") == (dtype == FP16) and dtype in (FP16, torch.float32)
        )


def test_winograd_takes_less_than_its_multiplications_at_the_peak():
    """A window of 3 x 3 on a card whose CUDA cores do it, by hand."""
    x, card = meta(64, 256, 28, 28), cards.card("v100-32")
    factors = roofline.table().groups
    for window, group, saves in ((3, "convolution_winograd", 4), (5, "convolution_fp32", 1)):
        time = roofline.step_time([convolution(x, meta(256, 256, window, window))], card)
        size = 28 - (window - 3)  # padded by one
        at_peak = 2 * 64 * size**2 * 256 * 256 * window**2 / card.fp32_flops_per_second
        assert time.estimate_seconds == pytest.approx(factors[group].compute * at_peak, rel=1e-3)
        assert time.lower_bound_seconds == pytest.approx(at_peak / saves, rel=1e-3)
    assert factors["convolution_winograd"].compute < 1 < factors["convolution_fp32"].compute


@pytest.mark.parametrize(("mask", "number"), [((1, 1, 0), 2), ((0, 1, 1), 1), ((0, 0, 1), 1)])
def test_each_gradient_of_a_convolution_is_a_kernel(mask, number):
    x, y, weight = meta(2, 8, 8, 8), meta(2, 16, 8, 8), meta(16, 8, 3, 3)
    shape = ([16], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [bool(m) for m in mask])
    signature = signature_of(aten.convolution_backward.default, (y, x, weight, *shape), {})
    found = roofline.work_of(signature, (TensorSpec(torch.float32, (16,), (1,)),)).parts
    assert len(found) == number
    assert {part.group for part in found} == ({"convolution"} if mask != (0, 0, 1) else {"reduce"})


def test_a_copy_into_another_order_is_a_kind_of_its_own():
    x = meta(64, 32)
    copied = aten.clone.default
    assert parts(call(copied, x))[0].group == "stream"
    signature = signature_of(copied, (x.t(),), {"memory_format": torch.contiguous_format})
    output = TensorSpec(torch.float32, (32, 64), (64, 1))
    assert roofline.work_of(signature, (output,)).parts[0].group == "transpose"


@given(
    batch=st.integers(1, 40),
    rows=st.integers(1, 3000),
    columns=st.integers(1, 3000),
    inner=st.integers(1, 3000),
    multiprocessors=st.integers(1, 170),
)
def test_whole_tiles_hold_all_flops_and_more_rows_take_no_less(
    batch, rows, columns, inner, multiprocessors
):
    found = whole_tiles((batch, rows, columns, inner), multiprocessors)
    assert found >= 2 * batch * rows * columns * inner
    assert whole_tiles((batch, rows + 128, columns, inner), multiprocessors) >= found


def test_tiles_fill_waves():
    # 16 x 10 tiles of 128 x 128 fill 80 multiprocessors twice; another row of them is a third wave
    full, more = (whole_tiles((1, 128 * n, 1280, 4096), 80) for n in (16, 17))
    assert full == pytest.approx(2 * 128 * 16 * 1280 * 4096, rel=0.05)
    assert more > full * 17 / 16
    # the gradient of a weight: 4 tiles on 80 multiprocessors, of an inner size of 100 000
    assert whole_tiles((1, 256, 256, 100_000), 80) < 2.5 * 2 * 256 * 256 * 100_000
    (part,) = parts(convolution(meta(1, 3, 8, 8), meta(33, 3, 3, 3)))
    assert part.flops == 2 * 64 * 9 * 8 * 64  # 3 channels count as 8, and 33 as 64


def test_cards_with_little_power_for_their_peak_work_below_their_boost_clock():
    needed = roofline.table().joules_per_flop
    t4, p4, v100 = (sustained(cards.card(name), needed) for name in ("t4", "p4", "v100-pcie-32"))
    assert t4 == pytest.approx(70 / 8.1e12 / needed)
    assert t4 < p4 < v100 == 1.0
    assert sustained(cards.card("l4"), needed) < 0.8 < sustained(cards.card("rtx-4090"), needed)
    assert sustained(cards.card("24GiB"), needed) == 1.0  # nothing is known


@given(watts=st.floats(10, 1000), name=st.sampled_from(cards.names()))
def test_more_power_is_never_slower(watts, name):
    card = cards.card(name)
    less, more = (dataclasses.replace(card, board_watts=x * watts) for x in (1, 2))
    assert 0 < sustained(less, 15e-12) <= sustained(more, 15e-12) <= 1


@pytest.mark.parametrize(
    ("name", "reach"),
    [("p100", "low"), ("p4", "low"), ("t4", "low"), ("l4", "low"), ("v100-16", "high"),
     ("a100-80", "high"), ("rtx-3090", "high"), ("h100", "high")],
)  # fmt: skip
def test_memory_delivers_less_before_volta_and_with_error_correction_in_it(name, reach):
    assert roofline.reach_of(cards.card(name)) == reach
    found = roofline.table().reach
    assert 0 < found["low"] < found["high"] <= 1


def test_arithmetic_and_memory_overlap_and_copies_of_layout_do_not():
    factors = Factors(compute=2, memory=3, written=5, layout=7)
    assert combined(Ideal(10, 1, 1, 1), factors) == 20 + 7
    assert combined(Ideal(1, 10, 1, 0), factors) == 30 + 5


def test_no_factor_is_absurd_and_every_kind_of_kernel_has_one():
    groups = roofline.table().groups
    for group in ("stream_fp32", "stream_half", "product_fp32", "product_half", "attention",
                  "other_product", "batch_norm", "normalize_forward", "normalize_backward",
                  "reduce", "pool", "transpose", "convolution", "convolution_fp32",
                  "convolution_winograd", "grouped_first", "grouped_last",
                  "depthwise_forward", "depthwise_data", "depthwise_weight"):  # fmt: skip
        factors = groups[group]
        values = (factors.compute, factors.memory, factors.written, factors.layout)
        assert min(values) > 0.5
        assert max(values) < 10


def test_the_half_width_grows_with_what_is_not_known():
    known, other = cards.card("rtx-3090"), cards.card("h100")
    width = roofline.time_half_width
    doubt = roofline.table().doubt
    assert width(known, 0.0) == doubt["model"]["half_width"]
    assert width(other, 0.0) == pytest.approx(
        np.hypot(doubt["model"]["half_width"], doubt["card"]["half_width"])
    )
    assert width(other, 0.0) < width(other, 0.2) < width(other, 0.4)
    assert width(None, 0.0) == width(other, 0.0)
    note = roofline.time_note(other, 0.4)
    assert f"± {width(other, 0.4):.0%}" in note
    steps = doubt["model"]["steps"] - doubt["erratic"]["steps"]
    assert f"from {steps} steps of other models in fp16" in note
    assert "fp32 operators on 5 other cards" in note
    of_operators = roofline.time_note(cards.card("t4"), 0.0)
    assert "fp32 operators on 4 other cards" in of_operators, "its own are not those of another"
    assert "few or no measurements" in note
    assert "other cards" not in roofline.time_note(known, 0.0)


def test_formats_and_kinds_without_data_are_told_apart():
    a, b = meta(256, 256, dtype=torch.bfloat16), meta(256, 256)
    for x, is_measured in ((a, False), (a.half(), True), (b, True)):
        time = roofline.step_time([call(aten.mm.default, x, x)], cards.card("rtx-3090"))
        unmeasured = roofline.table().doubt["unmeasured"]["half_width"]
        width = 0.0 if is_measured else unmeasured
        assert time.unsure_seconds == pytest.approx(width * time.estimate_seconds)
