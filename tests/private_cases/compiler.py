"""The compiler, and what is kept for the process."""

import torch

from tests.private_cases.parts import arguments_of, at, case, noting, there


@case("torch._dynamo", to="compile, and forget what was compiled")
def _() -> None:
    assert issubclass(at("torch._dynamo.exc.TorchDynamoException"), Exception)
    assert arguments_of(at("torch._dynamo.reset")) == []
    frames = at("torch._dynamo.convert_frame")
    assert arguments_of(frames.CatchErrorsWrapper.__call__)[:2] == ["self", "frame"]
    assert frames.ConvertFrameReturn().guarded_code is None
    assert at("torch._dynamo.config").automatic_dynamic_shapes is True


@case("torch._functorch.config", to="set the budget of what a compiled step saves")
def _() -> None:
    config = at("torch._functorch.config")
    settings = {
        "activation_memory_budget": 0.5,
        "activation_memory_budget_solver": "dp",
        "activation_memory_budget_runtime_estimator": "flops",
        "enable_autograd_cache": False,
    }
    assert config.activation_memory_budget == 1.0
    with config.patch(**settings):
        assert {name: getattr(config, name) for name in settings} == settings


@case(
    "torch._functorch.partitioners",
    "._extract_fwd_bwd_modules",
    "._size_of",
    to="judge the plans that the partitioner makes",
)
def _() -> None:
    module = at("torch._functorch.partitioners")
    assert {"joint_graph", "node_info", "memory_budget"} <= set(
        arguments_of(module.choose_saved_values_set)
    )
    extract = arguments_of(module._extract_fwd_bwd_modules)
    assert extract[:2] == ["joint_module", "saved_values"]
    assert "saved_sym_nodes" in extract
    for name in ("is_sym_node", "reordering_to_mimic_autograd_engine", "raise_getitems"):
        assert callable(getattr(module, name))
    assert arguments_of(module.solve_min_cut)[:3] == ["joint_graph", "node_info", "min_cut_options"]
    assert arguments_of(module.estimate_runtime) == ["node"]
    node = torch.fx.Graph().placeholder("x")
    node.meta["val"] = torch.ones(4)
    assert module._size_of(node) == 16


@case(
    "torch._inductor.config",
    "torch._inductor.graph",
    "torch._inductor.output_code",
    to="let Inductor plan the buffers of a step, and compile nothing",
)
def _() -> None:
    settings = at("torch._inductor.config")
    for name in (
        "fx_graph_cache", "fx_graph_remote_cache", "compile_threads", "shape_padding",
        "joint_graph_constant_folding",
    ):  # fmt: skip
        assert hasattr(settings, name)
    graph = at("torch._inductor.graph").GraphLowering
    assert arguments_of(graph.compile_to_module) == arguments_of(graph.codegen) == ["self"]
    output = at("torch._inductor.output_code")
    assert arguments_of(output.CompiledFxGraph.post_compile)[:2] == ["self", "example_inputs"]
    assert len(arguments_of(output.set_tracing_context_output_strides)) == 2


@case(
    "torch._dynamo.device_interface",
    "torch._inductor.choices",
    "torch._inductor.codegen.common",
    "torch._inductor.codegen.triton",
    "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.fx_passes.joint_graph",
    "torch._inductor.fx_passes.misc_patterns",
    "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.fx_passes.post_grad",
    "torch._inductor.fx_passes.pre_grad",
    "torch._inductor.kernel.bmm",
    "torch._inductor.kernel.mm",
    "torch._inductor.lowering",
    "torch._inductor.runtime.hints",
    "torch._inductor.scheduler",
    "torch._inductor.utils",
    "torch._inductor.virtualized",
    "torch.utils._triton",
    "._should_pad",
    to="have Inductor decide as for a card that is not there",
)
def _() -> None:
    for name in ("joint_graph", "post_grad", "pre_grad"):
        assert callable(at(f"torch._inductor.fx_passes.{name}").lazy_init)
    common = at("torch._inductor.codegen.common")
    assert arguments_of(common.register_backend_for_device)[:3] == [
        "device", "device_scheduling", "device_wrapper_codegen",
    ]  # fmt: skip
    assert len(arguments_of(common.register_device_op_overrides)) == 2
    assert isinstance(common.device_codegens, dict)
    assert isinstance(common.device_op_overrides_dict, dict)
    assert isinstance(at("torch._inductor.codegen.triton").TritonScheduling, type)
    assert "cuda" in at("torch._inductor.utils").GPU_TYPES
    assert callable(at("torch._inductor.utils").is_big_gpu.cache_clear)
    assert callable(at("torch._inductor.runtime.hints").DeviceProperties.create.cache_clear)
    for name in ("scheduler", "fx_passes.pad_mm"):
        assert callable(at(f"torch._inductor.{name}").has_triton)
    padding = arguments_of(at("torch._inductor.fx_passes.pad_mm")._should_pad)
    assert padding[:4] == ["match", "mat1", "mat2", "op"]
    named = arguments_of(at("torch._inductor.graph").GraphLowering.constant_name)
    assert named == ["self", "name", "device_override"]
    for name in ("choices", "kernel.bmm", "kernel.mm", "lowering", "fx_passes.misc_patterns"):
        assert at(f"torch._inductor.{name}")
    assert callable(at("torch._inductor.fx_passes.fuse_attention")._sfdp_params_check)
    assert hasattr(at("torch._inductor.virtualized"), "V")
    assert callable(at("torch.utils._triton").triton_hash_with_backend)
    interfaces = at("torch._dynamo.device_interface")
    assert isinstance(interfaces.device_interfaces, dict)
    assert isinstance(interfaces.CudaInterface.Worker, type)


@case(
    "torch._C._dispatch_tls_local_include_set",
    "torch._C._dispatch_tls_local_exclude_set",
    to="see that a job leaves a mode behind",
)
def _() -> None:
    before = str(at("torch._C._dispatch_tls_local_include_set")())
    with noting():
        assert str(at("torch._C._dispatch_tls_local_include_set")()) != before
    excluded = str(at("torch._C._dispatch_tls_local_exclude_set")())
    with torch.no_grad(), at("torch._C._AutoDispatchBelowAutograd")():
        assert str(at("torch._C._dispatch_tls_local_exclude_set")()) != excluded


@case("torch._C._get_fp32_precision_getter", to="see that a job changes the precision of fp32")
def _() -> None:
    assert isinstance(at("torch._C._get_fp32_precision_getter")("generic", "all"), str)


there("torch._C", "torch._C._autograd", "torch._C._functorch", to="ask for its switches")
there("torch._inductor", to="leave the compiler's processes out of those that a job leaves behind")


@case(
    "._callback_from_stance",
    "._maybe_set_eval_frame",
    to="see that a person's compiled function is called",
)
def _() -> None:
    module, seen = at("torch._dynamo.eval_frame"), []
    own = module._callback_from_stance, module._maybe_set_eval_frame

    def noted(callback: object) -> object:
        seen.append(callback)
        return own[0](callback)

    module._callback_from_stance = noted
    module._maybe_set_eval_frame = lambda callback: seen.append("set") or own[1](callback)
    try:
        with torch.compiler.set_stance("force_eager"):
            assert torch.compile(lambda x: x + 1, backend="aot_eager")(1) == 2
    finally:
        module._callback_from_stance, module._maybe_set_eval_frame = own
    assert seen[1:] == ["set", "set"]
    assert module.innermost_backend(seen[0]).compiler_name == "aot_eager"
