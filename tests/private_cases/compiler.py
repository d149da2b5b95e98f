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
