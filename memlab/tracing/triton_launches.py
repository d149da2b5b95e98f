"""Triton kernels while a step is predicted for a card: a launch does nothing.

A kernel of Triton writes into tensors that were allocated before it is launched, and allocates
nothing itself. So a launch is left out: it adds no memory, and no value is known anyway. That holds
for any kernel, of a package or of a person's own. Whoever launches one is a subclass of Triton's
`KernelInterface` (`JITFunction`, `Autotuner`, `Heuristics`), and `run` is what each of them calls.

The Python around a kernel asks whether its tensors are on a card, in many ways: `x.is_cuda`,
`x.device.type == "cuda"`, `torch.cuda.get_device_capability()`, `with torch.cuda.device(...)`. So
while a step is recorded, in files that use Triton the word "cuda" means the device that stands in
for it. In the code of their functions it is replaced by that device's name, as a constant and as
the name of an attribute:

    if x.is_cuda and y.device.type == "cuda"      becomes
    if x.is_cudalike and y.device.type == "cudalike"

A person's own functions are told likewise (`told`): those of the workload, and of files that belong
to no installed package. In them `torch.cuda` answers for the card. A variable of their file that is
"cuda" becomes the other name, and one that asks whether there is a card is computed again, unless
that would call another function than `torch.device`, `str` and `bool`:

    DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

`Tensor.cuda` moves to the device that stands in, whoever calls it.

Left out: what else a file has decided when it was imported, and constants of a notebook, whose
source is not known here; the candidates that an autotuner times on a
card, before the first step; the time of kernels. `SHORT` names kernels whose time does not matter,
and a step with any other kernel has no time. `card_answers.py` answers code that asks for the
number of processors or the shared memory of the card. A kernel that is compiled to look at it
(`kernel.warmup`) is refused.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch

from memlab._util.functions import OWN_PACKAGE, is_library
from memlab.errors import UnsupportedError

CUDA = re.compile(r"cuda:?(\d+)?")  # f"cuda:{0}" holds "cuda:"
NOT_TOLD = ("memlab", "torch", "triton")  # packages that know what they ask
METHODS = (classmethod, staticmethod, MethodType)
ANSWERS = (torch.device, torch.dtype, str, bool, int, float)
WITHOUT_CALLS = (
    ast.Attribute, ast.BoolOp, ast.Compare, ast.Constant, ast.FormattedValue, ast.IfExp,
    ast.JoinedStr, ast.Name, ast.UnaryOp, ast.boolop, ast.cmpop, ast.expr_context, ast.keyword,
    ast.unaryop,
)  # fmt: skip
"""Parts of an expression that call no function of a person's."""

SHORT = ("liger_kernel.ops.cross_entropy", "liger_kernel.ops.utils", "trl.kernels.chunked_logprob")
"""Files whose kernels make one pass over logits, between products that take far longer."""


@dataclass(slots=True, eq=False)
class _LeftOut:
    """What is replaced while launches are left out.

    Attributes:
        name: of the device that stands in for CUDA.
        restoring: gives everything back.
        seen: the files that were looked at.
        told: the code that a person's functions have in the meantime.
    """

    name: str
    restoring: contextlib.ExitStack
    seen: set[str] = field(default_factory=set)
    told: set[CodeType] = field(default_factory=set)


_now: _LeftOut | None = None
_noting: list[Callable[[str], None]] = []


@contextlib.contextmanager
def left_out(name: str, driver: Any) -> Iterator[None]:
    """Leave out all launches, and have files that use Triton take this device for CUDA.

    Args:
        name: of the device.
        driver: answers what kernels ask Triton's driver.
    """
    global _now
    before = _now
    with contextlib.ExitStack() as stack:
        stack.enter_context(_moved_by_cuda(name))
        if find_spec("triton") is not None:
            stack.enter_context(_without_launches())
            stack.enter_context(_answered_by(driver))
        _now = _LeftOut(name, stack)
        try:
            look()
            yield
        finally:
            _now = before


