"""Does each strategy of sharding combine with each technique? Writes docs/sharded_combinations.md.

Every pair is verified on the tiny model of `benchmarks.combinations`: three updates in real ranks
of this CPU, against one process with the same batch. The ranks are started once for each number of
them. What a CPU refuses by itself is predicted for a card. Left out is what
`benchmarks.combinations` leaves out.

    python -m benchmarks.sharded_combinations "loss chunks" compile

tries these rows again and takes the others from the page.
"""

import itertools
import re
import string
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.combinations import (
    BATCH_ON_A_CARD,
    CARD,
    ON_A_CARD,
    TECHNIQUES,
    WORKLOAD,
    Found,
    Kind,
)
from benchmarks.ranks import Ranks
from memlab import Outcome, StepConfig
from memlab.devices.cards import resolve
from memlab.errors import MemlabError
from memlab.prediction.planning import plan_in_process
from memlab.prediction.plans import plan_for
from memlab.prediction.predict import predict_in_process
from memlab.running import Ended
from memlab.techniques import registry

PAGE = Path(__file__).resolve().parents[1] / "docs" / "sharded_combinations.md"
ONCE = {"sync_each_micro_batch": False}  # as the first stage of DeepSpeed does
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": "ddp", "world_size": 2},
    "zero1": {"sharding": "zero1", "world_size": 2},
    "zero2": {"sharding": "zero2", "world_size": 2},
    "zero3": {"sharding": "zero3", "world_size": 2},
    "deepspeed-zero1": {"sharding": "deepspeed-zero1", "world_size": 2} | ONCE,
    "deepspeed-zero2": {"sharding": "deepspeed-zero2", "world_size": 2},
    "deepspeed-zero3": {"sharding": "deepspeed-zero3", "world_size": 2},
    "hybrid": {"sharding": "hybrid", "world_size": 4, "shard_group_size": 2},
    "tensor": {"sharding": "tensor", "world_size": 2},
    "zero3 and tensor": {"sharding": "zero3", "world_size": 4, "tensor_parallel_size": 2},
    "ddp and tensor": {"sharding": "ddp", "world_size": 4, "tensor_parallel_size": 2},
    "zero1 and tensor": {"sharding": "zero1", "world_size": 4, "tensor_parallel_size": 2},
}
ALONE = "alone"
SETTINGS = TECHNIQUES | {
    "offload shards": {"offload_optimizer": True, "offload_parameters": True},  # by `fully_shard`
}
LETTERS = (
    *string.ascii_letters,
    *map("".join, itertools.product(string.ascii_lowercase, repeat=2)),
)
BATCH = 8
CPU = torch.device("cpu")

HEAD = """# Which techniques combine with sharding

Written by `python -m benchmarks.sharded_combinations`, which tries every pair on the tiny model of
[combinations.md](combinations.md) in real processes of a CPU; `tests/matrix/test_sharded_pairs.py`
fails where this page says anything else.

- ✓ trains, and three updates are those of one process with the same batch, within the tolerance of
  `memlab.verify`.
- ◌ was predicted for a card (h200), since a CPU refuses it by itself; no card has run it here.
- a letter, or two of them, is a refusal: its sentence is below.
"""


def pairs() -> Iterator[tuple[str, str]]:
    """Yield every strategy alone, and with every technique."""
    for strategy in STRATEGIES:
        yield strategy, ALONE
        yield from ((strategy, technique) for technique in SETTINGS)


def tried(strategy: str, technique: str, ranks: Ranks) -> Found:
    """Return what comes of a pair."""
    own = SETTINGS.get(technique, {})
    config = StepConfig(batch_size=BATCH, **own, **STRATEGIES[strategy])
    if set(ON_A_CARD) & own.keys() and not config.is_deepspeed:
        return _predicted(replace(config, batch_size=BATCH_ON_A_CARD), technique)
    try:
        registry.check(config, CPU)
        plan = plan_for(WORKLOAD, config, resolve("cpu"), seed=0, run=_run)
        report = ranks.verified(WORKLOAD, config, plan=plan)
    except (MemlabError, Ended) as error:
        return _refused(str(error), technique)
    if report.outcome is Outcome.UNSUPPORTED:
        return _refused(report.why, technique)
    return Found(kind=Kind.TRAINS) if report.ok else Found(kind=Kind.WRONG, why=report.why)


