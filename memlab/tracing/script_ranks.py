"""A person's script as the first of several ranks, in one process without the others.

    started by                              what is done
    `torchrun --nproc-per-node N`           its variables are set, and the group of N is open
    `torch.multiprocessing.spawn`           its function is called once, as the first rank

Collectives return at once and move nothing (`simulated_ranks.py`). Left out: other ranks that would
hold something else, several nodes, and processes that a script starts in another way.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.multiprocessing

from memlab._util.functions import replaced
from memlab.tracing.simulated_ranks import alone_among
from memlab.tracing.tracker import Tracker

VARIABLES = re.compile(r"\b(LOCAL_RANK|RANK|LOCAL_WORLD_SIZE|WORLD_SIZE|MASTER_ADDR)\b")
NO_RANKS = (
    "{name} asks for {variable}, which torchrun would give it; run it as the first of N ranks with "
    "--nproc-per-node N (nproc_per_node in Python)"
)


@contextlib.contextmanager
def as_first_rank(ranks: int, tracker: Tracker) -> Iterator[None]:
    """Let a script find itself the first of so many ranks (0: of none), or of those it spawns.

    Raises:
        UnsupportedError: as for `alone_among`.
    """
    with contextlib.ExitStack() as stack:

        def replace(holder: Any, name: str, value: Callable[..., Any]) -> None:
            stack.enter_context(replaced([(holder, name, value)]))

        groups: list[int] = []  # that are open, by their size
        dist: Any = torch.distributed
        init, destroy = dist.init_process_group, dist.destroy_process_group
        replace(dist, "init_process_group", lambda *a, **k: None if groups else init(*a, **k))
        replace(dist, "destroy_process_group", lambda *a: None if groups else destroy(*a))

        def open_group(size: int) -> None:
            os.environ |= {
                "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
            }  # fmt: skip
            stack.enter_context(alone_among(size, 0, tracker))
            groups.append(size)
            stack.callback(groups.clear)  # before the group is closed
            if torch.cuda.is_available():
                replace(torch.cuda, "device_count", lambda: size)

        def spawn(
            function: Any, args: Sequence[Any] = (), nprocs: int = 1, *_: Any, **__: Any
        ) -> None:
            if not groups:
                open_group(nprocs)
            function(0, *args)

        replace(torch.multiprocessing, "spawn", spawn)
        if ranks:
            open_group(ranks)
        yield


def of_ranks(name: str, error: Exception) -> str:
    """Return what to say of a script that asks for a variable of `torchrun`, or "" of another."""
    found = VARIABLES.search(str(error))
    return NO_RANKS.format(name=name, variable=found[0]) if found else ""
