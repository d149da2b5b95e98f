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
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from memlab.torch_private.operators import OpOverload

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
    return _name(func), tuple([_key(value) for value in args]), keys


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
