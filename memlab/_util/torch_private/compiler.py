"""TorchDynamo and the partitioner of torch.compile.

They take seconds to import, so each is imported when a function here first needs it.
"""

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch

from memlab._util.torch_private.tensors import FakeTensor, found_as_itself, without_modes
from memlab.errors import UnsupportedError

# the module that compiling, and the first call of an optimizer, would import
DYNAMO = "torch._dynamo"

FUNCTIONS = (FunctionType, MethodType, staticmethod, classmethod)

# memlab's code that runs in place of PyTorch's while a step is recorded
_UTIL = Path(__file__).parents[1]
NEVER_COMPILED = (f"{_UTIL}{os.sep}", f"{_UTIL.with_name('tracing')}{os.sep}")


def partitioners() -> Any:
    """Return PyTorch's module that divides a joint graph into forward and backward.

    Public in it: `choose_saved_values_set`, `solve_min_cut`, `estimate_runtime`, `is_sym_node`,
    `reordering_to_mimic_autograd_engine`, `raise_getitems`.
    """
    return importlib.import_module("torch._functorch.partitioners")


def extract_graphs() -> Callable[..., Any]:
    """Return the partitioner's function that takes the two graphs out of a joint one."""
    extract: Callable[..., Any] = partitioners()._extract_fwd_bwd_modules
    return extract


def size_of(node: Any) -> int:
    """Return the bytes of a graph's node, as the partitioner counts them."""
    return int(partitioners()._size_of(node))


@contextlib.contextmanager
def partitioned_by(
    *, extract: Callable[..., Any] | None = None, **functions: Callable[..., Any]
) -> Iterator[None]:
    """Replace functions of the partitioner by name.

    Args:
        extract: replaces what `extract_graphs` returns.
        functions: replace the others.
    """
    if extract is not None:
        functions["_extract_fwd_bwd_modules"] = extract
    module = partitioners()
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def planned_with(**settings: Any) -> contextlib.AbstractContextManager[None]:
    """Return the context in which the partitioner has these settings, by name."""
    config = importlib.import_module("torch._functorch.config")
    patched: contextlib.AbstractContextManager[None] = config.patch(**settings)
    return patched


def compile_error() -> type[Exception]:
    """Return the base class of TorchDynamo's errors about code that it cannot compile."""
    error: type[Exception] = importlib.import_module(f"{DYNAMO}.exc").TorchDynamoException
    return error


def backend_error() -> Any:
    """Return the class of errors that a backend raises while it compiles: `inner_exception`."""
    return importlib.import_module(f"{DYNAMO}.exc").BackendCompilerFailed


def names_of_main(model: torch.nn.Module) -> dict[str, Any]:
    """Return what the classes of a model find in a `__main__` that is not that of this process.

    Those of a notebook or a script were sent to a worker by value. What such a forward calls finds
    its names in a dictionary of its own, but TorchDynamo looks them up in the module `__main__`.

    Raises:
        UnsupportedError: two of the classes find different things by one name.
    """
    here, found = vars(sys.modules["__main__"]), dict[str, Any]()
    owners = {base for module in model.modules() for base in type(module).__mro__}
    values = [value for owner in (*owners, *model.modules()) for value in vars(owner).values()]
    functions: list[Any] = [each for each in values if isinstance(each, FUNCTIONS)]
    scopes = [getattr(inspect.unwrap(each), "__globals__", {}) for each in functions]
    scopes = [each for each in scopes if each.get("__name__") == "__main__" and each is not here]
    for scope in {id(each): each for each in scopes}.values():
        for name, value in scope.items():
            if found.setdefault(name, value) is not value and not name.startswith("__"):
                raise UnsupportedError(
                    f"classes of the model find two different things by the name {name!r} in "
                    "__main__, and torch.compile would take one for both; define the model in a "
                    "file of its own that is imported, or use compile=False"
                )
    return {name: value for name, value in found.items() if not name.startswith("__")}


@contextlib.contextmanager
def found_in_main(names: dict[str, Any]) -> Iterator[None]:
    """Let TorchDynamo find these names in the module `__main__`."""
    here = vars(sys.modules["__main__"])
    before = {name: here[name] for name in names if name in here}
    here.update(names)
    try:
        yield
    finally:
        for name in names:
            here.pop(name, None)
        here.update(before)


def forget_compiled() -> None:
    """Drop all compiled code of this process."""
    importlib.import_module(DYNAMO).reset()