@contextlib.contextmanager
def noted(note: Callable[[str], None]) -> Iterator[None]:
    """Call `note` at each launch, with the file and the name of the kernel."""
    _noting.append(note)
    try:
        yield
    finally:
        _noting.remove(note)


def look() -> None:
    """Find files that use Triton and were imported since, while launches are left out."""
    if _now is None:
        return
    log_probabilities = without_kernels()
    if log_probabilities is not None:
        _now.restoring.enter_context(given_kernels(log_probabilities, launched))
        _tell(log_probabilities, _now)
    if "triton" in sys.modules and "triton" not in _now.seen:
        _now.seen.clear()  # a file may have imported it since
    for name in [name for name in sys.modules if name not in _now.seen]:
        _now.seen.add(name)
        module = sys.modules.get(name)
        if not isinstance(module, ModuleType) or name.split(".")[0] in NOT_TOLD:
            continue
        if "triton" in sys.modules and _uses_triton(module):
            _tell(module, _now)
        elif _is_own(module):
            _tell_own(vars(module), (), _now)


def told(functions: Iterable[Any]) -> None:
    """Have a person's functions, and those that they see, take this device for CUDA."""
    if _now is None:
        return
    for function in functions:
        while not isinstance(function, FunctionType) and function is not None:
            function = next(
                (getattr(function, n) for n in ("func", "__func__") if hasattr(function, n)), None
            )
        if function is not None and not is_library(function.__code__.co_filename):
            _tell_own(function.__globals__, (function,), _now)


def tell(modules: Iterable[ModuleType]) -> None:
    """Have files of PyTorch that decide by the word "cuda" take this device for it."""
    if _now is not None:
        for module in modules:
            _reword(module, {"is_cuda": f"is_{_now.name}"}, _now)


def launched(file: str, kernel: str) -> None:
    """Note a launch that was left out."""
    for note in _noting:
        note(f"{file}.{kernel}")


def _tell(module: ModuleType, now: _LeftOut) -> None:
    """Have the functions of a file take the device that stands in for CUDA."""
    words = {"cuda": now.name, "is_cuda": f"is_{now.name}"}
    for word in [word for word in words if word in vars(module)]:
        del words[word]  # a variable of the file
    _reword(module, words, now)


def _reword(module: ModuleType, words: dict[str, str], now: _LeftOut) -> None:
    """Replace "cuda" and these words in the functions of a file."""
    for function in _functions_of(vars(module)):
        now.restoring.callback(setattr, function, "__code__", function.__code__)
        function.__code__ = _with_words(function.__code__, words, now.name)


def _is_own(module: ModuleType) -> bool:
    """Return whether a file is a person's own."""
    file = getattr(module, "__file__", None) or OWN_PACKAGE
    return not (file.startswith(OWN_PACKAGE) or is_library(file))


def _tell_own(names: dict[str, Any], functions: Sequence[FunctionType], now: _LeftOut) -> None:
    """Have a person's functions that see these names take the device that stands in for CUDA."""
    for function in _functions_of(names, functions):
        if function.__code__ in now.told:
            continue
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            now.restoring.callback(setattr, function, name, getattr(function, name))
        words = {"is_cuda": f"is_{now.name}"}
        function.__code__ = _with_words(function.__code__, words, now.name)
        function.__defaults__ = _renamed(function.__defaults__, now.name)
        function.__kwdefaults__ = _renamed(function.__kwdefaults__, now.name)
        now.told.add(function.__code__)
    again = dict(_constants_of(names, now.name))
    for name, value in list(names.items()):
        other = _Torch(now.name) if value is torch else _renamed(again.get(name, value), now.name)
        if other is not value and not name.startswith("__"):
            now.restoring.callback(names.__setitem__, name, value)
            names[name] = other


