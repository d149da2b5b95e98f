"""`overhead_seconds`: what an operator of a step takes besides its kernel, on this machine.

That is modules and the model's Python around it in forward, autograd in backward, the optimizer's
Python in the update. It is found from a step whose tensors are tiny, so that kernels take almost
nothing:

    (the fastest of 30 forwards - its operators alone, each at its fastest) / number of operators

Before each phase caches are filled with other data, as they are in a step whose tensors are not
tiny: warm, the same Python takes half as long.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from memlab._util.torch_private.tensors import TorchDispatchMode
from memlab.cost_model.calibration import cache_filler, doubted, is_due, times_of
from memlab.cost_model.cost_store import LEAST_OVERHEAD, MOST_OVERHEAD, OVERHEAD, Store
from memlab.devices.here import LoadWatch, is_quiet
from memlab.devices.operators import (
    OperatorCost,
    Signature,
    as_in_training,
    is_view,
    prepare,
    signature_of,
)
from memlab.trace import Phase

OVERHEADS: dict[Phase, Signature] = {
    phase: (f"{OVERHEAD}{phase}", (), ())
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
}
NOTHING = OperatorCost(output_bytes=(), peak_bytes=0)
TINY, TINY_LAYERS, TINY_STEPS = 4, 4, 30


def overhead_seconds(
    store: Store | None, doubted_before: float | None = None
) -> dict[Phase, float]:
    """Return what an operator of each phase takes besides its kernel, in seconds.

    It is less the Python call that an operator alone is timed with: a few microseconds. Views have
    no kernel and take it all the same.

    Args:
        store: as for `calibrate`.
        doubted_before: as for `calibrate`.
    """
    known = {} if store is None else store.read(list(OVERHEADS.values()))
    old = doubted(known, doubted_before)
    known = {signature: cost for signature, cost in known.items() if signature not in old}
    found = {phase: known.get(signature) for phase, signature in OVERHEADS.items()}
    is_known = all(cost is not None and cost.seconds is not None for cost in found.values())
    is_any_due = any(is_due(cost) for cost in known.values())
    if is_known and not (is_any_due and is_quiet()):
        return {phase: cost.seconds for phase, cost in found.items() if cost and cost.seconds}

    watch = LoadWatch()
    seconds = _measured()
    if store is not None:
        taken = replace(NOTHING, others_share=watch.others_share(), taken_at=time.time())
        store.write({OVERHEADS[p]: replace(taken, seconds=s) for p, s in seconds.items()})
    return seconds


def _measured() -> dict[Phase, float]:
    """Return the overhead of each phase, from steps of a tiny model that run now."""
    with torch.random.fork_rng(devices=[]):
        model = torch.nn.Sequential(*(_Tiny() for _ in range(TINY_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(TINY, TINY, TINY)
    evict = cache_filler()
    times = [_phase_times(model, optimizer, batch, evict) for _ in range(TINY_STEPS)]

    seconds = {}
    for phase in OVERHEADS:
        signatures = _operators_of(phase, model, optimizer, batch)
        kernels = Counter(signature for signature, has_kernel in signatures if has_kernel)
        unused = torch.empty(0)  # nothing this small is ever evicted
        with as_in_training():
            # the fastest of each: on a busy machine medians differ by more than what is looked for
            alone = sum(min(times_of(prepare(s), unused)) * n for s, n in kernels.items())
        besides = min(each[phase] for each in times) - alone
        seconds[phase] = min(max(besides / len(signatures), LEAST_OVERHEAD), MOST_OVERHEAD)
    return seconds


class _Tiny(torch.nn.Module):
    """What a layer of a library's transformer does on the host, with almost nothing to compute.

    No layer that oneDNN runs: waiting for its threads takes milliseconds on a busy machine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(TINY)
        self.up, self.down = torch.nn.Linear(TINY, TINY), torch.nn.Linear(TINY, TINY)
        self.act = torch.nn.GELU()
        self.drop = torch.nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        heads = self.norm(x).view(samples, length, 2, width // 2).transpose(1, 2)
        scores = torch.matmul(heads, heads.transpose(2, 3)) * 0.5
        mixed = torch.matmul(torch.softmax(scores, dim=-1), heads)
        x = x + mixed.transpose(1, 2).reshape(samples, length, width)
        out: torch.Tensor = x + self.drop(self.down(self.act(self.up(x))))
        return out


def _operators_of(
    phase: Phase, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> list[tuple[Signature, bool]]:
    """Return the operators of one phase of a step, and whether each has a kernel: is no view."""
    seen: list[tuple[Signature, bool]] = []

    def run(here: Phase, work: Callable[[], Any]) -> Any:
        if here is not phase:
            return work()
        with _Signatures() as signatures:
            out = work()
        seen.extend(signatures.seen)
        return out

    _tiny_step(model, optimizer, batch, run)
    return seen


def _phase_times(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    evict: torch.Tensor,
) -> dict[Phase, float]:
    seconds: dict[Phase, float] = {}

    def run(here: Phase, work: Callable[[], Any]) -> Any:
        evict.add_(1)
        start = time.perf_counter()
        out = work()
        seconds[here] = time.perf_counter() - start
        return out

    _tiny_step(model, optimizer, batch, run)
    return seconds


def _tiny_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    run: Callable[[Phase, Callable[[], Any]], Any],
) -> None:
    loss = run(Phase.FORWARD, lambda: model(batch).square().mean())
    run(Phase.BACKWARD, loss.backward)
    run(Phase.OPTIMIZER, optimizer.step)
    optimizer.zero_grad()


class _Signatures(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[Signature, bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "profiler":
            self.seen.append((signature_of(func, args, kwargs or {}), not is_view(func)))
        return func(*args, **(kwargs or {}))
