"""The time that Python takes for a recompute. A CPU waits for it; on a card kernels hide it.

The constants are the minimum of many runs on a 2-core server with torch 2.13 (`host` of
benchmarks/recompute_checks.py). Left out: how much slower another machine is.
"""

REGION_SECONDS = 235e-6
"""For each call of a recomputed module."""

HOOK_SECONDS = 5.5e-6
"""For each of its operators, to drop and fetch what autograd saves."""

DISPATCH_SECONDS = 16e-6
"""For each operator if some outputs are kept: two dispatch modes count it, once in each run."""


def python_seconds(num_calls: int, num_operators: int, *, keeps: bool) -> float:
    """Return the time that Python takes for a recomputed module in one step.

    Args:
        num_calls: number of calls of the module's forward.
        num_operators: number of operators in all of these.
        keeps: whether outputs of some operators are kept.
    """
    each = HOOK_SECONDS + (DISPATCH_SECONDS if keeps else 0.0)
    return num_calls * REGION_SECONDS + num_operators * each