def _renamed(value: Any, device: str, within: tuple[Any, ...] = ()) -> Any:
    """Return the device that stands in for CUDA where CUDA is named, alone or among defaults.

    A dictionary that lies `within` itself, such as the names of a module, is left alone there.
    """
    if isinstance(value, torch.device):
        return torch.device(device, value.index or 0) if value.type == "cuda" else value
    if type(value) is str:
        return value.replace("cuda", device) if CUDA.fullmatch(value) else value
    if type(value) not in (dict, tuple) or any(value is one for one in within):
        return value
    within = (*within, value)
    if type(value) is tuple:
        return tuple(_renamed(one, device, within) for one in value)
    return {key: _renamed(one, device, within) for key, one in value.items()}


class _Torch(ModuleType):
    """PyTorch, except that `torch.cuda` is the module of the device that stands in for CUDA."""

    def __init__(self, device: str) -> None:
        super().__init__("torch")
        self.cuda = getattr(torch, device)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _constants_of(names: dict[str, Any], device: str) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a file that say whether there is a card, as on one that has it."""
    file = names.get("__file__")
    if not file or not str(file).endswith(".py"):
        return
    try:
        tree = ast.parse("".join(linecache.getlines(str(file))))
    except (SyntaxError, ValueError):
        return  # the person is changing it; what was imported stays as it was
    seen = {**names, **{n: _Torch(device) for n, value in names.items() if value is torch}}
    for line in tree.body:
        match line:
            case ast.Assign([ast.Name(name)], value) if _is_answer(value, names):
                code = compile(ast.Expression(value), str(file), "eval")
                with contextlib.suppress(Exception):  # it stays as it was
                    answer = eval(_with_words(code, {}, device), seen)
                    if isinstance(answer, ANSWERS):
                        yield name, answer


def _is_answer(value: ast.expr, names: dict[str, Any]) -> bool:
    """Return whether an expression asks for a card and runs nothing of the person's."""
    if "cuda.is_available" not in ast.unparse(value):
        return False
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            name, _, rest = ast.unparse(node.func).partition(".")
            is_torchs = names.get(name) is torch and rest in ("device", "cuda.is_available")
            if not is_torchs and (name not in ("str", "bool") or rest or name in names):
                return False
        elif not isinstance(node, WITHOUT_CALLS):
            return False
    return True


def _functions_of(
    names: dict[str, Any], functions: Sequence[FunctionType] = ()
) -> list[FunctionType]:
    """Return the functions and methods that see these names, also those that a decorator wraps."""
    found: dict[int, FunctionType] = {}
    wrapping: set[int] = set()

    def visit(value: Any) -> None:
        if isinstance(value, type):
            if id(value) not in wrapping:
                wrapping.add(id(value))
                for one in list(vars(value).values()):
                    visit(one)
            return
        # no attribute of another object is asked for: a module that is imported late would come
        value = value.__func__ if isinstance(value, METHODS) else value
        value = value.fget if isinstance(value, property) else value
        if not isinstance(value, FunctionType) or id(value) in wrapping:
            return
        wrapping.add(id(value))
        if value.__globals__ is names:
            found[id(value)] = value
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell without a value
                visit(cell.cell_contents)

    for value in (*functions, *names.values()):
        visit(value)
    return list(found.values())


def _with_words(code: CodeType, words: dict[str, str], name: str) -> CodeType:
    """Return code with other names of attributes, and with `name` in place of "cuda"."""

    def other(constant: Any) -> Any:
        if isinstance(constant, CodeType):
            return _with_words(constant, words, name)
        if isinstance(constant, str) and CUDA.fullmatch(constant):
            return constant.replace("cuda", name)
        if isinstance(constant, tuple | frozenset):
            return type(constant)(other(one) for one in constant)
        return constant

    return code.replace(
        co_consts=tuple(other(constant) for constant in code.co_consts),
        co_names=tuple(words.get(word, word) for word in code.co_names),
    )


