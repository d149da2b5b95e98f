"""Signatures of operator calls: everything that a kernel's memory and time depend on.

A signature is an operator's name and its arguments, with dtype, shape and strides of each tensor.
It can be hashed, written as a text that is the same in every process, and called again on new
tensors. Left out: devices, generators, the values in tensors, and whether two arguments share
memory.

>>> x = torch.ones(2, 3)
>>> print(to_text(signature_of(torch.ops.aten.sum.dim_IntList, (x, [0], True), {})))
aten.sum.dim_IntList(float32((2, 3), (3, 1)), (0,), True)
"""

import ast
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from memlab._util.collectives import Call, Collective
from memlab._util.torch_private import pytree
from memlab._util.torch_private.tensors import OpOverload, below_autograd, schema_of
from memlab.trace import Phase

Signature = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""An operator's full name, its arguments, and its keyword arguments sorted by name."""


class TensorSpec(NamedTuple):
    """A tensor without its memory; one that is not strided has a shape and no strides."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes from its first element to its last, elements between them included."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=False))
        return (last + 1) * self.dtype.itemsize


class Scalar(NamedTuple):
    """A float, bool or complex number as text, since 1, 1.0 and True are equal but their texts not.

    The type matters for what an operator returns: an int64 tensor times 2.0 is a float32 tensor.
    """

    text: str


TRUE, FALSE = Scalar("True"), Scalar("False")
PLAIN = frozenset((int, str, type(None), torch.dtype, torch.layout, torch.memory_format))
DROPPED = (torch.device, torch.Generator)
_new = tuple.__new__  # a NamedTuple's own __new__ takes twice as long


def signature_of(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """Return the signature of a call as a `TorchDispatchMode` sees it; takes a few microseconds."""
    keys = () if not kwargs else tuple([(k, _key(kwargs[k])) for k in sorted(kwargs)])
    name, values = _name(func), tuple([_key(value) for value in args])
    if name == RNN_FORWARD and not torch.is_grad_enabled():  # its kernel does not go by `train`
        values = (*values[:-1], None)
    return name, values, keys


@functools.cache
def _name(func: OpOverload) -> str:
    return str(func)


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        stride = value.stride() if value.layout is torch.strided else ()
        return _new(TensorSpec, (value.dtype, tuple(value.shape), stride))

    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is bool:
        return TRUE if value else FALSE
    if isinstance(value, list | tuple):
        return tuple([_key(item) for item in value])
    if isinstance(value, float):
        return Scalar(repr(value))
    if isinstance(value, complex):  # its repr does not tell 1-0j from 1+0j when it is read
        return Scalar(f"complex({value.real!r}, {value.imag!r})")
    if isinstance(value, DROPPED):
        return None

    return f"<{kind.__name__}>"  # not an argument of a kernel; repeating such a call fails


def call_of(
    signature: Signature, make_tensor: Callable[[TensorSpec], torch.Tensor]
) -> tuple[OpOverload, list[Any], dict[str, Any]]:
    """Return operator, arguments and keyword arguments of the call on newly made tensors.

    Raises:
        AttributeError: this process does not know the operator.
    """
    namespace, packet, overload = signature[0].split(".")
    func = getattr(getattr(getattr(torch.ops, namespace), packet), overload)

    def value_of(key: Any) -> Any:
        if isinstance(key, TensorSpec):
            return make_tensor(key)
        if isinstance(key, Scalar):
            return _evaluate(ast.parse(key.text, mode="eval").body)
        return [value_of(item) for item in key] if isinstance(key, tuple) else key

    return (
        func,
        [value_of(key) for key in signature[1]],
        {name: value_of(key) for name, key in signature[2]},
    )


def map_tensors(signature: Signature, change: Callable[[TensorSpec], TensorSpec]) -> Signature:
    """Return the signature with each tensor in it changed."""

    def changed(key: Any) -> Any:
        if isinstance(key, TensorSpec):
            return change(key)
        plain = not isinstance(key, tuple) or isinstance(key, Scalar)
        return key if plain else tuple(changed(item) for item in key)

    return signature[0], changed(signature[1]), changed(signature[2])


def tensors_of(signature: Signature) -> list[TensorSpec]:
    """Return the tensors among the arguments, in order."""
    found: list[TensorSpec] = []
    map_tensors(signature, lambda spec: found.append(spec) or spec)  # type: ignore[func-returns-value]
    return found


def to_text(signature: Signature) -> str:
    """Return the signature as a Python expression; `from_text` reads it back."""
    name, args, kwargs = signature
    parts = [_text(key) for key in args]
    parts += [f"{name}={_text(key)}" for name, key in kwargs]
    return f"{name}({', '.join(parts)})"


def _text(key: Any) -> str:
    if isinstance(key, TensorSpec):
        return _text_of_tensor(key)
    if isinstance(key, Scalar):
        return key.text
    if isinstance(key, tuple):
        return f"({', '.join([_text(item) for item in key])}{',' if len(key) == 1 else ''})"
    return repr(key)  # dtypes and the like write themselves as torch.float32


@functools.lru_cache(maxsize=2**16)
def _text_of_tensor(spec: TensorSpec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')}({spec.shape}, {spec.stride})"


def from_text(text: str) -> Signature:
    """Return the signature that `to_text` has written.

    Raises:
        ValueError: the text is not a signature.
    """
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call):
            raise TypeError
        args = tuple(_key_of(node) for node in call.args)
        kwargs = tuple((str(word.arg), _key_of(word.value)) for word in call.keywords)
        return ast.unparse(call.func), args, kwargs
    except (SyntaxError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{text!r} is not a signature of an operator call") from error


def _key_of(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id != "complex":
        shape, stride = (ast.literal_eval(part) for part in node.args)
        return TensorSpec(getattr(torch, node.func.id), shape, stride)
    if isinstance(node, ast.Tuple):
        return tuple(_key_of(item) for item in node.elts)
    if isinstance(node, ast.Attribute):
        return getattr(torch, node.attr)

    value = _evaluate(node)
    return value if type(value) in PLAIN else Scalar(ast.unparse(node))


def _evaluate(node: ast.expr) -> Any:
    """Return the value of a literal, also of inf, nan and complex, unlike `ast.literal_eval`."""
    if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return float(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.Call):
        return complex(*(_evaluate(part) for part in node.args))
    return ast.literal_eval(node)


# `OperatorCost`: the memory and time of one operator, and the conditions of the measurement.

STEADY = 1.5  # median over minimum; on an idle machine it is less
BUSY_SHARE = 0.15  # of all processors


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCost:
    """The memory and time of one operator, run alone on real memory.

    Attributes:
        output_bytes: for each output tensor, in flattening order, the bytes of the storage that
            the operator allocated; 0 if the storage belongs to an argument or an earlier output.
        peak_bytes: most bytes that the operator holds at once, outputs included.
        kept_bytes: bytes that stay allocated afterwards but are in no output, such as a cache.
        seconds: time of one call without autograd and Python around it; None if not timed.
        extrapolated: whether it was computed from the same operator at smaller sizes.
        num_repeats: number of timed calls.
        median_seconds: median of these calls.
        least_seconds: minimum of these calls.
        others_share: the share of all processors that other programs used; None if not known.
        taken_at: when it was timed, in seconds since 1970.
    """

    output_bytes: tuple[int, ...]
    peak_bytes: int
    kept_bytes: int = 0
    seconds: float | None = None
    extrapolated: bool = False
    num_repeats: int | None = None
    median_seconds: float | None = None
    least_seconds: float | None = None
    others_share: float | None = None
    taken_at: float | None = None

    @property
    def spread(self) -> float:
        """The median divided by the minimum; 1 if they are not known."""
        if not self.median_seconds or not self.least_seconds:
            return 1.0
        return self.median_seconds / self.least_seconds

    @property
    def is_noisy(self) -> bool:
        """Whether its time was taken while the machine was busy, as far as that is known."""
        if self.seconds is None:
            return False
        return self.spread > STEADY or (self.others_share or 0.0) > BUSY_SHARE


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnownCosts:
    """Recorded costs of operators on another machine.

    Attributes:
        operators: costs by signature. For a card only their seconds are used, since its memory
            follows rules.
        overheads: by phase, seconds that an operator takes besides its kernel; empty for a card.
        origin: a clause on where they were found, if a prediction has to say that.
    """

    operators: Mapping[Signature, OperatorCost]
    overheads: Mapping[Phase, float]
    origin: str = ""


# Which operators are collectives, and how large the whole tensor of a call is.
#
# Two namespaces have them: `c10d` changes tensors that it is given, `_c10d_functional`
# returns new ones. Left out: barriers, and what no step of memlab does (send and receive,
# gather and scatter).

NAMESPACES = ("c10d", "_c10d_functional")
# the collective of each operator of c10d, and the argument that holds the whole tensor
_WHOLE = {
    "_allgather_base_": (Collective.ALL_GATHER, 0),
    "allgather_": (Collective.ALL_GATHER, 0),
    "allgather_coalesced_": (Collective.ALL_GATHER, 0),
    "allgather_into_tensor_coalesced_": (Collective.ALL_GATHER, 0),
    "_reduce_scatter_base_": (Collective.REDUCE_SCATTER, 1),
    "reduce_scatter_": (Collective.REDUCE_SCATTER, 1),
    "reduce_scatter_tensor_coalesced_": (Collective.REDUCE_SCATTER, 1),
    "allreduce_": (Collective.ALL_REDUCE, 0),
    "allreduce_coalesced_": (Collective.ALL_REDUCE, 0),
    "broadcast_": (Collective.BROADCAST, 0),
    "alltoall_base_": (Collective.ALL_TO_ALL, 1),
    "alltoall_": (Collective.ALL_TO_ALL, 1),
}
_FUNCTIONAL = {
    "all_gather_into_tensor": Collective.ALL_GATHER,
    "reduce_scatter_tensor": Collective.REDUCE_SCATTER,
    "all_reduce": Collective.ALL_REDUCE,
    "broadcast": Collective.BROADCAST,
    "all_to_all_single": Collective.ALL_TO_ALL,
}


def call_of_collective(signature: Signature, num_ranks: int) -> Call | None:
    """Return what a call of an operator sends; None if it is no collective that is counted.

    Args:
        signature: of the call.
        num_ranks: of its group.
    """
    namespace, name, _ = signature[0].split(".")
    if namespace == "c10d" and name in _WHOLE:
        kind, position = _WHOLE[name]
        return Call(kind, num_ranks, bytes_of_argument(signature[1][position]))

    if namespace == "_c10d_functional":
        # the functional forms are also there in place, with an underscore, and for several tensors
        found = _FUNCTIONAL.get(name.removesuffix("_").removesuffix("_coalesced"))
        if found is not None:
            parts = num_ranks if found is Collective.ALL_GATHER else 1
            return Call(found, num_ranks, parts * bytes_of_argument(signature[1][0]))
    return None


def bytes_of_argument(argument: Any) -> int:
    """Return the bytes of the tensors in one argument."""
    specs = [argument] if isinstance(argument, TensorSpec) else tensors_of(("", argument, ()))
    return sum(spec.nbytes for spec in specs)


# Turn a signature into a call on real memory, and make such a call smaller.
#
# The tensors hold values that are safe for kernels: ones, and zeros in integer tensors,
# which are mostly indices. Left out: results that depend on values, such as the length of
# `nonzero`.

CPU = torch.device("cpu")
# Norms keep these in the format of their weight, but fake tensors have that of the input (bf16).
STATISTICS = frozenset({"save_mean", "save_invstd", "save_var", "mean", "rstd"})
RECURRENT = "aten.mkldnn_rnn_layer"  # its sequences have three dimensions, time first
RNN_FORWARD, RNN_BACKWARD = f"{RECURRENT}.default", f"{RECURRENT}_backward.default"
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
        return leaf_tensors([self.args, self.kwargs])


class _WithoutGradients(OperatorCall):
    """A recurrent layer of oneDNN in inference, where it returns no workspace."""

    def __call__(self) -> Any:
        with torch.no_grad():
            *outputs, _ = self.func(*self.args, **self.kwargs)
        return [*outputs, torch.empty(0)]  # as many as fake tensors have


@contextlib.contextmanager
def as_in_training() -> Iterator[None]:
    """Run the kernels that a training step runs, without autograd, and restore the random state.

    Gradients are enabled, because oneDNN's recurrent layers allocate their reserve only then. One
    whose signature says that it ran without them runs without them here too.
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
    if signature[0] == RNN_FORWARD and call.args[-1] is None:
        return _WithoutGradients(call.func, [*call.args[:-1], False], call.kwargs)
    special = {RNN_BACKWARD: _with_workspace, GROUPED: _with_even_groups}.get(signature[0])
    return call if special is None else special(call)


