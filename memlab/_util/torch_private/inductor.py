"""TorchInductor's plan of buffers, for a device on which none of its code runs.

What Inductor compiles is a function in Python that allocates buffers, calls kernels, uses buffers
again and drops them, and the source of those kernels. Here PyTorch decides and writes that function
as it would for a card: what is fused, recomputed, laid out in another way. Its kernels are replaced
by ones that do nothing, so over fake tensors it allocates and frees what the compiled step does.
Triton is not needed.

Left out: what Inductor decides by running something on the card (`LEFT_OUT`), and CUDA graphs.
"""

import ast
import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from memlab._util.torch_private.tensors import found_as_itself, without_modes

Replace = Callable[[Any, str, Any], None]

# no code is kept, and none is compiled beside this process
ALONE = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "compile_threads": 1}
# Products of odd sizes are padded where that was faster on the card, and constants of a graph are
# found by running its operators.
LEFT_OUT = {"shape_padding": False, "joint_graph_constant_folding": False}
PATTERNS = (  # whose rules are read at their first use
    "torch._inductor.fx_passes.joint_graph",
    "torch._inductor.fx_passes.post_grad",
    "torch._inductor.fx_passes.pre_grad",
)


@contextlib.contextmanager
def planned_by_inductor(device: torch.device) -> Iterator[None]:
    """Let what Inductor compiles in this context allocate as planned, and compute nothing.

    Args:
        device: the CPU, or one whose module answers for a card (`get_device_properties`).
    """
    with contextlib.ExitStack() as stack:
        with without_modes(), found_as_itself():
            _plan_alone(device, stack)
        yield


def _plan_alone(device: torch.device, stack: contextlib.ExitStack) -> None:
    """Replace what runs code, until the stack is closed."""

    def replace(owner: Any, name: str, value: Any) -> None:
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    config = import_module("torch._inductor.config")
    output = import_module("torch._inductor.output_code")
    graphs = import_module("torch._inductor.graph").GraphLowering

    def ended(compiled: Any, inputs: Any, *_: Any) -> None:
        output.set_tracing_context_output_strides(inputs, compiled)

    replace(graphs, "compile_to_module", lambda graph: _planned(graph, device))
    replace(output.CompiledFxGraph, "post_compile", ended)
    stack.enter_context(config.patch(ALONE))
    if device.type != "cpu":
        stack.enter_context(config.patch(LEFT_OUT))
        _decide_as_for_a_card(device, stack, replace)


def _decide_as_for_a_card(
    device: torch.device, stack: contextlib.ExitStack, replace: Replace
) -> None:
    """Make Inductor take a device for a CUDA card, whose properties its module tells."""
    for name in PATTERNS:
        patterns = import_module(name)
        patterns.lazy_init()
        replace(patterns, "lazy_init", lambda *_, **__: None)

    common = import_module("torch._inductor.codegen.common")
    kernels = import_module("torch._inductor.codegen.triton").TritonScheduling
    common.init_backend_registration()
    written = common.get_wrapper_codegen_for_device("cuda")
    common.register_backend_for_device(device.type, kernels, written)
    common.register_device_op_overrides(device.type, _words(common.DeviceOpOverrides)())
    stack.callback(common.device_codegens.pop, device.type)
    stack.callback(common.device_op_overrides_dict.pop, device.type)
    utils = import_module("torch._inductor.utils")
    replace(utils, "GPU_TYPES", [*utils.GPU_TYPES, device.type])

    interfaces = import_module("torch._dynamo.device_interface")
    answers = _interface(interfaces.CudaInterface, torch.get_device_module(device))
    interfaces.register_interface_for_device(device.type, answers)
    stack.callback(interfaces.device_interfaces.pop, device.type)
    replace(import_module("torch._inductor.scheduler"), "has_triton", lambda: True)
    # it stands in the source of kernels, by which Triton keeps what it compiled
    replace(import_module("torch.utils._triton"), "triton_hash_with_backend", str)
    hints = import_module("torch._inductor.runtime.hints")
    for asked_once in (hints.DeviceProperties.create, utils.is_big_gpu):
        asked_once.cache_clear()
        stack.callback(asked_once.cache_clear)


def _words(base: Any) -> Any:
    """Return the class of words that a written function has for the device."""
    words = {
        "import_get_raw_stream_as": lambda _, name: f"{name} = None",
        "set_device": lambda *_: "pass",
        "synchronize": lambda _: "pass",
        "device_guard": lambda *_: "nullcontext()",
    }
    return type("Words", (base,), words)


def _interface(base: Any, module: Any) -> Any:
    """Return what answers Inductor's questions about a card."""

    def capability(device: Any = None) -> int:
        major, minor = module.get_device_capability()
        return int(10 * major + minor)

    answers = {
        "get_device_properties": staticmethod(module.get_device_properties),
        "current_device": staticmethod(module.current_device),
        "get_compute_capability": staticmethod(capability),
        "is_available": staticmethod(lambda: True),
        "is_bf16_supported": staticmethod(module.is_bf16_supported),
        "is_triton_capable": staticmethod(lambda device=None: True),
        "raise_if_triton_unavailable": staticmethod(lambda device=None: None),
    }
    worker = type("Worker", (base.Worker,), answers)
    return type("Interface", (base,), {**answers, "Worker": worker})


def _planned(lowered: Any, device: torch.device) -> SimpleNamespace:
    """Return the function that Inductor has written for a graph, without its kernels."""
    written, _ = lowered.codegen()

    def empty(size: Any, stride: Any, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def on_host(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    def seen_as(base: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return torch.as_strided(base, size, stride, base.storage_offset() + offset)

    own = {
        **lowered.constants,
        "AsyncCompile": _NoKernels,
        "get_raw_stream": lambda _: None,
        "nullcontext": contextlib.nullcontext,
        "empty_strided": empty,
        "empty_strided_cpu": on_host,
        "reinterpret_tensor": seen_as,
        "copy_if_misaligned": lambda tensor: tensor,
        "assert_size_stride": lambda *_: None,
        "assert_alignment": lambda *_: None,
    }
    names = {"__name__": "planned"}
    for statement in ast.parse(written.value).body:
        # a machine without CUDA or Triton lacks names that the kernels alone use
        with contextlib.suppress(ImportError, AttributeError):
            exec(compile(ast.Module([statement], []), "<inductor>", "exec"), names)
        names.update(own)
    return SimpleNamespace(call=names["call"], runner=names.get("runner"))


class _NoKernels:
    """Stands for the compiler of kernels: whatever it compiles does nothing."""

    def wait(self, names: Any) -> None:
        """Wait for nothing."""

    def __getattr__(self, language: str) -> Callable[..., Any]:
        def kernel(*_: Any, **__: Any) -> None:
            """Do nothing."""

        kernel.run = kernel  # type: ignore[attr-defined]  # so Triton's are called
        return lambda *_, **__: kernel
