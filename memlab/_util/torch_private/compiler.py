"""TorchDynamo and the partitioner of torch.compile.

They take seconds to import, so each is imported when a function here first needs it.
"""

import contextlib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, FunctionType, MethodType, ModuleType
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


def scopes_of_main(
    model: torch.nn.Module, functions: Iterable[Callable[..., Any]]
) -> list[dict[str, Any]]:
    """Return where functions find their names that are of another `__main__` than this process's.

    They are of a notebook or a script, and were sent to this worker by value.

    Args:
        model: whose methods, and functions that it holds, its hooks too, are among them.
        functions: further ones.
    """
    owners = {base for module in model.modules() for base in type(module).__mro__}
    values = [value for owner in (*owners, *model.modules()) for value in vars(owner).values()]
    values += [each for value in values if isinstance(value, dict) for each in value.values()]
    every = map(_function_of, (*values, *functions))
    scopes = [getattr(inspect.unwrap(each), "__globals__", {}) for each in every]
    here = vars(sys.modules["__main__"])
    own = [each for each in scopes if each.get("__name__") == "__main__" and each is not here]
    return list({id(scope): scope for scope in own}.values())


def _function_of(value: Any) -> Any:
    """Return the function that a call of a value runs: of a method, a partial, or an object."""
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, FUNCTIONS) or not callable(value):
        return value
    return type(value).__call__


def main_of(scopes: list[dict[str, Any]]) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return the context in which TorchDynamo finds names of these scopes in `__main__`.

    It looks up the names of a function that another one calls in the module of its `__name__`.

    Raises:
        UnsupportedError: on entering it, if a name is two different things.
    """
    own = sys.modules["__main__"]

    class Main(ModuleType):
        """A module that has what is in the scopes now."""

        def __getattr__(self, name: str) -> Any:
            found = [scope[name] for scope in scopes if name in scope]
            return found[0] if found else getattr(own, name)

        def __setattr__(self, name: str, value: Any) -> None:
            for scope in scopes:
                scope[name] = value

    main = Main("__main__")

    @contextlib.contextmanager
    def found() -> Iterator[None]:
        known: dict[str, Any] = {}
        for scope in scopes:
            for name, value in scope.items():
                if known.setdefault(name, value) is not value and not name.startswith("__"):
                    raise UnsupportedError(
                        f"{name!r} is two different things to functions of __main__, and "
                        "torch.compile would take one for both; define the model in a file of its "
                        "own that is imported, or use compile=False"
                    )
        before, sys.modules["__main__"] = sys.modules["__main__"], main
        try:
            yield
        finally:
            sys.modules["__main__"] = before

    return found if scopes else contextlib.nullcontext


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
    tracing: Callable[[], contextlib.AbstractContextManager[None]],
    planning: Callable[[torch.fx.GraphModule], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Let `torch.compile` compile inside of dispatch modes, which it would not, as outside of them.

    Only what was compiled runs inside: its operators reach the modes. Each size is compiled apart,
    as in a process that meets no other; of two sizes there are twice as many graphs.

    Args:
        backend: the one that may compile, besides "eager". Others generate code, which cannot run
            over fake tensors.
        beat: called with a text before a function is compiled; what it raises ends the run.
        tracing: the context in which a function is traced, where it breaks a graph several times.
        planning: returns that in which the backend compiles a graph that was traced.
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
        unguarded = _unguarded(self.hooks, FakeTensor)
        with without_modes(), found_as_itself(), unguarded, tracing():
            return convert(self, frame, *args)

    def planned(self: Any, graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        with planning(graph):
            return compile_graph(self, graph, *args, **kwargs)

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
