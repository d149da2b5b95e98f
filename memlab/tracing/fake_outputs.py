"""`FakeOutputs`: what an operator returns over fake tensors, and what is known of the values in it.

The idea. Fake tensors have shapes and no values, and most operators need no more: their kernel for
fake tensors says the shapes of what they return. A step that asks for values is answered from the
first of these that knows:

    values.py          small tensors of known values, such as a mask of ones: operators on them are
                       run for real beside the fake ones
                       random numbers, drawn for real from the step's seed
    data_dependent.py  nothing is known: a value is assumed, and the recording says which

For `if (mask.sum() > 3): ...` over `mask = torch.ones(4)`:

    operator           fake output      known of its values
    aten::ones         (4,)             1, 1, 1, 1
    aten::sum          ()               4
    aten::gt           ()               True
    aten::_local_scalar_dense           the step asks for a value, and gets True

An operator that was run before, with the same signature, is not run again where no values matter:
`repeats.py` makes its outputs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from memlab._util.torch_private import pytree
from memlab._util.torch_private.python_device import registered_name
from memlab._util.torch_private.tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
    missing_kernels_run_by,
    schema_of,
    without_python,
)
from memlab.devices.operators import (
    Signature,
    as_in_training,
    leaf_tensors,
    prepare,
    signature_of,
    smaller,
    tensors_of,
)
from memlab.errors import UnsupportedError
from memlab.tracing.data_dependent import Draws, Guesses, UnknownValues, is_mask
from memlab.tracing.faking import Sparse, accumulates_in_place, are_sparse
from memlab.tracing.recording import OpTrace
from memlab.tracing.repeats import PlainCall, Repeats, plain_call, view_of
from memlab.tracing.values import (
    CHANCES,
    MOST_ELEMENTS,
    PICKS,
    Values,
    check_formats,
    for_real,
    tensors_in,
)

# Outputs of operators whose fake kernels in PyTorch fail, are wrong, or are missing.
#
# Left out: outputs that depend on more than the signature, which the tracker handles.

aten = torch.ops.aten
ALIGNMENT = 16  # bytes; the tensor memory accelerator of newer cards requires it of strides


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the output of a product of groups of rows, for any floating-point format.

    PyTorch's fake kernel accepts bfloat16 only. Its real kernels, on a CPU and on CUDA, accept fp32
    and fp16 too, and pad the rows of their output.
    Source: `create_grouped_gemm_output_tensor` in ATen/native/GroupedMMUtils.h.
    """
    for matrix in (a, b):
        _check_strides(matrix)

    a_is_2d, b_is_2d = a.dim() == 2, b.dim() == 2
    rows, columns = a.shape[-2], b.shape[-1]
    if a_is_2d and b_is_2d:
        assert offs is not None  # the operator refuses a call without it
        shape = [offs.shape[0], rows, columns]
    else:
        shape = [rows, columns] if a_is_2d or b_is_2d else [a.shape[0], rows, columns]

    dtype = out_dtype or a.dtype
    per_line = ALIGNMENT // dtype.itemsize
    padded = -(-columns // per_line) * per_line
    stride = [rows * padded, padded, 1][-len(shape) :]
    return a.new_empty_strided(shape, stride, dtype=dtype)


def _check_strides(matrix: torch.Tensor) -> None:
    """Raise the operator's error for rows or columns that are not aligned to 16 bytes."""
    size, stride = matrix.shape[-2:], matrix.stride()[-2:]
    if stride[0] == 1 and stride[1] >= max(1, size[0]):
        step = stride[1]
    elif stride[1] == 1 and stride[0] >= max(1, size[1]):
        step = stride[0]
    else:
        raise RuntimeError(
            f"Invalid strides/sizes, got {matrix.stride()} for strides and {tuple(matrix.shape)} "
            "for sizes"
        )

    if step * matrix.dtype.itemsize % ALIGNMENT:
        raise RuntimeError(f"strides should be multiple of {ALIGNMENT} bytes")


def _log_sigmoid_forward(x: torch.Tensor) -> Any:
    """Return the output and what backward needs beside it: on CUDA nothing.

    PyTorch's fake kernel knows CUDA by its name, which the device that stands in for it lacks.
    Source: `log_sigmoid_forward_cuda` in ATen/native/cuda/Activation.cpp.
    """
    if x.device.type != registered_name():
        return aten.log_sigmoid_forward.default(x)
    return torch.empty_like(x), x.new_empty(0)


def _waited_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a collective works on: waiting for it makes no other one.

    PyTorch's fake kernel returns a new tensor.
    Source: `wait_tensor` in torch/csrc/distributed/c10d/Functional.cpp.
    """
    return tensor


def _written_rows(
    tensor: torch.Tensor,
    indices: Any,
    values: torch.Tensor,
    accumulate: bool = False,
    _: bool = False,
) -> torch.Tensor:
    """Return the tensor that is written to, on a card also by indices in host memory.

    PyTorch's fake kernel of the public operator allows these; that of the private one does not.
    Source: `index_put_impl` in torch/_subclasses/fake_impls.py.
    """
    written: torch.Tensor = aten.index_put_.default(tensor, indices, values, accumulate)
    return written


OWN: dict[Any, Callable[..., Any]] = {
    aten.log_sigmoid_forward.default: _log_sigmoid_forward,
    aten._index_put_impl_.default: _written_rows,
}
if hasattr(aten, "_grouped_mm"):
    OWN[aten._grouped_mm.default] = _grouped_mm
if torch.distributed.is_available():
    OWN[torch.ops._c10d_functional.wait_tensor.default] = _waited_for


@contextlib.contextmanager
def missing_ones_run_on_cpu() -> Iterator[None]:
    """Run operators without a fake kernel on the CPU to learn the shapes of their outputs.

    PyTorch runs such an operator on zeros on the tensors' own device. The stand-in device has no
    kernels, and the process would end.
    """

    def on_cpu(run: Callable[..., Any], mode: Any, func: Any, flat_args: Any, *rest: Any) -> Any:
        fakes = [arg for arg in flat_args if isinstance(arg, FakeTensor)]
        elsewhere = [arg for arg in fakes if arg.fake_device.type not in ("cpu", "meta")]
        if not elsewhere:
            return run(mode, func, flat_args, *rest)

        device, cpu = elsewhere[0].fake_device, torch.device("cpu")
        back: dict[int, Any] = {}

        def moved(value: Any) -> Any:
            if isinstance(value, torch.device):
                return cpu
            if not isinstance(value, FakeTensor):
                return value
            like = _fake(value, mode, cpu)
            back[id(like)] = value
            return like

        def returned(value: Any) -> Any:
            if not isinstance(value, FakeTensor):
                return value

            # an operator in place returns its argument, which must stay the same object
            return back[id(value)] if id(value) in back else _fake(value, mode, device)

        out = run(mode, func, [moved(arg) for arg in flat_args], *rest)
        return pytree.tree_map(returned, out)

    with missing_kernels_run_by(on_cpu):
        yield


def _fake(like: FakeTensor, mode: Any, device: torch.device) -> FakeTensor:
    """Return a fake tensor of this shape on a device."""
    with without_python():
        empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        return FakeTensor(mode, empty, device)


# The strides of outputs of CPU kernels, for operators whose fake outputs have other strides.
#
# For instance, a batch norm over a transposed input returns a contiguous tensor on a CPU,
# but its fake output is transposed like the input. A later `.contiguous()` then copies in
# one run and not in the other, so whole tensors would be missed. Therefore an operator with
# a non-contiguous input runs once for real, on ones or on a part of them. Only the order of
# its outputs' dimensions is used. Left out: outputs with gaps, formats and sizes.

MOST_BYTES = 2**22  # of all arguments; a larger call runs on a part of them
# outputs that are always contiguous; these operators often have a transposed weight
CONTIGUOUS = frozenset(
    (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
)

Order = tuple[int, ...]  # dimensions, from the largest stride to the smallest


def as_on_cpu(func: Any, signature: Signature, out: Any) -> Any:
    """Return an operator's fake outputs with the order of dimensions that a CPU gives them."""
    if func in CONTIGUOUS or schema_of(func).is_mutable or torch.Tag.pointwise in func.tags:
        return out

    specs = [spec for spec in tensors_of(signature) if len(spec.stride) == len(spec.shape)]
    # dimensions of size one count too: their strides show whether an image is channels last
    if all(spec.stride == _strides(spec.shape, range(len(spec.shape))) for spec in specs):
        return out

    orders = _orders(signature)
    if len(orders) != len(leaf_tensors(out)):
        return out

    each = iter(orders)
    return pytree.tree_map_only(torch.Tensor, lambda fake: _ordered(fake, next(each)), out)


@functools.lru_cache(maxsize=4096)
def _orders(signature: Signature) -> tuple[Order | None, ...]:
    """Return the order of each output of a real run, None of one with gaps; none if it fails."""
    nbytes = sum(spec.nbytes for spec in tensors_of(signature))
    try:
        if nbytes > MOST_BYTES:
            largest = max(tensors_of(signature), key=lambda spec: spec.nbytes)
            # at least two rows, since the stride of a dimension of size one shows nothing
            part = smaller(signature, max(MOST_BYTES / nbytes, 2 / max(2, largest.shape[0])))
            signature = signature if part is None else part[0]

        with for_real(), as_in_training():
            return tuple(_order_of(tensor) for tensor in leaf_tensors(prepare(signature)()()))
    except Exception:  # an operator that cannot run alone keeps its fake strides
        return ()


def _order_of(tensor: torch.Tensor) -> Order | None:
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim)))
    return order if _matches(tensor.shape, tensor.stride(), order) else None