@contextlib.contextmanager
def compiled_calls_noted(begin: Callable[[str], None], end: Callable[[], None]) -> Iterator[None]:
    """Run what `torch.compile` has made as it was written, and tell of each call.

    What the backend "eager" has made is not told of: it runs the same operators.

    Args:
        begin: called before a call, with the name of the function or of the module's class.
        end: called after it, also if it raises.
    """
    module: Any = importlib.import_module(f"{DYNAMO}.eval_frame")
    callback_of, set_callback = module._callback_from_stance, module._maybe_set_eval_frame
    calls: list[tuple[FrameType, bool]] = []  # whether the function is running

    def compiling(callback: Any) -> Any:
        frame = sys._getframe(1)
        made = module.innermost_backend(callback) if callback else None
        is_eager = made is None or getattr(made, "compiler_name", "") == "eager"
        if not is_eager and "fn" in frame.f_locals:
            calls.append((frame, False))
            begin(_name_of(frame.f_locals["fn"]))
        return callback_of(callback)

    def set_for(callback: Any) -> Any:
        if calls and calls[-1][0] is sys._getframe(1):  # before the function, then after it
            frame, is_running = calls.pop()
            if is_running:
                end()
            else:
                calls.append((frame, True))
        return set_callback(callback)

    module._callback_from_stance, module._maybe_set_eval_frame = compiling, set_for
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        module._callback_from_stance, module._maybe_set_eval_frame = callback_of, set_callback


@contextlib.contextmanager
def compiled_inside_of_modes(
    backend: str,
    beat: Callable[[str], None],
    planning: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Let `torch.compile` compile inside of dispatch modes, which it would not, as outside of them.

    Only what was compiled runs inside: its operators reach the modes. Each size is compiled apart,
    as in a process that meets no other; of two sizes there are twice as many graphs.

    Args:
        backend: the one that may compile, besides "eager". Others generate code, which cannot run
            over fake tensors.
        beat: called with a text before a function is compiled; what it raises ends the run.
        planning: the context in which the backend compiles a graph, which has been traced then.
    """
    module: Any = importlib.import_module(f"{DYNAMO}.convert_frame")
    wrapper = module.CatchErrorsWrapper
    convert = wrapper.__call__

    def outside(self: Any, frame: Any, *args: Any) -> Any:
        code = frame.f_code
        if code.co_filename.startswith(NEVER_COMPILED):
            return module.ConvertFrameReturn()
        made = innermost(self)
        name, options = getattr(made, "compiler_name", ""), getattr(made, "config", None)
        if name not in (backend, "eager") or options:
            raise UnsupportedError(
                f"{code.co_qualname if sys.version_info >= (3, 11) else code.co_name} is compiled "
                f"by the model or its loss itself, with backend {name!r}"
                f"{' and a mode or options' * bool(options)}, whose code cannot be "
                "predicted beside a compiled step; use memlab.measure, or compile=False"
            )
        beat("torch.compile reads the model")
        with without_modes(), found_as_itself(), _unguarded(self.hooks, FakeTensor):
            return convert(self, frame, *args)

    def planned(self: Any, *args: Any, **kwargs: Any) -> Any:
        with planning():
            return compile_graph(self, *args, **kwargs)

    graphs = importlib.import_module(f"{DYNAMO}.output_graph").OutputGraph
    compile_graph = graphs.call_user_compiler
    wrapper.__call__, graphs.call_user_compiler = outside, planned
    innermost = importlib.import_module(f"{DYNAMO}.eval_frame").innermost_backend
    settings: Any = importlib.import_module(f"{DYNAMO}.config")
    most = 2 * settings.recompile_limit
    try:
        with settings.patch(automatic_dynamic_shapes=False, recompile_limit=most):
            yield
    finally:
        wrapper.__call__, graphs.call_user_compiler = convert, compile_graph


@contextlib.contextmanager
def _unguarded(hooks: Any, replaced: type) -> Iterator[None]:
    """Let what is compiled here run where a class is found as another one."""
    before = hooks.guard_filter_fn

    def kept(guards: Any) -> list[bool]:
        own = before(guards) if before else [True] * len(guards)
        return [keep and each.value is not replaced for keep, each in zip(own, guards, strict=True)]

    hooks.guard_filter_fn = kept
    try:
        yield
    finally:
        hooks.guard_filter_fn = before


def _name_of(function: Any) -> str:
    """Return the name of what was compiled; of a module that of its class."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    owner = getattr(function, "__self__", function)
    if isinstance(owner, torch.nn.Module) and not inspect.isclass(function):
        return type(owner).__name__
    return str(getattr(function, "__qualname__", function)).rpartition("<locals>.")[2]
