"""Does each strategy of sharding combine with each technique? Writes docs/sharded_combinations.md.

Every pair is verified on the tiny model of `benchmarks.combinations`: three updates in real ranks
of this CPU, against one process with the same batch. The ranks are started once for each number of
them. Left out is what `benchmarks.combinations` leaves out.
"""

import itertools
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.combinations import TECHNIQUES, WORKLOAD, Found, Kind
from benchmarks.ranks import Ranks
from memlab import Outcome, StepConfig
from memlab.devices.cards import resolve
from memlab.errors import MemlabError
from memlab.planning.chains import plan_in_process
from memlab.planning.plans import plan_for
from memlab.running import Ended
from memlab.techniques import every

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
- a letter, or two of them, is a refusal: its sentence is below.
"""


def pairs() -> Iterator[tuple[str, str]]:
    """Yield every strategy alone, and with every technique."""
    for strategy in STRATEGIES:
        yield strategy, ALONE
        yield from ((strategy, technique) for technique in TECHNIQUES)


def tried(strategy: str, technique: str, ranks: Ranks) -> Found:
    """Return what comes of a pair."""
    own = TECHNIQUES.get(technique, {})
    config = StepConfig(batch_size=BATCH, **own, **STRATEGIES[strategy])
    try:
        every.check(config, CPU)
        plan = plan_for(WORKLOAD, config, resolve("cpu"), seed=0, run=_run)
        report = ranks.verified(WORKLOAD, config, plan=plan)
    except (MemlabError, Ended) as error:
        return _refused(str(error), technique)
    if report.outcome is Outcome.UNSUPPORTED:
        return _refused(report.why, technique)
    return Found(kind=Kind.TRAINS) if report.ok else Found(kind=Kind.WRONG, why=report.why)


def _refused(why: str, technique: str) -> Found:
    """Return a refusal; it must name the setting, unless a CPU refuses that by itself."""
    named = list(TECHNIQUES.get(technique, {"sharding": ""}))[-1]
    kind = Kind.REFUSED if named in why else Kind.WRONG
    return Found(kind=kind, why=why)


def _run(_: str, arguments: dict[str, Any]) -> Any:
    return plan_in_process(**arguments, report=_mute)


def _mute(_: object) -> None:
    """Report nothing."""


def found_pairs(*, is_loud: bool = False) -> dict[tuple[str, str], Found]:
    """Return what comes of all pairs."""
    ranks, found = Ranks(), {}
    try:
        for pair in pairs():
            found[pair] = tried(*pair, ranks)
            if is_loud:
                print(*pair, found[pair].kind, found[pair].why[:200], flush=True)
    finally:
        ranks.end()
    return found


def page(found: dict[tuple[str, str], Found]) -> str:
    """Return the page that says what came of every pair.

    Raises:
        RuntimeError: a pair is neither right nor refused.
    """
    wrong = [f"{a} with {b}: {f.why}" for (a, b), f in found.items() if f.kind is Kind.WRONG]
    if wrong:
        raise RuntimeError("\n".join(wrong))
    reasons = dict.fromkeys(f.why for f in found.values() if f.kind is Kind.REFUSED)
    letters = dict(zip(reasons, LETTERS, strict=False))
    lines = [f"| | {' | '.join(STRATEGIES)} |", f"|---|{'---|' * len(STRATEGIES)}"]
    for technique in (ALONE, *TECHNIQUES):
        cells = [found[strategy, technique] for strategy in STRATEGIES]
        row = " | ".join(letters.get(cell.why, str(cell.kind)) for cell in cells)
        lines.append(f"| {technique} | {row} |")
    said = [f"- **{letter}** {reason}" for reason, letter in letters.items()]
    return "\n".join([HEAD, *lines, "", "## The refusals", "", *said]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(found_pairs(is_loud=True)), encoding="utf-8")
    print(f"wrote {PAGE}")