def _uses_triton(module: ModuleType) -> bool:
    """Return whether a file has imported Triton, or has one of its kernels."""
    triton, launcher = sys.modules["triton"], _launcher()
    return any(
        value is triton or launcher in type(value).__mro__ for value in list(vars(module).values())
    )


def _launcher() -> Any:
    """Return the class of whatever launches kernels."""
    return import_module("triton.runtime.jit").KernelInterface


@contextlib.contextmanager
def _without_launches() -> Iterator[None]:
    """Replace what launches a kernel."""

    def run(self: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> None:
        kernel = self
        while not isinstance(kernel, FunctionType) and hasattr(kernel, "fn"):
            kernel = kernel.fn
        if warmup:
            raise UnsupportedError(
                f"the Triton kernel {kernel.__name__} is compiled to look at it (warmup), which "
                "needs a card; launch it without, or measure the step on a card"
            )
        launched(kernel.__module__, kernel.__name__)

    import_module("triton.runtime.autotuner")  # of subclasses
    own = [(kind, vars(kind)["run"]) for kind in _below(_launcher()) if "run" in vars(kind)]
    for kind, _ in own:
        kind.run = run
    try:
        yield
    finally:
        for kind, method in own:
            kind.run = method


@contextlib.contextmanager
def _moved_by_cuda(name: str) -> Iterator[None]:
    """Have `Tensor.cuda`, which modules call too, move to the device that stands in for CUDA."""

    def cuda(self: Any, device: Any = None, non_blocking: bool = False, **more: Any) -> Any:
        return self.to(name, non_blocking=non_blocking, **more)

    tensors: Any = torch.Tensor
    tensors.cuda = cuda
    try:
        yield
    finally:
        del tensors.cuda  # what is left is that of the class above


@contextlib.contextmanager
def _answered_by(driver: Any) -> Iterator[None]:
    """Give Triton another driver: its own asks for a card when it is made."""
    config = import_module("triton.runtime.driver").driver
    usual = vars(config).copy()
    config.set_active(driver)
    try:
        yield
    finally:
        vars(config).clear()
        vars(config).update(usual)


def _below(kind: Any) -> Iterator[Any]:
    """Yield all subclasses of a class."""
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


# trl's Triton kernels where Triton is not installed: as a card runs them.
#
# trl computes log-probabilities tile by tile. On a card a Triton kernel folds each tile into
# tensors
# that are there already, and only the positions that have a label are computed; elsewhere
# operators
# of PyTorch make several tensors as large as a tile. PyTorch brings Triton with its builds for
# CUDA.
# So the machine that predicts may lack it, while the card that it predicts for has it.
#
# trl can be imported without Triton, and then notes that there is none. Inside this context it is
# told that there is, and its kernels do nothing. Where Triton is installed, there is nothing to
# do:
# `triton_launches.py` leaves out the launches of any package.

MODULE = "trl.kernels.chunked_logprob"


class _Kernel:
    """A kernel that does nothing: `kernel[grid](*arguments)`."""

    def __init__(self, name: str, launched: Callable[[str, str], None]) -> None:
        self.name, self.launched = name, launched

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launched(MODULE, self.name)


def without_kernels() -> ModuleType | None:
    """Return the file of trl that has found no Triton; None if there is none."""
    module = sys.modules.get(MODULE)
    return None if getattr(module, "_TRITON_AVAILABLE", True) else module


@contextlib.contextmanager
def given_kernels(module: ModuleType, launched: Callable[[str, str], None]) -> Iterator[None]:
    """Give this file kernels that do nothing but call `launched` with their file and name."""
    stand_ins = {
        "_forward_kernel": _Kernel("_forward_kernel", launched),
        "_backward_kernel": _Kernel("_backward_kernel", launched),
        "_TRITON_AVAILABLE": True,
        "triton": SimpleNamespace(cdiv=lambda one, other: -(-one // other)),
    }
    names = vars(module)
    usual = {name: names[name] for name in stand_ins if name in names}
    names.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del names[name]
        names.update(usual)
