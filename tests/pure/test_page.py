"""The page's JavaScript: its own tests by node, and its allocator beside Python's on drawn runs."""

import json
import random
import subprocess
from typing import Any

import numpy as np
import pytest

from memlab._util.units import KIB, MIB
from memlab.memory.replay import AllocatorSettings, replay
from tests.page_parts import FOLDER, node

NUM_RUNS, NUM_EVENTS = 150, 200


@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_*.js")), ids=lambda path: path.stem)
def test_javascript(path):
    done = subprocess.run([node(), "--test", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def drawn(rng: random.Random, *, expandable: bool) -> dict[str, Any]:
    """Draw allocations and frees on two streams, small and large, some with a limit."""
    events: list[tuple[int, int, int]] = []
    live: list[tuple[int, int, int]] = []
    for block in range(NUM_EVENTS):
        if live and rng.random() < 0.45:
            freed, size, stream = live.pop(rng.randrange(len(live)))
            events.append((freed, -size, stream))
        else:
            most = rng.choice([KIB, MIB, 12 * MIB, 40 * MIB])
            live.append((block, rng.randint(1, most), int(rng.random() < 0.2)))
            events.append(live[-1])
    blocks, sizes, streams = zip(*events, strict=True)
    return {
        "block": blocks,
        "bytes": sizes,
        "stream": rng.choice([streams, None]),
        "flushBefore": rng.sample(range(len(events)), 2),
        "expandable": expandable,
        "limitBytes": rng.choice([None, rng.randint(50 * MIB, 400 * MIB)]),
    }


@pytest.mark.parametrize("expandable", [False, True])
def test_the_allocator_holds_what_pythons_holds(expandable):
    rng = random.Random(f"runs {expandable}")
    runs = [drawn(rng, expandable=expandable) for _ in range(NUM_RUNS)]
    command = [node(), FOLDER / "replays.js"]
    done = subprocess.run(command, input=json.dumps(runs), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    failed = 0
    for run, found in zip(runs, json.loads(done.stdout), strict=True):
        held = replay(
            np.array(run["block"]),
            np.array(run["bytes"]),
            AllocatorSettings(expandable_segments=expandable, limit_bytes=run["limitBytes"]),
            flush_before=run["flushBefore"],
            stream=None if run["stream"] is None else np.array(run["stream"], np.int32),
        )
        assert found["reserved"] == held.reserved_bytes.tolist()
        assert found["allocated"] == held.allocated_bytes.tolist()
        assert found["failed"] == found["judged"] == (held.out_of_memory_at is not None)
        failed += found["failed"]
    assert 0 < failed < NUM_RUNS
