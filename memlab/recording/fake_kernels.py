"""Outputs of operators whose fake kernels in PyTorch fail, are wrong, or are missing.

Left out: outputs that depend on more than the signature, which the tracker handles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memlab.torch_private import pytree
from memlab.torch_private.dispatch import without_python
from memlab.torch_private.fakes import FakeTensor, missing_kernels_run_by
from memlab.torch_private.python_device import registered_name

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


OWN: dict[Any, Callable[..., Any]] = {aten.log_sigmoid_forward.default: _log_sigmoid_forward}
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
