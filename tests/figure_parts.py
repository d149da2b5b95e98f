"""What the tests of figures share: results that can be drawn, and the texts of a figure."""

from dataclasses import replace

import numpy as np

from memlab.config import StepConfig
from memlab.result import Outcome, Source, StepResult
from memlab.search.answer import Recommendation, Recommendations
from memlab.trace import CATEGORIES, PHASES, Category, Holding, Phase, Place, Timeline

MIB = 2**20


def make_timeline(activations, *, micro_batches=1):
    """Forward, backward by halves, then as long an optimizer phase; 10 MiB of parameters stand."""
    n = len(activations)
    table = np.zeros((2 * n, len(CATEGORIES)), np.int64)
    table[:, CATEGORIES.index(Category.PARAMETERS)] = 10 * MIB
    table[:n, CATEGORIES.index(Category.ACTIVATIONS)] = activations
    micro_batch = np.minimum(np.arange(2 * n) * micro_batches // n, micro_batches - 1)
    within = (np.arange(2 * n) * micro_batches % n) / n
    phase = np.where(within < 0.5, PHASES.index(Phase.FORWARD), PHASES.index(Phase.BACKWARD))
    phase[n:] = PHASES.index(Phase.OPTIMIZER)
    return Timeline(
        bytes_by_category=table,
        phase=phase.astype(np.int8),
        micro_batch=micro_batch.astype(np.int32),
        operator=np.arange(2 * n, dtype=np.int32) // 2,
    )


def make_result(*, timeline=None, seconds=(0.2, 0.1, 0.3), **changes):
    timeline = make_timeline([MIB, 5 * MIB, 30 * MIB, 7 * MIB]) if timeline is None else timeline
    result = StepResult(
        outcome=Outcome.OK,
        message="peak",
        source=Source.MEASURED,
        device="cpu",
        config=StepConfig(),
        workload_name="line",
        timeline=timeline,
        peak_allocated_bytes=int(timeline.total_bytes.max()),
        peak_by_category=timeline.peak_by_category,
        peak_place=Place(phase=Phase.BACKWARD, micro_batch=0, module="a.b", operator="aten::mm"),
        step_seconds=float(np.median(seconds)),
        step_seconds_all=tuple(seconds),
        samples_per_second=8 / float(np.median(seconds)),
    )
    return replace(result, **changes)


def texts_of(figure):
    return [text.get_text() for text in all_texts(figure)]


def all_texts(figure):
    return [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]


def out_of_memory(**changes):
    return make_result(
        outcome=Outcome.OUT_OF_MEMORY, message="out of memory in forward", step_seconds=None,
        step_seconds_all=(), samples_per_second=None, **changes,
    )  # fmt: skip


def recommended(*results, limit_bytes=50 * MIB, **changes):
    """Return recommendations of these results, the first one the best."""
    fitting = tuple(Recommendation(result=r, reasons=("why",), predicted=r) for r in results)
    return Recommendations(fitting=fitting, message="m", limit_bytes=limit_bytes, **changes)


def held(category, module, nbytes, operator="aten::mm"):
    return Holding(category=category, module=module, operator=operator, phase=Phase.FORWARD,
                   num_blocks=1, nbytes=nbytes)  # fmt: skip


def make_held(*holdings, **changes):
    sizes = dict.fromkeys(CATEGORIES, 0)
    for holding in holdings:
        sizes[holding.category] += holding.nbytes
    return make_result(
        peak_allocated_bytes=sum(sizes.values()), peak_by_category=sizes, peak_holdings=holdings,
        **changes,
    )  # fmt: skip


def transformer(num_blocks=12, unit=MIB):
    names = ("ln", "attn.qkv", "attn.out", "mlp.fc", "mlp.proj")
    places = [f"model.h.{i}.{name}" for i in range(num_blocks) for name in names]
    return make_held(
        *(held(Category.PARAMETERS, f"{p}.weight", unit) for p in places),
        *(held(Category.OPTIMIZER_STATE, f"{p}.weight", 2 * unit) for p in places),
        *(held(Category.ACTIVATIONS, p, (5 + i % 3) * unit) for i, p in enumerate(places)),
        held(Category.TEMPORARIES, "model.h.3.mlp.fc", 30 * unit),
        held(Category.INPUTS, "", unit // 64 + 1, operator="aten::clone"),
    )
