"""What the tests of records share: a visit, a result and a run that a file can hold."""

import numpy as np

from memlab import Outcome, StepConfig
from memlab.result import Holding, Source, StepResult
from memlab.store.records import RecordedRun
from memlab.trace import CATEGORIES, Category, Phase, Timeline

OPTIONS = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "sequence_length": 8}
VISIT = {"device": "t4", "title": "Tesla T4", "type": "cuda", "memory_bytes": 2**33}


def timeline(rows=50):
    draw = np.random.default_rng(0)
    return Timeline(
        bytes_by_category=draw.integers(0, 2**45, (rows, len(CATEGORIES)), np.int64),
        phase=draw.integers(0, 6, rows).astype(np.int8),
        micro_batch=draw.integers(0, 4, rows).astype(np.int32),
        operator=np.sort(draw.integers(0, 2**30, rows)).astype(np.int32),
    )


def result(config=None, **facts):
    holding = Holding(
        category=Category.BUFFERS, module="h", operator="", phase=Phase.BUILD,
        num_blocks=2, nbytes=64,
    )  # fmt: skip
    return StepResult(**{
        "outcome": Outcome.OK, "message": "", "source": Source.MEASURED, "device": "cuda:0",
        "config": config or StepConfig(), "workload_name": "gpt-small", "timeline": timeline(),
        "peak_holdings": (holding,), "peak_allocated_bytes": 7, "versions": {"torch": "2.11.0"},
        **facts,
    })  # fmt: skip


def run(config=None, **fields):
    facts = {"group": "grid", "workload": "gpt-small", "options": OPTIONS, "holdout": False}
    facts |= {"visit": "v", "seed": 0, "wall_seconds": 1.5, "result": result(config)}
    return RecordedRun(**(facts | fields))
