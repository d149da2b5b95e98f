"""The dispatcher, autograd and the profiler."""

import inspect
from typing import Any

import pytest
import torch
from torch.utils import checkpoint

from tests.private_cases.parts import at, case, fakes, noting


@case(
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch._C._DisableTorchDispatch",
    to="see each operator of a step, but for its own",
)
def _() -> None:
    x = torch.ones(2)
    with noting() as seen:
        x.sin()
        with at("torch.utils._python_dispatch._disable_current_modes")():
            x.cos()
        with at("torch._C._DisableTorchDispatch")():
            x.tan()
    assert seen.names == ["sin"]


@case("torch._C._AutoDispatchBelowAutograd", to="run an operator alone without autograd")
def _() -> None:
    x = torch.ones(2, requires_grad=True)
    with at("torch._C._AutoDispatchBelowAutograd")():
        assert not x.sin().requires_grad


@case(
    "torch._C._SetExcludeDispatchKeyGuard",
    "torch._C.DispatchKey.ADInplaceOrView",
    to="see whether a kept output was written to since",
)
def _() -> None:
    guard, key = at("torch._C._SetExcludeDispatchKeyGuard"), torch._C.DispatchKey.ADInplaceOrView
    kept: list[torch.Tensor] = []

    def keep(out: torch.Tensor) -> torch.Tensor:
        with guard(key, False):
            kept.append(out.detach())
        return out

    with noting(keep):
        out = torch.ones(2, requires_grad=True).sin()
    before = kept[0]._version
    out.add_(1)
    assert kept[-1]._version == before + 1


@case(
    "torch._C._parse_dispatch_key",
    "torch._C.DispatchKeySet",
    "torch._C._ExcludeDispatchKeyGuard",
    to="run an operator past autocast",
)
def _() -> None:
    x, key = torch.ones(2, 2), at("torch._C._parse_dispatch_key")("AutocastCPU")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with at("torch._C._ExcludeDispatchKeyGuard")(at("torch._C.DispatchKeySet")(key)):
            assert (x @ x).dtype is torch.float32


@case(
    "torch._C.DisableTorchFunction",
    "torch._C.DisableTorchFunctionSubclass",
    to="call functions on tensors of classes of its own",
)
def _() -> None:
    class Own(torch.Tensor):
        pass

    x = torch.ones(2).as_subclass(Own)
    for name in ("DisableTorchFunction", "DisableTorchFunctionSubclass"):
        assert type(x + 1) is Own
        with at(f"torch._C.{name}")():
            assert type(x + 1) is torch.Tensor


@case(
    "torch._C._get_dispatch_mode",
    "torch._C._TorchDispatchModeKey.FAKE",
    "torch._guards.detect_fake_mode",
    to="know whether a model is built of fake tensors",
)
def _() -> None:
    def found() -> tuple[Any, Any]:
        key = at("torch._C._TorchDispatchModeKey.FAKE")
        return at("torch._C._get_dispatch_mode")(key), at("torch._guards.detect_fake_mode")()

    assert found() == (None, None)
    with fakes() as mode:
        assert found() == (mode, mode)


@case("torch._C._current_autograd_node", to="know when a backward runs, and of what")
def _() -> None:
    current, x = at("torch._C._current_autograd_node"), torch.ones(2, requires_grad=True)
    assert current() is None
    loss = x.sin().sum()
    with noting(lambda out: (names.append(current() and current().name()), out)[1]):
        names: list[str] = []
        loss.backward()
    assert "SinBackward0" in names


@case(
    "torch._C._autograd._get_sequence_nr",
    "._sequence_nr",
    to="find the forward operator of a backward one",
)
def _() -> None:
    out = torch.ones(2, requires_grad=True).sin()
    assert out.grad_fn._sequence_nr() == at("torch._C._autograd._get_sequence_nr")() - 1


@case(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    to="know whether somebody else keeps what autograd saves",
)
def _() -> None:
    top = at("torch._C._autograd._top_saved_tensors_default_hooks")
    assert top(True) is None
    with torch.autograd.graph.saved_tensors_hooks(abs, abs):
        assert top(True) is not None


@case("torch._C._functorch.peek_interpreter_stack", to="refuse a recompute inside of torch.func")
def _() -> None:
    peek, seen = at("torch._C._functorch.peek_interpreter_stack"), []
    assert peek() is None
    torch.func.grad(lambda x: (seen.append(peek()), x.sum())[1])(torch.ones(2))
    assert seen[0] is not None


@case("torch._C._profiler._EventType", to="read operators and allocations of a profile")
def _() -> None:
    kinds = at("torch._C._profiler._EventType")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        torch.ones(4)
    roots = profile.profiler.kineto_results.experimental_event_tree()
    assert {event.tag for event in roots} >= {kinds.TorchOp}
    inner = [child for root in roots for child in root.children]
    assert kinds.Allocation in {event.tag for event in inner + roots}


@case(
    "torch.autograd.Variable._execution_engine.run_backward",
    to="run a backward below a mode of functions",
)
def _() -> None:
    x = torch.ones(2, requires_grad=True)
    run = at("torch.autograd.Variable._execution_engine.run_backward")
    options = {"allow_unreachable": True, "accumulate_grad": True}
    run(((x * 3).sum(),), (torch.tensor(1.0),), False, False, (), **options)
    assert x.grad.tolist() == [3.0, 3.0]


@case(
    "._checkpoint_without_reentrant_generator",
    "._checkpoint_without_reentrant_generator_impl",
    to="switch off the checkpointing that a model does by itself",
)
def _() -> None:
    older = "_checkpoint_without_reentrant_generator"
    name = f"{older}_impl" if hasattr(checkpoint, f"{older}_impl") else older
    assert inspect.isgeneratorfunction(getattr(checkpoint, name))
    calls: list[str] = []

    def plain(*_: Any, **__: Any) -> Any:
        calls.append(name)
        yield

    class Plain:
        @staticmethod
        def apply(function: Any, _: bool, *args: Any) -> Any:
            calls.append("CheckpointFunction")
            return function(*args)

    x = torch.ones(2, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, name, plain)
        patch.setattr(checkpoint, "CheckpointFunction", Plain)
        for is_reentrant in (False, True):
            assert checkpoint.checkpoint(torch.sin, x, use_reentrant=is_reentrant).requires_grad
    assert calls == [name, "CheckpointFunction"]
