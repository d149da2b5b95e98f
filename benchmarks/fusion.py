"""What does fusing a chain of pointwise operators save, in bytes moved and in time?

Run one by one, each operator reads its inputs from memory and writes its result there. Fused, the
chain reads what comes from outside and writes what is returned, once. Bytes are counted from the
operators' tensors, each once for an operator; caches are left out. Rows: eager; TorchScript, the
historical way, deprecated in favour of torch.compile; Inductor, where there is a C++ compiler.
"""

import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import report

NUM_NUMBERS, NUM_NUMBERS_QUICK = 1 << 24, 1 << 18
NUM_ROUNDS, NUM_ROUNDS_QUICK = 15, 3


def chain(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return GELU of x + bias by its tanh formula: ten pointwise operators over two inputs."""
    y = x + bias
    return 0.5 * y * (1.0 + torch.tanh(0.7978845608 * (y + 0.044715 * y * y * y)))


class Traffic(TorchDispatchMode):
    """Counts the operators that run under it, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operators = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_operators += 1
        self.num_bytes += bytes_of(*args, kwargs) + bytes_of(result)
        return result


def bytes_of(*values: Any) -> int:
    """Return the bytes of the tensors among these values, one that comes twice once."""
    tensors = {id(v): v for v in tree_leaves(values) if isinstance(v, torch.Tensor)}
    return sum(tensor.nbytes for tensor in tensors.values())


def one_by_one(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[int, int]:
    """Return how many operators a function runs, and the bytes that they move."""
    with Traffic() as traffic:
        function(*inputs)
    return traffic.num_operators, traffic.num_bytes


def fused(function: Callable[..., Any], *inputs: torch.Tensor) -> int:
    """Return the bytes that one kernel for the whole function moves."""
    return bytes_of(*inputs) + bytes_of(function(*inputs))


def by_inductor(*inputs: torch.Tensor) -> tuple[Callable[..., Any], int]:
    """Return the compiled chain and how many kernels were generated for it."""
    from torch._inductor import metrics

    metrics.reset()
    torch._dynamo.reset()
    compiled = torch.compile(chain, backend="inductor")
    # what comes from a cache is not counted
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        compiled(*inputs)
    return compiled, metrics.generated_kernel_count


def by_torchscript() -> Callable[..., Any]:
    """Return the chain as TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted: Callable[..., Any] = torch.jit.script(chain)
    return scripted


def seconds(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], rounds: int) -> float:
    """Return the median time of a call, after three that are not counted."""
    taken = []
    for _ in range(rounds + 3):
        start = time.perf_counter()
        function(*inputs)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[3:])


def rows(num_numbers: int, num_rounds: int) -> list[dict[str, Any]]:
    """Return one row for each way to run the chain."""
    inputs = (torch.randn(num_numbers), torch.randn(num_numbers))
    num_operators, moved = one_by_one(chain, *inputs)
    ways: dict[str, tuple[Callable[..., Any], int, int | None]] = {
        "eager, one by one": (chain, num_operators, moved),
        # a CPU's TorchScript fuses in some builds only, and tells nobody
        "TorchScript (historical, deprecated)": (by_torchscript(), 0, None),
    }
    if shutil.which("g++"):
        compiled, num_kernels = by_inductor(*inputs)
        bytes_moved = fused(chain, *inputs) if num_kernels == 1 else None
        ways["torch.compile, Inductor"] = (compiled, num_kernels, bytes_moved)
    return [
        {
            "run by": name,
            "kernels": kernels or None,
            "bytes moved": nbytes,
            "seconds": seconds(function, inputs, num_rounds),
        }
        for name, (function, kernels, nbytes) in ways.items()
    ]


def main() -> None:
    """Run the chain in every way."""
    given, before = report.options(__file__, __doc__), report.environment()
    size = NUM_NUMBERS_QUICK if given.quick else NUM_NUMBERS
    found = rows(size, NUM_ROUNDS_QUICK if given.quick else NUM_ROUNDS)
    report.show(f"a chain of pointwise operators over {size:,} numbers in fp32", found)
    report.write(given, before, {"rows": found})


if __name__ == "__main__":
    main()
