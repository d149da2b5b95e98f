"""Signatures: exact, hashable, the same text in every process."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from memlab.devices.operators import (
    Scalar,
    TensorSpec,
    call_of,
    from_text,
    signature_of,
    tensors_of,
    to_text,
)
from tests import ROOT

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
sizes = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
specs = sizes.flatmap(
    lambda shape: st.builds(
        TensorSpec,
        st.sampled_from(DTYPES),
        st.just(shape),
        st.tuples(*[st.integers(0, 2**40)] * len(shape)),
    )
)
plain = st.one_of(
    st.none(),
    st.integers(),
    st.text(),
    st.sampled_from([torch.float16, torch.strided, torch.channels_last, torch.sparse_coo]),
    st.one_of(st.floats(), st.booleans()).map(lambda x: Scalar(repr(x))),
    st.complex_numbers().map(lambda x: Scalar(f"complex({x.real!r}, {x.imag!r})")),
)
keys = st.recursive(specs | plain, lambda inner: st.lists(inner, max_size=3).map(tuple))
signatures = st.tuples(
    st.sampled_from(["aten.addmm.default", "aten.sum.dim_IntList", "mine.op.out"]),
    st.lists(keys, max_size=4).map(tuple),
    st.dictionaries(st.sampled_from(["alpha", "dtype", "out"]), keys).map(
        lambda words: tuple(sorted(words.items(), key=lambda item: item[0]))
    ),
)


@given(signatures)
def test_text_reads_back_to_the_same_signature(signature):
    assert from_text(to_text(signature)) == signature


@given(signatures, signatures)
def test_signatures_are_equal_exactly_when_their_texts_are(one, other):
    assert (one == other) == (to_text(one) == to_text(other))


def test_a_scalar_is_told_from_its_equal_of_another_type():
    x = torch.ones(3, dtype=torch.int64)
    found = {signature_of(aten.mul.Tensor, (x, value), {}) for value in (1, 1.0, True)}
    assert len(found) == 3  # they return int64, float32 and int64


def test_a_signature_is_that_of_fake_tensors_and_of_any_device_or_generator():
    real = signature_of(aten.relu.default, (torch.ones(2, 3),), {})
    with FakeTensorMode():
        assert signature_of(aten.relu.default, (torch.ones(2, 3),), {}) == real
    kwargs = {"device": torch.device("cpu"), "generator": torch.Generator()}
    dropped = signature_of(aten.rand.generator, ([2],), kwargs)[2]
    assert dropped == (("device", None), ("generator", None))
    for text in ("", "1 + 1", "aten.add.Tensor(", "aten.add.Tensor(float33(1))"):
        with pytest.raises(ValueError, match="is not a signature"):
            from_text(text)


def test_a_call_is_repeated_with_its_arguments():
    x, mean = torch.randn(4, 6).t(), torch.zeros(())
    signature = signature_of(
        aten.sum.dim_IntList, (x, [0], True), {"dtype": torch.float64, "out": None}
    )
    assert signature[2] == (("dtype", torch.float64), ("out", None))
    func, args, kwargs = call_of(signature, lambda spec: (spec.shape, spec.stride))
    assert func is aten.sum.dim_IntList
    assert args == [((6, 4), (1, 6)), [0], True]
    assert args[2] is True
    assert kwargs == {"dtype": torch.float64, "out": None}
    nested = signature_of(aten.stack.default, ([x, mean],), {})
    assert tensors_of(nested) == [
        TensorSpec(torch.float32, (6, 4), (1, 6)),
        TensorSpec(torch.float32, (), ()),
    ]


@pytest.mark.parametrize("value", [1.0, -0.0, float("inf"), 1 + 2j, 0.1, True, 3, None, "mean"])
def test_a_value_comes_back_as_it_was_given(value):
    signature = signature_of(aten.fill_.Scalar, (value,), {})
    (again,) = call_of(from_text(to_text(signature)), lambda spec: spec)[1]
    assert (type(again), repr(again)) == (type(value), repr(value))


@pytest.mark.parametrize(
    ("shape", "stride", "nbytes"),
    [((2, 3), (3, 1), 24), ((), (), 4), ((5, 0), (1, 1), 0), ((3, 2), (1, 1), 16), ((9,), (0,), 4)],
)
def test_bytes_from_first_to_last_element(shape, stride, nbytes):
    assert TensorSpec(torch.float32, shape, stride).nbytes == nbytes


def test_text_is_the_same_in_another_process():
    code = (
        "import torch; from memlab.devices.operators import *; print(to_text(signature_of("
        "torch.ops.aten.add.Tensor, (torch.ones(2, 1), 2.5), {'alpha': 1})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "aten.add.Tensor(float32((2, 1), (1, 1)), 2.5, alpha=1)"
