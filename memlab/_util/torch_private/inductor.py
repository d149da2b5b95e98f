"""TorchInductor's plan of buffers, for a device on which none of its code runs.

What Inductor compiles is a function in Python that allocates buffers, calls kernels, uses buffers
again and drops them, and the source of those kernels. Here PyTorch decides and writes that function
as it would for a card: what is fused, recomputed, laid out in another way. Its kernels are replaced
by ones that do nothing, so over fake tensors it allocates and frees what the compiled step does.
Triton is not needed.

Left out: what Inductor decides by running something on the card, and CUDA graphs. Products of odd
sizes would be padded where that is faster; how much the largest of them would take is noted.
"""

import ast
import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from memlab._util.torch_private.tensors import found_as_itself, without_modes
from memlab.errors import UnsupportedError

Replace = Callable[[Any, str, Any], None]

# no code is kept, and none is compiled beside this process
ALONE = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "compile_threads": 1}
# the graph of backward is lowered with that of forward, where no mode sees it
AT_ONCE = "force_non_lazy_backward_lowering"
LEFT_OUT = {"joint_graph_constant_folding": False}  # it runs operators of the graph
OPERATORS_A_BEAT = 50  # a tenth of a second
ALIGNED = 16  # bytes: inputs that begin elsewhere are copied
PATTERNS = (  # whose rules are read at their first use
    "torch._inductor.fx_passes.joint_graph",
    "torch._inductor.fx_passes.post_grad",
    "torch._inductor.fx_passes.pre_grad",
)
DECIDE = (  # by the word "cuda"
    "torch._inductor.choices",
    "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.fx_passes.misc_patterns",
    "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.kernel.bmm",
    "torch._inductor.kernel.mm",
    "torch._inductor.lowering",
    "torch._inductor.scheduler",
)


@contextlib.contextmanager
def planned_by_inductor(
    device: torch.device,
    tell: Callable[[list[ModuleType]], None] = lambda modules: None,
    beat: Callable[[str], None] = lambda doing: None,
) -> Iterator[list[int]]:
    """Let what Inductor compiles in this context allocate as planned, and compute nothing.

    Yields the bytes that padding would take, of each product of odd sizes.

    Args:
        device: the CPU, or one whose module answers for a card (`get_device_properties`).
        tell: called with the files of Inductor that must take the device for "cuda".
        beat: called now and then with what is being done; what it raises ends that.
    """
    padded: list[int] = []
    with contextlib.ExitStack() as stack:
        with without_modes(), found_as_itself():
            _plan_alone(device, stack, padded, beat)
            if device.type != "cpu":
                tell([import_module(name) for name in DECIDE])
        yield padded


def _plan_alone(
    device: torch.device,
    stack: contextlib.ExitStack,
    padded: list[int],
    beat: Callable[[str], None],
) -> None:
    """Replace what runs code, until the stack is closed."""

    def replace(owner: Any, name: str, value: Any) -> None:
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    config = import_module("torch._inductor.config")
    output = import_module("torch._inductor.output_code")
    graphs = import_module("torch._inductor.graph").GraphLowering

    def ended(compiled: Any, inputs: Any, *_: Any) -> None:
        output.set_tracing_context_output_strides(inputs, compiled)

    replace(graphs, "compile_to_module", lambda graph: _planned(graph, device, beat))
    replace(graphs, "run_node", _telling(graphs.run_node, beat))
    replace(output.CompiledFxGraph, "post_compile", ended)
    stack.enter_context(config.patch(ALONE))
    before_inductor = import_module("torch._functorch.config")
    if hasattr(before_inductor, AT_ONCE):
        stack.enter_context(before_inductor.patch({AT_ONCE: True}))
    log = logging.getLogger("torch._inductor")
    stack.callback(log.setLevel, log.level)
    log.setLevel(logging.CRITICAL)  # it misses templates for kernels that are not made here
    if device.type != "cpu":
        stack.enter_context(config.patch(LEFT_OUT))
        replace(import_module("torch._inductor.fx_passes.pad_mm"), "_should_pad", _noting(padded))
        replace(graphs, "constant_name", _on_card(graphs.constant_name, device))
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
    for name in ("torch._inductor.scheduler", "torch._inductor.fx_passes.pad_mm"):
        replace(import_module(name), "has_triton", lambda: True)
    # it stands in the source of kernels, by which Triton keeps what it compiled
    replace(import_module("torch.utils._triton"), "triton_hash_with_backend", str)
    hints = import_module("torch._inductor.runtime.hints")
    for asked_once in (hints.DeviceProperties.create, utils.is_big_gpu):
        asked_once.cache_clear()
        stack.callback(asked_once.cache_clear)


