"""Turn a signature into a call on real memory, and make such a call smaller.

The tensors hold values that are safe for kernels: ones, and zeros in integer tensors, which are
mostly indices. Left out: results that depend on values, such as the length of `nonzero`.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from memlab.operators.signatures import Signature, TensorSpec, call_of, map_tensors, tensors_of
from memlab.torch_private import pytree
from memlab.torch_private.dispatch import below_autograd
from memlab.torch_private.operators import OpOverload, schema_of

CPU = torch.device("cpu")
# Norms keep these in the format of their weight, but fake tensors have that of the input (bf16).
STATISTICS = frozenset({"save_mean", "save_invstd", "save_var", "mean", "rstd"})
RNN_BACKWARD = "aten.mkldnn_rnn_layer_backward.default"
GROUPED = "aten._grouped_mm.default"
# Functions of whole matrices take as long as a number of products of these matrices: LAPACK's
# singular values and eigenvalues about ten, a matrix exponential up to twenty.
OF_MATRICES = ("linalg_", "_linalg_", "geqrf", "orgqr", "ormqr", "cholesky", "_cholesky", "lu_")
OF_ELEMENTS = ("linalg_vector_norm", "linalg_cross", "linalg_vecdot", "linalg_diagonal")
MATRIX_PRODUCTS = 20


class OperatorCall(NamedTuple):
    """An operator and the arguments that it is called with."""

    func: OpOverload
    args: list[Any]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        """Run it."""
        return self.func(*self.args, **self.kwargs)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return tensors_in([self.args, self.kwargs])


@contextlib.contextmanager
def as_in_training() -> Iterator[None]:
    """Run the kernels that a training step runs, without autograd, and restore the random state.

    Gradients are enabled, because oneDNN's recurrent layers allocate their reserve only then.
    """
    with (
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        below_autograd(),
    ):
        yield


def prepare(signature: Signature, device: torch.device = CPU) -> Callable[[], OperatorCall]:
    """Return a function that makes the call on a device, after one such call has succeeded.

    A view allocates nothing and takes the same time without memory, so it runs on meta.

    Raises:
        Exception: the operator's error, which may be of any kind.
    """
    if is_view(on_meta(signature).func):
        on_meta(signature)()
        return functools.partial(on_meta, signature)

    ways = [functools.partial(build, signature, whole, device) for whole in (0, 1)]
    ways.append(functools.partial(build, _with_wide_statistics(signature), 0, device))
    first_error: Exception | None = None

    for make in ways:
        try:
            make()()
        except Exception as error:  # the next way may work
            first_error = first_error or error
        else:
            return make

    assert first_error is not None
    raise first_error


def build(signature: Signature, whole: int = 0, device: torch.device = CPU) -> OperatorCall:
    """Return the call with its tensors made on a device; whole numbers are set to `whole`."""
    is_small = signature[0].startswith("aten.linalg_")
    call = OperatorCall(*call_of(signature, lambda spec: _make(spec, whole, device, is_small)))
    if device.type != "cpu":  # signatures have no device, and factories default to a CPU
        return OperatorCall(call.func, call.args, call.kwargs | _device(call.func, device))
    special = {RNN_BACKWARD: _with_workspace, GROUPED: _with_even_groups}.get(signature[0])
    return call if special is None else special(call)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in arguments or results, in flattening order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _make(
    spec: TensorSpec, whole: int, device: torch.device, is_small: bool = False
) -> torch.Tensor:
    """Return a tensor of ones, or one whose rows sum to at most 1.

    Functions of matrices iterate more often for larger arguments: the exponential of a large matrix
    of ones is squared again and again, and overflows.
    """
    if len(spec.stride) != len(spec.shape):
        raise ValueError(f"a tensor of shape {spec.shape} is not strided")
    # strides may overlap or leave gaps, so the whole storage is filled before it gets a shape
    buffer = torch.empty(spec.nbytes // spec.dtype.itemsize, dtype=spec.dtype, device=device)
    real = spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype is torch.bool
    is_small &= spec.dtype.is_floating_point
    number = 1 / max(1, *spec.shape) if is_small else 1
    return buffer.fill_(number if real else whole).as_strided(spec.shape, spec.stride)


def _with_workspace(call: OperatorCall) -> OperatorCall:
    """Give a recurrent layer's backward the workspace that its forward makes.

    The fake workspace has no bytes, and oneDNN would read beyond its end.
    """
    names = [argument.name for argument in schema_of(call.func).arguments]
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    forward = torch.ops.aten.mkldnn_rnn_layer.default
    renamed = {f"weight{i}": f"weight{i + 1}" for i in range(4)} | {"cx_": "cx_tmp"}
    wanted = [argument.name for argument in schema_of(forward).arguments]
    workspace = forward(*(given[renamed.get(name, name)] for name in wanted))[-1]
    args = [
        workspace if name == "workspace" else value
        for name, value in zip(names, call.args, strict=False)
    ]

    return OperatorCall(call.func, args, call.kwargs)


def _with_even_groups(call: OperatorCall) -> OperatorCall:
    """Give each group of a grouped product equally many rows; with empty groups nothing runs."""
    a, b, offs = call.args[0], call.args[1], (*call.args[2:3], call.kwargs.get("offs"))[0]
    if offs is None:
        return call
    grouped = a.shape[-1] if a.dim() == b.dim() else a.shape[0] if a.dim() == 2 else b.shape[-1]
    ends = torch.linspace(0, grouped, len(offs) + 1, device=offs.device)[1:]
    offs.copy_(ends.to(offs.dtype))
    return call


def _with_wide_statistics(signature: Signature) -> Signature:
    """Return the signature with a norm's statistics in fp32."""
    packet = call_of(signature, lambda spec: torch.empty(0))[0]
    keys = [
        key._replace(dtype=torch.float32)
        if isinstance(key, TensorSpec) and argument.name in STATISTICS
        else key
        for argument, key in zip(schema_of(packet).arguments, signature[1], strict=False)
    ]

    return signature[0], tuple(keys), signature[2]