def _ordered(fake: torch.Tensor, order: Order | None) -> torch.Tensor:
    """Return a fake tensor whose dimensions lie in memory in this order."""
    if order is None or len(order) != fake.dim() or not fake.numel():
        return fake
    strides = _strides(fake.shape, order)
    return fake if fake.stride() == strides else fake.new_empty_strided(fake.shape, strides)


def _matches(shape: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Return whether a tensor is dense and its dimensions lie in this order."""
    wanted = _strides(shape, order)
    return all(n == 1 or a == b for n, a, b in zip(shape, stride, wanted, strict=True))


def _strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides, step = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


COLLECTIVES = "c10d"  # what they return comes from other ranks
# what they return depends on more than their signatures
NEVER_REPEATED = frozenset(
    (
        aten.index.Tensor, aten.all.default, aten.all.dim, aten._is_all_true.default,
        aten.eq.Tensor, aten.ne.Tensor,
    )
)  # fmt: skip


class FakeOutputs:
    """The outputs of the operators of one attempt.

    Attributes:
        values: what is known of fake tensors.
        unknown: what is assumed of them.
        sparse: the sparse tensors among them.
        is_by_values: whether the last operator returned as much as values say.

    Args:
        device_type: where the step runs.
        recording: of the attempt; its last interval says whether a step has begun.
        draws: what random operators draw.
        guesses: what is assumed of values, from one attempt to the next.
        assume: called with what the run does, what is assumed, and what that decides.
        place: returns where the run is.
    """

    def __init__(
        self,
        device_type: str,
        recording: OpTrace,
        draws: Draws,
        guesses: Guesses,
        assume: Callable[[str, str, str], None],
        place: Callable[[], object],
    ) -> None:
        self.values = Values()
        self.unknown = UnknownValues(self.values, guesses, assume, place)
        self.sparse = Sparse(self.values, device_type, assume, place)
        self.is_by_values = False
        self._repeats = Repeats()
        self._device_type = device_type
        self._recording = recording
        self._draws = draws
        self._place = place

    def of(self, func: Any, signature: Signature | None, args: Any, kwargs: Any) -> Any:
        """Return the operator's outputs, and remember what is known of their values."""
        self.is_by_values = False
        again = view_of(func, args, kwargs, self.values)
        if again is not None:
            return again
        if func is aten.add.Tensor and accumulates_in_place(args):
            func = aten.add_.Tensor
            signature = signature_of(func, args, kwargs)
        call = plain_call(signature, args, kwargs, self.values)
        again = self._repeats.outputs_of(call, args)
        if again is not None:
            return again

        out = self._run(func, args, kwargs)
        if are_sparse(out):
            raise self.sparse.refusal(func)
        if func.namespace == COLLECTIVES:
            self.values.forget_written(func, args, kwargs)
            return out
        if signature is not None and self._device_type == "cpu":
            out = as_on_cpu(func, signature, out)
        self._learn(func, call, args, kwargs, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the operator's fake output."""
        check_formats(func, args)
        try:
            if func is aten.index.Tensor and any(is_mask(index) for index in args[1]):
                return self._by_values(self.unknown.select(args))
            if func in OWN:
                return OWN[func](*args, **kwargs)
            if func is aten._to_copy.default and kwargs.get("device") is not None:
                args[0].constant = None  # a real value cannot follow to a fake device
            return func(*args, **kwargs)
        except DataDependentOutputException:
            return self.unknown.value(func, args, self.values.run(func, args, kwargs))
        except DynamicOutputShapeException:
            real = self.values.run(func, args, kwargs)
            if real is None:
                return self._by_values(self.unknown.largest(func, args))
            return self._by_values(self.unknown.shaped(args, real))
        except UnsupportedOperatorException as error:
            raise UnsupportedError(
                f"{self._place()}: operator {func} has no fake kernel, so that its outputs cannot "
                "be known without running it; register one with torch.library.register_fake"
            ) from error

    def _by_values(self, out: Any) -> Any:
        """Remember that the size of this operator's output depends on values."""
        self.is_by_values = True
        return out

    def _learn(self, func: Any, call: PlainCall | None, args: Any, kwargs: Any, out: Any) -> None:
        """Remember what is known, or assumed, of the outputs' values; else their shapes alone."""
        real = self.values.run(func, args, kwargs, out)
        if real is None and torch.Tag.nondeterministic_seeded in func.tags:
            real = self._drawn(func, args, kwargs, out)
        if real is not None:
            is_assumed = self.values.are_assumed(args)
            for fake, value in zip(tensors_in(out), tensors_in(real), strict=True):
                self.values.learn(fake, value, is_assumed=is_assumed)
            return

        assumed = self.values.assumed(func, args, out)
        for at, value in assumed.items():
            self.values.learn(tensors_in(out)[at], value, is_assumed=func in PICKS)
        self.unknown.note_check(func, out)
        if call is None or assumed or self.is_by_values:
            return
        if not self._is_special(func, out):
            self._repeats.learn(call, func, args, out)

    def _drawn(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Return what a random operator drew, in a step: None if that is not known."""
        if self._recording.intervals[-1].step < 0:
            return None
        return self._draws.drawn(func, args, kwargs, out, self.values)

    def _is_special(self, func: Any, out: Any) -> bool:
        """Return whether each call of an operator has to be looked at, even if it is repeated."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func in NEVER_REPEATED or func in CHANCES
        is_small = any(tensor.numel() <= MOST_ELEMENTS for tensor in tensors_in(out))
        return self._draws.are_followed or is_small