def _on_card(own: Callable[..., str], device: torch.device) -> Callable[..., str]:
    """Return what names a constant of a graph, on the device as a tensor without values."""
    virtualized = import_module("torch._inductor.virtualized").V

    def constant_name(graph: Any, name: str, device_override: torch.device | None) -> str:
        if device_override is None or device_override.type != device.type:
            return own(graph, name, device_override)
        moved = f"{name}_{device.type}"
        if graph.constants[name].device != device_override and moved not in graph.constants:
            given = graph.constants[name]
            with virtualized.fake_mode:
                graph.constants[moved] = torch.empty_strided(
                    given.shape, given.stride(), dtype=given.dtype, device=device
                )
        return moved if moved in graph.constants else name

    return constant_name


def _noting(padded: list[int]) -> Callable[..., bool]:
    """Return what pads no product, and notes the bytes of what would be copied to pad it."""

    def should_pad(_: Any, first: torch.Tensor, second: torch.Tensor, *__: Any, **___: Any) -> bool:
        (*batch, rows, inner), columns = first.shape, second.shape[-1]
        alignment = 16 // first.itemsize
        is_odd = [size > 1 and size % alignment > 0 for size in (rows, inner, columns)]
        of_result = math.prod(batch) * rows * columns * first.itemsize
        padded.append(
            first.nbytes * (is_odd[0] or is_odd[1])
            + second.nbytes * (is_odd[1] or is_odd[2])
            + of_result * (is_odd[0] or is_odd[2])
        )
        return False

    return should_pad


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


def _planned(lowered: Any, device: torch.device, beat: Callable[[str], None]) -> SimpleNamespace:
    """Return the function that Inductor has written for a graph, without its kernels."""
    beat(f"torch.compile fuses and orders the kernels of {_pass_of(lowered)}")
    written, _ = lowered.codegen()

    def empty(size: Any, stride: Any, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def on_host(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    def seen_as(base: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return torch.as_strided(base, size, stride, base.storage_offset() + offset)

    def aligned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.storage_offset() * tensor.itemsize % ALIGNED else tensor

    def check(tensor: torch.Tensor, size: Any, stride: Any, *_: Any) -> None:
        sizes = zip(tensor.shape, tensor.stride(), size, stride, strict=True)
        if any(own != told or (step != jump and own > 1) for own, step, told, jump in sizes):
            raise UnsupportedError(
                f"torch.compile's plan has a tensor of shape {tuple(size)} and strides "
                f"{tuple(stride)} where the step has {tuple(tensor.shape)} and {tensor.stride()}; "
                "use memlab.measure, or compile=False"
            )

    own = {
        **lowered.constants,
        "AsyncCompile": _NoKernels,
        "get_raw_stream": lambda _: None,
        "nullcontext": contextlib.nullcontext,
        "empty_strided": empty,
        "empty_strided_cpu": on_host,
        "reinterpret_tensor": seen_as,
        "copy_if_misaligned": aligned,
        "assert_size_stride": check,
        "assert_alignment": lambda *_: None,
    }
    names = {"__name__": "planned"}
    for statement in ast.parse(written.value).body:
        # a machine without CUDA or Triton lacks names that the kernels alone use
        with contextlib.suppress(ImportError, AttributeError):
            exec(compile(ast.Module([statement], []), "<inductor>", "exec"), names)
        names.update(own)
    return SimpleNamespace(call=names["call"], runner=names.get("runner"))


def _telling(own: Callable[..., Any], beat: Callable[[str], None]) -> Callable[..., Any]:
    """Return what lowers an operator of a graph, and tells of some of them."""

    def run_node(graph: Any, node: Any) -> Any:
        number = getattr(graph, "lowered_here", 0)
        graph.lowered_here = number + 1
        if number % OPERATORS_A_BEAT == 0:
            of_all = f"operator {number + 1} of {len(graph.module.graph.nodes)}"
            beat(f"torch.compile lowers {_pass_of(graph)}, {of_all}")
        return own(graph, node)

    return run_node


def _pass_of(graph: Any) -> str:
    return "backward" if graph.is_backward else "forward"


class _NoKernels:
    """Stands for the compiler of kernels: whatever it compiles does nothing."""

    def wait(self, names: Any) -> None:
        """Wait for nothing."""

    def __getattr__(self, language: str) -> Callable[..., Any]:
        def kernel(*_: Any, **__: Any) -> None:
            """Do nothing."""

        kernel.run = kernel  # type: ignore[attr-defined]  # so Triton's are called
        return lambda *_, **__: kernel
