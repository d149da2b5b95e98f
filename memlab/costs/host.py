"""Time that Python takes to recompute: a CPU waits for it, on a card kernels hide it.

Constants are the least of many runs on a 2-core server with torch 2.13 (`host` of
benchmarks/recompute_checks.py). Left out: how much slower another machine is.
"""

REGION_SECONDS = 235e-6
"""For each call of a recomputed module."""

HOOK_SECONDS = 5.5e-6
"""For each of its operators: what autograd saves is dropped and fetched."""

DISPATCH_SECONDS = 16e-6
"""For each where some are kept: two dispatch modes count it, in forward and when it runs again."""


def python_seconds(num_calls: int, num_operators: int, *, keeps: bool) -> float:
    """Return the time of Python for a recomputed module in one step.

    Args:
        num_calls: of the module's forward.
        num_operators: in all of these.
        keeps: whether outputs of some operators are kept.
    """
    each = HOOK_SECONDS + (DISPATCH_SECONDS if keeps else 0.0)
    return num_calls * REGION_SECONDS + num_operators * each