def leaf_tensors(tree: Any) -> list[torch.Tensor]:
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
    size += 0 if shared else sum(t.nbytes for t in leaf_tensors(outputs))
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
    itself, to a whole number of rows. A recurrent layer gets fewer time steps: its kernel does not
    check that weights have the size of the state, and would read beyond their end.
    """
    specs = [spec for spec in tensors_of(signature) if spec.shape]
    if not specs:
        return None
    if signature[0].startswith(("aten._foreach_", "aten._fused_")):
        return map_tensors(signature, lambda spec: _cut(spec, share)), share
    if signature[0].startswith(RECURRENT):
        return _with_fewer_steps(signature, share)

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


def _with_fewer_steps(signature: Signature, share: float) -> tuple[Signature, float] | None:
    """Return a recurrent layer's call over fewer time steps, which lead its sequences alone."""
    whole = tensors_of(signature)[0].shape[0]
    part = max(1, round(whole * share))
    if part == whole:
        return None
    cut = map_tensors(signature, lambda one: _led_by(one, part) if len(one.shape) == 3 else one)
    return cut, part / whole


def _led_by(spec: TensorSpec, size: int) -> TensorSpec:
    """Return the tensor with another leading dimension; larger strides are scaled with it."""
    whole, step = spec.shape[0], spec.stride[0]
    stride = tuple(n // whole * size if step and n >= step * whole else n for n in spec.stride)
    return spec._replace(shape=(size, *spec.shape[1:]), stride=stride)


def _cut(spec: TensorSpec, share: float) -> TensorSpec:
    return _led_by(spec, max(1, round(spec.shape[0] * share))) if spec.shape else spec