def bytes_and_operations(signature: Signature) -> tuple[int, int]:
    """Return the bytes of arguments and results, and the arithmetic operations if known.

    Operations are counted for matrix products. For other functions of matrices they are an upper
    bound. Nothing is allocated, because the call runs on the meta device.
    """
    from torch.utils.flop_counter import flop_registry  # half a second, and only here

    size = sum(spec.nbytes for spec in tensors_of(signature))
    call = OperatorCall(*call_of(signature, _on_meta))

    try:
        outputs = OperatorCall(
            call.func, call.args, call.kwargs | _device(call.func, torch.device("meta"))
        )()
    except Exception:  # an operator without a meta kernel: only its arguments are counted
        return size, _matrix_operations(signature)

    shared = is_view(call.func) or schema_of(call.func).is_mutable
    size += 0 if shared else sum(t.nbytes for t in tensors_in(outputs))
    count: Callable[..., int] | None = flop_registry.get(call.func.overloadpacket)
    if count is None:
        return size, _matrix_operations(signature)

    return size, int(count(*call.args, **call.kwargs, out_val=outputs))


def _matrix_operations(signature: Signature) -> int:
    """Return the most operations that a function of matrices may take; 0 for other operators."""
    name = signature[0].removeprefix("aten.")
    if not name.startswith(OF_MATRICES) or name.startswith(OF_ELEMENTS):
        return 0
    matrices = [spec.shape for spec in tensors_of(signature) if len(spec.shape) > 1]
    return sum(2 * MATRIX_PRODUCTS * math.prod(shape) * min(shape[-2:]) for shape in matrices)


def is_view(func: OpOverload) -> bool:
    """Return whether the operator returns a view of its argument."""
    returned = [returns.alias_info for returns in schema_of(func).returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


def on_meta(signature: Signature) -> OperatorCall:
    """Return the call on tensors without memory; a view costs the same there."""
    return OperatorCall(*call_of(signature, _on_meta))


def _on_meta(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")


def _device(func: OpOverload, device: torch.device) -> dict[str, Any]:
    takes = any(argument.name == "device" for argument in schema_of(func).arguments)
    return {"device": device} if takes else {}


def smaller(signature: Signature, share: float) -> tuple[Signature, float] | None:
    """Return the same call with a smaller leading dimension, and the share that resulted.

    The size of the largest tensor's leading dimension is replaced wherever it is the leading
    dimension of a tensor or an argument. In operators over lists of tensors each tensor is cut by
    itself, to a whole number of rows.
    """
    specs = [spec for spec in tensors_of(signature) if spec.shape]
    if not specs:
        return None
    if signature[0].startswith(("aten._foreach_", "aten._fused_")):
        return map_tensors(signature, lambda spec: _cut(spec, share)), share

    whole = max(specs, key=lambda spec: spec.nbytes).shape[0]
    part = max(1, round(whole * share))
    if whole < 2 or part == whole:
        return None

    def change(key: Any) -> Any:
        if isinstance(key, TensorSpec):
            return _led_by(key, part) if key.shape[:1] == (whole,) else key
        if type(key) is tuple:
            return tuple(change(item) for item in key)
        return part if type(key) is int and key == whole else key

    changed = tuple((name, change(key)) for name, key in signature[2])
    return (signature[0], change(signature[1]), changed), part / whole


def _led_by(spec: TensorSpec, size: int) -> TensorSpec:
    """Return the tensor with another leading dimension; larger strides are scaled with it."""
    whole, step = spec.shape[0], spec.stride[0]
    stride = tuple(n // whole * size if step and n >= step * whole else n for n in spec.stride)
    return spec._replace(shape=(size, *spec.shape[1:]), stride=stride)


def _cut(spec: TensorSpec, share: float) -> TensorSpec:
    return _led_by(spec, max(1, round(spec.shape[0] * share))) if spec.shape else spec