def _predicted(config: StepConfig, technique: str) -> Found:
    """Return what comes of a pair on a card."""
    result = predict_in_process(
        WORKLOAD, config, resolve(CARD), seed=0, memory_limit=None, report=_mute
    ).result
    if result.outcome is Outcome.UNSUPPORTED:
        return _refused(result.message, technique)
    is_right = result.outcome is Outcome.OK
    return Found(
        kind=Kind.PREDICTED if is_right else Kind.WRONG, why="" if is_right else result.message
    )


def _refused(why: str, technique: str) -> Found:
    """Return a refusal; it must name the setting, unless a CPU refuses that by itself."""
    named = list(SETTINGS.get(technique, {"sharding": ""}))[-1]
    kind = Kind.REFUSED if named in why else Kind.WRONG
    return Found(kind=kind, why=why)


def _run(_: str, arguments: dict[str, Any]) -> Any:
    return plan_in_process(**arguments, report=_mute)


def _mute(_: object) -> None:
    """Report nothing."""


def found_pairs(rows: Sequence[str] = ()) -> dict[tuple[str, str], Found]:
    """Return what comes of all pairs; with `rows`, those of other techniques are as on the page."""
    written = read(PAGE.read_text(encoding="utf-8")) if rows else {}
    ranks, found = Ranks(), {}
    try:
        for pair in pairs():
            is_tried = pair[1] in rows or pair not in written
            found[pair] = tried(*pair, ranks) if is_tried else written[pair]
            if is_tried:
                print(*pair, found[pair].kind, found[pair].why[:200], flush=True)
    finally:
        ranks.end()
    return found


def read(written: str) -> dict[tuple[str, str], Found]:
    """Return what a page says of every pair."""
    reasons = dict(re.findall(r"^- \*\*(\w+)\*\* (.*)$", written, re.MULTILINE))
    kinds = {str(kind): kind for kind in Kind}
    head, _, *rows = [
        line.strip("| ").split(" | ") for line in written.splitlines() if line.startswith("|")
    ]
    return {
        (strategy, technique): Found(kind=kinds.get(cell, Kind.REFUSED), why=reasons.get(cell, ""))
        for technique, *cells in rows
        for strategy, cell in zip(head, cells, strict=True)
    }


def page(found: dict[tuple[str, str], Found]) -> str:
    """Return the page that says what came of every pair.

    Raises:
        RuntimeError: a pair is neither right nor refused.
    """
    wrong = [f"{a} with {b}: {f.why}" for (a, b), f in found.items() if f.kind is Kind.WRONG]
    if wrong:
        raise RuntimeError("\n".join(wrong))
    in_order = [found[pair] for pair in pairs()]
    reasons = dict.fromkeys(f.why for f in in_order if f.kind is Kind.REFUSED)
    letters = dict(zip(reasons, LETTERS, strict=False))
    lines = [f"| | {' | '.join(STRATEGIES)} |", f"|---|{'---|' * len(STRATEGIES)}"]
    for technique in (ALONE, *SETTINGS):
        cells = [found[strategy, technique] for strategy in STRATEGIES]
        row = " | ".join(letters.get(cell.why, str(cell.kind)) for cell in cells)
        lines.append(f"| {technique} | {row} |")
    said = [f"- **{letter}** {reason}" for reason, letter in letters.items()]
    return "\n".join([HEAD, *lines, "", "## The refusals", "", *said]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(found_pairs(sys.argv[1:])), encoding="utf-8")
    print(f"wrote {PAGE}")
