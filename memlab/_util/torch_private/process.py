"""What PyTorch keeps for a whole process: switches that can be read, and caches that fill.

A worker compares both before and after a job. A switch that this PyTorch does not have is left out.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

OF_TORCH = (
    "_get_autograd_fallback_mode", "_get_backcompat_broadcast_warn", "_get_backcompat_keepdim_warn",
    "_get_blas_preferred_backend", "_get_cpu_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction", "_get_cublas_allow_fp16_accumulation",
    "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_tf32",
    "_get_cudnn_allow_tf32", "_get_cudnn_benchmark", "_get_cudnn_depthwise_kernel",
    "_get_cudnn_deterministic", "_get_cudnn_enabled", "_get_cudnn_sdp_enabled",
    "_get_deterministic_fill_uninitialized_memory", "_get_fa3_sdp_enabled",
    "_get_flash_sdp_enabled", "_get_graph_executor_optimize", "_get_linalg_preferred_backend",
    "_get_math_sdp_allow_fp16_bf16_reduction", "_get_math_sdp_enabled",
    "_get_mem_efficient_sdp_enabled", "_get_miopen_immediate", "_get_mkldnn_deterministic",
    "_get_mkldnn_enabled", "_get_nnpack_enabled", "_get_onednn_allow_tf32",
    "_get_overrideable_sdp_enabled", "_get_qengine", "_get_rocm_fa_preferred_backend",
    "_get_sdp_priority_order", "_get_sm_carveout_experimental", "_get_tracing_state",
    "_is_default_mobile_cpu_allocator_set", "_is_fwd_grad_enabled",
    "_is_grad_layout_enforcement_enabled", "_is_multithreading_enabled",
    "_is_torch_function_all_disabled", "_is_torch_function_enabled", "_is_view_replay_enabled",
    "_len_torch_dispatch_stack", "_len_torch_function_stack", "_only_lift_cpu_tensors",
)  # fmt: skip
OF_AUTOGRAD = (
    "_profiler_enabled", "_saved_tensors_hooks_get_disabled_error_message",
    "_saved_tensors_hooks_is_enabled",
)  # fmt: skip
OF_FUNCTORCH = (
    "_is_vmap_fallback_enabled", "get_dynamic_layer_stack_depth",
    "get_inplace_requires_grad_allowed", "get_single_level_autograd_function_allowed",
)  # fmt: skip

# the names of all dispatch keys that this thread includes, and excludes
included_dispatch_keys = torch._C._dispatch_tls_local_include_set
excluded_dispatch_keys = torch._C._dispatch_tls_local_exclude_set

# the precision of fp32 by backend and operator; None in a PyTorch without it
fp32_precision_of: Callable[[str, str], Any] | None = getattr(
    torch._C, "_get_fp32_precision_getter", None
)

# places where runs leave data (never functions or classes) on which no later run depends
CACHES = (
    "torch._custom_class_base.", "torch._decomp.decompositions_for_rng.PhiloxStateTracker",
    "torch._dynamo.", "torch._functorch.", "torch._guards.", "torch._higher_order_ops.",
    "torch._inductor.", "torch._jit_internal.", "torch._library.simple_registry.",
    "torch._logging.", "torch._opaque_base.", "torch._ops.", "torch._subclasses.",
    "torch.cuda._lazy_seed_tracker", "torch.distributed._meta_registrations.used_ids",
    "torch.distributed.elastic.events._events_loggers",
    "torch.distributed.distributed_c10d._backend",  # of the newest process group
    "torch.distributed.fsdp._fully_shard._fully_shard.cls_to_fsdp_cls",  # made of a class alone
    "torch.fx.", "torch.jit.", "torch.mtia._lazy_seed_tracker",
    "torch.nn.utils.parametrize._cache", "torch.ops.",
    "torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.NO_SERIALIZED_TYPE_NAME_FOUND",
    "torch.utils._stats.", "torch.utils._sympy.", "torch.utils.hooks.RemovableHandle.next_id",
    "torch.utils.weak.", "torch.xpu._lazy_seed_tracker",
)  # fmt: skip

# places that their first use changes permanently; no bytes and no bits of a step depend on them
CHANGED_ONCE = (
    "torch.compiler._cache.", "torch.fx.graph_module._forward_from_src",
    "torch.nn.modules.module.Module.___needs_generation_tag_patch", "torch.ops.c10d",
)  # fmt: skip

# None while no process group is open
DEFAULT_GROUP = "torch.distributed.distributed_c10d._world._default_pg"

# files whose code wraps functions: the compiler, and every optimizer class at its first use
WRAPPERS = (
    "/torch/_dynamo/".replace("/", os.sep),
    "/torch/optim/optimizer.py".replace("/", os.sep),
)

# text in the command lines of processes that the compiler keeps to generate code
COMPILER_PROCESSES = ("torch/_inductor", "torch._inductor")


def switches() -> dict[str, Callable[[], Any]]:
    """Return a function that reads each switch, by the name of the switch."""
    found: dict[str, Callable[[], Any]] = {}
    for owner, prefix, names in (
        (torch._C, "torch._C.", OF_TORCH),
        (torch._C._autograd, "torch.autograd.", OF_AUTOGRAD),
        (torch._C._functorch, "torch.func.", OF_FUNCTORCH),
    ):
        found |= {prefix + name: getattr(owner, name) for name in names if hasattr(owner, name)}
    return found
